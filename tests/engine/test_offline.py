# SPDX-License-Identifier: Apache-2.0
"""``LLM`` on two offline data-parallel ranks that are replicas, each with prompts of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from scripts import demo
from scripts.gpu.offline import rank_environ

RANK = """
import json, sys
from vllm import LLM, SamplingParams
model, lengths, options, output = sys.argv[1], *map(json.loads, sys.argv[2:4]), sys.argv[4]
if __name__ == "__main__":
    llm = LLM(model, **options)
    prompts = [{"prompt_token_ids": [10 + 7 * i % 900 for i in range(n)]} for n in lengths]
    answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    with open(output, "w") as file:
        json.dump([list(answer.outputs[0].token_ids) for answer in answers], file)
"""
LENGTHS = ((3, 50, 21), (7,))
OPTIONS = {"dtype": "float32", "enforce_eager": True, "max_model_len": 128, "max_num_seqs": 8}


def _start(model: Path, lengths: tuple[int, ...], output: Path, **environ: str) -> Any:
    script = output.with_suffix(".py")
    script.write_text(RANK)
    command = [sys.executable, str(script), str(model), json.dumps(lengths), json.dumps(OPTIONS)]
    lane = demo.pick_lane()
    return subprocess.Popen(
        [*command, str(output)],
        env={**os.environ, **lane.environ, "HF_HUB_OFFLINE": "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("multiprocessing", ["1", "0"])
def test_offline_ranks_are_independent(serves: None, multiprocessing: str) -> None:
    """Unequal numbers of prompts, and the tokens of one ``LLM`` that answers all of them."""
    model = demo.make_model("qwen3-moe", demo.pick_lane())
    port = demo.free_port(2)
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("rank-0", "rank-1", "alone")]
        runs = [
            _start(
                model,
                lengths,
                output,
                VLLM_PLUGINS="moe_dp_dispatch",
                VLLM_MOE_DP_FIX_EXPERTS="replicated",
                VLLM_ENABLE_V1_MULTIPROCESSING=multiprocessing,
                **rank_environ(rank, 2, port),
            )
            for rank, (lengths, output) in enumerate(zip(LENGTHS, outputs, strict=False))
        ]
        runs.append(_start(model, sum(LENGTHS, ()), outputs[2], VLLM_PLUGINS=""))
        said = [run.communicate(timeout=demo.START_TIMEOUT_S)[0] for run in runs]
        assert [run.returncode for run in runs] == [0, 0, 0], said
        found = [json.loads(output.read_text()) for output in outputs]
    assert found[0] + found[1] == found[2]
    assert "2 independent replicas" in said[0]
