# SPDX-License-Identifier: Apache-2.0
"""Both quantizers against ml_dtypes and against vLLM's own, byte for byte."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest
import torch
import triton

from scripts.gpu.bench_mxfp4_quantize import ENTRY, load_downcast
from vllm_moe_dp_fix.mxfp4 import triton_kernel
from vllm_moe_dp_fix.mxfp4.quantize import quantize
from vllm_moe_dp_fix.mxfp4.sharding import NAN_SCALE

Tensor: TypeAlias = torch.Tensor
Pair: TypeAlias = tuple[Any, Any]  # packed and scales, as numpy
Quantize: TypeAlias = Callable[[Tensor, Tensor, Tensor], None]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=("bf16", "fp16", "fp32"))
UNTOUCHED = 0xA5
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(params=("torch", "triton"))
def path(request: pytest.FixtureRequest) -> Quantize:
    return quantize if request.param == "torch" else triton_kernel.quantize


@pytest.fixture
def downcast(tmp_path: Path, exact_conversions: None) -> Callable[..., Any]:
    """The installed vLLM's function, taken from its source: vLLM for CPU disables Triton."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent / "model_executor/layers/quantization/utils/mxfp4_utils.py"
    return load_downcast(source, tmp_path)


def oracle(rows: Tensor) -> Pair:
    """In float64, where all is exact, with the roundings of ml_dtypes."""
    blocks = rows.double().numpy().reshape(len(rows), -1, 32)
    largest = np.abs(blocks).max(axis=2)
    mantissa, exponent = np.frexp(largest)  # of [0.5, 1)
    exponent = exponent - 1 + (mantissa >= 0.875)
    exponent = np.where(exponent == 128, 127, np.maximum(exponent - 2, -127))
    exponent = np.where(largest == 0, -127, exponent)
    scales = np.ldexp(1.0, exponent).astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
    values = np.clip(np.ldexp(blocks, -exponent[..., None]), -6, 6)
    codes = values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(len(rows), -1)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales


