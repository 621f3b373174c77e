# SPDX-License-Identifier: Apache-2.0
"""Quantized activations through the data-parallel MoE dispatch.

``prepare()`` quantizes a rank's rows and gathers rows and scales over the ranks. That is right for
scales that have a row a token, and wrong for a single scale: every rank's rows would need the
scale of all rows. ``defer_input_quant=True`` makes ``prepare()`` gather what it is given and leave
scales alone, so the replacements quantize around it: before the gather where the scale is already
common to all ranks, else after it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm_moe_dp_fix import settings
from vllm_moe_dp_fix.patching import overridden
from vllm_moe_dp_fix.records import Fault, Fix, Patch, Repair
from vllm_moe_dp_fix.registry import NAIVE_DP_EP
from vllm_moe_dp_fix.replicas.patches import REPAIR as REPLICAS

if TYPE_CHECKING:
    import torch

    Tensor: TypeAlias = torch.Tensor
    Gather: TypeAlias = Callable[[Tensor], tuple[Any, ...]]

_MODULAR = "MoEPrepareAndFinalizeNaiveDPEPModular"
_MONOLITHIC = "MoEPrepareAndFinalizeNaiveDPEPMonolithic"


def has_one_scale(quant_config: Any) -> bool:
    """Whether this scheme has one activation scale for all rows, and so cannot be gathered."""
    if quant_config.per_act_token_quant or quant_config.block_shape is not None:
        return False
    if quant_config.use_nvfp4_w4a4:
        return False
    scale = quant_config.a1_scale
    return quant_config.use_fp8_w8a8 if scale is None else scale.numel() == 1


def _wrap_modular(original: FunctionType, module: ModuleType) -> FunctionType:
    dispatch = _one_scale_dispatch(module)

    @functools.wraps(original)
    def prepare(
        self: Any,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> Any:
        def gather(rows: Tensor, defer: bool = True) -> Any:
            return original(
                self,
                rows,
                topk_weights,
                topk_ids,
                num_experts,
                expert_map,
                apply_router_weight_on_input,
                quant_config,
                defer,
            )

        if defer_input_quant or not has_one_scale(quant_config):
            return gather(a1, defer_input_quant)
        if apply_router_weight_on_input and topk_ids.size(1) == 1:
            # Weighting comes before quantizing; original() would do it after.
            a1 = a1 * topk_weights.to(a1.dtype)
            apply_router_weight_on_input = False
        return dispatch(gather, a1, quant_config, self.is_sequence_parallel)

    return prepare  # type: ignore[return-value]


def _wrap_monolithic(original: FunctionType, module: ModuleType) -> FunctionType:
    dispatch = _one_scale_dispatch(module)

    @functools.wraps(original)
    def prepare(
        self: Any,
        a1: Tensor,
        router_logits: Tensor,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> Any:
        if defer_input_quant or not has_one_scale(quant_config):
            return original(self, a1, router_logits, quant_config, defer_input_quant)

        def gather(rows: Tensor) -> Any:
            return original(self, rows, router_logits, quant_config, True)

        return dispatch(gather, a1, quant_config, self.is_sequence_parallel)

    return prepare  # type: ignore[return-value]


def _one_scale_dispatch(
    module: ModuleType,
) -> Callable[[Gather, Tensor, Any, bool], tuple[Any, ...]]:
    """Makes the dispatch of a scheme with one scale, with the strategy that is set."""
    import torch
    from vllm.forward_context import get_forward_context

    from vllm_moe_dp_fix.fp8 import shared_scale

    strategy = settings.fp8_dispatch()

    def shares_scale(rows: Tensor, config: Any) -> bool:
        """The same on all ranks: each knows the numbers of rows of all."""
        if strategy != "auto":
            return strategy == "shared_scale"
        if not shared_scale.has_kernel(rows, config.quant_dtype):
            return False
        sizes = getattr(get_forward_context().dp_metadata, "local_sizes", None) or ()
        return shared_scale.pays(sum(sizes), rows.shape[1])

    def quantize(rows: Tensor, scale: Tensor | None, config: Any) -> tuple[Tensor, Tensor | None]:
        if rows.shape[0] == 0 and scale is not None and config.use_fp8_w8a8:
            return rows.to(config.quant_dtype), scale  # CUDA cannot launch a kernel on no rows
        return module.moe_kernel_quantize_input(
            rows, scale, config.quant_dtype, config.per_act_token_quant, config.block_shape
        )

    def quantize_alike(rows: Tensor, config: Any, group: Any) -> tuple[Tensor, Tensor | None]:
        """With the scale of the concatenation, told from the largest values of each rank."""
        if shared_scale.has_kernel(rows, config.quant_dtype):
            maxima = _all_reduce_max(shared_scale.local_maxima(rows), group)
            return shared_scale.quantize(rows, maxima)
        if rows.shape[0] > 0:
            scale = quantize(rows, None, config)[1]
        else:
            scale = rows.new_zeros(1, dtype=torch.float32)
        return quantize(rows, _all_reduce_max(scale, group), config)

    def dispatch(
        gather: Gather, a1: Tensor, config: Any, is_sequence_parallel: bool
    ) -> tuple[Any, ...]:
        if config.a1_scale is not None:
            a1, scale = quantize(a1, config.a1_scale, config)
        elif shares_scale(a1, config):
            a1, scale = quantize_alike(a1, config, _gather_group(module, is_sequence_parallel))
        else:
            rows, _, *rest = gather(a1)
            return (*quantize(rows, None, config), *rest)
        rows, _, *rest = gather(a1)
        return (rows, scale, *rest)

    return dispatch


def _gather_group(module: ModuleType, is_sequence_parallel: bool) -> Any:
    """The group that the all2all manager gathers over."""
    ep_group = module.get_ep_group()
    manager = ep_group.device_communicator.all2all_manager
    if hasattr(manager, "_get_comm_group"):  # from 0.26.0
        return manager._get_comm_group(is_sequence_parallel)
    from vllm.distributed import get_dp_group

    return ep_group if is_sequence_parallel else get_dp_group()


def _all_reduce_max(tensor: Tensor, group: Any) -> Tensor:
    """Maximum over the group, on the stream that the gather uses."""
    import torch.distributed as dist

    pynccl = getattr(group.device_communicator, "pynccl_comm", None)
    if pynccl is not None and not pynccl.disabled:
        return pynccl.all_reduce(tensor, op=dist.ReduceOp.MAX)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group.device_group)
    return tensor


def _wrap_unwrap_scale(original: FunctionType, module: ModuleType) -> FunctionType:
    import torch
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import swizzle_mxfp8_scale

    @functools.wraps(original)
    def _unwrap_scale_and_prepare_for_moe(scales: list[Tensor] | None, quant_config: Any) -> Tensor:
        scale: Tensor = original(scales, quant_config)
        if quant_config.quant_dtype != "mxfp8" or not _wants_swizzled_scale(quant_config):
            return scale
        if scale.is_cuda and torch.version.hip is None:  # FlashInfer's kernel, as for NVFP4
            return module.nvfp4_block_scale_interleave(scale)
        rows, blocks = scale.shape
        return swizzle_mxfp8_scale(scale, rows, blocks * 32)

    return _unwrap_scale_and_prepare_for_moe  # type: ignore[return-value]


def _wants_swizzled_scale(quant_config: Any) -> bool:
    if hasattr(quant_config, "is_scale_swizzled"):  # from 0.21.0
        return bool(quant_config.is_scale_swizzled)
    # To 0.20.2 the flag speaks of NVFP4. The one back end that takes MXFP8 scales row-major there
    # is TRTLLM, which quantizes by itself to 0.20.0 and asks for an alignment of 256 after.
    return bool(quant_config.is_nvfp4_scale_swizzled) and not getattr(
        quant_config, "mx_alignment", 0
    )


# --- probes ---------------------------------------------------------------------------------


class _NotARowAToken(Exception):
    """A tensor was handed to dispatch that does not have a row a token."""


class _TwinRanks:
    """A gather group of two ranks that hold the same rows."""

    world_size = 2
    rank_in_group = 0
    disabled = False

    def __init__(self) -> None:
        self.device_communicator = self.all2all_manager = self.pynccl_comm = self

    def _get_comm_group(self, is_sequence_parallel: bool) -> _TwinRanks:
        return self

    def all_reduce(self, tensor: Tensor, op: object = None) -> Tensor:
        return tensor

    def dispatch(
        self,
        hidden_states: Tensor,
        *others: Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: list[Tensor] | None = None,
    ) -> tuple[Any, ...]:
        extras = extra_tensors or []
        for tensor in (*others, *extras):
            if tensor.shape[:1] != hidden_states.shape[:1]:
                raise _NotARowAToken(
                    f"a tensor of shape {tuple(tensor.shape)} is gathered as if it had one row for "
                    f"each of {hidden_states.shape[0]} tokens"
                )
        twice = [tensor[[0, 1, 2] * 2] for tensor in (hidden_states, *others, *extras)]
        count = 1 + len(others)
        return tuple(twice) if extra_tensors is None else (*twice[:count], twice[count:])

    dispatch_router_logits = dispatch


def _reference_fp8(
    rows: Tensor, scale: Tensor | None, quant_dtype: Any, *_: object, **__: object
) -> tuple[Tensor, Tensor]:
    """Per-tensor FP8 after vLLM's formula, on any device."""
    import torch

    limit = torch.finfo(quant_dtype).max
    if scale is None:
        scale = (rows.float().abs().max() / limit).reshape(1)
    return (rows.float() / scale).clamp(-limit, limit).to(quant_dtype), scale


