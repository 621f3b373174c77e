# SPDX-License-Identifier: Apache-2.0
"""MXFP4 quantization in Triton, one pass from the rows to the strided outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

    Tensor: TypeAlias = torch.Tensor

# 4096 elements a program: a thread loads 64 bytes, and one expert is programs for a whole GPU.
_TILE = 4096
_WARPS = 4
_WIDEST = 2048
_WIDEST_STRIDED = 64  # for rows that may be dense along their columns instead


def quantize(rows: Tensor, packed: Tensor, scales: Tensor) -> None:
    """Launches the kernel on the current device, once ``quantize.quantize()`` has checked.

    Shapes are as there. ``rows`` must not be empty.
    """
    count, width = rows.shape
    widest = _WIDEST if rows.stride(1) == 1 else _WIDEST_STRIDED
    columns = min(width & -width, widest)  # a power of two that divides the width
    height = _TILE // columns
    grid = (triton.cdiv(count, height), width // columns)
    _quantize[grid](
        rows,
        packed,
        scales,
        count,
        rows.stride(0),
        rows.stride(1),
        packed.stride(0),
        scales.stride(0),
        HEIGHT=height,
        COLUMNS=columns,
        EVEN=count % height == 0,
        num_warps=_WARPS,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _quantize(  # type: ignore[no-untyped-def]
    rows,
    packed,
    scales,
    count,
    row_stride,
    column_stride,
    packed_stride,
    scale_stride,
    HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
) -> None:
    BLOCKS: tl.constexpr = COLUMNS // 32
    row = (tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)).to(tl.int64)[:, None]
    inside = None if EVEN else row < count
    tile = tl.program_id(1).to(tl.int64)

    column = tile * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    x = tl.load(rows + row * row_stride + column * column_stride, mask=inside)
    if x.dtype == tl.bfloat16:  # the upper half of a float32
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) << 16
    else:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    size = tl.reshape(bits & 0x7FFFFFFF, (HEIGHT, BLOCKS, 32))

    # Integers order as the floats do, with infinity and then NaN on top.
    top = tl.max(size, axis=2)
    exponent = (tl.minimum(top, 0x7F800000) + 0x200000) >> 23
    scale = tl.where(exponent == 255, 254, tl.maximum(exponent - 2, 0))
    # 1 / scale, in bits. Only the largest scale has a subnormal reciprocal.
    inverse = tl.maximum((254 - scale) << 23, 0x400000).to(tl.float32, bitcast=True)

    # E2M1 has steps of 1/2, 1 and 2, so that its codes are a concave function of the size: the
    # least of 2y, y + 2 and y / 2 + 4. Adding 2**23 rounds that to an integer, ties to even, in the
    # low bits. It rounds once, fused or not: a product with a power of two is exact. As y is below
    # 7, no code is above 7.
    y = size.to(tl.float32, bitcast=True) * inverse[:, :, None]
    code = tl.minimum(tl.minimum(2.0 * y + 8388608.0, y + 8388610.0), 0.5 * y + 8388612.0)
    code = tl.reshape(code.to(tl.int32, bitcast=True), (HEIGHT, COLUMNS))
    code = ((bits >> 28) & 8) | code
    even, odd = tl.split(tl.reshape(code, (HEIGHT, COLUMNS // 2, 2)))
    pair = (even | (odd << 4)).to(tl.uint8)

    column = tile * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)[None, :]
    tl.store(packed + row * packed_stride + column, pair, mask=inside)
    column = tile * BLOCKS + tl.arange(0, BLOCKS)[None, :]
    scale = tl.where(top >= 0x7F800000, 255, scale).to(tl.uint8)
    tl.store(scales + row * scale_stride + column, scale, mask=inside)
