#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the dispatch of per-tensor FP8 activations on two CUDA GPUs.

Both strategies beside the lower bound, which is the gather of what must travel and nothing else:
FP8 rows and the routing; and what the strategies are made of. Where the ranks have unequal numbers
of rows, also three ways to gather them. Times are microseconds of the slower rank, medians over
rounds in which all take turns.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.gpu import machine
from scripts.gpu.ranks import capture, spawn, step
from vllm_moe_dp_fix import settings
from vllm_moe_dp_fix.fp8 import shared_scale

HIDDEN = (2048, 2816, 4096, 7168)
TOKENS = (1, 16, 64, 256, 1024, 4096, 8192, 16384)
TOP_K = 8
ROUNDS = 7
ELEMENTS_A_ROUND = 2**27  # decides how often a round repeats a call, between the limits below
LEAST_CALLS, MOST_CALLS = 4, 40
AFTER, SHARED, BOUND = "quantize after gather", "shared scale", "lower bound"
PARTS = ("find maxima", "all-reduce", "quantize", "vLLM's quantizer")  # of all rows, the last
GATHERS = ("broadcasts", "padded", "sends")
SETTINGS = {AFTER: "quantize_after_gather", SHARED: "shared_scale"}


class Case(NamedTuple):
    hidden: int
    tokens: tuple[int, ...]
    how: str

    @property
    def name(self) -> str:
        return f"hidden {self.hidden}, {self.tokens[0]} + {self.tokens[1]} tokens, {self.how}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--hidden", type=int, nargs="+", default=HIDDEN)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="of rank 0")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--plot", type=Path, help="draw them into this file (needs matplotlib)")
    parser.add_argument("--read", type=Path, help="show the results in this file, measure nothing")
    arguments = parser.parse_args()
    if arguments.read:
        report = json.loads(arguments.read.read_text())
    else:
        report = {**machine.describe(), "cases": _measure(arguments.hidden, arguments.tokens)}
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    show(report)
    if arguments.plot:
        plot(report, arguments.plot)
    return 0


# --- measuring ------------------------------------------------------------------------------


