# SPDX-License-Identifier: Apache-2.0
"""The dispatch: ``prepare()`` must hand the experts what one rank with all rows would have.

Each check raises where that is not so; it knows nothing of the plugin.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from world import Rank

HIDDEN = 128
TOP_K = 2
EXPERTS = 8


@dataclass
class Batch:
    """What one rank holds in a step."""

    rows: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    logits: torch.Tensor
    lora: torch.Tensor

    @classmethod
    def of(cls, rank: int, tokens: int, dtype: torch.dtype, top_k: int = TOP_K) -> Batch:
        """Random rows with outliers that grow with the rank: no two ranks' own scales agree."""
        generator = torch.Generator().manual_seed(1000 + rank)
        rows = torch.randn(tokens, HIDDEN, generator=generator)
        rows[:, 3] *= 1.0 + 40.0 * rank
        return cls(
            rows.to(dtype),
            torch.rand(tokens, top_k, generator=generator),
            torch.randint(EXPERTS, (tokens, top_k), generator=generator, dtype=torch.int32),
            torch.randn(tokens, EXPERTS, generator=generator),
            torch.randint(4, (tokens,), generator=generator, dtype=torch.int32),
        )


@dataclass
class Step:
    """A step of all ranks, as this rank sees it and as a single rank would."""

    rank: Rank
    mine: Batch
    all: Batch
    is_sequence_parallel: bool

    def modular(self, config: Any, **options: Any) -> Any:
        """Runs the modular ``prepare()``, checks what travels with the rows; rows and scale."""
        from vllm.model_executor.layers.fused_moe.prepare_finalize import naive_dp_ep

        prepare = naive_dp_ep.MoEPrepareAndFinalizeNaiveDPEPModular(self.is_sequence_parallel)
        lora = options.pop("lora", False)
        if lora:
            mapping = SimpleNamespace(token_lora_mapping=self.mine.lora)
            context = SimpleNamespace(punica_wrapper=SimpleNamespace(token_mapping_meta=mapping))
            prepare.set_lora_context(context)
        on_input = options.pop("apply_router_weight_on_input", False)
        mine = self.mine
        rows, scale, _, ids, weights = prepare.prepare(
            mine.rows, mine.weights, mine.ids, EXPERTS, None, on_input, config, **options
        )
        same(ids, self.all.ids, "top-k ids")
        same(weights, self.all.weights, "top-k weights")
        if lora:
            same(context.local_token_lora_mapping, self.all.lora, "LoRA mapping")
        return rows, scale

    def monolithic(self, config: Any, **options: Any) -> Any:
        from vllm.model_executor.layers.fused_moe.prepare_finalize import naive_dp_ep

        prepare = naive_dp_ep.MoEPrepareAndFinalizeNaiveDPEPMonolithic(self.is_sequence_parallel)
        rows, scale, logits = prepare.prepare(self.mine.rows, self.mine.logits, config, **options)
        same(logits, self.all.logits, "router logits")
        return rows, scale


