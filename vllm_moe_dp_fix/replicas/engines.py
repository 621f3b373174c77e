# SPDX-License-Identifier: Apache-2.0
"""Engines that run on their own: the mark on a configuration, and what an engine process runs."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from vllm_moe_dp_fix import settings
from vllm_moe_dp_fix.host import detect
from vllm_moe_dp_fix.patching import overridden

_MARK = "_moe_dp_fix_replicated"

# vLLM's own, where it was replaced in this process; a forked one inherits that, a spawned one not.
vllm_run_engine_core: Callable[..., None] | None = None


class ReplicasRefusedError(ValueError):
    """Replicas beside something that ties the ranks together."""


def mark(parallel_config: Any, replicated: bool) -> None:
    """Writes a decision down, which travels with the configuration to other processes."""
    setattr(parallel_config, _MARK, replicated)


def decision(parallel_config: Any) -> bool | None:
    """Whether the ranks are independent engines with all experts; None where it is not decided."""
    return getattr(parallel_config, _MARK, None)


def is_replicated(parallel_config: Any) -> bool:
    return decision(parallel_config) is True


@contextlib.contextmanager
def as_one_rank(parallel_config: Any) -> Iterator[None]:
    """Shows a configuration with one rank, as its engines will see it."""
    size = parallel_config.data_parallel_size
    parallel_config.data_parallel_size = 1
    try:
        yield
    finally:
        parallel_config.data_parallel_size = size


def make_independent(parallel_config: Any) -> None:
    """What vLLM does to the configuration of a dense model's rank.

    ``data_parallel_index`` and ``data_parallel_rank_local`` stay, for ports, names and devices.
    """
    reconfigure = getattr(parallel_config, "reconfigure_for_independent_dp_rank", None)
    if reconfigure is not None:  # from 0.28.0
        reconfigure()
        return
    parallel_config.data_parallel_size = 1
    parallel_config.data_parallel_size_local = 1
    parallel_config.data_parallel_rank = 0


def run_engine_core(*args: Any, dp_rank: int = 0, local_dp_rank: int = 0, **kwargs: Any) -> None:
    """``EngineCoreProc.run_engine_core``, for replicas too.

    It is the target of engine processes, and a name that a spawned one can import: such a process
    has chosen its engine, and met its front end, before it loads plugins.
    """
    from vllm.v1.engine import core

    run = vllm_run_engine_core or core.EngineCoreProc.run_engine_core
    parallel_config = kwargs["vllm_config"].parallel_config
    with contextlib.ExitStack() as stack:
        stack.enter_context(_greeted_alike(core.EngineCoreProc))
        if is_replicated(parallel_config):
            if parallel_config.data_parallel_external_lb:
                # A server for each rank: its engine has nothing to learn from rank 0.
                own = kwargs.pop("client_handshake_address", None)
                kwargs["handshake_address"] = own or kwargs["handshake_address"]
            stack.enter_context(overridden(core, DPEngineCoreProc=_independent_engine))
        run(*args, dp_rank=dp_rank, local_dp_rank=local_dp_rank, **kwargs)


def _independent_engine(*args: Any, **kwargs: Any) -> Any:
    """The engine of a dense model's rank, where vLLM wants one for a rank among many."""
    from vllm.v1.engine import core

    vllm_config = kwargs["vllm_config"]
    index = vllm_config.parallel_config.data_parallel_rank
    make_independent(vllm_config.parallel_config)
    # All have rank 0 now, and vLLM names shared memory by the instance and the rank.
    vllm_config.instance_id = f"{vllm_config.instance_id}_dp{index}"
    return core.EngineCoreProc(*args, engine_index=index, **kwargs)


@contextlib.contextmanager
def _greeted_alike(engine: Any) -> Iterator[None]:
    """Lets no engine wait for others where its node and that of rank 0 differ over replicas.

    To ranks that step together the front end of rank 0 sends where they meet; to replicas nothing.
    """
    if detect().release is None:  # its front end may send something else
        yield
        return
    original = engine.startup_handshake
    signature = inspect.signature(original)

    @functools.wraps(original)
    def startup_handshake(*args: Any, **kwargs: Any) -> Any:
        told = signature.bind(*args, **kwargs).arguments.get("parallel_config")
        if told is None or told.enable_elastic_ep:
            return original(*args, **kwargs)
        is_replica = is_replicated(told)
        if told.data_parallel_size == 1 and not is_replica:
            return original(*args, **kwargs)
        port, told.data_parallel_master_port = told.data_parallel_master_port, None
        addresses = original(*args, **kwargs)
        meets_replicas = told.data_parallel_master_port is None
        if meets_replicas:
            told.data_parallel_master_port = port
        if is_replica != meets_replicas:
            here, there = ("replicated", "sharded") if is_replica else ("sharded", "replicated")
            raise ReplicasRefusedError(
                f"The experts of this node's ranks are {here}, those of rank 0 {there}. Set "
                f"{settings.EXPERTS} alike on all nodes; with auto, their devices must be alike."
            )
        return addresses

    engine.startup_handshake = staticmethod(startup_handshake)
    try:
        yield
    finally:
        engine.startup_handshake = staticmethod(original)