def _measure(hidden: Sequence[int], tokens: Sequence[int]) -> list[dict[str, Any]]:
    """A dictionary a case, with the times of the slower rank."""
    cases = [
        Case(width, pair, how)
        for how in ("graph", "eager")
        for width in hidden
        for count in tokens
        for pair in dict.fromkeys([(count, count), (count, max(1, count // 2))])
        if how == "graph" or pair[0] == pair[1]
    ]
    ranks = spawn(_measure_rank, cases)
    return [
        {
            **case._asdict(),
            "us": {
                name: statistics.median(map(max, zip(*(rank[name] for rank in found), strict=True)))
                for name in found[0]
            },
        }
        for case, found in zip(cases, zip(*ranks, strict=True), strict=True)
    ]


def _measure_rank(rank: int, config: Any, cases: Sequence[Case]) -> list[dict[str, list[float]]]:
    """A rank's times, a list over rounds for each contender."""
    import torch

    found = []
    prepares = _prepares()
    for case in cases:
        if rank == 0:
            print(case.name, file=sys.stderr, flush=True)
        torch.manual_seed(rank)
        rows = torch.randn(case.tokens[rank], case.hidden, device="cuda").bfloat16()
        if rank == 0:
            rows[:, 7] *= 40.0
        with step(config, case.tokens, rank):
            contenders = _contenders(case, rank, rows, prepares)
            found.append(_times(contenders, case))
        torch.cuda.empty_cache()
    return found


def _prepares() -> dict[str, Callable[..., Any]]:
    """``prepare()`` with each strategy, beside each other in one process."""
    from vllm.model_executor.layers.fused_moe.prepare_finalize import naive_dp_ep

    from vllm_moe_dp_fix.fixes import moe_dp_dispatch

    kind = naive_dp_ep.MoEPrepareAndFinalizeNaiveDPEPModular
    original = inspect.unwrap(kind.prepare)
    found: dict[str, Callable[..., Any]] = {}
    for name, value in SETTINGS.items():
        with mock.patch.dict(os.environ, {settings.FP8_DISPATCH: value}):
            prepare = moe_dp_dispatch._wrap_modular(original, naive_dp_ep)
        found[name] = partial(prepare, kind(False))
    return found


def _contenders(
    case: Case, rank: int, rows: Any, prepares: dict[str, Callable[..., Any]]
) -> dict[str, Callable[[], Any]]:
    """What is measured; they have been compared with each other."""
    import torch
    from torch.distributed import ReduceOp
    from vllm import _custom_ops
    from vllm.distributed import get_dp_group
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    weights = torch.rand(len(rows), TOP_K, device="cuda")
    ids = torch.randint(128, (len(rows), TOP_K), dtype=torch.int32, device="cuda")
    config = FusedMoEQuantConfig.make(quant_dtype=torch.float8_e4m3fn)
    found: dict[str, Callable[[], Any]] = {
        name: partial(prepare, rows, weights, ids, 128, None, False, config)
        for name, prepare in prepares.items()
    }
    after, shared = found[AFTER](), found[SHARED]()
    assert torch.equal(after[1], shared[1]), f"{case}: the scales differ"
    assert torch.equal(after[0].view(torch.uint8), shared[0].view(torch.uint8)), f"{case}: rows"

    group = get_dp_group()
    packed = torch.empty_like(rows, dtype=torch.float8_e4m3fn)
    sizes = list(case.tokens)
    found[BOUND] = partial(group.all_gatherv, [packed, weights, ids], 0, sizes)
    comm = group.device_communicator.pynccl_comm
    maxima = shared_scale.local_maxima(rows)
    every = rows.new_ones(sum(sizes), case.hidden)
    parts = (
        partial(shared_scale.local_maxima, rows),
        partial(comm.all_reduce, maxima, op=ReduceOp.MAX),
        partial(shared_scale.quantize, rows, maxima),
        partial(_custom_ops.scaled_fp8_quant, every),
    )
    found |= zip(PARTS, parts, strict=True)
    if len(set(sizes)) > 1:
        ways = (_broadcasts, _padded, _sends)
        want = None
        for name, gather in zip(GATHERS, ways, strict=True):
            found[name] = partial(gather, comm, rank, rows, sizes)
            gathered = found[name]()
            want = gathered if want is None else want
            assert torch.equal(gathered, want), f"{case}: {name} gathers other rows"
    return found


def _broadcasts(comm: Any, rank: int, rows: Any, sizes: list[int]) -> Any:
    """vLLM's way: a broadcast from each rank."""
    gathered = rows.new_empty(sum(sizes), rows.shape[1])
    comm.all_gatherv(gathered, rows, sizes)
    return gathered


def _padded(comm: Any, rank: int, rows: Any, sizes: list[int]) -> Any:
    """All ranks send as many rows as the largest; the padding is cut out."""
    import torch

    largest = max(sizes)
    padded = rows.new_empty(largest, rows.shape[1])
    padded[: len(rows)].copy_(rows)
    gathered = rows.new_empty(len(sizes), largest, rows.shape[1])
    comm.all_gather(gathered, padded)
    return torch.cat([part[:size] for part, size in zip(gathered, sizes, strict=True)])


def _sends(comm: Any, rank: int, rows: Any, sizes: list[int]) -> Any:
    """Each rank sends its rows to every other."""
    gathered = rows.new_empty(sum(sizes), rows.shape[1])
    parts = gathered.split(sizes)
    comm.group_start()
    for peer in range(len(sizes)):
        if peer != rank:
            comm.send(rows, peer)
            comm.recv(parts[peer], peer)
    comm.group_end()
    parts[rank].copy_(rows)
    return gathered


def _times(contenders: dict[str, Callable[[], Any]], case: Case) -> dict[str, list[float]]:
    import torch
    import torch.distributed as dist
    from vllm.distributed import get_dp_group

    calls = ELEMENTS_A_ROUND // (sum(case.tokens) * case.hidden)
    calls = min(max(calls, LEAST_CALLS), MOST_CALLS)

    def repeat(function: Callable[[], Any]) -> None:
        for _ in range(calls):
            function()

    if case.how == "graph":
        graphs = {name: capture(partial(repeat, f))[0] for name, f in contenders.items()}
        runs = {name: graph.replay for name, graph in graphs.items()}
    else:
        runs = {name: partial(repeat, function) for name, function in contenders.items()}
    found: dict[str, list[float]] = {name: [] for name in runs}
    group = get_dp_group()
    meeting = torch.zeros(1, device="cuda")
    for round_ in range(ROUNDS + 1):
        for name, run in runs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            dist.barrier(group.cpu_group)
            # The GPUs meet, too: none of them waits for the other in what is measured.
            group.device_communicator.pynccl_comm.all_reduce(meeting)
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            if round_ > 0:
                found[name].append(begin.elapsed_time(end) * 1000 / calls)
    return found


# --- results --------------------------------------------------------------------------------


def show(report: dict[str, Any]) -> None:
    """The strategies, what they are made of, and the gathers of unequal numbers of rows."""
    print(machine.words(report))
    for names in ((AFTER, SHARED, BOUND), PARTS, GATHERS):
        ratios = {f"/ {other}": (SHARED, other) for other in (AFTER, BOUND) if SHARED in names}
        heads = [*names, *ratios, *(["auto takes"] if ratios else [])]
        print(f"\n| hidden | tokens | | {' | '.join(heads)} |")
        print("|---" * (3 + len(heads)) + "|")
        for case in report["cases"]:
            times = case["us"]
            if names[0] in times:
                tokens = " + ".join(f"{count:,}" for count in case["tokens"])
                cells = [str(case["hidden"]), tokens, case["how"]]
                cells += [f"{times[name]:.1f}" for name in names]
                cells += [f"{times[one] / times[other]:.2f}" for one, other in ratios.values()]
                cells += [_choice(case)] if ratios else []
                print(f"| {' | '.join(cells)} |")


def _choice(case: dict[str, Any]) -> str:
    return SHARED if shared_scale.pays(sum(case["tokens"]), case["hidden"]) else AFTER


def plot(report: dict[str, Any], path: Path) -> None:
    """Equal numbers of rows, in CUDA graphs: times above, and below them as ratios."""
    from matplotlib import pyplot

    widths = sorted({case["hidden"] for case in report["cases"]})
    figure, axes = pyplot.subplots(
        2, len(widths), figsize=(3.6 * len(widths), 6), sharex=True, sharey="row", squeeze=False
    )
    for column, width in enumerate(widths):
        cases = [
            case
            for case in report["cases"]
            if case["hidden"] == width
            and case["how"] == "graph"
            and case["tokens"][0] == case["tokens"][1]
        ]
        tokens = [case["tokens"][0] for case in cases]
        times = {name: [c["us"][name] for c in cases] for name in (AFTER, SHARED, BOUND)}
        above, below = axes[:, column]
        for name, style in ((AFTER, "o-"), (SHARED, "s-"), (BOUND, ":")):
            above.plot(tokens, times[name], style, label=name, markersize=4)
        for other, style in ((AFTER, "o-"), (BOUND, ":")):
            ratios = [a / b for a, b in zip(times[SHARED], times[other], strict=True)]
            below.plot(tokens, ratios, style, label=f"{SHARED} / {other}", markersize=4)
        below.axhline(1.0, color="grey", linewidth=0.8)
        for axis in (above, below):  # of two ranks
            axis.axvline(shared_scale.PAYS_FROM / (2 * width), color="grey", linestyle="--")
        above.set_title(f"hidden {width}")
        above.set_yscale("log")
        below.set_xscale("log")
        below.set_xticks(tokens, [f"{count:,}" for count in tokens], rotation=60)
        below.minorticks_off()
        below.set_xlabel("tokens a rank")
    axes[0, 0].set_ylabel("µs")
    axes[1, 0].set_ylabel("ratio")
    for row in axes:
        row[0].legend(fontsize=8)
    figure.suptitle(f"FP8 dispatch, {machine.words(report)}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