@contextlib.contextmanager
def step(
    rank: Rank,
    tokens: list[int],
    dtype: torch.dtype = torch.bfloat16,
    top_k: int = TOP_K,
) -> Iterator[Step]:
    """A step with ``tokens[i]`` tokens on DP rank i; with TP, an even share on each TP rank."""
    held = [-(-count // rank.tp_size) for count in tokens for _ in range(rank.tp_size)]
    batches = [Batch.of(r, count, dtype, top_k) for r, count in enumerate(held)]
    everything = Batch(*(torch.cat(parts) for parts in zip(*map(_fields, batches), strict=True)))
    with rank.step(tokens):
        yield Step(rank, batches[rank.rank], everything, rank.tp_size > 1)


def _fields(batch: Batch) -> list[torch.Tensor]:
    return list(vars(batch).values())


def same(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Bit for bit."""
    if got is None:
        raise AssertionError(f"{what} is None")
    if got.dtype != want.dtype or got.shape != want.shape:
        raise AssertionError(f"{what}: {got.dtype} {tuple(got.shape)}, not {tuple(want.shape)}")
    if not torch.equal(_bits(got), _bits(want)):
        wrong = (_bits(got) != _bits(want)).reshape(-1).float().mean().item()
        raise AssertionError(f"{what}: {wrong:.0%} of the bytes differ")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def one_scale(scale: torch.Tensor, want: torch.Tensor) -> None:
    if scale is None:
        raise AssertionError("the experts get no scale")
    if scale.numel() != 1:
        raise AssertionError(f"the experts get {scale.numel()} scales, {scale.tolist()}")
    same(scale.reshape(1), want.reshape(1), "scale")


def fp8_config(scale: torch.Tensor | None = None, **options: Any) -> Any:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    return FusedMoEQuantConfig.make(quant_dtype=torch.float8_e4m3fn, a1_scale=scale, **options)


def quantized(rows: torch.Tensor, scale: torch.Tensor | None = None) -> Any:
    from vllm import _custom_ops

    return _custom_ops.scaled_fp8_quant(rows, scale)


def _per_tensor(rank: Rank, tokens: list[int], scale: torch.Tensor | None, **options: Any) -> None:
    """Both paths with one scale: rows and scale equal the quantized concatenation."""
    rank.use_cuda_communicators()
    dtype = options.pop("dtype", torch.bfloat16)
    lora = options.pop("lora", False)
    with step(rank, tokens, dtype) as now:
        want_rows, want_scale = quantized(now.all.rows, scale)
        for rows, got in (
            now.modular(fp8_config(scale), lora=lora),
            now.monolithic(fp8_config(scale)),
        ):
            one_scale(got, want_scale)
            same(rows, want_rows, "rows")


def uneven(rank: Rank) -> None:
    _per_tensor(rank, [1, 36], None)


def none_on_rank_0(rank: Rank) -> None:
    _per_tensor(rank, [0, 5], None)


def four_ranks(rank: Rank) -> None:
    _per_tensor(rank, [3, 0, 17, 2], None)


def even(rank: Rank) -> None:
    """The silent twin: no row count differs, only the scales do."""
    _per_tensor(rank, [4, 4], None)


def half_precision(rank: Rank) -> None:
    _per_tensor(rank, [2, 7], None, dtype=torch.float16)


def sequence_parallel(rank: Rank) -> None:
    _per_tensor(rank, [6, 2], None)


def with_lora(rank: Rank) -> None:
    _per_tensor(rank, [5, 2], None, lora=True)


def router_weight_on_input(rank: Rank) -> None:
    rank.use_cuda_communicators()
    for scale in (None, torch.tensor([0.03])):
        with step(rank, [3, 8], top_k=1) as now:
            weighted = now.all.rows * now.all.weights.to(now.all.rows.dtype)
            want_rows, want_scale = quantized(weighted, scale)
            rows, got = now.modular(fp8_config(scale), apply_router_weight_on_input=True)
            same(rows, want_rows, "rows")
            one_scale(got, want_scale)


def static_one_element(rank: Rank) -> None:
    _per_tensor(rank, [1, 36], torch.tensor([0.03]))


def static_one_element_even(rank: Rank) -> None:
    _per_tensor(rank, [4, 4], torch.tensor([0.03]))


def static_0_dim(rank: Rank) -> None:
    _per_tensor(rank, [1, 36], torch.tensor(0.03))
    _per_tensor(rank, [4, 4], torch.tensor(0.03))


def fp8_on_the_wire(rank: Rank) -> None:
    """With a shared scale, rows travel as FP8: one byte an element, none of two."""
    twin = rank.use_cuda_communicators()
    with step(rank, [2, 9]) as now:
        want_rows, want_scale = quantized(now.all.rows)
        for prepare in (now.modular, now.monolithic):
            twin.wire.clear()
            rows, got = prepare(fp8_config())
            same(rows, want_rows, "rows")
            one_scale(got, want_scale)
            if twin.wire[0] != 1 or 2 in twin.wire:
                raise AssertionError(f"bytes an element on the wire: {twin.wire}")


def _mxfp8(rank: Rank, swizzled: bool, alignment: int = 0) -> None:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
    from vllm.model_executor.layers.quantization.utils import mxfp8_utils

    rank.use_cuda_communicators()
    config = FusedMoEQuantConfig.make(quant_dtype="mxfp8")
    is_new = hasattr(config, "is_scale_swizzled")
    if alignment and not is_new:
        config.mx_alignment = alignment  # TRTLLM to 0.20.2: the flag is on, the layout row-major
    else:
        setattr(config, "is_scale_swizzled" if is_new else "is_nvfp4_scale_swizzled", swizzled)
    with step(rank, [1, 36]) as now:
        want_rows, want_scale = mxfp8_utils.mxfp8_e4m3_quantize(now.all.rows, swizzled)
        for rows, scale in (now.modular(config), now.monolithic(config)):
            same(rows, want_rows, "rows")
            same(scale, want_scale, "scales")


def mxfp8_swizzled(rank: Rank) -> None:
    _mxfp8(rank, True)


def mxfp8_row_major(rank: Rank) -> None:
    _mxfp8(rank, False)
    _mxfp8(rank, False, alignment=256)


def unquantized(rank: Rank) -> None:
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG

    rank.use_cuda_communicators()
    with step(rank, [1, 36]) as now:
        for prepare in (now.modular, now.monolithic):
            rows, scale = prepare(FUSED_MOE_UNQUANTIZED_CONFIG)
            same(rows, now.all.rows, "rows")
            if scale is not None:
                raise AssertionError("a scale without quantization")


def per_token(rank: Rank) -> None:
    rank.use_cuda_communicators()
    from vllm import _custom_ops

    with step(rank, [1, 36]) as now:
        want = _custom_ops.scaled_fp8_quant(now.all.rows, use_per_token_if_dynamic=True)
        for prepare in (now.modular, now.monolithic):
            rows, scale = prepare(fp8_config(per_act_token_quant=True))
            same(rows, want[0], "rows")
            same(scale, want[1], "scales")


def per_block(rank: Rank) -> None:
    from vllm.model_executor.layers.fused_moe import utils

    rank.use_cuda_communicators()
    with step(rank, [1, 36]) as now:
        want = utils.per_token_group_quant_fp8(now.all.rows, 128)
        for prepare in (now.modular, now.monolithic):
            rows, scale = prepare(fp8_config(block_shape=[128, 128]))
            same(rows, want[0], "rows")
            same(scale, want[1], "scales")


def deferred(rank: Rank) -> None:
    """Experts that quantize by themselves get rows as they are."""
    rank.use_cuda_communicators()
    with step(rank, [1, 36]) as now:
        for prepare in (now.modular, now.monolithic):
            rows, scale = prepare(fp8_config(), defer_input_quant=True)
            same(rows, now.all.rows, "rows")
            if scale is not None:
                raise AssertionError("a scale though quantization is deferred")
