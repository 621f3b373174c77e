# SPDX-License-Identifier: Apache-2.0
"""The places where vLLM ties the ranks of an MoE model together (F1d)."""

from __future__ import annotations

import functools
import inspect
from importlib import import_module
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

from vllm_moe_dp_fix.patching import overridden
from vllm_moe_dp_fix.records import Fault, Patch, Repair
from vllm_moe_dp_fix.registry import CORE_CLIENT
from vllm_moe_dp_fix.replicas import choice, engines

VLLM_CONFIG = "vllm.config.vllm"
COORDINATOR = "vllm.v1.engine.coordinator"
ENGINE_CORE = "vllm.v1.engine.core"
ENGINE_UTILS = "vllm.v1.engine.utils"


def _wrap_post_init(original: FunctionType, module: ModuleType) -> FunctionType:
    @functools.wraps(original)
    def __post_init__(self: Any) -> None:
        if not choice.is_wanted(self):
            original(self)
            return
        parallel = self.parallel_config
        with engines.as_one_rank(parallel):
            original(self)
        if parallel.data_parallel_size > 1 and parallel.data_parallel_rank_local is not None:
            # Offline each rank has a client of its own, which would wait for waves to end.
            engines.make_independent(parallel)
            parallel.data_parallel_index = 0  # its only engine; the device stays that of the rank

    return __post_init__  # type: ignore[return-value]


def _wrap_needs_coordinator(original: FunctionType, module: ModuleType) -> FunctionType:
    @functools.wraps(original)
    def needs_dp_coordinator(self: Any) -> bool:
        parallel = self.parallel_config
        if engines.is_replicated(parallel) and parallel.data_parallel_external_lb:
            return False
        return bool(original(self))

    return needs_dp_coordinator  # type: ignore[return-value]


def _wrap_coordinator(original: FunctionType, module: ModuleType) -> FunctionType:
    """Without waves it only counts requests, for load balancing."""

    @functools.wraps(original)
    def __init__(
        self: Any,
        parallel_config: Any,
        enable_wave_coordination: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        waves = enable_wave_coordination and not engines.is_replicated(parallel_config)
        original(self, parallel_config, waves, *args, **kwargs)

    return __init__  # type: ignore[return-value]


def _wrap_engine_startup(original: FunctionType, module: ModuleType) -> FunctionType:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wait_for_engine_startup(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        given = call.arguments
        parallel = given["parallel_config"]
        if engines.is_replicated(parallel):
            given["coordinated_dp"] = False
            if parallel.data_parallel_external_lb:
                given["core_engines"] = [e for e in given["core_engines"] if e.local]
        return original(*call.args, **call.kwargs)

    return wait_for_engine_startup  # type: ignore[return-value]


def _wrap_actor_manager(original: FunctionType, module: ModuleType) -> FunctionType:
    """Ray: the actor's class is chosen here, and imported by name in the actor's process."""

    @functools.wraps(original)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        core = import_module(ENGINE_CORE)
        actor = core.DPMoEEngineCoreActor
        if engines.is_replicated(vllm_config.parallel_config):
            actor = core.EngineCoreActor
        with overridden(core, DPMoEEngineCoreActor=actor):
            original(self, vllm_config, *args, **kwargs)

    return __init__  # type: ignore[return-value]


def _wrap_run_engine_core(original: FunctionType, module: ModuleType) -> FunctionType:
    if original is not engines.run_engine_core:
        engines.vllm_run_engine_core = original
    return engines.run_engine_core  # type: ignore[return-value]


def _wrap_make_client(original: FunctionType, module: ModuleType) -> FunctionType:
    """A server for each rank has one engine, and no coordinator to listen to."""

    @functools.wraps(original)
    def make_async_mp_client(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        client = module.DPAsyncMPClient
        if engines.is_replicated(vllm_config.parallel_config):
            client = module.AsyncMPClient
        with overridden(module, DPAsyncMPClient=client):
            return original(vllm_config, *args, **kwargs)

    return make_async_mp_client  # type: ignore[return-value]


# --- probe ----------------------------------------------------------------------------------


def _probe_f1d(module: ModuleType) -> str | None:
    """Whether a rank can do without the others. Which engine it is, no process shows in a probe."""
    core, utils = import_module(ENGINE_CORE), import_module(ENGINE_UTILS)
    run = core.EngineCoreProc.run_engine_core
    _refers(run, "DPEngineCoreProc", "EngineCoreProc", "is_moe")
    _refers(utils.CoreEngineActorManager.__init__, "DPMoEEngineCoreActor", "EngineCoreActor")
    _refers(utils.launch_core_engines, "DPCoordinator", "wait_for_engine_startup")
    _refers(module.EngineCoreClient.make_async_mp_client, "DPAsyncMPClient", "AsyncMPClient")

    parallel = SimpleNamespace(data_parallel_size=2, data_parallel_external_lb=True)
    engines.mark(parallel, True)
    model = SimpleNamespace(is_moe=True)
    config = SimpleNamespace(parallel_config=parallel, model_config=model)
    if import_module(VLLM_CONFIG).VllmConfig.needs_dp_coordinator.fget(config):
        return "the ranks of an MoE model always wait for each other"
    return None


def _refers(function: Any, *names: str) -> None:
    """Raises LookupError unless the function looks these names up, which are replaced for it."""
    code = inspect.unwrap(function).__code__
    missing = {*names} - {*code.co_names}
    if missing and function is not engines.run_engine_core:
        raise LookupError(f"{function.__qualname__} knows no {', '.join(sorted(missing))}")


F1D = Fault(
    id="F1d",
    summary="Without expert parallelism the experts are always sharded over all ranks; there is no "
    "way to keep a full copy on each",
    upstream=(
        "https://github.com/vllm-project/vllm/issues/36222",
        "https://github.com/vllm-project/vllm/pull/51130",
    ),
    removable="when vLLM can run the ranks of an MoE model independently",
    probe=_probe_f1d,
)

REPAIR = Repair(
    module=CORE_CLIENT,
    faults=(F1D,),
    patches=(
        Patch(("VllmConfig.__post_init__",), _wrap_post_init, module=VLLM_CONFIG),
        Patch(("VllmConfig.needs_dp_coordinator",), _wrap_needs_coordinator, module=VLLM_CONFIG),
        Patch(("DPCoordinator.__init__",), _wrap_coordinator, module=COORDINATOR),
        Patch(("wait_for_engine_startup",), _wrap_engine_startup, module=ENGINE_UTILS),
        Patch(("CoreEngineActorManager.__init__",), _wrap_actor_manager, module=ENGINE_UTILS),
        Patch(("EngineCoreProc.run_engine_core",), _wrap_run_engine_core, module=ENGINE_CORE),
        Patch(("EngineCoreClient.make_async_mp_client",), _wrap_make_client),
    ),
)
