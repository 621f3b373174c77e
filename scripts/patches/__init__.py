# SPDX-License-Identifier: Apache-2.0
"""Makes the patch series for vLLM that ``vllm_moe_dp_fix/upstream/series`` holds."""
