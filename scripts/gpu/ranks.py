# SPDX-License-Identifier: Apache-2.0
"""Two data-parallel ranks of vLLM over NCCL, a CUDA GPU each where there are two."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.demo import free_port

RANKS = 2


def spawn(function: Callable[..., list[Any]], *arguments: Any) -> list[list[Any]]:
    """What ``function(rank, vllm_config, *arguments)`` returns on each rank.

    Each rank is a process with vLLM's groups set up and its plugins loaded.
    """
    import torch.multiprocessing as mp

    results: Any = mp.get_context("spawn").SimpleQueue()
    running = mp.spawn(_rank, (free_port(), results, function, arguments), RANKS, join=False)
    found: dict[int, list[Any]] = {}
    is_done = False
    while not is_done:
        is_done = running.join(timeout=0.2)  # raises where a rank has failed
        while not results.empty():  # read as it comes: a full pipe stops the rank
            found.update([results.get()])
    return [found[rank] for rank in range(RANKS)]


def _rank(
    rank: int, port: int, results: Any, function: Callable[..., list[Any]], arguments: Sequence[Any]
) -> None:
    import torch
    import torch.distributed as dist
    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        get_ep_group,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    gpu = rank % torch.cuda.device_count()
    torch.cuda.set_device(gpu)
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS
    )
    parallel = ParallelConfig(data_parallel_size=RANKS)
    parallel.data_parallel_rank = rank
    config = VllmConfig(parallel_config=parallel)
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, "env://", gpu, "nccl")
        initialize_model_parallel(1, 1, backend="nccl")
        ep = get_ep_group()
        ep.device_communicator.all2all_manager = AgRsAll2AllManager(ep.cpu_group)
        results.put((rank, function(rank, config, *arguments)))
    torch.cuda.synchronize()
    dist.barrier()


@contextlib.contextmanager
def step(config: Any, tokens: Sequence[int], rank: int) -> Iterator[None]:
    """A forward pass in which rank r has ``tokens[r]`` rows."""
    import torch
    from vllm.forward_context import get_forward_context, set_forward_context

    across = torch.tensor(tokens, dtype=torch.int32)
    with (
        set_forward_context(None, config, num_tokens=tokens[rank], num_tokens_across_dp=across),
        get_forward_context().dp_metadata.sp_local_sizes(1),
    ):
        yield


def capture(function: Callable[[], Any]) -> tuple[Any, Any]:
    """A CUDA graph of ``function``, as vLLM captures its own, and what it returned."""
    import torch
    from vllm.distributed.parallel_state import graph_capture

    function()  # compiles kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    device = torch.device("cuda", torch.cuda.current_device())
    with (
        graph_capture(device=device) as context,
        torch.cuda.graph(graph, stream=context.stream),
    ):
        result = function()
    return graph, result
