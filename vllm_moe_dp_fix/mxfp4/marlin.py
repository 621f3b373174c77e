# SPDX-License-Identifier: Apache-2.0
"""Marlin where a back end is made for gpt-oss alone, as most are to vLLM 0.19.1."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

from vllm_moe_dp_fix.mxfp4.sharding import is_gpt_oss

# Takes a layer's configuration, returns a back end and the class of its experts.
Select: TypeAlias = Callable[[Any], tuple[Any, Any]]


def marlin_for_others(select: Select) -> Select:
    """Selects the back end whose weight conversion fits experts of any model."""

    @functools.wraps(select)
    def selected(config: Any) -> tuple[Any, Any]:
        backend, experts = select(config)
        if is_gpt_oss(config):
            return backend, experts
        return _marlin(config, backend, experts)

    return selected


def _marlin(config: Any, backend: Any, experts: Any) -> tuple[Any, Any]:
    from vllm.model_executor.layers.fused_moe import modular_kernel
    from vllm.model_executor.layers.fused_moe.oracle import mxfp4 as oracle

    backends = oracle.Mxfp4MoeBackend
    if backend in (backends.NONE, backends.MARLIN, backends.BATCHED_MARLIN, backends.XPU):
        return backend, experts
    formats = modular_kernel.FusedMoEActivationFormat
    is_batched = config.moe_parallel_config.use_batched_activation_format
    marlin = backends.BATCHED_MARLIN if is_batched else backends.MARLIN
    wanted = formats.BatchedExperts if is_batched else formats.Standard
    kernel = oracle.backend_to_kernel_cls(marlin)[0]
    is_supported, reason = kernel.is_supported_config(
        kernel, config, oracle.kMxfp4Static, None, wanted
    )
    if not is_supported:
        raise ValueError(f"{backend.value} is made for gpt-oss alone, and {marlin.value}: {reason}")
    return marlin, kernel
