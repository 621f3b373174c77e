# SPDX-License-Identifier: Apache-2.0
"""An error that says why MXFP4 experts get no kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

# Takes a layer's configuration, returns a back end and the class of its experts.
Select: TypeAlias = Callable[[Any], tuple[Any, Any]]


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
