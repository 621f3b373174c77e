# SPDX-License-Identifier: Apache-2.0
"""Independent replicas: every data-parallel rank holds all experts and is an engine of its own.

vLLM treats dense models so. A rank of an MoE model is tied to the others by what vLLM decides in a
few places: which engine runs, whether a coordinator and waves are needed, who shakes hands with
whom. ``choice`` decides once for a configuration, ``engines`` marks it, and what ``patches`` puts
in those places looks at the mark. The engine then sees a configuration with one rank, and all that
follows from it, down to the experts' shapes, is vLLM's own.
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module

from vllm_moe_dp_fix import runtime, settings
from vllm_moe_dp_fix.registry import CORE_CLIENT

logger = logging.getLogger("vllm.moe_dp_fix")


def prepare() -> None:
    """Has vLLM patched before it makes a configuration.

    A process that has imported the engine's arguments is about to make one, and will import what is
    imported here anyway.
    """
    if "vllm.engine.arg_utils" not in sys.modules:
        return
    try:
        import_module(CORE_CLIENT)
    except runtime.FixNotAppliedError:
        raise
    except Exception:
        logger.exception("experts: %s could not be imported", CORE_CLIENT)
    verdict = runtime.verdicts()["moe_dp_dispatch"].get("F1d")
    is_in_force = verdict is not None and verdict.outcome.value == "applied"
    if settings.experts() != "sharded" and not is_in_force:
        reason = verdict.reason if verdict else "it could not be judged"
        logger.error("experts: %s has no effect here: %s", settings.EXPERTS, reason)
