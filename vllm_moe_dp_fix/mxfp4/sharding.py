# SPDX-License-Identifier: Apache-2.0
"""Which part of an MXFP4 expert a tensor-parallel rank holds, and where it keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch

    Tensor: TypeAlias = torch.Tensor

BLOCK = 32  # values along the contraction dimension that share one scale
NAN_SCALE = 255  # E8M0


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def is_gpt_oss(config: Any) -> bool:
    """Whether the activation of a layer wants gate and up in alternating rows."""
    return config.activation.value == "swigluoai"


@dataclass(frozen=True)
class ExpertShard:
    """The share of one rank in each expert, in whole blocks.

    Rows of w13, columns of w2 and columns of w2's scales stay together only where a rank begins on
    a block. All ranks but the last hold ``stride`` columns, as in vLLM's own gpt-oss loader; the
    last ones hold what is left, down to none.

    Attributes:
        hidden: Hidden size of the model, without padding.
        intermediate: Intermediate size of an expert over all ranks, without padding.
        tp_size, tp_rank: Of the experts: data parallelism folds into it without expert parallelism.
    """

    hidden: int
    intermediate: int
    tp_size: int
    tp_rank: int

    @property
    def stride(self) -> int:
        """Intermediate columns from the beginning of one rank to that of the next."""
        if self.tp_size == 1:
            return self.intermediate
        return cdiv(cdiv(self.intermediate, BLOCK), self.tp_size) * BLOCK

    @property
    def start(self) -> int:
        return min(self.tp_rank * self.stride, self.intermediate)

    @property
    def stop(self) -> int:
        return min(self.start + self.stride, self.intermediate)

    @property
    def width(self) -> int:
        """Intermediate columns that this rank really holds."""
        return self.stop - self.start

    @property
    def is_even(self) -> bool:
        """Whether all ranks hold the same width."""
        return self.stride * self.tp_size == self.intermediate


@dataclass(frozen=True)
class ExpertLayout:
    """Where a rank's share lies, in the checkpoint's tensors and in the padded parameters.

    Tensors are ``[..., rows, columns]``, or ``[..., rows]`` for biases. ``per_element`` values of a
    row lie in one element: 2 in packed weights, 32 in scales, 1 in full precision, 0 for biases.
    w13 holds gate (part 0) and up (part 1) one after the other, or in alternating rows as in
    gpt-oss; ``part`` None is both of those as they are.
    """

    shard: ExpertShard
    is_gated: bool = True
    is_interleaved: bool = False

    @property
    def parts(self) -> tuple[int, ...]:
        """The parts of w13."""
        return (0, 1) if self.is_gated else (0,)

    def shape(self, projection: str, parts: int, per_element: int) -> tuple[int, ...]:
        """Of an expert in the checkpoint, ``parts`` of w13 together."""
        hidden, intermediate = self.shard.hidden, self.shard.intermediate
        rows, values = (parts * intermediate, hidden)
        if projection == "w2":
            rows, values = hidden, intermediate
        return (rows, cdiv(values, per_element)) if per_element else (rows,)

    def share(self, projection: str, parts: int, per_element: int) -> tuple[int, ...]:
        """As ``shape``, of an expert that a model's loader has cut for this rank already."""
        shape = self.shape(projection, parts, per_element)
        if projection == "w2":
            return (shape[0], self._columns(per_element)) if per_element else shape
        return (parts * self.shard.width, *shape[1:])

    def source(
        self, projection: str, expert: Tensor, index: int | None, per_element: int, is_share: bool
    ) -> Tensor:
        """This rank's piece of an expert from the checkpoint; ``index`` of the part in it."""
        shard = self.shard
        if projection == "w2":
            if is_share or not per_element:
                return expert
            first = shard.start // per_element
            return expert[:, first : first + self._columns(per_element)]
        start, size = (0, shard.width) if is_share else (shard.start, shard.intermediate)
        if index is None:
            return expert[2 * start : 2 * (start + shard.width)]
        return expert[index * size + start : index * size + start + shard.width]

    def target(self, projection: str, data: Tensor, part: int | None, per_element: int) -> Tensor:
        """Where that piece belongs in a parameter."""
        shard = self.shard
        if projection == "w2":
            if not per_element:
                return data[..., : shard.hidden]
            return data[..., : shard.hidden, : self._columns(per_element)]
        dim = -2 if per_element else -1
        if self.is_interleaved:
            rows = slice(part or 0, 2 * shard.width, 1 if part is None else 2)
        else:
            half = data.shape[dim] // len(self.parts)
            rows = slice((part or 0) * half, (part or 0) * half + min(shard.width, half))
        if not per_element:
            return data[..., rows]
        return data[..., rows, : cdiv(shard.hidden, per_element)]

    def clear_padding(self, projection: str, data: Tensor, per_element: int) -> None:
        """Zeroes what of a parameter belongs to nobody."""
        shard = self.shard
        if projection == "w2":
            data.narrow(1, shard.hidden, data.shape[1] - shard.hidden).zero_()
            columns = self._columns(per_element) if per_element else 0
        else:
            halves = 1 if self.is_interleaved else len(self.parts)
            half = data.shape[1] // halves
            used = shard.width * len(self.parts) // halves
            for begin in range(0, halves * half, half):
                data.narrow(1, begin + used, half - used).zero_()
            columns = cdiv(shard.hidden, per_element) if per_element else 0
        if per_element:
            data[..., columns:].zero_()

    def _columns(self, per_element: int) -> int:
        """This rank's columns of w2."""
        return cdiv(self.shard.stop, per_element) - self.shard.start // per_element
