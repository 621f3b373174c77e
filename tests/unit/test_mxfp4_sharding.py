# SPDX-License-Identifier: Apache-2.0
"""Whole blocks on every rank, nothing twice, nothing left out."""

from __future__ import annotations

import itertools

import pytest
import torch

from vllm_moe_dp_fix.mxfp4.sharding import BLOCK, ExpertLayout, ExpertShard, cdiv

SIZES = (32, 64, 704, 768, 1408, 1536, 2880, 14336)
TP_SIZES = (1, 2, 3, 4, 7, 8, 16)
CASES = list(itertools.product(SIZES, TP_SIZES))
HIDDEN = 64


def shards(intermediate: int, tp_size: int) -> list[ExpertShard]:
    return [ExpertShard(HIDDEN, intermediate, tp_size, rank) for rank in range(tp_size)]


@pytest.mark.parametrize(("intermediate", "tp_size"), CASES)
def test_shares_are_whole_blocks_side_by_side(intermediate: int, tp_size: int) -> None:
    ranks = shards(intermediate, tp_size)
    assert ranks[0].start == 0
    assert ranks[-1].stop == intermediate
    for one, after in itertools.pairwise(ranks):
        assert one.stop == after.start
        assert one.stop % BLOCK == 0
    assert all(rank.width <= rank.stride for rank in ranks)
    assert ranks[0].is_even == (len({rank.width for rank in ranks}) == 1)


@pytest.mark.parametrize(("intermediate", "tp_size"), CASES)
def test_shares_fit_what_every_back_end_makes_room_for(intermediate: int, tp_size: int) -> None:
    """Back ends round a rank's even share up to a multiple of 32, 64, 128 or 256."""
    for multiple in (32, 64, 128, 256):
        room = cdiv(cdiv(intermediate, tp_size), multiple) * multiple
        assert shards(intermediate, tp_size)[0].stride <= room


@pytest.mark.parametrize("intermediate", SIZES)
def test_an_even_share_of_whole_blocks_is_what_vllm_takes(intermediate: int) -> None:
    for tp_size in TP_SIZES:
        if intermediate % (tp_size * BLOCK) == 0:
            widths = {shard.width for shard in shards(intermediate, tp_size)}
            assert widths == {intermediate // tp_size}


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("is_gated", [True, False])
def test_padding_is_what_is_no_target(is_gated: bool, is_interleaved: bool) -> None:
    layout = ExpertLayout(ExpertShard(HIDDEN, 704, 4, 3), is_gated, is_gated and is_interleaved)
    rows = 256 * len(layout.parts)
    for per_element in (2, BLOCK):
        for projection, shape in (("w13", (2, rows, 256)), ("w2", (2, 256, 256))):
            data = torch.ones(shape)
            for part in layout.parts if projection == "w13" else (0,):
                layout.target(projection, data, part, per_element).fill_(2)
            expected = torch.where(data == 2, data, torch.zeros(()))
            layout.clear_padding(projection, data, per_element)
            assert data.equal(expected)
            assert 0 < int((data == 2).sum()) < data.numel()
    for projection, biases in (("w13", (2, rows)), ("w2", (2, 256))):
        data = torch.ones(biases)
        for part in layout.parts if projection == "w13" else (0,):
            layout.target(projection, data, part, 0).fill_(2)
        expected = torch.where(data == 2, data, torch.zeros(()))
        layout.clear_padding(projection, data, 0)
        assert data.equal(expected)
