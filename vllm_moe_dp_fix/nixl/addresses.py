# SPDX-License-Identifier: Apache-2.0
"""Where the experts of peers lie, without a copy of what is the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from vllm_moe_dp_fix.nixl.layout import Key, Layout


class PeerTensors(Mapping[Key, tuple[int, int, int]]):
    """(layer, tensor) -> (address, bytes an expert, device), of a peer that holds what we hold."""

    def __init__(
        self, tensors: Mapping[Key, tuple[int, int]], bases: Sequence[int], device_id: int
    ) -> None:
        self._tensors, self._bases, self._device_id = tensors, bases, device_id

    def __getitem__(self, key: Key) -> tuple[int, int, int]:
        position, nbytes = self._tensors[key]
        return self._bases[position], nbytes, self._device_id

    def __iter__(self) -> Iterator[Key]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def by_tensor(
    layout: Layout, peers: Mapping[int, tuple[Sequence[int], int]]
) -> dict[int, PeerTensors]:
    """Peer -> its tensors, from their addresses and its device."""
    tensors = {
        key: (index, tensor.nbytes) for index, (key, tensor) in enumerate(layout.tensors.items())
    }
    return {peer: PeerTensors(tensors, *where) for peer, where in peers.items()}
