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

TIMEOUT_S = 120
RIGHT = "right"


@dataclass
class Rank:
    """One rank of a check: vLLM's parallel state, set up for data parallelism.

    Attributes:
        rank, world_size: Over all ranks.
        dp_size, tp_size: Of the parallel state; their product is the world size.
        config: The ``VllmConfig`` in force, None in a process that is no rank.
    """

    rank: int
    world_size: int
    dp_size: int
    tp_size: int
    config: Any

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tp_size

    @contextlib.contextmanager
    def own_communicators(self) -> Iterator[None]:
        """Gives the groups the communicators that vLLM made for them back afterwards."""
        if self.config is None:
            yield
            return
        from vllm.distributed import get_dp_group, get_ep_group

        groups = (get_dp_group(), get_ep_group())
        before = [group.device_communicator for group in groups]  # none where there is one rank
        managers = [communicator and communicator.all2all_manager for communicator in before]
        yield
        for group, communicator, manager in zip(groups, before, managers, strict=True):
            group.device_communicator = communicator
            if communicator:
                communicator.all2all_manager = manager

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


Check = Callable[[Rank], None]


class Dies(BaseException):
    """A rank that a check wants to end in the middle of it."""


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


def run(
    checks: dict[str, Check], dp_size: int, tp_size: int, fix_ids: list[str]
) -> dict[str, list[str]]:
    """Runs checks one after the other on freshly forked ranks, with the given fixes loaded.

    With a ``dp_size`` of 0, in one process that is no rank of anything.

    Returns:
        For each check what went wrong, one line a rank that raised; empty where all was right.
        Ranks that only lost their peers are left out where a peer says why. Several ranks end at
        the first check that fails, since they are out of step then; those after it are missing.
    """
    pipes: list[int] = []
    pids: list[int] = []
    # The ranks meet in a file: a free port can be taken before they listen on it.
    with tempfile.TemporaryDirectory() as meeting:
        for rank in range(max(1, dp_size * tp_size)):
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                _child(checks, rank, dp_size, tp_size, meeting, fix_ids, writer)
            os.close(writer)
            pipes.append(reader)
            pids.append(pid)
        said = _collect(pipes, next(iter(checks)))
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    results: dict[str, list[str]] = {}
    for name in checks:
        texts = [by_check.get(name, "ended before") for by_check in said]
        lines = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text != RIGHT]
        results[name] = [line for line in lines if "peer" not in line.lower()] or lines
        if lines and len(pids) > 1:
            break
    return results


def _child(
    checks: dict[str, Check],
    rank: int,
    dp_size: int,
    tp_size: int,
    meeting: str,
    fix_ids: list[str],
    writer: int,
) -> None:
    said: dict[str, str] = {}
    name = next(iter(checks))
    try:
        os.environ["VLLM_PLUGINS"] = ",".join(fix_ids)
        with _parallel_state(rank, dp_size, tp_size, meeting) as state:
            from vllm.plugins import load_general_plugins

            load_general_plugins()
            for name, check in checks.items():
                try:
                    with state.own_communicators():
                        check(state)
                    said[name] = RIGHT
                except Dies:
                    said[name] = RIGHT
                    break
                except BaseException as error:
                    said[name] = _words(error)
                    if state.world_size > 1:
                        break
    except BaseException as error:
        said[name] = _words(error)
    os.write(writer, json.dumps(said).encode())  # at once: it fits the pipe
    # Exit at once: peers that wait for this rank see its sockets close.
    os._exit(0)


def _words(error: BaseException) -> str:
    if os.environ.get("SOURCE_LANE_TRACEBACK"):
        traceback.print_exception(error)
    where = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{os.path.basename(where.filename)}:{where.lineno}"
    return f"{type(error).__name__}: {str(error)[:1500]} [{place}]"


@contextlib.contextmanager
def _parallel_state(rank: int, dp_size: int, tp_size: int, meeting: str) -> Iterator[Rank]:
    if dp_size == 0:
        yield Rank(rank, 0, dp_size, tp_size, None)
        return
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


def _collect(pipes: list[int], first: str) -> list[dict[str, str]]:
    """What each rank says of the checks; a rank without a word fails the first."""
    said = [{first: f"hangs: no word in {TIMEOUT_S} s"} for _ in pipes]
    deadline = time.monotonic() + TIMEOUT_S
    waiting = dict(enumerate(pipes))
    while waiting and time.monotonic() < deadline:
        ready, _, _ = select.select(list(waiting.values()), [], [], 1.0)
        for rank, pipe in list(waiting.items()):
            if pipe in ready:
                text = os.read(pipe, 65536)
                said[rank] = json.loads(text) if text else {first: "died without a word"}
                del waiting[rank]
    for pipe in pipes:
        os.close(pipe)
    return said
