# SPDX-License-Identifier: Apache-2.0
"""Uneven all-gather and reduce-scatter: checked on CUDA, brought to the CPU.

On CUDA the checks run before vLLM's own code, so that a tensor that does not fit is an error with
a name and not an open NCCL group. On CPU, where vLLM has neither collective, both run over gloo on
raw bytes, so that they carry every dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import FunctionType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from vllm_moe_dp_fix.patching import overridden
from vllm_moe_dp_fix.records import Fault, Fix, Patch, Repair
from vllm_moe_dp_fix.registry import CPU_COMMUNICATOR, CUDA_COMMUNICATOR

if TYPE_CHECKING:
    import torch

    Tensor: TypeAlias = torch.Tensor


# --- checks ---------------------------------------------------------------------------------


def check_gather(communicator: Any, tensors: Sequence[Tensor], sizes: list[int] | None) -> None:
    """Checks that each tensor has ``sizes[rank]`` rows. Reads shapes only.

    Raises:
        ValueError: Names the tensor, its shape and dtype, the rank, the rows expected and sizes.
    """
    if sizes is None:
        return
    if len(sizes) != communicator.world_size:
        _refuse("all_gatherv", communicator, f"{len(sizes)} sizes {sizes}", "one size a rank")
    rows = sizes[communicator.rank_in_group]
    for tensor in tensors:
        if tensor.ndim == 0 or tensor.size(0) != rows:
            index = next(i for i, candidate in enumerate(tensors) if candidate is tensor)
            _refuse(
                "all_gatherv",
                communicator,
                _describe(tensor, index, len(tensors)),
                f"{rows} rows (sizes {sizes}); a tensor without a row a token, such as a "
                "per-tensor scale, cannot be gathered",
            )


def check_scatter(communicator: Any, tensor: Tensor, rows: int, sizes: list[int] | None) -> None:
    """Checks that ``rows``, along the scattered dimension, can be dealt out. Reads shapes only.

    Raises:
        ValueError: Names the tensor's shape and dtype, the rank, the rows expected and sizes.
    """
    world_size = communicator.world_size
    if sizes is None:
        if rows % world_size:
            expected = f"rows that {world_size} ranks can share evenly, or sizes"
            _refuse("reduce_scatterv", communicator, _describe(tensor), expected)
    elif len(sizes) != world_size:
        _refuse("reduce_scatterv", communicator, f"{len(sizes)} sizes {sizes}", "one size a rank")
    elif rows != sum(sizes):
        expected = f"{sum(sizes)} rows, the sum of sizes {sizes}"
        _refuse("reduce_scatterv", communicator, _describe(tensor), expected)


def _describe(tensor: Tensor, index: int = 0, count: int = 1) -> str:
    return f"tensor {index} of {count} with shape {tuple(tensor.shape)} and dtype {tensor.dtype}"


def _refuse(what: str, communicator: Any, got: str, expected: str) -> NoReturn:
    raise ValueError(
        f"{what} on rank {communicator.rank_in_group} of {communicator.world_size} in group "
        f"{communicator.unique_name or 'unnamed'!r}: got {got}, expected {expected}. "
        "No collective was started."
    )


# --- CUDA -----------------------------------------------------------------------------------


def _wrap_cuda_all_gatherv(original: FunctionType, module: ModuleType) -> FunctionType:
    from vllm.distributed.device_communicators.pynccl_wrapper import ncclDataTypeEnum

    tensor_type = module.torch.Tensor
    nccl_dtypes: set[torch.dtype] = set()

    def check_nccl(self: Any, tensor: Tensor, index: int, count: int) -> None:
        """NCCL's own conditions, which vLLM finds violated only inside the group."""
        if tensor.device != self.device:
            expected = f"a tensor on {self.device}, not on {tensor.device}"
            _refuse("all_gatherv", self, _describe(tensor, index, count), expected)
        try:
            ncclDataTypeEnum.from_torch(tensor.dtype)
        except ValueError as error:
            _refuse("all_gatherv", self, _describe(tensor, index, count), str(error))
        nccl_dtypes.add(tensor.dtype)

    @functools.wraps(original)
    def all_gatherv(
        self: Any,
        input_: Tensor | list[Tensor],
        dim: int = 0,
        sizes: list[int] | None = None,
    ) -> Any:
        tensors = [input_] if isinstance(input_, tensor_type) else input_
        if dim == 0:
            check_gather(self, tensors, sizes)
            device, dense = self.device, True
            for index, tensor in enumerate(tensors):
                if tensor.dtype not in nccl_dtypes or tensor.device != device:
                    check_nccl(self, tensor, index, len(tensors))
                dense = dense and tensor.is_contiguous()
            if not dense:  # NCCL reads memory as it lies, whatever the strides
                tensors = [tensor.contiguous() for tensor in tensors]
                input_ = tensors[0] if isinstance(input_, tensor_type) else tensors
        return original(self, input_, dim, sizes)

    return all_gatherv  # type: ignore[return-value]


