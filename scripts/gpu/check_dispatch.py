#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks on two CUDA GPUs that the dispatch gives the bits of one rank.

Real NCCL, vLLM's own FP8 kernels, ``prepare()`` of both classes, both strategies, eager and in a
CUDA graph. Rows and scale must equal ``scaled_fp8_quant`` of all ranks' rows. Prints a line a case.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any

RANKS = 2
HIDDEN = 2048
TOKENS = ((1, 36), (4, 4), (300, 17), (4096, 4096), (0, 5))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    import torch.multiprocessing as mp

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    results: Any = context.SimpleQueue()
    found: list[dict[str, Any]] = []
    for strategy in ("quantize_after_gather", "shared_scale"):
        os.environ["VLLM_MOE_DP_FIX_FP8_DISPATCH"] = strategy
        mp.spawn(_rank, (port, strategy, results), RANKS)
        while not results.empty():
            found += results.get()
        port += 1
    for case in found:
        print("{strategy:22} {how:5} {path:10} {tokens!s:14} {right}".format(**case))
    right = all(case["right"] == "right" for case in found)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    print("every case is right" if right and found else "WRONG")
    return 0 if right and found else 1


def _rank(rank: int, port: int, strategy: str, results: Any) -> None:
    import torch
    import torch.distributed as dist
    from vllm import _custom_ops
    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        get_ep_group,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
    from vllm.model_executor.layers.fused_moe.prepare_finalize import naive_dp_ep
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS
    )
    parallel = ParallelConfig(data_parallel_size=RANKS)
    parallel.data_parallel_rank = rank
    config = VllmConfig(parallel_config=parallel)
    found = []
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, "env://", rank, "nccl")
        initialize_model_parallel(1, 1, backend="nccl")
        ep = get_ep_group()
        ep.device_communicator.all2all_manager = AgRsAll2AllManager(ep.cpu_group)
        quant = FusedMoEQuantConfig.make(quant_dtype=torch.float8_e4m3fn)
        modular = naive_dp_ep.MoEPrepareAndFinalizeNaiveDPEPModular(False)
        monolithic = naive_dp_ep.MoEPrepareAndFinalizeNaiveDPEPMonolithic(False)
        for tokens in TOKENS:
            every = [_rows(r, n).to(device) for r, n in enumerate(tokens)]
            mine = every[rank]
            weights = torch.ones(len(mine), 1, device=device)
            ids = torch.zeros(len(mine), 1, dtype=torch.int32, device=device)
            want = _custom_ops.scaled_fp8_quant(torch.cat(every))
            paths = {
                "modular": partial(modular.prepare, mine, weights, ids, 1, None, False, quant),
                "monolithic": partial(monolithic.prepare, mine, weights, quant),
            }
            for path, prepare in paths.items():
                for how in ("eager", "graph"):
                    if rank == 0:
                        print(f"{strategy} {path} {how} {tokens}", file=sys.stderr, flush=True)
                    with _step(config, tokens, rank):
                        got = prepare() if how == "eager" else _replayed(prepare)
                    torch.cuda.synchronize()
                    text = _compare(got, want)
                    case = {"strategy": strategy, "how": how, "path": path, "tokens": tokens}
                    found.append({**case, "rank": rank, "right": text})
    results.put(found if rank == 0 else [f for f in found if f["right"] != "right"])
    torch.cuda.synchronize()
    dist.barrier()


def _rows(rank: int, count: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(rank)
    rows = torch.randn(count, HIDDEN, generator=generator)
    if rank == 0:
        rows[:, 7] *= 40.0
    return rows.bfloat16()


def _step(config: Any, tokens: tuple[int, ...], rank: int) -> Any:
    import contextlib

    import torch
    from vllm.forward_context import get_forward_context, set_forward_context

    stack = contextlib.ExitStack()
    across = torch.tensor(tokens, dtype=torch.int32)
    stack.enter_context(
        set_forward_context(None, config, num_tokens=tokens[rank], num_tokens_across_dp=across)
    )
    stack.enter_context(get_forward_context().dp_metadata.sp_local_sizes(1))
    return stack


def _replayed(prepare: Any) -> Any:
    """What a captured graph gives on its second replay."""
    import torch
    from vllm.distributed.parallel_state import graph_capture

    prepare()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with (
        graph_capture(device=torch.device("cuda", torch.cuda.current_device())) as context,
        torch.cuda.graph(graph, stream=context.stream),
    ):
        result = prepare()
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