def quantized(path: Quantize, rows: Tensor) -> Pair:
    """Into views of larger parameters, whose other bytes must stay."""
    count, width = rows.shape
    found = []
    for columns, (left, right) in ((width // 2, (16, 3)), (width // 32, (1, 2))):
        whole = torch.full((count + 3, left + columns + right), UNTOUCHED, dtype=torch.uint8)
        found.append((whole, whole[2 : 2 + count, left : left + columns]))
    path(rows, *(view for _, view in found))
    results = []
    for whole, view in found:
        results.append(view.numpy().copy())
        view.fill_(UNTOUCHED)
        assert (whole == UNTOUCHED).all()
    return results[0], results[1]


def check(path: Quantize, rows: Tensor) -> None:
    for got, want in zip(quantized(path, rows), oracle(rows), strict=True):
        np.testing.assert_array_equal(got, want)


def normal(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 0.02).to(dtype)


def least(dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps


def exponents(dtype: torch.dtype) -> range:
    """Those of the type's finite values."""
    return range(int(np.frexp(least(dtype))[1]) - 1, int(np.frexp(torch.finfo(dtype).max)[1]))


def neighbours(values: Tensor) -> Tensor:
    """The values of the type just below, at and just above; ``values`` are positive."""
    bits = values.view(torch.int32 if values.dtype == FP32 else torch.int16)
    return torch.stack((bits - 1, bits, bits + 1), -1).flatten(-2).view(values.dtype)


def midpoint_blocks(dtype: torch.dtype) -> Tensor:
    """For every scale, midpoints of both signs and what is next to them. A row a block."""
    rows = []
    for exponent in exponents(dtype):
        scaled = torch.tensor((4.0, 6.0, *MIDPOINTS), dtype=torch.float64) * 2.0 ** (exponent - 2)
        values = scaled.to(dtype)
        for top in values[:2]:
            if not 0 < top < torch.inf:
                continue
            places = neighbours(values[2:].clamp(min=least(dtype)))
            signs = torch.tensor([1.0, -1.0], dtype=dtype).repeat(11)[:21]
            for sign in (1, -1):
                rows.append(torch.cat((top[None], sign * signs * places, -places[:10])))
    return torch.stack(rows)


def boundary_blocks(dtype: torch.dtype) -> Tensor:
    """For every exponent, the largest size just below, at and just above 1.75, and lesser ones."""
    info = torch.finfo(dtype)
    places = torch.tensor([1.75 * 2.0**e for e in exponents(dtype)], dtype=torch.float64).to(dtype)
    sizes = neighbours(places[(places > least(dtype)) & (places < torch.inf)])
    ends = torch.tensor([info.max, info.smallest_normal, least(dtype)])
    largest = torch.cat((sizes, ends.to(dtype)))[:, None]
    lesser = largest.double() * torch.linspace(-1, 1, 31, dtype=torch.float64)
    return torch.cat((lesser.to(dtype), largest), 1)


def subnormal_blocks(dtype: torch.dtype) -> Tensor:
    info = torch.finfo(dtype)
    steps = torch.randint(
        0, round(1 / info.eps), (40, 32), generator=torch.Generator().manual_seed(1)
    )
    steps >>= torch.arange(40)[:, None] % 24
    signs = 1 - 2 * (torch.arange(32) % 2)
    return (steps * signs * least(dtype)).to(dtype)


def random_blocks(dtype: torch.dtype, seed: int) -> Tensor:
    """Blocks at every exponent, in them sizes over a few exponents. Rows of several blocks."""
    generator = torch.Generator().manual_seed(seed)
    span = exponents(dtype)
    top = torch.arange(span.start, span.stop, dtype=torch.float64)
    top = top[torch.randperm(len(top), generator=generator)]
    lower = 6 * torch.rand((len(top), 32), generator=generator, dtype=torch.float64)
    lower[torch.arange(len(top)), torch.randint(0, 32, (len(top),), generator=generator)] = 0
    signs = 1 - 2 * torch.randint(0, 2, lower.shape, generator=generator)
    fractions = 1 + torch.rand(lower.shape, generator=generator, dtype=torch.float64)
    values = signs * fractions * torch.exp2((top[:, None] - lower).floor())
    values = values.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    return values[: len(values) // 3 * 3].view(-1, 96)


def hard(dtype: torch.dtype) -> Iterator[Tensor]:
    yield midpoint_blocks(dtype)
    yield boundary_blocks(dtype)
    yield subnormal_blocks(dtype)
    for seed in range(3):
        yield random_blocks(dtype, seed)


@DTYPES
@pytest.mark.parametrize(
    "shape",
    [(1, 32), (1, 2880), (2, 2048), (3, 96), (3, 4096), (5, 704), (7, 32), (129, 64)],
    ids=str,
)
def test_shapes(path: Quantize, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    check(path, normal(shape, dtype))


@DTYPES
@pytest.mark.parametrize("shape", [(0, 64), (0, 0), (5, 0)], ids=str)
def test_nothing_to_do(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    packed, scales = quantized(quantize, torch.empty(shape, dtype=dtype))
    assert packed.size == scales.size == 0


def test_many_chunks() -> None:
    check(quantize, normal((3001, 96), BF16))


@DTYPES
def test_midpoints(path: Quantize, dtype: torch.dtype) -> None:
    check(path, midpoint_blocks(dtype))


@DTYPES
def test_scale_boundary(path: Quantize, dtype: torch.dtype) -> None:
    rows = boundary_blocks(dtype)
    scales = oracle(rows)[1]
    assert {int(value) for value in np.diff(scales[:-3].astype(int).reshape(-1, 3)).flat} >= {0, 1}
    check(path, rows)


@DTYPES
def test_subnormals(path: Quantize, dtype: torch.dtype) -> None:
    check(path, subnormal_blocks(dtype))


@DTYPES
@pytest.mark.parametrize("seed", range(5))
def test_random_exponents(path: Quantize, dtype: torch.dtype, seed: int) -> None:
    check(path, random_blocks(dtype, seed))


@DTYPES
def test_zeros_keep_their_sign(path: Quantize, dtype: torch.dtype) -> None:
    rows = torch.zeros(3, 64, dtype=dtype)
    rows[0, :32] = -0.0
    rows[1, ::2] = -0.0
    rows[2, 3] = 1.0
    check(path, rows)
    packed, scales = quantized(path, rows)
    assert set(packed[0, :16]) == {0x88}
    assert set(packed[0, 16:]) == {0}
    assert set(packed[1]) == {0x08}
    assert scales.tolist() == [[0, 0], [0, 0], [125, 0]]


def test_known_bytes(path: Quantize) -> None:
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    rows = torch.tensor([values + [-value for value in values] + [5.0, 6.5] * 8], dtype=BF16)
    packed, scales = quantized(path, rows)
    assert packed.tolist() == [[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] + [0x76] * 8]
    assert scales.tolist() == [[127]]


@DTYPES
def test_huge(path: Quantize, dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    rows = torch.full((2, 64), most, dtype=dtype)
    rows[1] = torch.linspace(-most, most, 64, dtype=torch.float64).to(dtype)
    check(path, rows)
    assert set(oracle(rows)[1].flat) == {141 if dtype == FP16 else 254}


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@DTYPES
def test_not_finite(path: Quantize, dtype: torch.dtype) -> None:
    ints = torch.int32 if dtype == FP32 else torch.int16
    infinity = torch.tensor(torch.inf, dtype=dtype).view(ints).item()
    lowest = torch.iinfo(ints).min
    patterns = (infinity, infinity + 1, torch.iinfo(ints).max, lowest + infinity, -1)
    rows = normal((2 * len(patterns), 96), dtype)
    want_packed, want_scales = oracle(rows)
    for row, (pattern, place) in enumerate(itertools.product(patterns, (32, 63))):
        rows.view(ints)[row, place] = pattern
    assert int((~rows.isfinite()).sum()) == len(rows)
    packed, scales = quantized(path, rows)
    np.testing.assert_array_equal(scales[:, 1], NAN_SCALE)
    for block in (0, 2):
        codes = slice(16 * block, 16 * block + 16)
        np.testing.assert_array_equal(scales[:, block], want_scales[:, block])
        np.testing.assert_array_equal(packed[:, codes], want_packed[:, codes])


@DTYPES
@pytest.mark.parametrize(
    "view",
    [
        lambda rows: rows[:, 40:136],
        lambda rows: rows[::3, :96],
        lambda rows: rows[:, :192:2],
        lambda rows: rows[:96].t(),
        lambda rows: rows[:192:2, 5:18].t(),
        lambda rows: rows[:1, :96].expand(4, 96),
    ],
    ids=("columns", "rows", "every-second", "transposed", "part-of-transposed", "expanded"),
)
def test_strided_rows(path: Quantize, dtype: torch.dtype, view: Callable[[Tensor], Tensor]) -> None:
    rows = view(normal((192, 200), dtype))
    assert not rows.is_contiguous()
    before = rows.clone()
    check(path, rows)
    assert torch.equal(rows, before)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=("bf16", "fp16"))
def test_equals_vllm(path: Quantize, downcast: Callable[..., Any], dtype: torch.dtype) -> None:
    for rows in (normal((5, 2880), dtype), *hard(dtype)):
        want = downcast(rows, -1)
        for got, right in zip(quantized(path, rows), want, strict=False):
            np.testing.assert_array_equal(got, right.numpy())


@DTYPES
def test_flushed_subnormals(dtype: torch.dtype) -> None:
    """Where the CPU takes subnormal floats for zero, as after a library built for fast math."""
    every = [(rows, oracle(rows)) for rows in hard(dtype)]
    with _flushing():
        got = [quantized(quantize, rows) for rows, _ in every]
    for pair, (_, want) in zip(got, every, strict=True):
        for mine, right in zip(pair, want, strict=True):
            np.testing.assert_array_equal(mine, right)


@contextlib.contextmanager
def _flushing() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def test_gpu_tensors_go_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded = []

    class OnGpu(torch.Tensor):  # type: ignore[misc]
        is_cuda = True

    class Devices:
        @staticmethod
        def device(device: torch.device) -> contextlib.AbstractContextManager[None]:
            guarded.append(device)
            return contextlib.nullcontext()

    monkeypatch.setattr(torch, "get_device_module", lambda _: Devices)
    monkeypatch.setattr("vllm_moe_dp_fix.mxfp4.quantize._quantize", None)
    rows = normal((3, 64), BF16)
    got = quantized(lambda _, *outputs: quantize(rows.as_subclass(OnGpu), *outputs), rows)
    for mine, right in zip(got, oracle(rows), strict=True):
        np.testing.assert_array_equal(mine, right)
    assert guarded == [rows.device]


def test_triton_is_not_imported_on_cpu() -> None:
    script = """
import sys, torch
from vllm_moe_dp_fix.mxfp4.quantize import quantize
scales = torch.zeros(1, 1, dtype=torch.uint8)
quantize(torch.ones(1, 32), torch.zeros(1, 16, dtype=torch.uint8), scales)
print(scales.item(), "triton" in sys.modules)
"""
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["125", "False"]


@pytest.mark.parametrize(
    ("rows", "packed", "scales", "says"),
    [
        ((2, 48), (2, 24), (2, 1), "multiple of 32"),
        ((64,), (2, 16), (2, 1), "not \\[M, K\\]"),
        ((2, 64), (2, 31), (2, 2), "packed is"),
        ((2, 64), (3, 32), (2, 2), "packed is"),
        ((2, 64), (2, 32), (2, 1), "scales is"),
    ],
)
def test_wrong_shapes(
    rows: tuple[int, ...], packed: tuple[int, ...], scales: tuple[int, ...], says: str
) -> None:
    outputs = [torch.full(shape, UNTOUCHED, dtype=torch.uint8) for shape in (packed, scales)]
    with pytest.raises(ValueError, match=says):
        quantize(torch.ones(rows), *outputs)
    assert all((output == UNTOUCHED).all() for output in outputs)


def test_wrong_tensors() -> None:
    rows, packed, scales = (
        torch.ones(2, 64),
        torch.zeros(2, 32, dtype=torch.uint8),
        torch.zeros(2, 2, dtype=torch.uint8),
    )
    with pytest.raises(ValueError, match=r"rows of torch\.float64"):
        quantize(rows.double(), packed, scales)
    with pytest.raises(ValueError, match=r"packed is torch\.int8"):
        quantize(rows, packed.view(torch.int8), scales)
    with pytest.raises(ValueError, match="scales has a stride of 2"):
        quantize(rows, packed, scales.t().contiguous().t())
    with pytest.raises(ValueError, match="packed is on meta"):
        quantize(rows, packed.to("meta"), scales)


# --- scripts/gpu/bench_mxfp4_quantize.py ----------------------------------------------------


def test_extraction_takes_what_the_entry_needs(downcast: Callable[..., Any]) -> None:
    namespace = downcast.__globals__
    kernels = [name for name, value in namespace.items() if hasattr(value, "fn")]
    assert downcast.__name__ == ENTRY
    assert namespace["triton"] is triton
    assert sorted(kernels) == ["_compute_quant_and_scale", "_downcast_to_mxfp"]
    assert "vllm.logger" not in Path(namespace["__file__"]).read_text()


def test_extraction_without_the_entry(tmp_path: Path) -> None:
    source = tmp_path / "mxfp4_utils.py"
    source.write_text("def mxfp4_quantize(x):\n    return x\n")
    with pytest.raises(SystemExit, match="--vllm-source"):
        load_downcast(source, tmp_path)
