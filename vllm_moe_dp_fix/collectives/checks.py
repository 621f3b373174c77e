# SPDX-License-Identifier: Apache-2.0
"""What all_gatherv and reduce_scatterv must be given, told before a collective starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

if TYPE_CHECKING:
    import torch

    Tensor: TypeAlias = torch.Tensor

_nccl_dtypes: set[torch.dtype] = set()  # that NCCL is known to have


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


def check_output(
    communicator: Any, output: Tensor, tensor: Tensor, rows: int, sizes: list[int] | None
) -> None:
    """Checks that ``output`` can take this rank's share of ``rows``. Reads shapes only.

    Raises:
        ValueError: Names the output's shape and dtype, the rank, and what was expected.
    """
    world_size = communicator.world_size
    mine = rows // world_size if sizes is None else sizes[communicator.rank_in_group]
    if output.shape != (mine, *tensor.shape[1:]) or output.dtype != tensor.dtype:
        expected = f"shape {(mine, *tensor.shape[1:])} and dtype {tensor.dtype}"
        _refuse("reduce_scatterv", communicator, f"as output {_describe(output)}", expected)


def fit_for_nccl(
    communicator: Any, input_: Tensor | list[Tensor], sizes: list[int] | None
) -> Tensor | list[Tensor]:
    """What to gather: the same tensors, made contiguous where they are not.

    Raises:
        ValueError: As ``check_gather``, or for NCCL's own conditions, which vLLM finds violated
            only inside the group.
    """
    tensors = input_ if isinstance(input_, (list, tuple)) else [input_]
    check_gather(communicator, tensors, sizes)
    device, is_dense = communicator.device, True
    for index, tensor in enumerate(tensors):
        if tensor.dtype not in _nccl_dtypes or tensor.device != device:
            _check_nccl(communicator, tensor, index, len(tensors))
        is_dense = is_dense and tensor.is_contiguous()
    if is_dense:
        return input_
    # NCCL reads memory as it lies, whatever the strides.
    dense = [tensor.contiguous() for tensor in tensors]
    return dense if tensors is input_ else dense[0]


def _check_nccl(communicator: Any, tensor: Tensor, index: int, count: int) -> None:
    from vllm.distributed.device_communicators.pynccl_wrapper import ncclDataTypeEnum

    if tensor.device != communicator.device:
        expected = f"a tensor on {communicator.device}, not on {tensor.device}"
        _refuse("all_gatherv", communicator, _describe(tensor, index, count), expected)
    try:
        ncclDataTypeEnum.from_torch(tensor.dtype)
    except ValueError as error:
        _refuse("all_gatherv", communicator, _describe(tensor, index, count), str(error))
    _nccl_dtypes.add(tensor.dtype)


def _describe(tensor: Tensor, index: int = 0, count: int = 1) -> str:
    return f"tensor {index} of {count} with shape {tuple(tensor.shape)} and dtype {tensor.dtype}"


def _refuse(what: str, communicator: Any, got: str, expected: str) -> NoReturn:
    raise ValueError(
        f"{what} on rank {communicator.rank_in_group} of {communicator.world_size} in group "
        f"{communicator.unique_name or 'unnamed'!r}: got {got}, expected {expected}. "
        "No collective was started."
    )


def scattered_rows(tensor: Tensor, dim: int) -> int:
    """The rows that vLLM deals out: those of ``tensor.movedim(0, dim)``."""
    if dim < 0:
        dim += tensor.ndim
    return tensor.shape[0] if dim == 0 else tensor.movedim(0, dim).shape[0]
