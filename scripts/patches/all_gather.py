# SPDX-License-Identifier: Apache-2.0
"""Patches for the uneven collectives."""

from __future__ import annotations

from scripts.patches.build import PLUGIN, Change, Tree
from scripts.patches.edit import Source
from scripts.patches.tests_from import regression_test
from vllm_moe_dp_fix.registry import CUDA_COMMUNICATOR

FIX = "moe_dp_all_gather"
RECORD = f"vllm_moe_dp_fix.fixes.{FIX}"
FOLDER = "vllm/distributed/device_communicators"
CUDA, CPU = f"{FOLDER}/cuda_communicator.py", f"{FOLDER}/cpu_communicator.py"
CHECKS = "vllm.distributed.device_communicators.v_collective_checks"
GLOO = "vllm.distributed.device_communicators.gloo_v_collectives"


def _all_gatherv(tree: Tree) -> None:
    tree.vendor(CHECKS, PLUGIN / "collectives" / "checks.py", {})

    def edit(source: Source) -> None:
        source.insert(
            "CudaCommunicator.all_gatherv", 1, "input_ = fit_for_nccl(self, input_, sizes)"
        )
        source.add_import(CHECKS, "fit_for_nccl")

    tree.edit(CUDA, edit)
    tree.add(
        "tests/distributed/test_all_gatherv_checks.py",
        regression_test(
            "What all_gatherv refuses before it opens an NCCL group.",
            (RECORD, "_probe_f2a"),
            CUDA_COMMUNICATOR,
            "unequal_sizes_are_checked",
            "\n\ndef test_equal_sizes_are_checked() -> None:\n"
            '    assert _probe_cuda(cuda_communicator, "all_gatherv", 1, [3, 3]) is None\n',
        ),
    )


def _reduce_scatterv(tree: Tree) -> None:
    def edit(source: Source) -> None:
        names = "check_scatter, fit_for_nccl, scattered_rows"
        if source.has("CudaCommunicator._reduce_scatterv"):
            names = f"check_output, {names}"
            source.insert(
                "CudaCommunicator._reduce_scatterv",
                0,
                """
                rows = scattered_rows(input_, dim)
                check_scatter(self, input_, rows, sizes)
                if output is not None:
                    check_output(self, output, input_, rows, sizes)
                """,
            )
        else:
            source.insert(
                "CudaCommunicator.reduce_scatterv",
                0,
                "check_scatter(self, input_, scattered_rows(input_, dim), sizes)",
            )
        source.replace(f"from {CHECKS} import fit_for_nccl\n", "")
        source.add_import(CHECKS, names)

    tree.edit(CUDA, edit)
    tree.add(
        "tests/distributed/test_reduce_scatterv_checks.py",
        regression_test(
            "What reduce_scatterv refuses before it starts.",
            (RECORD, "_probe_f2c"),
            CUDA_COMMUNICATOR,
            "sizes_are_checked",
        ),
    )


CPU_METHODS = """
def all_gatherv(
    self,
    input_: torch.Tensor | list[torch.Tensor],
    dim: int = 0,
    sizes: list[int] | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    return gloo_v_collectives.all_gatherv(self, input_, dim, sizes)

def reduce_scatterv(
    self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
) -> torch.Tensor:
    return gloo_v_collectives.reduce_scatterv(self, input_, dim, sizes)
"""

CPU_TEST = '''"""all_gatherv and reduce_scatterv of the CPU communicator, on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

SIZES = [3, 2]


def _gather(communicator: CpuCommunicator, rank: int, dtype: torch.dtype) -> None:
    rows = torch.arange(sum(SIZES) * 4).reshape(sum(SIZES), 4).to(dtype)
    mine = rows.split(SIZES)[rank]
    got, ids = communicator.all_gatherv([mine, mine[:, 0]], 0, SIZES)
    assert torch.equal(got.float(), rows.float())
    assert torch.equal(ids.float(), rows[:, 0].float())


def _scatter(communicator: CpuCommunicator, rank: int, dtype: torch.dtype) -> None:
    rows = torch.arange(sum(SIZES) * 4).reshape(sum(SIZES), 4).to(dtype)
    got = communicator.reduce_scatterv(rows * (rank + 1), 0, SIZES)
    assert torch.equal(got.float(), 3 * rows.split(SIZES)[rank].float())


def _refuse(communicator: CpuCommunicator, rank: int, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="expected"):
        communicator.all_gatherv(torch.zeros(7, 4, dtype=dtype), 0, SIZES)


CHECKS = {
    torch.float32: [_gather, _scatter, _refuse],
    torch.bfloat16: [_gather, _scatter],
    torch.float8_e4m3fn: [_gather],
}


def _rank(rank: int, meeting: str) -> None:
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    group = dist.group.WORLD
    communicator = CpuCommunicator(group, torch.device("cpu"), group)
    for dtype, checks in CHECKS.items():
        for check in checks:
            check(communicator, rank, dtype)
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks(tmp_path: Path) -> None:
    mp.spawn(_rank, (f"file://{tmp_path}/meeting",), 2)
'''


def _cpu(tree: Tree) -> None:
    names = {"vllm_moe_dp_fix.collectives.checks": CHECKS}
    tree.vendor(GLOO, PLUGIN / "collectives" / "gloo.py", names)

    def edit(source: Source) -> None:
        methods = [
            node.name for node in source.find("CpuCommunicator").body if hasattr(node, "name")
        ]
        source.add_after(f"CpuCommunicator.{methods[-1]}", CPU_METHODS)
        source.add_import("vllm.distributed.device_communicators", "gloo_v_collectives")

    tree.edit(CPU, edit)
    tree.add("tests/distributed/test_cpu_v_collectives.py", CPU_TEST)


CHANGES = (
    Change(
        fix=FIX,
        faults=("F2a", "F2b"),
        title="[Bugfix][Distributed] Check what all_gatherv is given before it starts",
        message="""
all_gatherv asserts row counts inside an open NCCL group, which stays open:
the next collective hangs. Where the sizes are equal nothing is checked, and
a tensor without a row a token gathers wrong rows silently; so does one that
is not contiguous.

All of that is checked first, on shapes alone, with an error that names the
tensor, the rank and what was expected.
""",
        upstream=(),
        make=_all_gatherv,
    ),
    Change(
        fix=FIX,
        faults=("F2c",),
        title="[Bugfix][Distributed] Check what reduce_scatterv is given before it starts",
        message="""
Bare assertions say neither the tensor nor the sizes that do not fit.
""",
        upstream=(),
        make=_reduce_scatterv,
    ),
    Change(
        fix=FIX,
        faults=("F2d",),
        title="[CPU][Distributed] Add all_gatherv and reduce_scatterv",
        message="""
MoE models with data parallelism need both on the CPU, where the first
request ends in NotImplementedError. They run over gloo on raw bytes, so
that they carry every dtype.
""",
        upstream=(),
        make=_cpu,
    ),
)