def _probe_one_scale(module: ModuleType, scale: Tensor | None) -> str | None:
    """Runs both ``prepare()`` with three tokens on each of two ranks."""
    import torch
    from vllm.platforms import current_platform

    dtype = current_platform.fp8_dtype()
    config = module.FusedMoEQuantConfig.make(quant_dtype=dtype, a1_scale=scale)
    tokens = torch.tensor([[0.5, -3.0], [1.5, 2.0], [0.25, 7.0]], dtype=torch.bfloat16)
    weights, ids = torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int32)
    want_rows, want_scale = _reference_fp8(tokens.repeat(2, 1), scale, dtype)
    modular, monolithic = getattr(module, _MODULAR)(), getattr(module, _MONOLITHIC)()
    with overridden(module, get_ep_group=_TwinRanks, moe_kernel_quantize_input=_reference_fp8):
        try:
            results = {
                _MODULAR: modular.prepare(tokens, weights, ids, 1, None, False, config),
                _MONOLITHIC: monolithic.prepare(tokens, weights, config),
            }
        except _NotARowAToken as error:
            return str(error)
    for name, (rows, got, *_) in results.items():
        if got is None:
            return f"{name}.prepare() drops the activation scale"
        if got.numel() != 1 or not torch.equal(got.reshape(1), want_scale.reshape(1)):
            return f"{name}.prepare() returns the scale {got.tolist()}, not {want_scale.tolist()}"
        if not torch.equal(rows.float(), want_rows.float()):
            return f"{name}.prepare() returns other rows than the quantized concatenation"
    return None


