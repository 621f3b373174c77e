#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks on two ranks with CUDA that the dispatch gives the bits of one rank.

Real NCCL, vLLM's own FP8 kernels, ``prepare()`` of both classes, both strategies, eager and in a
CUDA graph. Rows and scale must equal ``scaled_fp8_quant`` of all ranks' rows. Prints a line a case.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.gpu import sharing
from scripts.gpu.ranks import capture, spawn, step
from vllm_moe_dp_fix import settings

HIDDEN = 2048
TOKENS = ((1, 36), (4, 4), (300, 17), (4096, 4096), (0, 5))
VALUES = ("normal", "zeros", "nan", "inf")  # rank 0's, beside an outlier channel
STRATEGIES = ("quantize_after_gather", "shared_scale")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sharing.share_a_single_gpu()
    found: list[dict[str, Any]] = []
    for strategy in STRATEGIES:
        os.environ[settings.FP8_DISPATCH] = strategy
        ranks = spawn(_check, strategy)
        for first, *others in zip(*ranks, strict=True):
            wrong = [case for case in (first, *others) if case["right"] != "right"]
            found.append((wrong or [first])[0])
    for case in found:
        print("{strategy:22} {how:5} {path:10} {tokens!s:14} {values:7} {right}".format(**case))
    right = sum(case["right"] == "right" for case in found)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    print(f"{right} of {len(found)} cases are right")
    return 0 if found and right == len(found) else 1


def _check(rank: int, config: Any, strategy: str) -> list[dict[str, Any]]:
    import torch
    from vllm import _custom_ops
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
    from vllm.model_executor.layers.fused_moe.prepare_finalize import naive_dp_ep

    quant = FusedMoEQuantConfig.make(quant_dtype=torch.float8_e4m3fn)
    modular = naive_dp_ep.MoEPrepareAndFinalizeNaiveDPEPModular(False)
    monolithic = naive_dp_ep.MoEPrepareAndFinalizeNaiveDPEPMonolithic(False)
    found = []
    for tokens, values in [*((t, "normal") for t in TOKENS), *(((3, 5), v) for v in VALUES[1:])]:
        every = [_rows(r, n, values).cuda() for r, n in enumerate(tokens)]
        mine = every[rank]
        weights = torch.ones(len(mine), 1, device="cuda")
        ids = torch.zeros(len(mine), 1, dtype=torch.int32, device="cuda")
        want = _custom_ops.scaled_fp8_quant(torch.cat(every))
        paths = {
            "modular": partial(modular.prepare, mine, weights, ids, 1, None, False, quant),
            "monolithic": partial(monolithic.prepare, mine, weights, quant),
        }
        for path, prepare in paths.items():
            for how in ("eager", "graph"):
                case = {"strategy": strategy, "how": how, "path": path, "tokens": tokens}
                if rank == 0:
                    print(*case.values(), values, file=sys.stderr, flush=True)
                with step(config, tokens, rank):
                    got = prepare() if how == "eager" else _replayed(prepare)
                torch.cuda.synchronize()
                found.append({**case, "values": values, "right": _compare(got, want)})
    return found


def _rows(rank: int, count: int, values: str) -> Any:
    import torch

    generator = torch.Generator().manual_seed(rank)
    rows = torch.randn(count, HIDDEN, generator=generator)
    if rank == 0:
        rows[:, 7] *= 40.0
    if values == "zeros":
        rows.zero_()
    elif values != "normal" and rank == 0:
        rows[1, 5] = math.nan if values == "nan" else -math.inf
    return rows.bfloat16()


def _replayed(prepare: Any) -> Any:
    """What a captured graph gives on its second replay."""
    import torch

    graph, result = capture(prepare)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    return result


def _compare(got: Any, want: Any) -> str:
    import torch

    rows, scale = got[0], got[1]
    if scale is None or scale.numel() != 1 or not torch.equal(scale.reshape(1), want[1]):
        return f"scale {scale}, not {want[1]}"
    if rows.shape != want[0].shape:
        return f"{tuple(rows.shape)} rows, not {tuple(want[0].shape)}"
    differ = (rows.view(torch.uint8) != want[0].view(torch.uint8)).sum().item()
    return f"{differ} bytes differ" if differ else "right"


if __name__ == "__main__":
    sys.exit(main())
