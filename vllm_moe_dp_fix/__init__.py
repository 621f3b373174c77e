# SPDX-License-Identifier: Apache-2.0
"""Repairs MoE serving under data parallelism in an installed vLLM.

vLLM loads the fixes by itself through the entry points in ``plugin.py``. The functions below do
the same by hand, for notebooks and tests.
"""

from vllm_moe_dp_fix.runtime import install, uninstall, verdicts

__version__ = "0.1.0"

__all__ = ["__version__", "install", "uninstall", "verdicts"]
