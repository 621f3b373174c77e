# SPDX-License-Identifier: Apache-2.0
"""Rows to MXFP4, written in place: a Triton kernel on GPUs, integer arithmetic elsewhere."""

from __future__ import annotations

import functools
from typing import TypeAlias

import torch

from vllm_moe_dp_fix.mxfp4.sharding import BLOCK, NAN_SCALE

Tensor: TypeAlias = torch.Tensor

_INFINITY = 0x7F800000  # as float32 bits; NaNs are above
# The midpoints between neighbouring E2M1 values, in quarters.
_MIDPOINTS = (1, 3, 5, 7, 10, 14, 20)
_CHUNK = 2**17  # elements whose temporaries stay in a core's cache


def quantize(rows: Tensor, packed: Tensor, scales: Tensor) -> None:
    """Quantizes ``rows`` to MXFP4, 32 elements along a row to a scale.

    A scale is a power of two, from the largest size in its block: the exponent of that size, after
    a mantissa of 1.75 or more has rounded up to the next power, minus 2. Elements over scale round
    to nearest E2M1, ties to even, at most ±6; zeros keep their sign. This gives the bytes of
    ``downcast_to_mxfp`` in vLLM 0.28 to 0.33
    (``vllm/model_executor/layers/quantization/utils/mxfp4_utils.py``), but for two cases:

    - A block with a NaN or an infinity gets the scale byte 255, NaN in E8M0, so that it can be
      found later, without waiting for the device. Its elements mean nothing.
    - A block of sizes below 1.75 * 2**-125 has the smallest scale, 2**-127, which vLLM's kernel
      flushes to zero on CUDA: the elements there are zeros. Here they are rounded like all others.

    Args:
        rows: [M, K], bfloat16, float16 or float32, any strides. K is a multiple of 32; M may be 0.
        packed: [M, K / 2], uint8, dense along a row. Gets the E2M1 codes, the even element of a
            pair in the low four bits.
        scales: [M, K / 32], uint8, dense along a row. Gets the E8M0 scales: byte b is 2**(b - 127).

    Raises:
        ValueError: shapes, types, strides or devices are not as above. Nothing is written.
    """
    _check(rows, packed, scales)
    if rows.numel() == 0:
        return
    if rows.is_cuda or rows.is_xpu:
        from vllm_moe_dp_fix.mxfp4 import triton_kernel

        with torch.get_device_module(rows.device).device(rows.device):
            triton_kernel.quantize(rows, packed, scales)
        return
    step = max(1, _CHUNK // rows.shape[1])
    for start in range(0, rows.shape[0], step):
        chunk = slice(start, start + step)
        _quantize(rows[chunk], packed[chunk], scales[chunk])


def _check(rows: Tensor, packed: Tensor, scales: Tensor) -> None:
    if rows.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"rows of {rows.dtype} cannot be quantized to MXFP4")
    if rows.ndim != 2 or rows.shape[1] % BLOCK:
        raise ValueError(
            f"rows of shape {tuple(rows.shape)}, not [M, K] with K a multiple of {BLOCK}"
        )
    count, width = rows.shape
    outputs = {"packed": (packed, width // 2), "scales": (scales, width // BLOCK)}
    for name, (tensor, columns) in outputs.items():
        if tensor.dtype != torch.uint8 or tuple(tensor.shape) != (count, columns):
            raise ValueError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, not uint8 of shape "
                f"{(count, columns)}"
            )
        if columns > 1 and tensor.stride(1) != 1:
            raise ValueError(f"{name} has a stride of {tensor.stride(1)} along a row, not 1")
        if tensor.device != rows.device:
            raise ValueError(f"{name} is on {tensor.device}, but the rows are on {rows.device}")


def _quantize(rows: Tensor, packed: Tensor, scales: Tensor) -> None:
    """Compares bits as integers: a CPU that flushes subnormal floats to zero does not matter."""
    if rows.dtype == torch.float16:
        rows = rows.float()
    integers = torch.int16 if rows.dtype == torch.bfloat16 else torch.int32
    width = torch.iinfo(integers).bits
    bits = rows.contiguous().view(integers).view(-1, BLOCK)
    size = bits & torch.iinfo(integers).max
    top = size.amax(1).int() << (32 - width)
    exponent = (top.clamp(max=_INFINITY) + 0x200000) >> 23
    scale = (exponent - 2).clamp(min=0).masked_fill(exponent == 255, 254)

    code = (bits >> (width - 4)) & 8
    above = torch.empty_like(code)
    for limit in _limits(integers)[:, scale].unsqueeze(2):
        torch.sub(limit, size, out=above)
        code -= above.bitwise_right_shift_(width - 1)  # -1 where the size is above the limit
    code = code.view(rows.shape)
    packed.copy_(torch.add(code[:, ::2], code[:, 1::2], alpha=16))
    scales.copy_(scale.masked_fill(top >= _INFINITY, NAN_SCALE).view(scales.shape))


@functools.cache
def _limits(integers: torch.dtype) -> Tensor:
    """[7, 255]: for each midpoint and scale byte, the bits above which the greater code is due."""
    drop = 32 - torch.iinfo(integers).bits
    return torch.tensor(
        [
            # A tie goes to the even code, which every second time is the greater one.
            [(_float_bits(quarters, scale - 129) >> drop) - code % 2 for scale in range(255)]
            for code, quarters in enumerate(_MIDPOINTS)
        ],
        dtype=integers,
        device="cpu",
    )


def _float_bits(significand: int, exponent: int) -> int:
    """The float32 bits of ``significand * 2**exponent``; what is too large gives the last NaN."""
    leading = significand.bit_length() - 1
    biased = exponent + leading + 127
    mantissa = significand << (23 - leading)
    if biased < 1:
        return mantissa >> (1 - biased)
    return min(((biased - 1) << 23) + mantissa, 0x7FFFFFFF)
