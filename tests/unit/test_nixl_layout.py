# SPDX-License-Identifier: Apache-2.0
"""What a rank says of its experts, and what all are told where they differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_moe_dp_fix.nixl import report
from vllm_moe_dp_fix.nixl.layout import Labels, Layout, describe
from vllm_moe_dp_fix.nixl.report import Described

LABELS = Labels("0.33.0", {(0, 0): "layers.0.experts.w13_weight"}, {0: "Mxfp4MoEMethod MARLIN"})


def held(
    layers: int = 2, experts: int = 4, width: int = 32, dtype: torch.dtype = torch.uint8
) -> list[list[torch.Tensor]]:
    return [
        [torch.zeros(experts, width, dtype=dtype), torch.zeros(experts, 2)] for _ in range(layers)
    ]


def layout(**options: Any) -> Layout:
    weights = held(**options)
    return describe(weights, [torch.zeros_like(tensor) for tensor in weights[0]], LABELS)


def text(*groups: tuple[tuple[int, ...], Layout]) -> str:
    described = [Described(ranks, one, LABELS) for ranks, one in groups]
    return report.differences(described, sum(len(ranks) for ranks, _ in groups))


def test_equal_weights_have_one_digest_and_others_have_others() -> None:
    others = [layout(layers=3), layout(experts=5), layout(width=64), layout(dtype=torch.int8)]
    assert layout().digest == layout().digest
    assert len({one.digest for one in (layout(), *others)}) == 5


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (lambda w: w[1].__setitem__(0, torch.zeros(3, 32).byte()), ["(3, 32)", "4 local experts"]),
        (lambda w: w[0].__setitem__(0, torch.tensor(1.0)), ["()", "0 local experts"]),
        (lambda w: w[1].__setitem__(0, torch.zeros(32, 4).byte().t()), ["one after the other"]),
        (lambda w: w[1].__setitem__(0, torch.zeros(4, 64).byte()[:, ::2]), ["without gaps"]),
        (lambda w: w[1].__setitem__(0, torch.zeros(8, 32).byte()[::2]), ["without gaps"]),
        (lambda w: w[1].pop(), ["layer 1 has 1 tensors", "receive buffer 2"]),
        (lambda w: w[1].__setitem__(1, torch.zeros(4, 4)), ["16 bytes of torch.float32", "8 of"]),
        (lambda w: w[1].__setitem__(1, torch.zeros(4, 2).int()), ["torch.int32", "torch.float32"]),
    ],
)
def test_what_cannot_be_transferred_is_named(plant: Callable[[Any], Any], words: list[str]) -> None:
    weights = held()
    buffer = [torch.zeros_like(tensor) for tensor in weights[0]]
    plant(weights)
    with pytest.raises(ValueError, match=r"layer|w13_weight") as caught:
        describe(weights, buffer, LABELS)
    for word in words:
        assert word in str(caught.value)


def test_inner_dimensions_may_be_permuted_where_all_ranks_permute_them() -> None:
    plain = describe([[torch.zeros(4, 6, 8)]], None, LABELS)
    permuted = describe([[torch.zeros(4, 8, 6).transpose(1, 2)]], None, LABELS)
    assert plain.tensors[0, 0].order == (0, 1)
    assert permuted.tensors[0, 0].order == (1, 0)
    assert plain.digest != permuted.digest


def test_bytes_come_first_in_vllms_words() -> None:
    said = text(((0, 1, 2), layout()), ((3,), layout(width=64)))
    head, *lines = said.splitlines()
    assert head.startswith("NIXL EPLB nbytes_per_expert mismatch for (0, 0): rank 3 of 4 hold")
    assert any("bytes an expert: 32 on ranks 0-2, 64 on rank 3" in line for line in lines)
    assert any("layers.0.experts.w13_weight (layer 0-1, tensor 0)" in line for line in lines)
    assert len(lines) == 2
    assert lines[-1].startswith("  Likely cause: ")


def test_the_odd_rank_is_named_where_the_first_one_is_odd() -> None:
    said = text(((0,), layout(dtype=torch.int8)), ((1, 2, 3), layout()))
    assert "metadata mismatch for (0, 0): rank 0 of 4 hold" in said
    assert "dtype: torch.uint8 on ranks 1-3, torch.int8 on rank 0" in said


def test_several_differences_at_once() -> None:
    said = text(
        ((0, 2), layout()),
        ((1,), layout(layers=3)),
        ((3,), layout(experts=5)),
    )
    assert said.startswith("NIXL EPLB metadata key mismatch: ranks 1, 3 of 4 hold")
    assert "local experts: 4 on ranks 0-2, 5 on rank 3" in said
    assert "tensor: missing on ranks 0, 2-3, there on rank 1: (layer 2, tensor 0)" in said
    assert "number of local experts" in said


def test_reports_stay_short() -> None:
    many = [((rank,), layout(width=32 + 32 * rank, layers=rank + 1)) for rank in range(64)]
    assert len(text(*many).splitlines()) <= report.MAX_LINES
    causes = {rank: f"cause {rank}" for rank in range(64)}
    assert len(report.failures(causes, 64).splitlines()) <= report.MAX_LINES
    spelled = report.spell(range(0, 64, 2))
    assert spelled.endswith("and 26 more ranges")


def test_ranks_of_kinds_that_are_not_described_are_odd() -> None:
    groups = [Described((0, 1), layout(), LABELS), Described((2,), layout(width=64), LABELS)]
    assert "ranks 2-4 of 5 hold other" in report.differences(groups, 5)


def test_no_weights_are_an_error() -> None:
    empty: list[torch.Tensor] = []
    for nothing in ([], [empty]):
        with pytest.raises(ValueError, match="no expert weights"):
            describe(nothing, None, LABELS)


def test_equal_causes_are_said_once() -> None:
    said = report.failures({1: "no memory", 2: "no memory", 7: "no peer"}, 8)
    assert said.splitlines() == [
        "NIXL EPLB init failed on 3 of 8 ranks; all of them stop",
        "  ranks 1-2: no memory",
        "  rank 7: no peer",
    ]


def test_other_versions_are_a_likely_cause_and_alone_a_warning() -> None:
    newer = Labels("0.34.0", LABELS.names, LABELS.methods)
    groups = [Described((0, 1), layout(), LABELS), Described((2,), layout(width=64), newer)]
    assert "vLLM version (0.33.0 on ranks 0-1, 0.34.0 on rank 2)" in report.differences(groups, 3)
    said = report.label_differences([groups[0], Described((2,), layout(), newer)])
    assert "vLLM 0.33.0 on ranks 0-1, 0.34.0 on rank 2" in said
