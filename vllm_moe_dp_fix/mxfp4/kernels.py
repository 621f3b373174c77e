# SPDX-License-Identifier: Apache-2.0
"""Which method and kernel MXFP4 experts get, and an error that says why there is none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

from vllm_moe_dp_fix.mxfp4.sharding import is_gpt_oss

# Takes a layer's configuration, returns a back end and the class of its experts.
Select: TypeAlias = Callable[[Any], tuple[Any, Any]]

_TAKE_ANY = ("CPU", "XPU", "EMULATION")  # back ends that take the weights as they are


def with_kernel(make: Callable[[], Any], make_for_gpt_oss: Callable[[], Any]) -> Any:
    """The method for experts that are not gpt-oss's.

    Where that one has no kernel, gpt-oss's has some that are not for gpt-oss alone.
    """
    try:
        return make()
    except ValueError:
        with suppress(Exception):
            method = make_for_gpt_oss()
            if method.mxfp4_backend.name in _TAKE_ANY:
                return method
        raise


def explained(select: Select) -> Select:
    """Selects a back end, or says what was asked and what there is."""

    @functools.wraps(select)
    def selected(config: Any) -> tuple[Any, Any]:
        from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend

        try:
            backend, experts = select(config)
        except (NotImplementedError, ValueError) as error:
            raise ValueError(_no_kernel(config, str(error))) from error
        if backend == Mxfp4MoeBackend.NONE:
            raise ValueError(_no_kernel(config, "no back end supports this device"))
        return backend, experts

    return selected


def marlin_for_others(select: Select) -> Select:
    """To 0.19.1, the one back end whose weight conversion is not made for gpt-oss alone."""

    @functools.wraps(select)
    def selected(config: Any) -> tuple[Any, Any]:
        backend, experts = select(config)
        return (backend, experts) if is_gpt_oss(config) else _marlin(config, backend, experts)

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


def _no_kernel(config: Any, reason: str) -> str:
    import vllm
    from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
    from vllm.platforms import current_platform

    names = ", ".join(backend.value for backend in Mxfp4MoeBackend if backend.value != "None")
    return (
        f"--quantization mxfp4 was asked for, and vLLM {vllm.__version__} has no MXFP4 kernel for "
        f"experts with activation {config.activation.value!r} on "
        f"{current_platform.device_name or current_platform.device_type}: {reason} Its back ends "
        f"are {names}; which of them fit, VLLM_LOGGING_LEVEL=DEBUG says. Serve without "
        "--quantization or with fp8, use a GPU of compute capability 8.0 or newer (Marlin), or a "
        "newer vLLM."
    )
