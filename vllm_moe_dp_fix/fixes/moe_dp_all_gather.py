# SPDX-License-Identifier: Apache-2.0
"""Uneven all-gather and reduce-scatter: checked on CUDA, brought to the CPU.

On CUDA the checks run before vLLM's own code, so that a tensor that does not fit is an error with
a name and not an open NCCL group. On CPU vLLM has neither collective.
"""

from __future__ import annotations

import functools
from types import FunctionType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from vllm_moe_dp_fix.patching import overridden
from vllm_moe_dp_fix.records import Fault, Fix, Patch, Repair
from vllm_moe_dp_fix.registry import CPU_COMMUNICATOR, CUDA_COMMUNICATOR

if TYPE_CHECKING:
    import torch

    Tensor: TypeAlias = torch.Tensor


# --- CUDA -----------------------------------------------------------------------------------


def _wrap_cuda_all_gatherv(original: FunctionType, module: ModuleType) -> FunctionType:
    from vllm_moe_dp_fix.collectives.checks import fit_for_nccl

    @functools.wraps(original)
    def all_gatherv(
        self: Any,
        input_: Tensor | list[Tensor],
        dim: int = 0,
        sizes: list[int] | None = None,
    ) -> Any:
        if dim == 0:
            input_ = fit_for_nccl(self, input_, sizes)
        return original(self, input_, dim, sizes)

    return all_gatherv  # type: ignore[return-value]


def _wrap_cuda_reduce_scatterv(original: FunctionType, module: ModuleType) -> FunctionType:
    from vllm_moe_dp_fix.collectives.checks import check_output, check_scatter, scattered_rows

    if not hasattr(module.CudaCommunicator, "_reduce_scatterv"):  # to 0.31.0

        @functools.wraps(original)
        def reduce_scatterv(
            self: Any, input_: Tensor, dim: int = -1, sizes: list[int] | None = None
        ) -> Any:
            check_scatter(self, input_, scattered_rows(input_, dim), sizes)
            return original(self, input_, dim, sizes)

        return reduce_scatterv  # type: ignore[return-value]

    @functools.wraps(original)
    def _reduce_scatterv(
        self: Any,
        input_: Tensor,
        dim: int,
        sizes: list[int] | None,
        output: Tensor | None = None,
    ) -> Any:
        rows = scattered_rows(input_, dim)
        check_scatter(self, input_, rows, sizes)
        if output is not None:
            check_output(self, output, input_, rows, sizes)
        return original(self, input_, dim, sizes, output)

    return _reduce_scatterv  # type: ignore[return-value]


# --- CPU ------------------------------------------------------------------------------------


def _wrap_cpu_all_gatherv(original: FunctionType, module: ModuleType) -> FunctionType:
    from vllm_moe_dp_fix.collectives import gloo

    @functools.wraps(original)
    def all_gatherv(
        self: Any,
        input_: Tensor | list[Tensor],
        dim: int = 0,
        sizes: list[int] | None = None,
    ) -> Any:
        return gloo.all_gatherv(self, input_, dim, sizes)

    return all_gatherv  # type: ignore[return-value]


