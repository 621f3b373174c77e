# SPDX-License-Identifier: Apache-2.0
"""The collectives: right results, and clear errors that leave the communicator usable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from checks_dispatch import EXPERTS, same, step
from world import Rank


def _communicator() -> Any:
    from vllm.distributed import get_dp_group

    return get_dp_group().device_communicator


def _must_refuse(call: Callable[[], object], twin: Any, *words: object) -> None:
    """The call is a ValueError that says ``words``, before a group was opened."""
    try:
        call()
    except ValueError as error:
        if twin is not None and twin.depth != 0:
            raise AssertionError(f"NCCL group left open ({error})") from error
        missing = [str(word) for word in words if str(word) not in str(error)]
        if missing:
            raise AssertionError(f"the error does not name {missing}: {error}") from error
    except AssertionError as error:
        left = f"; NCCL group left open: {twin.depth}" if twin is not None and twin.depth else ""
        raise AssertionError(f"bare assertion {str(error)!r}{left}") from error
    else:
        raise AssertionError("taken without a word")


def _rows(rank: int, rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    values = torch.randint(-8, 8, (rows, 3), generator=generator)
    return values.to(dtype) if dtype is not torch.bool else values > 0


# --- CudaCommunicator over the NCCL twin ----------------------------------------------------


def wrong_rows_uneven(rank: Rank) -> None:
    """One tensor of rank 1 has a wrong row count; its peers already wait in the right call."""
    twin = rank.use_cuda_communicators()
    sizes = [1, 36, 0, 5][: rank.dp_size]
    mine = sizes[rank.rank]
    right = [_rows(rank.rank, mine), torch.full((mine, 1), rank.rank, dtype=torch.int32)]
    communicator = _communicator()
    if rank.rank == 1:
        wrong = [right[0], torch.zeros(1)]
        _must_refuse(
            lambda: communicator.all_gatherv(wrong, dim=0, sizes=sizes),
            twin,
            *("tensor 1 of 2", "(1,)", torch.float32, "rank 1", "36 rows", sizes),
        )
    values, owner = communicator.all_gatherv(right, dim=0, sizes=sizes)
    same(values, torch.cat([_rows(r, n) for r, n in enumerate(sizes)]), "gathered rows")
    same(owner[:, 0], _owners(sizes), "gathered owners")


def _owners(sizes: list[int]) -> torch.Tensor:
    ranks = torch.arange(len(sizes), dtype=torch.int32)
    return ranks.repeat_interleave(torch.tensor(sizes))


def unfit_tensors(rank: Rank) -> None:
    """Each rank alone: what NCCL would find unfit only inside the group."""
    twin = rank.use_cuda_communicators()
    communicator = _communicator()
    sizes = list(range(2, 2 + rank.dp_size))
    mine = sizes[rank.rank]
    right = torch.zeros(mine, 3)
    for unfit in (torch.zeros(mine, 3, dtype=torch.bool), torch.tensor(1.0)):
        _must_refuse(
            lambda unfit=unfit: communicator.all_gatherv([right, unfit], 0, sizes),  # type: ignore[misc]
            twin,
            *("tensor 1 of 2", tuple(unfit.shape), unfit.dtype, f"rank {rank.rank}"),
        )
    _must_refuse(lambda: communicator.all_gatherv([right], 0, [mine]), twin, "one size a rank")


def wrong_rows_even(rank: Rank) -> None:
    """Equal sizes: every rank has one row where two were announced."""
    twin = rank.use_cuda_communicators()
    communicator = _communicator()
    sizes = [2] * rank.dp_size
    for wrong in (_rows(rank.rank, 1), [_rows(rank.rank, 2), torch.zeros(1)]):
        _must_refuse(
            lambda wrong=wrong: communicator.all_gatherv(wrong, dim=0, sizes=sizes),  # type: ignore[misc]
            twin,
            *("2 rows", sizes, f"rank {rank.rank}"),
        )
    got = communicator.all_gatherv(_rows(rank.rank, 2), dim=0, sizes=sizes)
    same(got, torch.cat([_rows(r, 2) for r in range(rank.dp_size)]), "gathered rows")


def strided(rank: Rank) -> None:
    """A transposed view is gathered as the values it shows."""
    rank.use_cuda_communicators()
    want = torch.cat([_rows(r, 3) for r in range(rank.dp_size)])
    transposed = _rows(rank.rank, 3).t().contiguous().t()
    for sizes in ([3] * rank.dp_size, None):
        same(_communicator().all_gatherv([transposed], 0, sizes)[0], want, "gathered rows")
        same(_communicator().all_gatherv(transposed, 0, sizes), want, "gathered rows")


def scatter_refuses(rank: Rank) -> None:
    twin = rank.use_cuda_communicators()
    communicator = _communicator()
    sizes = list(range(1, 1 + rank.dp_size))
    total = sum(sizes)
    _refused_scatters(rank, twin)
    summed = communicator.reduce_scatterv(_rows(0, total) * (rank.rank + 1), dim=0, sizes=sizes)
    _is_my_share(summed, rank, sizes)
    if hasattr(communicator, "reduce_scatterv_into_output"):
        output = torch.zeros(sizes[rank.rank] + 1, 3)
        wide = _rows(0, total)
        _must_refuse(
            lambda: communicator.reduce_scatterv_into_output(wide, output, dim=0, sizes=sizes),
            twin,
            *(tuple(output.shape), f"({sizes[rank.rank]}, 3)"),
        )
        output = output[1:]
        mine = wide * (rank.rank + 1)
        communicator.reduce_scatterv_into_output(mine, output, dim=0, sizes=sizes)
        _is_my_share(output, rank, sizes)


def _refused_scatters(rank: Rank, twin: Any) -> None:
    communicator = _communicator()
    sizes = list(range(1, 1 + rank.dp_size))
    total = sum(sizes)
    wrong, even = torch.zeros(total + 1, 3), [2] * rank.dp_size
    for rows, given, words in (
        (wrong, sizes, ((total + 1, 3), torch.float32, f"rank {rank.rank}", f"{total} rows")),
        (torch.zeros(1, 3), even, ((1, 3), f"{sum(even)} rows", even)),
        (torch.zeros(3, 3), [3], ("one size a rank",)),
        (torch.zeros(2 * rank.dp_size + 1, 3), None, ("evenly",)),
    ):
        _must_refuse(
            lambda rows=rows, given=given: communicator.reduce_scatterv(rows, 0, given),  # type: ignore[misc]
            twin,
            *words,
        )


def _is_my_share(got: torch.Tensor, rank: Rank, sizes: list[int]) -> None:
    """The sum over ranks r of (r + 1) times the same rows."""
    start = sum(sizes[: rank.rank])
    share = _rows(0, sum(sizes))[start : start + sizes[rank.rank]]
    same(got, share * sum(range(1, rank.dp_size + 1)), "summed rows")


# --- CpuCommunicator ------------------------------------------------------------------------

DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int32, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn),
)


def cpu_gather(rank: Rank) -> None:
    communicator = _communicator()
    for sizes in ([4, 1, 0, 3][: rank.dp_size], [0, 5, 2, 2][: rank.dp_size], [2] * rank.dp_size):
        every = [[_rows(r, n, dtype) for dtype in DTYPES] for r, n in enumerate(sizes)]
        got = communicator.all_gatherv(every[rank.rank], dim=0, sizes=sizes)
        for dtype, tensor, parts in zip(DTYPES, got, zip(*every, strict=True), strict=True):
            same(tensor, torch.cat(parts), f"gathered {dtype}, sizes {sizes}")
        one = [torch.arange(n * 4.0).view(n, 2, 2) + r for r, n in enumerate(sizes)]
        same(communicator.all_gatherv(one[rank.rank], 0, sizes), torch.cat(one), "single tensor")
    flat = torch.arange(3) + rank.rank
    want = torch.cat([torch.arange(3) + r for r in range(rank.dp_size)])
    same(communicator.all_gatherv(flat), want, "1-D without sizes")
    strides = _rows(rank.rank, 3).t().contiguous().t()
    same(communicator.all_gatherv([strides])[0], communicator.all_gatherv(_rows(rank.rank, 3)), "t")
    column = torch.stack([flat, -flat], dim=1)[:, 0]
    same(communicator.all_gatherv(column), want, "1-D with a stride")
    sizes = [1] * rank.dp_size
    wrong = [torch.zeros(1, 2), torch.zeros(2, 2)]
    _must_refuse(lambda: communicator.all_gatherv(wrong, 0, sizes), None, "tensor 1 of 2", sizes)


def cpu_scatter(rank: Rank) -> None:
    """Sums are taken in FP32 and rounded once; integers are exact."""
    communicator = _communicator()
    for sizes in ([4, 1, 0, 3][: rank.dp_size], [0, 5, 2, 2][: rank.dp_size], [2] * rank.dp_size):
        start, total = sum(sizes[: rank.rank]), sum(sizes)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64):
            every = [_rows(r, total).mul(0.37 + r).to(dtype) for r in range(rank.dp_size)]
            wide = torch.float32 if dtype.is_floating_point else dtype
            want = torch.stack([t.to(wide) for t in every]).sum(0, dtype=wide).to(dtype)
            want = want[start : start + sizes[rank.rank]]
            got = communicator.reduce_scatterv(every[rank.rank], dim=0, sizes=sizes)
            same(got, want, f"summed {dtype}, sizes {sizes}")
            if hasattr(communicator, "reduce_scatterv_into_output"):
                output = torch.empty_like(want)
                communicator.reduce_scatterv_into_output(every[rank.rank], output, 0, sizes)
                same(output, want, f"summed into output {dtype}, sizes {sizes}")
    columns = torch.arange(6.0 * rank.dp_size).view(3, -1)
    got = communicator.reduce_scatterv(columns)
    same(got, columns[:, 2 * rank.rank : 2 * rank.rank + 2] * rank.dp_size, "along dim -1")
    _refused_scatters(rank, None)


def cpu_dispatch_and_combine(rank: Rank) -> None:
    """vLLM's own dispatch and combine over ``CpuCommunicator``: what serving does."""
    from vllm.distributed import get_ep_group

    rank.use_cpu_communicators()
    for tokens in ([1, 36, 0, 5][: rank.dp_size], [4] * rank.dp_size):
        with step(rank, tokens) as now:
            group, mine = get_ep_group(), now.mine
            rows, weights, ids = group.dispatch(mine.rows, mine.weights, mine.ids)
            same(rows, now.all.rows, "rows")
            same(weights, now.all.weights, "top-k weights")
            same(ids, now.all.ids, "top-k ids")
            same(group.dispatch_router_logits(mine.rows, mine.logits)[1], now.all.logits, "logits")
            combined = group.combine(now.all.logits * (rank.rank + 1))
            want = mine.logits * sum(range(1, rank.dp_size + 1))
            if combined.shape != (tokens[rank.rank], EXPERTS):
                raise AssertionError(f"combined rows have the shape {tuple(combined.shape)}")
            torch.testing.assert_close(combined, want, rtol=1e-6, atol=0)
