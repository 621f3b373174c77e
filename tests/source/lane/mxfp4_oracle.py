# SPDX-License-Identifier: Apache-2.0
"""MXFP4 experts by definition: numpy and ml_dtypes, nothing of vLLM and nothing of the plugin."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np
import safetensors.torch
import torch

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Values: TypeAlias = dict[str, Array]  # gate, up, down, gate_bias, up_bias, down_bias; by expert

BLOCK = 32  # values of a row that share a scale


def decode_scales(scales: torch.Tensor) -> Array:
    return scales.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)


def decode(packed: torch.Tensor, scales: torch.Tensor) -> Array:
    """The values ``[..., columns]`` of E2M1 pairs, the even one in the low bits, and scales."""
    pairs = packed.numpy()
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1).view(ml_dtypes.float4_e2m1fn)
    values = codes.astype(np.float64).reshape(*pairs.shape[:-1], 2 * pairs.shape[-1])
    return values * decode_scales(scales).repeat(BLOCK, axis=-1)[..., : values.shape[-1]]


def quantize(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E2M1 pairs and E8M0 scales of ``[..., columns]``, as vLLM makes them from 0.28.0 on.

    The scale is the exponent of the largest size, rounded up from a mantissa of 1.75, minus 2.
    """
    exact = values.double().numpy()
    blocks = exact.reshape(*exact.shape[:-1], -1, BLOCK)
    largest = np.ascontiguousarray(np.abs(blocks).max(axis=-1), dtype=np.float32)
    scales = np.clip(((largest.view(np.int32) + 0x200000) >> 23) - 2, 0, 254).astype(np.uint8)
    steps = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)[..., None]
    codes = np.clip(blocks / steps, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    codes = codes.reshape(exact.shape)
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    return torch.from_numpy(packed), torch.from_numpy(scales)


class Tensor(NamedTuple):
    """A tensor of a checkpoint, and what a model's loader says of it."""

    param: str
    data: torch.Tensor
    shard_id: str | None
    expert_id: int | None


@dataclass(frozen=True)
class Layout:
    """How a checkpoint stores experts.

    Attributes:
        is_stacked: All experts in one tensor.
        is_merged: Gate and up in one tensor, of no shard.
        is_interleaved: In that one, gate and up in alternating rows.
        is_blocked: Packed weights as ``[..., blocks, 16]``.
        is_strided: Not contiguous in memory.
        weights: Type of packed weights.
        scales: Type of scales.
    """

    is_stacked: bool = False
    is_merged: bool = False
    is_interleaved: bool = False
    is_blocked: bool = False
    is_strided: bool = False
    weights: torch.dtype = torch.uint8
    scales: torch.dtype = torch.uint8


@dataclass(frozen=True)
class Matrix:
    """[experts, rows, columns / 2], [experts, rows, columns / 32] and [experts, rows]."""

    packed: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None = None

    @classmethod
    def random(cls, shape: tuple[int, int, int], has_bias: bool, seed: int) -> Matrix:
        """Any bytes, with scales over so many powers of two that a shifted one shows."""
        experts, rows, columns = shape
        generator = torch.Generator().manual_seed(seed)

        def bytes_(low: int, high: int, width: int) -> torch.Tensor:
            size = (experts, rows, width)
            return torch.randint(low, high, size, generator=generator, dtype=torch.uint8)

        bias = torch.randn(experts, rows, generator=generator).bfloat16() if has_bias else None
        return cls(bytes_(0, 256, columns // 2), bytes_(115, 140, columns // BLOCK), bias)

    @classmethod
    def of(cls, values: torch.Tensor) -> Matrix:
        return cls(*quantize(values))

    def some(self, experts: list[int]) -> Matrix:
        bias = None if self.bias is None else self.bias[experts]
        return Matrix(self.packed[experts], self.scales[experts], bias)


@dataclass(frozen=True)
class Checkpoint:
    """The experts of one layer, unsharded."""

    gate: Matrix
    up: Matrix
    down: Matrix

    @classmethod
    def random(
        cls,
        intermediate: int,
        hidden: int = 64,
        experts: int = 4,
        has_bias: bool = False,
        seed: int = 0,
    ) -> Checkpoint:
        wide, narrow = (experts, intermediate, hidden), (experts, hidden, intermediate)
        shapes = (wide, wide, narrow)
        return cls(*(Matrix.random(s, has_bias, 3 * seed + i) for i, s in enumerate(shapes)))

    @classmethod
    def joined(cls, shares: Sequence[Checkpoint]) -> Checkpoint:
        """Of the shares of all ranks; biases of w2 are added up, as the outputs are."""

        def join(matrices: Sequence[Matrix], dim: int) -> Matrix:
            packed = torch.cat([matrix.packed for matrix in matrices], dim)
            scales = torch.cat([matrix.scales for matrix in matrices], dim)
            biases = [matrix.bias for matrix in matrices if matrix.bias is not None]
            if not biases:
                return Matrix(packed, scales)
            bias = torch.cat(biases, 1) if dim == 1 else torch.stack(biases).sum(0)
            return Matrix(packed, scales, bias)

        gates, ups, downs = zip(*(share.matrices for share in shares), strict=True)
        return cls(join(gates, 1), join(ups, 1), join(downs, 2))

    def some(self, experts: Iterable[int]) -> Checkpoint:
        chosen = list(experts)
        return Checkpoint(*(matrix.some(chosen) for matrix in self.matrices))

    @property
    def matrices(self) -> tuple[Matrix, Matrix, Matrix]:
        return self.gate, self.up, self.down

    @property
    def experts(self) -> int:
        return len(self.gate.packed)

    @property
    def intermediate(self) -> int:
        return self.gate.packed.shape[1]

    @property
    def hidden(self) -> int:
        return self.down.packed.shape[1]

    @property
    def has_bias(self) -> bool:
        return self.down.bias is not None

    def values(self) -> Values:
        found: Values = {}
        for name, matrix in zip(("gate", "up", "down"), self.matrices, strict=True):
            found[name] = decode(matrix.packed, matrix.scales)
            if matrix.bias is not None:
                found[f"{name}_bias"] = matrix.bias.double().numpy()
        return found

    def tensors(self, layout: Layout) -> list[Tensor]:
        """The tensors as they come out of a file with that layout."""
        found: list[Tensor] = []
        for kind, attribute in (("weight", "packed"), ("weight_scale", "scales"), ("bias", "bias")):
            matrices = [getattr(matrix, attribute) for matrix in self.matrices]
            if matrices[0] is None:
                continue
            gate, up, down = (_stored(kind, data, layout) for data in matrices)
            if layout.is_merged:
                merge: Callable[..., torch.Tensor] = torch.cat
                if layout.is_interleaved:
                    merge = _interleave
                shards: list[tuple[str, str | None, torch.Tensor]]
                shards = [("w13", None, merge([gate, up], dim=1)), ("w2", None, down)]
            else:
                shards = [("w13", "w1", gate), ("w13", "w3", up), ("w2", "w2", down)]
            for projection, shard_id, data in shards:
                param = f"{projection}_{kind}"
                if layout.is_stacked:
                    found.append(Tensor(param, data, shard_id, None))
                else:
                    found += [Tensor(param, one, shard_id, e) for e, one in enumerate(data)]
        return _through_file(found, layout)


def _interleave(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    return torch.stack(parts, dim=dim + 1).flatten(dim, dim + 1)


def _stored(kind: str, data: torch.Tensor, layout: Layout) -> torch.Tensor:
    if kind == "weight" and layout.is_blocked:
        return data.unflatten(-1, (-1, BLOCK // 2))
    if kind == "weight_scale" and layout.scales.is_floating_point:
        if layout.scales == torch.float8_e8m0fnu:
            return data.view(layout.scales)
        return torch.from_numpy(decode_scales(data)).to(layout.scales)
    return data


def _through_file(tensors: list[Tensor], layout: Layout) -> list[Tensor]:
    """Written with safetensors and read again."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        contents = {str(i): t.data.clone().contiguous() for i, t in enumerate(tensors)}
        safetensors.torch.save_file(contents, path)
        read = safetensors.torch.load_file(path)
    found = [tensor._replace(data=read[str(i)]) for i, tensor in enumerate(tensors)]
    return [tensor._replace(data=_read(tensor, layout)) for tensor in found]


def _read(tensor: Tensor, layout: Layout) -> torch.Tensor:
    data = tensor.data
    if layout.is_strided:
        data = data.mT.contiguous().mT if data.ndim > 1 else data.repeat_interleave(2)[::2]
    # torch cannot write its 4-bit type; a checkpoint's is viewed so by who reads it.
    return data.view(layout.weights) if tensor.param.endswith("_weight") else data


def outputs(values: Values, rows: Array, activation: str) -> Array:
    """Of each expert for all rows ``[tokens, hidden]``: ``[experts, tokens, hidden]``, float64."""
    gate = rows @ values["gate"].swapaxes(1, 2) + _bias(values, "gate")
    up = rows @ values["up"].swapaxes(1, 2) + _bias(values, "up")
    if activation == "swigluoai":  # of gpt-oss: clamped, alpha 1.702, and one more of up
        gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0) + 1.0
    inner = gate * up * _sigmoid(1.702 * gate if activation == "swigluoai" else gate)
    return inner @ values["down"].swapaxes(1, 2) + _bias(values, "down")


def _bias(values: Values, name: str) -> Array:
    bias = values.get(f"{name}_bias")
    return np.zeros(1) if bias is None else bias[:, None, :]


def _sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-np.clip(x, -700.0, 700.0)))
