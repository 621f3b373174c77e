# SPDX-License-Identifier: Apache-2.0
"""Forks the ranks of one check and gathers what they saw."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 60


@dataclass
class Rank:
    """One rank of a check: vLLM's parallel state, set up for data parallelism.

    Attributes:
        rank, world_size: Over all ranks.
        dp_size, tp_size: Of the parallel state; their product is the world size.
        config: The ``VllmConfig`` in force.
    """

    rank: int
    world_size: int
    dp_size: int
    tp_size: int
    config: Any

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tp_size

    def use_cuda_communicators(self) -> Any:
        """Puts real ``CudaCommunicator`` objects over NCCL twins into the DP and EP groups.

        Returns the twin of the group that is gathered without sequence parallelism.
        """
        from vllm.distributed import get_dp_group, get_ep_group

        for group in (get_dp_group(), get_ep_group()):
            group.device_communicator = cuda_communicator(group)
        return get_dp_group().device_communicator.pynccl_comm

    def use_cpu_communicators(self) -> None:
        """Gives the EP group's ``CpuCommunicator`` the manager that serving gives it."""
        from vllm.distributed import get_ep_group
        from vllm.distributed.device_communicators import all2all

        group = get_ep_group()
        # To 0.19.1 the CPU broadcasts; its manager went when it began to gather.
        name = "NaiveAll2AllManager"
        manager = getattr(all2all, name, all2all.AgRsAll2AllManager)
        group.device_communicator.all2all_manager = manager(group.cpu_group)

    @contextlib.contextmanager
    def step(self, tokens: list[int]) -> Iterator[None]:
        """A forward step in which DP rank i holds ``tokens[i]`` tokens."""
        from vllm.forward_context import get_forward_context, set_forward_context

        across = torch.tensor(tokens, dtype=torch.int32)
        with set_forward_context(
            None, self.config, num_tokens=tokens[self.dp_rank], num_tokens_across_dp=across
        ):
            metadata = get_forward_context().dp_metadata
            with metadata.sp_local_sizes(self.tp_size):
                yield


def cuda_communicator(group: Any) -> Any:
    from twins import NcclTwin
    from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager
    from vllm.distributed.device_communicators.base_device_communicator import (
        DeviceCommunicatorBase,
    )
    from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

    communicator = object.__new__(CudaCommunicator)
    DeviceCommunicatorBase.__init__(
        communicator,
        group.cpu_group,
        torch.device("cpu"),
        group.device_group,
        group.unique_name,
    )
    communicator.pynccl_comm = NcclTwin(group.device_group)
    communicator.aiter_ar_comm = None
    communicator.use_aiter_ag_rs = False
    communicator.all2all_manager = AgRsAll2AllManager(group.cpu_group)
    return communicator


def run(check: Callable[[Rank], None], dp_size: int, tp_size: int, fix_ids: list[str]) -> list[str]:
    """Runs ``check`` on freshly forked ranks, with the given fixes loaded.

    Returns:
        What went wrong, one line a rank that raised, rank by rank; empty where all was right. Ranks
        that only lost their peers are left out where a peer says why.
    """
    pipes: list[int] = []
    pids: list[int] = []
    # The ranks meet in a file: a free port can be taken before they listen on it.
    with tempfile.TemporaryDirectory() as meeting:
        for rank in range(dp_size * tp_size):
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                _child(check, rank, dp_size, tp_size, meeting, fix_ids, writer)
            os.close(writer)
            pipes.append(reader)
            pids.append(pid)
        said = _collect(pipes)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    lines = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text != "right"]
    own = [line for line in lines if "peer" not in line.lower()]
    return own or lines


def _child(
    check: Callable[[Rank], None],
    rank: int,
    dp_size: int,
    tp_size: int,
    meeting: str,
    fix_ids: list[str],
    writer: int,
) -> None:
    try:
        os.environ["VLLM_PLUGINS"] = ",".join(fix_ids)
        with _parallel_state(rank, dp_size, tp_size, meeting) as state:
            from vllm.plugins import load_general_plugins

            load_general_plugins()
            check(state)
        result = "right"
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{os.path.basename(where.filename)}:{where.lineno}"
        result = f"{type(error).__name__}: {error} [{place}]"
        if os.environ.get("SOURCE_LANE_TRACEBACK"):
            traceback.print_exc()
    os.write(writer, json.dumps(result[:2000]).encode())  # at once: it fits the pipe
    # Exit at once: peers that wait for this rank see its sockets close.
    os._exit(0)


@contextlib.contextmanager
def _parallel_state(rank: int, dp_size: int, tp_size: int, meeting: str) -> Iterator[Rank]:
    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}/store",
        rank=rank,
        world_size=dp_size * tp_size,
        timeout=timedelta(seconds=TIMEOUT_S // 2),
    )
    parallel = ParallelConfig(data_parallel_size=dp_size, tensor_parallel_size=tp_size)
    parallel.data_parallel_rank = rank // tp_size
    config = VllmConfig(parallel_config=parallel)
    with set_current_vllm_config(config):
        init_distributed_environment(tp_size, rank % tp_size, "env://", rank, "gloo")
        initialize_model_parallel(tp_size, 1, backend="gloo")
        yield Rank(rank, dp_size * tp_size, dp_size, tp_size, config)


def _collect(pipes: list[int]) -> list[str]:
    said = [""] * len(pipes)
    deadline = time.monotonic() + TIMEOUT_S
    waiting = dict(enumerate(pipes))
    while waiting and time.monotonic() < deadline:
        ready, _, _ = select.select(list(waiting.values()), [], [], 1.0)
        for rank, pipe in list(waiting.items()):
            if pipe in ready:
                said[rank] = json.loads(os.read(pipe, 65536) or b'"died without a word"')
                del waiting[rank]
    for rank in waiting:
        said[rank] = f"hangs: no word in {TIMEOUT_S} s"
    for pipe in pipes:
        os.close(pipe)
    return said
