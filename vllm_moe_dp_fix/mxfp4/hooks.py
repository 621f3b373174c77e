# SPDX-License-Identifier: Apache-2.0
"""What vLLM's MXFP4 methods call as they make the parameters of a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_moe_dp_fix.mxfp4.loading import attach
from vllm_moe_dp_fix.mxfp4.sharding import ExpertShard, is_gpt_oss

if TYPE_CHECKING:
    from vllm_moe_dp_fix.mxfp4.loading import Quantizer

_SHARD = "_moe_dp_fix_shard"


def cut_into_blocks(
    method: Any, hidden_size: int, intermediate_size_per_partition: int, parallel: Any
) -> int:
    """The intermediate size per partition in whole blocks, before a back end pads it.

    Raises:
        ValueError: ranks would hold unequal parts, and LoRA needs equal ones.
    """
    tp_size, tp_rank = parallel.tp_size, parallel.tp_rank
    intermediate = intermediate_size_per_partition * tp_size
    shard = ExpertShard(hidden_size, intermediate, tp_size, tp_rank)
    if not shard.is_even:
        if method.moe.is_lora_enabled:
            raise ValueError(
                f"MXFP4 experts of intermediate size {shard.intermediate} cannot be cut into "
                f"{tp_size} equal parts of whole blocks, which LoRA needs; use "
                "--enable-expert-parallel, another TP or DP size, or no LoRA"
            )
        # What kernels read as the width of this rank; the stride only where it is the width.
        method.moe.intermediate_size_per_partition_unpadded = shard.width
    setattr(method, _SHARD, shard)
    return shard.stride


def attach_loader(method: Any, layer: Any, quantizer: Quantizer | None) -> None:
    """Gives the parameters of a layer the loader that knows their sizes."""
    shard = getattr(method, _SHARD)
    attach(layer, shard, quantizer, is_interleaved=is_gpt_oss(method.moe))