def _wrap_cpu_reduce_scatterv(original: FunctionType, module: ModuleType) -> FunctionType:
    from vllm_moe_dp_fix.collectives import gloo

    @functools.wraps(original)
    def reduce_scatterv(
        self: Any, input_: Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> Any:
        return gloo.reduce_scatterv(self, input_, dim, sizes)

    return reduce_scatterv  # type: ignore[return-value]


# --- probes ---------------------------------------------------------------------------------


class _CollectiveReached(Exception):
    """The tensors went on to NCCL."""


class _NoNccl:
    """Stands where NCCL would be reached, and says that it was."""

    disabled = False
    nccl_version = 0

    def __getattr__(self, name: str) -> NoReturn:
        raise _CollectiveReached(name)


def _probe_communicator(module: ModuleType) -> Any:
    """Rank 0 of 2, without groups: enough for the code before the first collective."""
    import torch

    communicator = object.__new__(module.CudaCommunicator)
    communicator.__dict__.update(
        world_size=2,
        rank_in_group=0,
        unique_name="probe",
        device=torch.device("cpu"),
        pynccl_comm=_NoNccl(),
        aiter_ar_comm=None,
        use_aiter_ag_rs=False,
    )
    return communicator


def _probe_cuda(module: ModuleType, method: str, rows: int, sizes: list[int]) -> str | None:
    """Hands a tensor of ``rows`` rows to rank 0; right is a ValueError before NCCL is reached."""
    import torch

    tensor = torch.zeros(rows, 1)
    call = getattr(_probe_communicator(module), method)
    symmetric = "should_nccl_symm_mem_ag_rs"
    names = {symmetric: lambda: False} if hasattr(module, symmetric) else {}
    with overridden(module, **names):
        try:
            call([tensor] if method == "all_gatherv" else tensor, dim=0, sizes=sizes)
        except ValueError:
            return None
        except _CollectiveReached:
            return f"{method} takes {rows} rows to NCCL where sizes are {sizes}"
        except AssertionError:
            return f"{method} fails with a bare assertion where sizes are {sizes}"
    return f"{method} takes {rows} rows where sizes are {sizes}"


def _probe_f2a(module: ModuleType) -> str | None:
    return _probe_cuda(module, "all_gatherv", 1, [3, 2])


def _probe_f2b(module: ModuleType) -> str | None:
    return _probe_cuda(module, "all_gatherv", 1, [3, 3])


def _probe_f2c(module: ModuleType) -> str | None:
    return _probe_cuda(module, "reduce_scatterv", 4, [3, 2])


def _probe_f2d(module: ModuleType) -> str | None:
    communicator = module.CpuCommunicator
    if "NaiveAll2AllManager" in communicator.__init__.__code__.co_names:
        return None  # its dispatch broadcasts and needs neither collective
    import torch

    alone = SimpleNamespace(world_size=1, rank_in_group=0, unique_name="probe", device_group=None)
    for method in ("all_gatherv", "reduce_scatterv"):
        try:
            # Without a process group: far enough to tell whether there is an implementation.
            getattr(communicator, method)(alone, torch.zeros(1, 1), 0, [2])
        except NotImplementedError:
            return f"CpuCommunicator has no {method}"
        except Exception:
            continue
    return None


# --- record ---------------------------------------------------------------------------------

F2A = Fault(
    id="F2a",
    summary="all_gatherv asserts row counts inside an open NCCL group; the next collective hangs",
    upstream=(),
    removable="when vLLM checks before group_start()",
    probe=_probe_f2a,
)
F2B = Fault(
    id="F2b",
    summary="all_gatherv checks nothing where the sizes are equal: wrong rows, silently",
    upstream=(),
    removable="when vLLM checks equal sizes too",
    probe=_probe_f2b,
)
F2C = Fault(
    id="F2c",
    summary="reduce_scatterv fails with a bare assertion",
    upstream=(),
    removable="when vLLM raises ValueError",
    probe=_probe_f2c,
)
F2D = Fault(
    id="F2d",
    summary="No all_gatherv and reduce_scatterv on CPU: NotImplementedError on the first request",
    upstream=(),
    removable="when CpuCommunicator has both",
    probe=_probe_f2d,
)

FIX = Fix(
    id="moe_dp_all_gather",
    summary="all_gatherv and reduce_scatterv on CUDA and CPU",
    repairs=(
        Repair(
            module=CUDA_COMMUNICATOR,
            faults=(F2A, F2B, F2C),
            patches=(
                Patch(("CudaCommunicator.all_gatherv",), _wrap_cuda_all_gatherv),
                Patch(
                    ("CudaCommunicator._reduce_scatterv", "CudaCommunicator.reduce_scatterv"),
                    _wrap_cuda_reduce_scatterv,
                ),
            ),
            on_cpu=False,
        ),
        Repair(
            module=CPU_COMMUNICATOR,
            faults=(F2D,),
            patches=(
                Patch(("CpuCommunicator.all_gatherv",), _wrap_cpu_all_gatherv),
                Patch(("CpuCommunicator.reduce_scatterv",), _wrap_cpu_reduce_scatterv),
            ),
            on_cpu=True,
        ),
    ),
)