def _probe_f1a(module: ModuleType) -> str | None:
    import torch

    return _probe_one_scale(module, None) or _probe_one_scale(module, torch.tensor([0.125]))


def _probe_f1b(module: ModuleType) -> str | None:
    import torch

    return _probe_one_scale(module, torch.tensor(0.125))


def _probe_f1c(module: ModuleType) -> str | None:
    import torch
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import swizzle_mxfp8_scale

    config = module.FusedMoEQuantConfig.make(quant_dtype="mxfp8")
    scale = torch.arange(12, dtype=torch.uint8).reshape(3, 4)
    want = swizzle_mxfp8_scale(scale, 3, 128)
    with overridden(module, nvfp4_block_scale_interleave=lambda _: want):
        got = module._unwrap_scale_and_prepare_for_moe([scale], config)
    return None if torch.equal(got, want) else "MXFP8 scales stay row-major after dispatch"


# --- record ---------------------------------------------------------------------------------

F1A = Fault(
    id="F1a",
    summary="A single FP8 activation scale is gathered as if it were one row a token: "
    "AssertionError '1 != 36', or rank 0's scale for every rank's rows",
    upstream=(
        "https://github.com/vllm-project/vllm/issues/38999",
        "https://github.com/vllm-project/vllm/pull/54683",
    ),
    removable="when vLLM quantizes per-tensor FP8 activations after the gather",
    probe=_probe_f1a,
)
F1B = Fault(
    id="F1b",
    summary="A static (0-dim) activation scale is lost in dispatch",
    upstream=(),
    removable="with vLLM 0.22, fixed in 0.23.0",
    probe=_probe_f1b,
)
F1C = Fault(
    id="F1c",
    summary="MXFP8 activation scales keep the row-major layout after dispatch: NaN or garbage",
    upstream=(
        "https://github.com/vllm-project/vllm/issues/42118",
        "https://github.com/vllm-project/vllm/pull/49335",
        "https://github.com/vllm-project/vllm/pull/42133",
    ),
    removable="when one of the pull requests is released",
    probe=_probe_f1c,
)

FIX = Fix(
    id="moe_dp_dispatch",
    summary="Quantized activations through the MoE dispatch; sharded or replicated experts",
    repairs=(
        Repair(
            module=NAIVE_DP_EP,
            faults=(F1A, F1B),
            patches=(
                Patch((f"{_MODULAR}.prepare",), _wrap_modular),
                Patch((f"{_MONOLITHIC}.prepare",), _wrap_monolithic),
            ),
        ),
        Repair(
            module=NAIVE_DP_EP,
            faults=(F1C,),
            patches=(Patch(("_unwrap_scale_and_prepare_for_moe",), _wrap_unwrap_scale),),
        ),
        REPLICAS,
    ),
)
