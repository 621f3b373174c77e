# SPDX-License-Identifier: Apache-2.0
"""All fixes, and the modules of vLLM that each one repairs.

A fix's record lies in ``fixes/<id>.py`` and is loaded when one of its modules is imported, so that
the entry points stay light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_moe_dp_fix.records import Fix

NAIVE_DP_EP = "vllm.model_executor.layers.fused_moe.prepare_finalize.naive_dp_ep"
CORE_CLIENT = "vllm.v1.engine.core_client"
CUDA_COMMUNICATOR = "vllm.distributed.device_communicators.cuda_communicator"
CPU_COMMUNICATOR = "vllm.distributed.device_communicators.cpu_communicator"
MXFP4 = "vllm.model_executor.layers.quantization.mxfp4"
GPT_OSS = "vllm.model_executor.models.gpt_oss"
EPLB_COMMUNICATOR = "vllm.distributed.eplb.eplb_communicator"

MODULES = {
    "moe_dp_dispatch": (NAIVE_DP_EP, CORE_CLIENT),
    "moe_dp_all_gather": (CUDA_COMMUNICATOR, CPU_COMMUNICATOR),
    "mxfp4_weight_loader": (MXFP4, GPT_OSS),
    "nixl_eplb_validator": (EPLB_COMMUNICATOR,),
}
FIX_IDS = tuple(MODULES)


def modules_of(fix_id: str) -> tuple[str, ...]:
    """The modules of vLLM that a fix repairs. Raises KeyError where there is no such fix."""
    if fix_id not in MODULES:
        raise KeyError(f"{fix_id!r} is no fix; known: {', '.join(FIX_IDS)}")
    return MODULES[fix_id]


def load(fix_id: str) -> Fix:
    """The record of a fix."""
    modules_of(fix_id)
    fix: Fix = import_module(f"vllm_moe_dp_fix.fixes.{fix_id}").FIX
    return fix
