# SPDX-License-Identifier: Apache-2.0
"""CPU twins of what a CPU build of vLLM lacks: NCCL, FP8 quantizers, FlashInfer's MXFP8.

Everything else in these tests is vLLM's own code.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
import torch.distributed as dist

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


class NcclTwin:
    """``PyNcclCommunicator`` over gloo.

    Like NCCL it reads memory as it lies, whatever the strides, and a collective that is enqueued
    in a group takes place when the outermost group ends.

    Attributes:
        depth: Groups that are open. What is enqueued after a failure in an open group never runs.
        wire: Bytes per element of every tensor that was gathered.
    """

    disabled = False
    nccl_version = 22703

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.world_size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.device = torch.device("cpu")
        self.depth = 0
        self.wire: list[int] = []
        self._queue: list[Any] = []

    def group_start(self) -> None:
        self.depth += 1

    def group_end(self) -> None:
        self.depth -= 1
        if self.depth == 0:
            queue, self._queue = self._queue, []
            for collective in queue:
                collective()

    def _enqueue(self, collective: Any) -> None:
        self._queue.append(collective)
        if self.depth == 0:
            self.depth = 1
            self.group_end()

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, stream: Any = None) -> None:
        rows = tensor.shape[0]
        self.all_gatherv(output, tensor, [rows] * self.world_size)

    def all_gatherv(
        self, output: torch.Tensor, tensor: torch.Tensor, sizes: list[int], stream: Any = None
    ) -> None:
        from vllm.distributed.device_communicators.pynccl_wrapper import ncclDataTypeEnum

        ncclDataTypeEnum.from_torch(tensor.dtype)
        self.wire.append(tensor.element_size())
        row_shape = output.shape[1:]

        def run() -> None:
            sent = torch.empty(max(sizes), *row_shape, dtype=tensor.dtype)
            raw = as_it_lies(tensor)[: sizes[self.rank]]
            sent[: raw.shape[0]] = raw
            parts = [torch.empty_like(sent) for _ in sizes]
            dist.all_gather(
                [part.view(torch.uint8) for part in parts], sent.view(torch.uint8), group=self.group
            )
            start = 0
            for part, size in zip(parts, sizes, strict=True):
                output[start : start + size] = part[:size]
                start += size

        self._enqueue(run)

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, op: Any = None, stream: Any = None
    ) -> None:
        self.reduce_scatterv(output, tensor, [output.shape[0]] * self.world_size)

    def reduce_scatterv(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        sizes: list[int],
        op: Any = None,
        stream: Any = None,
    ) -> None:
        def run() -> None:
            total = tensor.clone()
            dist.all_reduce(total, group=self.group)
            start = sum(sizes[: self.rank])
            output.copy_(total[start : start + sizes[self.rank]])

        self._enqueue(run)

    def all_reduce(
        self, tensor: torch.Tensor, out: Any = None, op: Any = dist.ReduceOp.SUM, stream: Any = None
    ) -> torch.Tensor:
        result = tensor.clone()
        dist.all_reduce(result, op=op, group=self.group)
        return result


def as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's shape over its memory, as a C pointer sees it."""
    strides = torch.empty(tensor.shape).stride()
    return tensor.as_strided(tensor.shape, strides, tensor.storage_offset())


def register_fp8_ops() -> None:
    """Per-tensor, per-token and static FP8 quantization after the formulas of vLLM's kernels."""

    def convert(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        scaled = rows.float() * (1.0 / scale)
        return scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)

    def dynamic(out: torch.Tensor, rows: torch.Tensor, scale: torch.Tensor) -> None:
        amax = rows.float().abs().max() if rows.numel() else torch.zeros(())
        scale.fill_(amax / FP8_MAX)
        out.copy_(convert(rows, scale))

    def per_token(
        out: torch.Tensor, rows: torch.Tensor, scale: torch.Tensor, bound: torch.Tensor | None
    ) -> None:
        amax = rows.float().abs().amax(-1, keepdim=True)
        scale.copy_((amax / FP8_MAX).clamp(min=1.0 / (FP8_MAX * 512.0)))
        out.copy_(convert(rows, scale))

    def static(
        out: torch.Tensor,
        rows: torch.Tensor,
        scale: torch.Tensor,
        group: list[int] | None = None,
    ) -> None:
        out.copy_(convert(rows, scale))

    ops = torch.library.Library("_C", "FRAGMENT")
    tensors = "Tensor! out, Tensor rows, Tensor"
    ops.define(f"dynamic_scaled_fp8_quant({tensors}! scale) -> ()")
    ops.define(f"dynamic_per_token_scaled_fp8_quant({tensors}! scale, Tensor? bound) -> ()")
    ops.define(f"static_scaled_fp8_quant({tensors} scale, int[]? group=None) -> ()")
    ops.impl("dynamic_scaled_fp8_quant", dynamic, "CPU")
    ops.impl("dynamic_per_token_scaled_fp8_quant", per_token, "CPU")
    ops.impl("static_scaled_fp8_quant", static, "CPU")
    globals()["_ops"] = ops  # a library unregisters its ops when it is collected


def install_block_quantizer() -> None:
    """The FP8 quantizer for blocks along a row, which is a Triton kernel."""
    from vllm.model_executor.layers.fused_moe import utils

    def per_token_group_quant_fp8(
        rows: torch.Tensor, group_size: int, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        groups = rows.float().view(rows.shape[0], -1, group_size)
        scale = groups.abs().amax(-1).clamp(min=1e-10) / FP8_MAX
        values = (groups / scale[..., None]).clamp(-FP8_MAX, FP8_MAX)
        return values.view(rows.shape).to(torch.float8_e4m3fn), scale

    utils.per_token_group_quant_fp8 = per_token_group_quant_fp8


def install_flashinfer() -> None:
    """FlashInfer's MXFP8 quantizer, which vLLM 0.19 has no other for."""
    from vllm.model_executor.layers.quantization.utils import mxfp8_utils

    if hasattr(mxfp8_utils, "_mxfp8_e4m3_quantize_torch"):
        return

    def mxfp8_quantize(
        rows: torch.Tensor, is_sf_swizzled_layout: bool = True, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = rows.float().view(rows.shape[0], -1, 32)
        exponent = torch.floor(torch.log2(blocks.abs().amax(-1).clamp(min=2.0**-126)))
        scale = (exponent + 127.0).clamp(0, 254).to(torch.uint8)
        values = (blocks / torch.exp2(exponent)[..., None]).view(rows.shape)
        if is_sf_swizzled_layout:
            scale = mxfp8_utils.swizzle_mxfp8_scale(scale, *rows.shape)
        return values.to(torch.float8_e4m3fn), scale

    flashinfer = types.ModuleType("flashinfer")
    flashinfer.mxfp8_quantize = mxfp8_quantize  # type: ignore[attr-defined]
    sys.modules["flashinfer"] = flashinfer
