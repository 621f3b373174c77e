# SPDX-License-Identifier: Apache-2.0
"""FP8 with a scale shared by ranks, byte for byte after the formula of vLLM's CUDA kernels."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest
import torch
from vllm import forward_context

from vllm_moe_dp_fix import settings
from vllm_moe_dp_fix.fixes import moe_dp_dispatch as dispatch
from vllm_moe_dp_fix.fp8 import shared_scale, triton_kernel
from vllm_moe_dp_fix.registry import NAIVE_DP_EP

Tensor: TypeAlias = torch.Tensor

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=("bf16", "fp16", "fp32")
)
UNTOUCHED = 0xA5


@pytest.fixture(autouse=True)
def _quiet(exact_conversions: None) -> Iterator[None]:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        yield


def oracle(rows: Tensor) -> tuple[Any, np.float32]:
    """What ``dynamic_scaled_fp8_quant`` makes of these rows, which are all there are.

    fmaxf and fminf of CUDA return the other operand where one is NaN, and so do NumPy's.
    """
    values = rows.float().numpy()
    scale = np.fmax.reduce(np.abs(values), axis=None, initial=np.float32(0)) / np.float32(448)
    scaled = values * (np.float32(1) / scale)
    limited = np.fmax(np.float32(-448), np.fmin(scaled, np.float32(448)))
    return limited.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), scale


def quantized(*ranks: Tensor) -> list[tuple[Any, np.float32]]:
    """What each rank gets once all have agreed."""
    maxima = torch.stack([shared_scale.local_maxima(rows) for rows in ranks]).amax(0)
    found = []
    for rows in ranks:
        codes, scale = shared_scale.quantize(rows, maxima)
        assert codes.dtype == torch.float8_e4m3fn
        assert codes.shape == rows.shape
        assert scale.dtype == torch.float32
        assert scale.shape == (1,)
        found.append((codes.view(torch.uint8).numpy(), scale.numpy()[0]))
    return found


def check(*ranks: Tensor) -> None:
    """Every rank's part is that of one rank with all the rows."""
    want, want_scale = oracle(torch.cat(ranks))
    found = quantized(*ranks)
    for _, scale in found:
        np.testing.assert_array_equal(scale.view(np.uint32), want_scale.view(np.uint32))
    np.testing.assert_array_equal(np.concatenate([codes for codes, _ in found]), want)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 2048), (1, 1), (3, 7), (36, 2816), (129, 257), (2, 8192)])
