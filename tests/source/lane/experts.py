# SPDX-License-Identifier: Apache-2.0
"""Real MXFP4 expert layers of any vLLM release: made, loaded, and read again.

Set by hand are the back end (there is none for this machine) and, where a group is given, its
sizes; the layer, its method, parameters, loaders and expert map are vLLM's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from mxfp4_oracle import BLOCK, Checkpoint, Layout, Matrix, Tensor

METHODS = "vllm.model_executor.layers.quantization.mxfp4"
GPT_OSS = "vllm.model_executor.models.gpt_oss"


@dataclasses.dataclass(frozen=True)
class Group:
    """Where a rank stands: expert tensor parallelism, or expert parallelism."""

    tp_size: int = 1
    tp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0


def build(
    intermediate: int,
    group: Group | None = Group(),
    hidden: int = 64,
    experts: int = 8,
    backend: str = "MARLIN",
    activation: str = "silu",
    has_bias: bool = False,
    redundant: int = 0,
    quant_config: Any = None,
    **options: Any,
) -> Any:
    """The layer that holds the expert parameters of one rank; without a group, of this process."""
    methods = importlib.import_module(METHODS)
    layers = importlib.import_module("vllm.model_executor.layers.fused_moe.layer")
    factory = getattr(layers, "FusedMoEFactory", None) or layers.FusedMoE
    _built.append(None)
    with _group(group, redundant > 0), selected(backend):
        made = factory(
            num_experts=experts,
            top_k=2,
            hidden_size=hidden,
            intermediate_size=intermediate,
            params_dtype=torch.bfloat16,
            quant_config=quant_config or methods.Mxfp4Config(),
            prefix=f"model.layers.{len(_built)}.mlp.experts",
            activation=activation,
            has_bias=has_bias,
            enable_eplb=redundant > 0,
            num_redundant_experts=redundant,
            **options,
        )
    return getattr(made, "routed_experts", made)


_built: list[None] = []


def build_gpt_oss(intermediate: int, group: Group | None, **options: Any) -> Any:
    """As the model makes its experts."""
    methods, models = importlib.import_module(METHODS), importlib.import_module(GPT_OSS)
    config = getattr(methods, "GptOssMxfp4Config", methods.Mxfp4Config)  # from 0.20.0
    if hasattr(models, "GptOssRoutedExperts"):  # from 0.29.0
        options["routed_experts_cls"] = models.GptOssRoutedExperts
    return build(
        intermediate,
        group,
        activation="swigluoai",
        has_bias=True,
        quant_config=config(),
        **options,
    )


@contextlib.contextmanager
def selected(backend: str) -> Iterator[None]:
    """Back-end selection answers ``backend``, and no kernel."""
    methods = importlib.import_module(METHODS)
    modules = [methods]
    with contextlib.suppress(ImportError):  # from 0.28.0
        modules.append(importlib.import_module(f"{METHODS.rpartition('.')[0]}.online.mxfp4"))
    answer = (methods.Mxfp4MoeBackend[backend], None)
    with contextlib.ExitStack() as stack:
        for module in modules:
            for name in list(vars(module)):
                if name.startswith("select_") and "mxfp4" in name:
                    stack.enter_context(mock.patch.object(module, name, return_value=answer))
        yield


@contextlib.contextmanager
def _group(group: Group | None, enable_eplb: bool) -> Iterator[None]:
    if group is None:
        yield
        return
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

    make = FusedMoEParallelConfig.make

    def made(*args: Any, **kwargs: Any) -> Any:
        return dataclasses.replace(
            make(*args, **kwargs),
            tp_size=group.tp_size,
            tp_rank=group.tp_rank,
            ep_size=group.ep_size,
            ep_rank=group.ep_rank,
            use_ep=group.ep_size > 1,
            enable_eplb=enable_eplb,
        )

    with mock.patch.object(FusedMoEParallelConfig, "make", made):
        yield


def load(layer: Any, tensors: Iterable[Tensor]) -> list[bool]:
    """As models do; says for each tensor whether some of it belongs on this rank."""
    found = []
    for param, data, shard_id, expert_id in tensors:
        parameter = layer._parameters[param]
        success = parameter.weight_loader(
            parameter,
            data,
            f"{layer.layer_name}.{param}",
            shard_id=shard_id,
            expert_id=expert_id,
            return_success=True,
        )
        found.append(success)
    return found


def load_gpt_oss(layer: Any, checkpoint: Checkpoint, layout: Layout, group: Group | None) -> None:
    """Through the loader of the model; without a group, with the sizes of this process."""
    models = importlib.import_module(GPT_OSS)
    model = object.__new__(models.GptOssModel)
    torch.nn.Module.__init__(model)
    path = ["layers", "0", "mlp", "experts"]
    if hasattr(models, "GptOssRoutedExperts") or type(layer).__name__ == "RoutedExperts":
        path.append("routed_experts")
    module = model
    for name in path[:-1]:
        child = torch.nn.Module()
        module.add_module(name, child)
        module = child
    module.add_module(path[-1], layer)
    ep_size, ep_rank = (group.ep_size, group.ep_rank) if group else (1, 0)
    model.config = SimpleNamespace(
        num_local_experts=checkpoint.experts, intermediate_size=checkpoint.intermediate
    )
    model.parallel_config = SimpleNamespace(enable_expert_parallel=ep_size > 1)
    here = checkpoint.experts // ep_size
    weights = [
        (
            ".".join([*path[:4], *([] if t.expert_id is None else [str(t.expert_id)]), t.param]),
            t.data,
        )
        for t in checkpoint.tensors(layout)
    ]
    arguments = {
        "ep_rank_end": (ep_rank + 1) * here,
        "ep_rank_start": ep_rank * here,
        "weights": iter(weights),
        "stacked_params_mapping": [],
    }
    if "head_start" in inspect.signature(models.GptOssModel._load_weights_mxfp4).parameters:
        arguments |= {"heads_per_rank": 0, "head_start": 0}  # to 0.28.0
    with _groups(models, group) if group else contextlib.nullcontext():
        model._load_weights_mxfp4(**arguments)


@contextlib.contextmanager
def _groups(models: Any, group: Group) -> Iterator[None]:
    """To the model, expert tensor parallelism comes from data parallelism."""
    alone = SimpleNamespace(world_size=1, rank_in_group=0)
    data = SimpleNamespace(world_size=group.tp_size, rank_in_group=group.tp_rank)
    with mock.patch.multiple(
        models,
        get_tensor_model_parallel_world_size=lambda: 1,
        get_dp_group=lambda: data,
        get_pcp_group=lambda: alone,
    ):
        yield


def held(layer: Any, hidden: int, is_whole: bool = False) -> Checkpoint:
    """What the parameters of a rank hold, as a checkpoint of its own.

    It is as wide as the layer's configuration says without padding, and what is beyond must be
    zero; ``is_whole``: as wide as with padding.
    """
    config = layer.moe_config
    padded = layer.w13_weight.shape[1] // 2
    if config.intermediate_size_per_partition != padded:
        raise AssertionError(f"{config.intermediate_size_per_partition} columns, not {padded}")
    width = padded if is_whole else config.intermediate_size_per_partition_unpadded
    found: dict[str, list[torch.Tensor]] = {"gate": [], "up": [], "down": []}
    for kind, per_element in (("weight", 2), ("weight_scale", BLOCK), ("bias", 0)):
        if f"w2_{kind}" not in layer._parameters:
            continue
        w13, w2 = (layer._parameters[f"{name}_{kind}"].data.clone() for name in ("w13", "w2"))
        is_interleaved = config.activation.value == "swigluoai"
        halves = (w13[:, ::2], w13[:, 1::2]) if is_interleaved else w13.split(padded, dim=1)
        pieces = [_piece(half, width, hidden, per_element) for half in halves]
        pieces.append(_piece(w2, hidden, width, per_element))
        for part, piece in zip(found.values(), pieces, strict=True):
            part.append(piece.clone())
            piece.zero_()
        if kind == "weight" and (w13.any() or w2.any()):
            raise AssertionError(f"more than the {width} rows and columns of the rank are set")
    return Checkpoint(*(Matrix(*part) for part in found.values()))


def _piece(data: torch.Tensor, rows: int, columns: int, per_element: int) -> torch.Tensor:
    piece = data[:, :rows]
    return piece[..., : -(-columns // per_element)] if per_element else piece
