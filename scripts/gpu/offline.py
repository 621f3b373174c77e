#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""``LLM`` on offline data-parallel ranks, a process each, in step with each other.

The engine runs in the ranks' own processes, so that it has all prompts before its first step, and
the ranks' steps hold what ``PROMPTS`` says.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts import demo
from scripts.gpu import marks
from scripts.gpu.checkpoints import FIRST_OUTLIER

TIMEOUT_S = 300
GRACE_S = 15  # for the peers of a rank that has failed
ANSWER_TOKENS = 4

Logprobs: TypeAlias = list[list[float]]  # of each rank's prompts, token by token
# Shape -> rank -> (prompts, tokens of each)
PROMPTS = {"equal": ((4, 9), (4, 9)), "unequal": ((1, 5), (4, 9))}


@dataclass
class Run:
    """What became of the ranks.

    Attributes:
        logprobs: Of the prompts' tokens, by shape. A shape that failed is missing.
        errors: What the ranks raised, or that they hung.
        log: All that they said.
    """

    logprobs: dict[str, Logprobs] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    log: str = ""


def prompts(shape: str, rank: int) -> list[list[int]]:
    """Rank 0's have the outlier channel, rank 1's do not."""
    count, length = PROMPTS[shape][rank]
    first = FIRST_OUTLIER if rank == 0 else 10
    return [[first + (31 * i + 7 * j) % 400 for j in range(length)] for i in range(count)]


def rank_environ(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Makes an ``LLM`` one of several ranks; the engines take ``port``, their workers the next."""
    return {
        "VLLM_DP_SIZE": str(ranks),
        "VLLM_DP_RANK": str(rank),
        "VLLM_DP_RANK_LOCAL": str(rank),
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(port),
    }


def generate(
    model: Path,
    ranks: int,
    plugins: str,
    name: str,
    shapes: Sequence[str] = tuple(PROMPTS),
    rounds: int = 1,
    environ: dict[str, str] | None = None,
    **options: Any,
) -> Run:
    """The prompts of both ranks, on two ranks or all of them on one.

    Args:
        rounds: How often each shape is asked for; the last counts.
        options: Of ``LLM``.
    """
    port = demo.free_port(2)
    lane = demo.pick_lane(gpus=1)
    logs = [demo.CACHE / f"{model.name}-{name}-{rank}.log" for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        variables = {"VLLM_PLUGINS": plugins, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        if ranks > 1:
            variables |= rank_environ(rank, ranks, port)
        task = {"model": str(model), "rank": rank, "ranks": ranks, "rounds": rounds}
        task |= {"shapes": list(shapes), "options": options}
        with log.open("wb") as output:
            processes.append(
                subprocess.Popen(
                    [sys.executable, __file__, json.dumps(task)],
                    env={**os.environ, **lane.environ, **variables, **(environ or {})},
                    cwd=demo.CACHE,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            )
    hung = _wait(processes)
    texts = [log.read_text(errors="replace") for log in logs]
    found = [marks.read(text.splitlines()) for text in texts]
    run = Run(log="\n".join(texts), errors=["no end"] if hung else [])
    for text, items in zip(texts, found, strict=True):
        run.errors += [_cause(text) or item["error"] for item in items if "error" in item]
    if any(process.returncode for process in processes) and not run.errors:
        run.errors = [f"ended early: {' | '.join(texts[0].splitlines()[-2:])}"]
    for shape in shapes:
        parts = [
            item["logprobs"] for items in found for item in items if item.get("shape") == shape
        ]
        if len(parts) == ranks:
            run.logprobs[shape] = [rank for part in parts for rank in part]
    return run


def _cause(text: str) -> str:
    """What a worker raised; its engine only says that it failed."""
    lines = re.findall(r"ERROR.*?\] (\w+Error\b.*)$", text, re.MULTILINE)
    return next((line for line in lines if "Worker failed" not in line), "")[:300]


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> bool:
    """Until all have ended, or some time after one has failed; whether time ran out before."""
    limit = time.monotonic() + TIMEOUT_S
    has_failed = False
    while any(process.poll() is None for process in processes) and time.monotonic() < limit:
        if not has_failed and any(process.poll() for process in processes):
            has_failed = True
            limit = min(limit, time.monotonic() + GRACE_S)
        time.sleep(0.2)
    hung = any(process.poll() is None for process in processes)
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
    return hung and not has_failed


def _rank_main(task: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        task["model"],
        skip_tokenizer_init=True,
        seed=0,
        enable_prefix_caching=False,
        max_model_len=128,
        max_num_seqs=32,
        **task["options"],
    )
    sampling = SamplingParams(
        temperature=0,
        max_tokens=ANSWER_TOKENS,
        prompt_logprobs=0,
        ignore_eos=True,
        detokenize=False,
    )
    mine = [task["rank"]] if task["ranks"] > 1 else [0, 1]
    for shape in task["shapes"]:
        asked = [{"prompt_token_ids": prompt} for rank in mine for prompt in prompts(shape, rank)]
        for _ in range(task["rounds"]):
            outputs = llm.generate(asked, sampling, use_tqdm=False)  # type: ignore[arg-type,unused-ignore]
        values = [
            [next(iter(token.values())).logprob for token in output.prompt_logprobs[1:]]
            for output in outputs
        ]
        logprobs = []
        for rank in mine:
            count = PROMPTS[shape][rank][0]
            logprobs.append([value for prompt in values[:count] for value in prompt])
            del values[:count]
        marks.write({"shape": shape, "logprobs": logprobs})


if __name__ == "__main__":
    try:
        _rank_main(json.loads(sys.argv[1]))
    except BaseException as failure:
        marks.write({"error": f"{type(failure).__name__}: {str(failure)[:300]}"})
        raise
    os._exit(0)  # a peer may have gone already
