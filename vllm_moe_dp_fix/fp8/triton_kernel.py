# SPDX-License-Identifier: Apache-2.0
"""The two passes over the rows of ``fp8.shared_scale``, in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

    Tensor: TypeAlias = torch.Tensor

# Elements a program and step: two loads of 16 bytes a thread are under way at once.
_TILE = 8192
_WARPS = 16


def find_maxima(rows: Tensor, maxima: Tensor) -> None:
    """Launches a program for each of the maxima. ``rows`` is dense."""
    _find_maxima[(maxima.numel(),)](rows, maxima, rows.numel(), TILE=_TILE, num_warps=_WARPS)


def quantize(rows: Tensor, maxima: Tensor, quantized: Tensor, scale: Tensor) -> None:
    """Writes ``quantized`` and ``scale``; the scale also where there are no rows. All are dense."""
    count = rows.numel()
    _quantize[(max(1, triton.cdiv(count, _TILE)),)](
        rows, maxima, quantized, scale, count, MAXIMA=maxima.numel(), TILE=_TILE, num_warps=_WARPS
    )


@triton.jit  # type: ignore[untyped-decorator]
def _find_maxima(rows, maxima, count, TILE: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    program = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([TILE], tl.float32)
    for start in range(program * TILE, count, tl.num_programs(0) * TILE):
        at = start + tl.arange(0, TILE)
        x = tl.load(rows + at, mask=at < count, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.where(x == x, tl.abs(x), 0.0))
    tl.store(maxima + program, tl.max(largest, axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def _quantize(  # type: ignore[no-untyped-def]
    rows,
    maxima,
    quantized,
    scale,
    count,
    MAXIMA: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    program = tl.program_id(0).to(tl.int64)
    # From the end: what was read last for the maxima is still in the L2 cache.
    tile = tl.num_programs(0) - 1 - program
    largest = tl.max(tl.load(maxima + tl.arange(0, MAXIMA)), axis=0)
    shared = tl.div_rn(largest, 448.0)
    inverse = tl.div_rn(1.0, shared)

    at = tile * TILE + tl.arange(0, TILE)
    x = tl.load(rows + at, mask=at < count).to(tl.float32) * inverse
    x = tl.where(x == x, tl.clamp(x, -448.0, 448.0), 448.0)
    tl.store(quantized + at, x.to(tl.float8e4nv), mask=at < count)
    if program == 0:
        tl.store(scale, shared)
