#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the plugin costs: a start of a process, a checked collective, an expert tensor loaded.

Runs beside any vLLM, for instance a source tree of ``scripts/source_lane.sh`` on PYTHONPATH.
"""

from __future__ import annotations

import subprocess
import sys
import timeit
from functools import partial
from typing import Any

import torch
import vllm
from vllm.distributed.device_communicators import cuda_communicator

import vllm_moe_dp_fix
from vllm_moe_dp_fix.fixes.moe_dp_all_gather import _wrap_cuda_all_gatherv
from vllm_moe_dp_fix.fixes.mxfp4_weight_loader import _TinyLayer as TinyLayer

ENTRY = """
import time, vllm.plugins
began = time.perf_counter()
import vllm_moe_dp_fix.plugin as plugin
from vllm_moe_dp_fix.registry import FIX_IDS
for name in FIX_IDS:
    getattr(plugin, name)()
print(1e3 * (time.perf_counter() - began))
"""
CALLS = 20_000
SHARDS = (("w13_weight", "w1"), ("w13_weight_scale", "w3"), ("w2_weight", "w2"))


def main() -> None:
    print(f"vLLM {vllm.__version__}")
    starts = sorted(_start_ms() for _ in range(5))
    print(f"the entry points, in a process that has vllm.plugins: {starts[2]:.1f} ms (median of 5)")

    def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: Any = None) -> None:
        """Stands for the collective, so that the check alone is left."""

    checked = _wrap_cuda_all_gatherv(all_gatherv, cuda_communicator)  # type: ignore[arg-type]
    communicator = object.__new__(cuda_communicator.CudaCommunicator)
    communicator.__dict__.update(world_size=2, rank_in_group=1, device=torch.device("cpu"))
    rows, top_k = torch.zeros(36, 2048, dtype=torch.bfloat16), torch.zeros(36, 8)
    tensors = [rows, top_k, top_k.int(), torch.zeros(36, 16)]
    for count in (1, 3, 4):
        given = tensors[:count]
        times = [
            min(timeit.repeat(partial(call, communicator, given, 0, [1, 36]), number=CALLS))
            for call in (checked, all_gatherv)
        ]
        cost = 1e6 * (times[0] - times[1]) / CALLS
        print(f"check of all_gatherv, {count} tensors: {cost:.1f} µs a call")

    own = {shard: _load_us(*shard) for shard in SHARDS}
    vllm_moe_dp_fix.install("mxfp4_weight_loader")
    for shard, before in own.items():
        cost = _load_us(*shard) - before
        print(f"loading {' '.join(shard)}: {cost:.1f} µs a tensor above vLLM's {before:.1f}")


def _load_us(name: str, shard_id: str) -> float:
    """Loads a tensor of one expert, so small that hardly anything is copied."""
    from vllm.model_executor.layers.quantization import mxfp4

    layer = TinyLayer(mxfp4, 64, tp_size=2, hidden=64).layer
    if (state := getattr(layer, "_moe_dp_fix_mxfp4", None)) is not None:
        state.was_finished = True  # the same tensor again is an update
    per_element = 32 if name.endswith("scale") else 2
    shape = (64, 64 // per_element)
    parameter, tensor = getattr(layer, name), torch.ones(shape, dtype=torch.uint8)
    load = partial(parameter.weight_loader, parameter, tensor, f"experts.{name}", shard_id, 0)
    return 1e6 * min(timeit.repeat(load, number=CALLS)) / CALLS


def _start_ms() -> float:
    run = subprocess.run([sys.executable, "-c", ENTRY], capture_output=True, text=True, check=True)
    return float(run.stdout.split()[-1])


if __name__ == "__main__":
    main()
