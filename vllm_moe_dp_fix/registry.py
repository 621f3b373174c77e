# SPDX-License-Identifier: Apache-2.0
"""All fixes, by id."""

from __future__ import annotations

from vllm_moe_dp_fix.fixes import moe_dp_all_gather, moe_dp_dispatch

FIXES = {fix.id: fix for fix in (moe_dp_dispatch.FIX, moe_dp_all_gather.FIX)}
FIX_IDS = tuple(FIXES)
