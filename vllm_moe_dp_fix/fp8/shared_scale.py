# SPDX-License-Identifier: Apache-2.0
"""One FP8 scale for the rows of all ranks: each finds its maxima, and quantizes once they agree.

    maxima = all_reduce(local_maxima(rows), MAX)
    quantized, scale = quantize(rows, maxima)

gives on every rank, bit for bit, its part of what vLLM's ``scaled_fp8_quant`` gives for the rows of
all: the largest size over 448 is the scale, and the rows times its reciprocal, at most ±448, are
rounded to E4M3. As there, NaNs do not count for the scale and become 448. The maxima, not the
scale, are what the ranks agree on, so that no kernel waits for another to bring them together.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

Tensor: TypeAlias = torch.Tensor

MAXIMA = 512  # a rank: enough programs to read at the memory's speed, few enough to read again
PAYS_FROM = 2**25  # elements, by measurement: docs/gpu/dispatch.json
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def has_kernel(rows: Tensor, dtype: torch.dtype) -> bool:
    """Whether these rows can be quantized here: Triton on CUDA, to the E4M3 that CUDA has."""
    return (
        rows.is_cuda
        and torch.version.hip is None
        and dtype == torch.float8_e4m3fn
        and rows.dtype in _DTYPES
    )


def pays(rows: int, columns: int) -> bool:
    """Whether agreeing on a scale is faster than gathering all ranks' rows as they are."""
    return rows * columns >= PAYS_FROM


def local_maxima(rows: Tensor) -> Tensor:
    """The largest sizes in parts of this rank's rows, in one pass.

    Args:
        rows: [M, K], bfloat16, float16 or float32. M may be 0, and then all maxima are.

    Returns:
        [MAXIMA], float32. Which rows a maximum is of does not matter.
    """
    from vllm_moe_dp_fix.fp8 import triton_kernel

    maxima = torch.empty(MAXIMA, dtype=torch.float32, device=rows.device)
    triton_kernel.find_maxima(rows.contiguous(), maxima)
    return maxima


def quantize(rows: Tensor, maxima: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's rows, with the scale that the maxima of all ranks give.

    Args:
        rows: [M, K], as for ``local_maxima``.
        maxima: [MAXIMA], float32, the same on all ranks.

    Returns:
        [M, K], float8_e4m3fn, and the scale, [1], float32.
    """
    from vllm_moe_dp_fix.fp8 import triton_kernel

    quantized = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=rows.device)
    scale = torch.empty(1, dtype=torch.float32, device=rows.device)
    triton_kernel.quantize(rows.contiguous(), maxima, quantized, scale)
    return quantized, scale
