# SPDX-License-Identifier: Apache-2.0
"""Both collectives for vLLM's CPU communicator, over gloo on raw bytes: they carry every dtype."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from vllm_moe_dp_fix.collectives.checks import check_gather, check_scatter

Tensor: TypeAlias = torch.Tensor

# The newer name, where torch has it, does not warn.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def all_gatherv(
    communicator: Any, input_: Tensor | list[Tensor], dim: int, sizes: list[int] | None
) -> Any:
    """The rows of all ranks, one rank behind the other.

    Args:
        communicator: Has world_size, rank_in_group, unique_name and device_group.
        input_: [sizes[rank], ...], or several of these.
        dim: 0.
        sizes: Rows of each rank; None where all have as many.

    Raises:
        ValueError: As ``check_gather``.
    """
    if dim != 0:
        raise NotImplementedError("only dim 0 all-gatherv is supported")
    tensors = [input_] if isinstance(input_, torch.Tensor) else input_
    check_gather(communicator, tensors, sizes)
    world_size = communicator.world_size
    rows = [[t.shape[0]] * world_size if sizes is None else sizes for t in tensors]
    row_bytes = [t.element_size() * t.shape[1:].numel() for t in tensors]
    outputs = [t.new_empty((sum(r), *t.shape[1:])) for t, r in zip(tensors, rows, strict=True)]
    result = outputs[0] if isinstance(input_, torch.Tensor) else outputs

    # One gather for all tensors: each rank's, one behind the other, padded to the largest rank.
    width = max(
        sum(r[rank] * size for r, size in zip(rows, row_bytes, strict=True))
        for rank in range(world_size)
    )
    if width == 0:
        return result
    sent = torch.empty(width, dtype=torch.uint8)
    offset = 0
    for tensor in tensors:
        end = offset + tensor.numel() * tensor.element_size()
        sent[offset:end] = _as_bytes(tensor)
        offset = end
    received = torch.empty(world_size * width, dtype=torch.uint8)
    _all_gather(received, sent, group=communicator.device_group)

    starts = [0] * len(tensors)
    for rank, buffer in enumerate(received.view(world_size, width).unbind(0)):
        offset = 0
        for i, output in enumerate(outputs):
            length = rows[i][rank] * row_bytes[i]
            _as_bytes(output)[starts[i] : starts[i] + length] = buffer[offset : offset + length]
            starts[i] += length
            offset += length
    return result


def reduce_scatterv(communicator: Any, input_: Tensor, dim: int, sizes: list[int] | None) -> Tensor:
    """This rank's rows of the sum over all ranks.

    Args:
        communicator: As for ``all_gatherv``.
        input_: Has sum(sizes) rows along ``dim``.
        sizes: Rows that each rank gets; None where all get as many.

    Raises:
        ValueError: As ``check_scatter``.
    """
    parts = input_.movedim(dim, 0).contiguous()
    check_scatter(communicator, input_, parts.shape[0], sizes)
    world_size = communicator.world_size
    if sizes is None:
        sizes = [parts.shape[0] // world_size] * world_size
    mine = sizes[communicator.rank_in_group]
    row_bytes = parts.element_size() * parts.shape[1:].numel()

    # Every rank gets all ranks' summands of its rows and adds them in the order of the ranks,
    # rounding once.
    received = parts.new_empty((world_size, mine, *parts.shape[1:]))
    dist.all_to_all_single(
        _as_bytes(received),
        _as_bytes(parts),
        [mine * row_bytes] * world_size,
        [size * row_bytes for size in sizes],
        group=communicator.device_group,
    )
    narrow_float = parts.is_floating_point() and parts.element_size() < 4
    accumulator = torch.float32 if narrow_float else parts.dtype
    output = received.to(accumulator).sum(0, dtype=accumulator).to(parts.dtype)
    return output.movedim(0, dim).contiguous()


def _as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's memory; a copy of it where the tensor is not contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)
