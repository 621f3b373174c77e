# SPDX-License-Identifier: Apache-2.0
"""Sharded or replicated experts: the decision over one configuration.

It rests on what all processes of a deployment see alike, so that they come to the same one.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterator
from typing import Any

from vllm_moe_dp_fix import settings
from vllm_moe_dp_fix.registry import FIX_IDS
from vllm_moe_dp_fix.replicas import memory
from vllm_moe_dp_fix.replicas.engines import ReplicasRefusedError, decision, mark

logger = logging.getLogger("vllm.moe_dp_fix")

# Options of ParallelConfig that need ranks which step together, and why.
_LOCKSTEP_OPTIONS = {
    "enable_expert_parallel": "spreads the experts over the ranks",
    "enable_eplb": "moves experts between the ranks",
    "enable_elastic_ep": "spreads the experts over a changing number of ranks",
    "enable_dbo": "hides the experts' traffic, of which there is none",
    "enable_fault_tolerance": "watches over ranks that step together",
}
# KV connectors that tell the ranks apart by what replicas do not have.
_LOCKSTEP_CONNECTORS = {
    "MoRIIOConnector": "finds its peers by their data-parallel rank",
    "P2pNcclConnector": "counts its ports through the ranks of all engines",
}


def is_wanted(vllm_config: Any) -> bool:
    """Whether the ranks of this configuration shall be replicas; decided once, in one log line.

    Raises:
        ReplicasRefusedError: They shall, and something else that was asked for rules it out.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    decided = decision(parallel)
    if decided is None and model and model.is_moe and parallel.data_parallel_size > 1:
        decided = _decide(vllm_config)
        mark(parallel, decided)
    return bool(decided)


def _decide(vllm_config: Any) -> bool:
    setting = settings.experts()
    try:
        obstacles = list(find_obstacles(vllm_config))
        if setting == "replicated":
            if obstacles:
                raise ReplicasRefusedError(refusal(obstacles))
            ranks = vllm_config.parallel_config.data_parallel_size
            _say(f"{ranks} independent replicas, as {settings.EXPERTS} asks")
            return True
        if obstacles:
            if setting == "auto":
                _say(f"sharded, since {' and '.join(obstacles)}")
            return False
        return _decide_by_memory(vllm_config, setting)
    except ReplicasRefusedError:
        raise
    except memory.UnknownSizeError as error:
        if setting == "auto":
            _say(f"sharded, since {error}")
    except Exception:
        if setting == "sharded":
            return False  # there would have been a hint
        logger.exception("experts: sharded, since nothing else could be decided")
        if settings.read(FIX_IDS).strict:
            raise
    return False


def _decide_by_memory(vllm_config: Any, setting: str) -> bool:
    need = memory.of_full_copy(vllm_config)
    ranks = vllm_config.parallel_config.data_parallel_size
    if setting == "sharded":
        if need.leaves_half:
            _say(
                f"sharded over {ranks} ranks, though {need}; {settings.EXPERTS}=replicated serves "
                "independent copies, with no traffic between them"
            )
        return False
    if need.leaves_half:
        _say(f"{ranks} independent replicas, since {need}")
    else:
        _say(f"sharded, since {need}")
    return need.leaves_half


def find_obstacles(vllm_config: Any) -> Iterator[str]:
    """What keeps the ranks of this configuration from being replicas, in words."""
    parallel = vllm_config.parallel_config
    for option, reason in _LOCKSTEP_OPTIONS.items():
        if getattr(parallel, option, False):
            yield f"--{option.replace('_', '-')} {reason}"
    if getattr(parallel, "ubatch_size", 0) > 1:
        yield "--ubatch-size hides the experts' traffic, of which there is none"
    if parallel.distributed_executor_backend == "external_launcher":
        yield "the external launcher puts all ranks into one process group"
    if getattr(parallel, "nnodes", 1) > 1:
        yield (
            "--nnodes puts the ranks of all nodes into one process group, where "
            "--data-parallel-size-local gives each node whole ranks"
        )
    for name in _kv_connectors(vllm_config.kv_transfer_config):
        if name in _LOCKSTEP_CONNECTORS:
            yield f"the KV connector {name} {_LOCKSTEP_CONNECTORS[name]}"
    if vllm_config.load_config.load_format == "ipc_cache":
        yield "--load-format ipc_cache keeps the sharded weights"


def _kv_connectors(kv_transfer_config: Any) -> Iterator[str]:
    if kv_transfer_config is None:
        return
    yield kv_transfer_config.kv_connector
    for inner in (kv_transfer_config.kv_connector_extra_config or {}).get("connectors", ()):
        yield inner.get("kv_connector", "")


def refusal(obstacles: list[str]) -> str:
    return (
        f"{settings.EXPERTS}=replicated makes every data-parallel rank an engine of its own, but "
        f"{' and '.join(obstacles)}. Leave that out, or set {settings.EXPERTS}=sharded."
    )


def _say(text: str) -> None:
    """Once a deployment: further API servers decide again, and have nothing to add."""
    if not multiprocessing.current_process().name.startswith("ApiServer"):
        logger.info("experts: %s", text)
