# SPDX-License-Identifier: Apache-2.0
"""Entry points of the group ``vllm.general_plugins``: one function a fix.

vLLM calls them once in every process, before it imports the code they repair, and does not catch
what they raise.
"""

from vllm_moe_dp_fix import replicas
from vllm_moe_dp_fix.runtime import activate


def moe_dp_dispatch() -> None:
    activate("moe_dp_dispatch")
    replicas.prepare()


def moe_dp_all_gather() -> None:
    activate("moe_dp_all_gather")


def mxfp4_weight_loader() -> None:
    activate("mxfp4_weight_loader")


def nixl_eplb_validator() -> None:
    activate("nixl_eplb_validator")