def test_gives_the_bytes_of_one_rank(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(math.prod(shape))
    check((torch.randn(shape) * 30).to(dtype))


@pytest.mark.parametrize("place", [0, 8191, 8192, 50 * 2048 - 1])
def test_finds_the_largest_wherever_it_is(place: int) -> None:
    rows = torch.randn(50, 2048).bfloat16()
    rows.view(-1)[place] = -77.0
    check(rows)
    assert quantized(rows)[0][0].flat[place] == 0xFE  # -448


def test_more_rows_than_programs_hold_at_once() -> None:
    """Each program of the first pass takes several tiles."""
    count = shared_scale.MAXIMA * triton_kernel._TILE
    rows = torch.randn(3 * count // 4096 + 1, 4096).bfloat16()
    rows[-1, -1] = 123.0
    maxima = shared_scale.local_maxima(rows)
    assert maxima.max() == 123.0
    assert (maxima > 0).all()


@DTYPES
def test_every_exponent_of_the_result(dtype: torch.dtype) -> None:
    """Down to FP8's subnormals and below, on ties and beside them."""
    values = torch.logspace(-14, 0, 4096, base=2.0)
    ties = torch.arange(0, 449, dtype=torch.float32) / 448
    check(torch.cat([values, -values, ties, -ties])[None].to(dtype))


@DTYPES
def test_beyond_the_range_of_fp8(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    check(torch.tensor([[449.0, -1e4, 60000.0, 3.0], [largest, -largest, 1.0, 0.0]]).to(dtype))


@DTYPES
def test_zeros_alone(dtype: torch.dtype) -> None:
    """The scale is 0, and what it scales is as with vLLM's kernel."""
    check(torch.zeros(3, 40, dtype=dtype), -torch.zeros(1, 40, dtype=dtype))


def test_rows_of_zeros_among_others() -> None:
    rows = torch.randn(4, 64).bfloat16()
    rows[1] = 0
    rows[3] = -0.0
    check(rows)


@DTYPES
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_no_numbers(dtype: torch.dtype, value: float) -> None:
    rows = torch.randn(5, 33).to(dtype)
    rows[2, 11] = value
    check(rows, torch.randn(2, 33).to(dtype))


def test_a_nan_does_not_move_the_scale_of_others() -> None:
    rows = torch.randn(5, 33).bfloat16()
    _, want = oracle(rows)
    broken = rows.clone()
    broken[rows.abs() < 1] = math.nan
    assert quantized(broken)[0][1] == want


def test_nothing_but_nans() -> None:
    check(torch.full((2, 5), math.nan))


@pytest.mark.parametrize(
    "counts", [(1, 36), (36, 1), (0, 5), (5, 0), (0, 0), (4, 4), (3, 1, 0, 17)], ids=str
)
def test_ranks_agree(counts: tuple[int, ...]) -> None:
    """Unequal numbers of rows, none among them, and one rank with an outlier channel."""
    torch.manual_seed(0)
    ranks = [torch.randn(count, 96).bfloat16() for count in counts]
    ranks[0][:, 7] *= 40
    check(*ranks)


def test_rows_with_a_stride() -> None:
    wide = torch.randn(6, 100).bfloat16()
    wide[:, 64:] = 1e4  # not of the rows
    check(wide[:, :64], wide[::2, 8:72])


def test_writes_nothing_else() -> None:
    rows = torch.randn(3, 37)
    buffer = torch.full((3 * 37 + 64,), UNTOUCHED, dtype=torch.uint8)
    scale = torch.zeros(3)
    maxima = torch.full((shared_scale.MAXIMA + 2,), -1.0)
    triton_kernel.find_maxima(rows, maxima[1:-1])
    assert maxima[0] == maxima[-1] == -1.0
    assert (maxima[1:-1] >= 0).all()
    codes = buffer[32 : 32 + 3 * 37].view(torch.float8_e4m3fn)
    triton_kernel.quantize(rows, maxima[1:-1], codes, scale[1:2])
    assert (buffer[:32] == UNTOUCHED).all()
    assert (buffer[-32:] == UNTOUCHED).all()
    assert scale[0] == scale[2] == 0
    np.testing.assert_array_equal(buffer[32:-32].numpy(), oracle(rows)[0].ravel())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_is_for_cuda_alone(device: str) -> None:
    """Elsewhere the dispatch quantizes with vLLM's own functions."""
    rows = torch.zeros(1, 8, device=device)
    assert not shared_scale.has_kernel(rows, torch.float8_e4m3fn)


# --- in the dispatch ------------------------------------------------------------------------


class Ranks:
    """The group of one rank of several, whose maxima are known; what it gathers stays its own."""

    world_size = 2
    rank_in_group = 0
    disabled = False

    def __init__(self, every: list[Tensor]) -> None:
        self.every = every
        self.device_communicator = self.all2all_manager = self.pynccl_comm = self
        self.reduced: list[tuple[int, ...]] = []
        self.gathered: list[torch.dtype] = []

    def _get_comm_group(self, is_sequence_parallel: bool) -> Ranks:
        return self

    def all_reduce(self, tensor: Tensor, op: object = None) -> Tensor:
        self.reduced.append(tuple(tensor.shape))
        return torch.stack([shared_scale.local_maxima(rows) for rows in self.every]).amax(0)

    def dispatch(self, rows: Tensor, *others: Tensor, **_: object) -> tuple[Tensor, ...]:
        self.gathered.append(rows.dtype)
        return (rows, *others)

    dispatch_router_logits = dispatch


def _rows(counts: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    every = [torch.randn(count, 64).bfloat16() for count in counts]
    every[1] *= 40
    return every


def _prepared(
    path: str, every: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Ranks, Tensor, Tensor]]:
    """What vLLM's ``prepare()``, repaired, does and gives on each rank, as on CUDA."""
    naive_dp_ep = importlib.import_module(NAIVE_DP_EP)
    monkeypatch.setattr(shared_scale, "has_kernel", lambda rows, dtype: True)
    kind = getattr(naive_dp_ep, f"MoEPrepareAndFinalizeNaiveDPEP{path.title()}")
    wrap = {"modular": dispatch._wrap_modular, "monolithic": dispatch._wrap_monolithic}[path]
    prepare = wrap(inspect.unwrap(kind.prepare), naive_dp_ep)
    config = naive_dp_ep.FusedMoEQuantConfig.make(quant_dtype=torch.float8_e4m3fn)
    for rows in every:
        group = Ranks(every)
        monkeypatch.setattr(naive_dp_ep, "get_ep_group", lambda group=group: group)
        weights, ids = torch.ones(len(rows), 1), torch.zeros(len(rows), 1, dtype=torch.int32)
        others = {"modular": (weights, ids, 1, None, False), "monolithic": (weights,)}[path]
        got, scale, *_ = prepare(kind(False), rows, *others, config)
        yield group, got, scale


@pytest.mark.parametrize("path", ["modular", "monolithic"])
@pytest.mark.parametrize("counts", [(3, 5), (0, 4)], ids=str)
def test_dispatch_gathers_fp8(
    path: str, counts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernels: the rows of each rank leave as FP8."""
    monkeypatch.setenv(settings.FP8_DISPATCH, "shared_scale")
    every = _rows(counts)
    codes, scales = [], set()
    for group, got, scale in _prepared(path, every, monkeypatch):
        assert group.reduced == [(shared_scale.MAXIMA,)]
        assert group.gathered == [torch.float8_e4m3fn]
        codes.append(got.view(torch.uint8).numpy())
        scales.add(scale.item())
    want, want_scale = oracle(torch.cat(every))
    np.testing.assert_array_equal(np.concatenate(codes), want)
    assert scales == {want_scale}


@pytest.mark.parametrize("path", ["modular", "monolithic"])
@pytest.mark.parametrize(
    ("counts", "shares"), [((0, 10), True), ((5, 5), True), ((8, 1), False), ((1, 8), False)]
)
def test_all_ranks_choose_alike(
    path: str, counts: tuple[int, int], shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the rows of all ranks, whatever a rank has itself."""
    monkeypatch.delenv(settings.FP8_DISPATCH, raising=False)
    monkeypatch.setattr(shared_scale, "PAYS_FROM", 10 * 64)
    metadata = SimpleNamespace(local_sizes=list(counts))
    context = SimpleNamespace(dp_metadata=metadata)
    monkeypatch.setattr(forward_context, "get_forward_context", lambda: context)
    naive_dp_ep = importlib.import_module(NAIVE_DP_EP)
    # CUDA's kernel, which takes the gathered rows where the ranks do not share a scale.
    monkeypatch.setattr(naive_dp_ep, "moe_kernel_quantize_input", dispatch._reference_fp8)
    wanted = torch.float8_e4m3fn if shares else torch.bfloat16
    for group, got, _ in _prepared(path, _rows(counts), monkeypatch):
        assert group.gathered == [wanted]
        assert group.reduced == [(shared_scale.MAXIMA,)] * shares
        assert got.dtype == torch.float8_e4m3fn
