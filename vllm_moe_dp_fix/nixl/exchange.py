# SPDX-License-Identifier: Apache-2.0
"""Collectives of a CPU group that end: with a result, or with an error in bounded time."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(minutes=5)  # as the barrier after the READs


class NixlEplbError(RuntimeError):
    """The ranks cannot move experts over NIXL. Every rank of the group raises the same text."""


def gather(group: Any, item: Any) -> list[Any]:
    """The items of all ranks, by rank; like ``all_gather_object`` but with a time limit.

    Works with stateless groups, which ``torch.distributed`` does not know. No collective where the
    group has one rank.

    Raises:
        NixlEplbError: A rank died, or does not come.
    """
    world_size = group.size()
    if world_size == 1:
        return [item]
    data = torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    mine = torch.tensor([data.numel()])
    _wait(lambda: dist.all_gather(sizes, mine, group=group, async_op=True))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: data.numel()] = data
    parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(world_size)]
    _wait(lambda: dist.all_gather(parts, padded, group=group, async_op=True))
    return [
        pickle.loads(part[: int(size)].numpy().tobytes())
        for part, size in zip(parts, sizes, strict=True)
    ]


def spread(group: Any, data: bytes | None, size: int) -> bytes:
    """``data`` of the one rank that has it, ``size`` bytes, on all ranks.

    Raises:
        NixlEplbError: A rank died, or does not come.
    """
    if data is None:
        buffer = torch.zeros(size, dtype=torch.uint8)
    else:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    _wait(lambda: dist.all_reduce(buffer, group=group, async_op=True))
    return buffer.numpy().tobytes()


def all_fine(group: Any, is_fine: bool) -> bool:
    """Whether all ranks say so; a barrier at the same time.

    Raises:
        NixlEplbError: A rank died, or does not come.
    """
    if group.size() == 1:
        return is_fine
    trouble = torch.tensor([int(not is_fine)], dtype=torch.int32)
    _wait(lambda: dist.all_reduce(trouble, group=group, async_op=True))
    return int(trouble) == 0


def _wait(start: Callable[[], Any]) -> None:
    try:
        start().wait(timeout=TIMEOUT)
    except Exception as error:
        raise NixlEplbError(
            f"NIXL EPLB: a rank died or did not come within {TIMEOUT}; its own log says why "
            f"({error})"
        ) from error
