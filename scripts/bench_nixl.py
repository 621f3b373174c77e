#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What it costs one rank to validate EPLB over NIXL in a large group, beside vLLM's own validator.

A simulation in one process: the set-up of vLLM's communicator runs as it is, with agents that do
nothing and a group in which every rank says what this one says. Counted are the bytes that this
rank sends, the time from its first exchange to the end, unpickling included, and the peak memory.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pickle
import time
import tracemalloc
from pathlib import Path
from typing import Any

import torch
import vllm

import vllm_moe_dp_fix
from vllm_moe_dp_fix.fixes import nixl_eplb_validator as fix
from vllm_moe_dp_fix.registry import EPLB_COMMUNICATOR

LAYERS, TENSORS, EXPERTS = 94, 8, 2
AGENT_BYTES = 600  # of the metadata of a NIXL agent with UCX on one machine


class Group:
    """A group of which this process is rank 0, and all others say the same."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.sent = 0

    def size(self) -> int:
        return self._world_size

    def rank(self) -> int:
        return 0

    def gather(self, item: Any) -> list[Any]:
        data = pickle.dumps(item)
        self.sent += len(data)
        return [pickle.loads(data) for _ in range(self._world_size)]


class Agent(fix._Wrapper):
    def get_agent_metadata(self) -> bytes:
        return bytes(AGENT_BYTES)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    module = importlib.import_module(EPLB_COMMUNICATOR)
    print(f"vLLM {vllm.__version__}, {LAYERS} layers of {TENSORS} tensors")
    print(f"{'ranks':>6}{'validator':>12}{'bytes sent':>12}{'ms':>9}{'peak MiB':>10}")
    found = [_measure(module, world_size, "vLLM") for world_size in (8, 64, 256, 1024)]
    vllm_moe_dp_fix.install("nixl_eplb_validator")
    found += [_measure(module, world_size, "plugin") for world_size in (8, 64, 256, 1024)]
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


def _measure(module: Any, world_size: int, validator: str) -> dict[str, Any]:
    tensors = [torch.zeros(EXPERTS, 16, dtype=torch.uint8) for _ in range(TENSORS)]
    weights = [tensors for _ in range(LAYERS)]

    def run() -> int:
        group = Group(world_size)
        kept = fix._set_up(module, group, weights, Agent)  # type: ignore[arg-type]
        assert len(kept._remote_send_meta) == world_size - 1
        return group.sent

    run()
    began = time.perf_counter()
    sent = run()
    took = 1e3 * (time.perf_counter() - began)
    tracemalloc.start()
    run()
    peak = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    print(f"{world_size:>6}{validator:>12}{sent:>12}{took:>9.1f}{peak:>10.1f}", flush=True)
    return {
        "ranks": world_size,
        "validator": validator,
        "bytes_sent": sent,
        "ms": took,
        "peak_mib": peak,
    }


if __name__ == "__main__":
    main()