def _wrap_cuda_reduce_scatterv(original: FunctionType, module: ModuleType) -> FunctionType:
    if not hasattr(module.CudaCommunicator, "_reduce_scatterv"):  # to 0.31.0

        @functools.wraps(original)
        def reduce_scatterv(
            self: Any, input_: Tensor, dim: int = -1, sizes: list[int] | None = None
        ) -> Any:
            check_scatter(self, input_, _scattered_rows(input_, dim), sizes)
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
        rows = _scattered_rows(input_, dim)
        check_scatter(self, input_, rows, sizes)
        if output is not None:
            mine = rows // self.world_size if sizes is None else sizes[self.rank_in_group]
            if output.shape != (mine, *input_.shape[1:]) or output.dtype != input_.dtype:
                expected = f"shape {(mine, *input_.shape[1:])} and dtype {input_.dtype}"
                _refuse("reduce_scatterv", self, f"as output {_describe(output)}", expected)
        return original(self, input_, dim, sizes, output)

    return _reduce_scatterv  # type: ignore[return-value]


def _scattered_rows(tensor: Tensor, dim: int) -> int:
    """The rows that vLLM deals out: those of ``tensor.movedim(0, dim)``."""
    if dim < 0:
        dim += tensor.ndim
    return tensor.shape[0] if dim == 0 else tensor.movedim(0, dim).shape[0]


# --- CPU ------------------------------------------------------------------------------------


def _as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's memory; a copy of it where the tensor is not contiguous."""
    import torch

    return tensor.reshape(-1).view(torch.uint8)


def _wrap_cpu_all_gatherv(original: FunctionType, module: ModuleType) -> FunctionType:
    import torch
    import torch.distributed as dist

    # The newer name, where torch has it, does not warn.
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

    @functools.wraps(original)
    def all_gatherv(
        self: Any,
        input_: Tensor | list[Tensor],
        dim: int = 0,
        sizes: list[int] | None = None,
    ) -> Any:
        if dim != 0:
            raise NotImplementedError("only dim 0 all-gatherv is supported")
        tensors = [input_] if isinstance(input_, torch.Tensor) else input_
        check_gather(self, tensors, sizes)
        world_size = self.world_size
        rows = [[t.shape[0]] * world_size if sizes is None else sizes for t in tensors]
        row_bytes = [t.element_size() * t.shape[1:].numel() for t in tensors]
        outputs = [t.new_empty((sum(r), *t.shape[1:])) for t, r in zip(tensors, rows, strict=True)]
        result = outputs[0] if isinstance(input_, torch.Tensor) else outputs

        # One gather for all tensors: each rank's, one behind the other, padded to the largest rank.
        width = max(
            sum(r[rank] * size for r, size in zip(rows, row_bytes, strict=True))
            for rank in range(world_size)
        )
        if width == 0:
            return result
        sent = torch.empty(width, dtype=torch.uint8)
        offset = 0
        for tensor in tensors:
            end = offset + tensor.numel() * tensor.element_size()
            sent[offset:end] = _as_bytes(tensor)
            offset = end
        received = torch.empty(world_size * width, dtype=torch.uint8)
        all_gather(received, sent, group=self.device_group)

        starts = [0] * len(tensors)
        for rank, buffer in enumerate(received.view(world_size, width).unbind(0)):
            offset = 0
            for i, output in enumerate(outputs):
                length = rows[i][rank] * row_bytes[i]
                _as_bytes(output)[starts[i] : starts[i] + length] = buffer[offset : offset + length]
                starts[i] += length
                offset += length
        return result

    return all_gatherv  # type: ignore[return-value]


def _wrap_cpu_reduce_scatterv(original: FunctionType, module: ModuleType) -> FunctionType:
    import torch
    import torch.distributed as dist

    @functools.wraps(original)
    def reduce_scatterv(
        self: Any, input_: Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> Any:
        parts = input_.movedim(dim, 0).contiguous()
        check_scatter(self, input_, parts.shape[0], sizes)
        world_size = self.world_size
        if sizes is None:
            sizes = [parts.shape[0] // world_size] * world_size
        mine = sizes[self.rank_in_group]
        row_bytes = parts.element_size() * parts.shape[1:].numel()

        # Every rank gets all ranks' summands of its rows and adds them in the order of the ranks,
        # rounding once.
        received = parts.new_empty((world_size, mine, *parts.shape[1:]))
        dist.all_to_all_single(
            _as_bytes(received),
            _as_bytes(parts),
            [mine * row_bytes] * world_size,
            [size * row_bytes for size in sizes],
            group=self.device_group,
        )
        narrow_float = parts.is_floating_point() and parts.element_size() < 4
        accumulator = torch.float32 if narrow_float else parts.dtype
        output = received.to(accumulator).sum(0, dtype=accumulator).to(parts.dtype)
        return output.movedim(0, dim).contiguous()

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
