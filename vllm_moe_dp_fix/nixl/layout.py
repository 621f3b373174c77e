# SPDX-License-Identifier: Apache-2.0
"""What a transfer of an expert relies on, said in words and in a digest."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import torch

    Tensor: TypeAlias = torch.Tensor

Key = tuple[int, int]  # layer, tensor: as in vLLM's own messages


class TensorLayout(NamedTuple):
    """One expert of a tensor: ``[experts, *shape]``.

    Attributes:
        nbytes: Of one expert.
        stride: Bytes from one expert to the next.
        order: Dimensions of an expert, outermost first.
    """

    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    stride: int
    order: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """The experts of one rank, as its peers must know them.

    Attributes:
        tensors: By layer and tensor, in vLLM's order.
        experts: Local experts.
        device: Type of the device.
    """

    tensors: dict[Key, TensorLayout]
    experts: int
    device: str

    @property
    def digest(self) -> bytes:
        return _digest(self.experts, self.device, *sorted(self.tensors.items()))


@dataclass(frozen=True)
class Labels:
    """What people call those tensors; transfers do not depend on it.

    Attributes:
        names: By layer and tensor: the parameter.
        methods: By layer: quantization method and kernel back end.
        version: Of vLLM.
    """

    version: str = ""
    names: dict[Key, str] = field(default_factory=dict)
    methods: dict[int, str] = field(default_factory=dict)

    @property
    def digest(self) -> bytes:
        return _digest(self.version, *sorted(self.names.items()), *sorted(self.methods.items()))

    def name(self, key: Key) -> str:
        return self.names.get(key) or f"layer {key[0]} tensor {key[1]}"


def describe(
    weights: Sequence[Sequence[Tensor]], buffer: Sequence[Tensor] | None, labels: Labels
) -> Layout:
    """The layout of a rank's expert weights, ``[layer][tensor]`` of ``[experts, ...]`` each.

    Args:
        buffer: The tensors that received experts go to, one for each tensor of a layer.

    Raises:
        ValueError: Names what cannot be transferred: a tensor whose experts do not lie one after
            the other, another number of experts, a receive buffer of another size or dtype.
    """
    if not weights or not weights[0]:
        raise ValueError("there are no expert weights")
    tensors: dict[Key, TensorLayout] = {}
    first = weights[0][0]
    experts = first.shape[0] if first.ndim else 0
    for layer, in_layer in enumerate(weights):
        for index, tensor in enumerate(in_layer):
            key = (layer, index)
            if tensor.ndim == 0 or tensor.shape[0] != experts or not experts:
                raise ValueError(
                    f"{labels.name(key)}: shape {tuple(tensor.shape)} cannot be divided into "
                    f"{experts} local experts of equal size"
                )
            tensors[key] = _layout_of(tensor, labels.name(key))
    if buffer is not None:
        _check_buffer(weights, buffer, tensors, labels)
    return Layout(tensors, experts, first.device.type)


def _layout_of(tensor: Tensor, name: str) -> TensorLayout:
    shape, strides = tuple(tensor.shape[1:]), tensor.stride()[1:]
    nbytes = tensor.nbytes // tensor.shape[0]
    if tensor.is_contiguous():
        return TensorLayout(nbytes, str(tensor.dtype), shape, nbytes, tuple(range(len(shape))))
    stride = tensor.stride(0) * tensor.element_size() if tensor.shape[0] > 1 else nbytes
    order = tuple(sorted(range(len(shape)), key=lambda dim: (-strides[dim], dim)))
    dense = 1
    for dim in reversed(order):
        if shape[dim] > 1 and strides[dim] != dense:
            break
        dense *= shape[dim]
    if stride != nbytes or dense * tensor.element_size() != nbytes:
        raise ValueError(
            f"{name}: the experts do not lie one after the other in memory, whole, without gaps: "
            f"shape {tuple(tensor.shape)}, strides {tensor.stride()}"
        )
    return TensorLayout(nbytes, str(tensor.dtype), shape, stride, order)


def _check_buffer(
    weights: Sequence[Sequence[Tensor]],
    buffer: Sequence[Tensor],
    tensors: dict[Key, TensorLayout],
    labels: Labels,
) -> None:
    twins = [(t.dtype, t.nbytes // t.shape[0] if t.ndim and t.shape[0] else 0) for t in buffer]
    for layer, in_layer in enumerate(weights):
        if len(in_layer) != len(twins):
            raise ValueError(
                f"layer {layer} has {len(in_layer)} tensors, the receive buffer {len(twins)}"
            )
        for index, (dtype, nbytes) in enumerate(twins):
            layout = tensors[layer, index]
            if (str(dtype), nbytes) != (layout.dtype, layout.nbytes):
                raise ValueError(
                    f"{labels.name((layer, index))}: {layout.nbytes} bytes of {layout.dtype} an "
                    f"expert, the receive buffer has {nbytes} of {dtype}"
                )


def find_labels(weights: Sequence[Sequence[Tensor]]) -> Labels:
    """Names of the tensors, from the layers that vLLM has registered; what is there of them."""
    import vllm

    labels = Labels(vllm.__version__)
    with suppress(Exception):
        from vllm.config import get_current_vllm_config

        layers = get_current_vllm_config().compilation_config.static_forward_context
        known = {
            parameter.data_ptr(): (layer_name, name, module)
            for layer_name, layer in layers.items()
            for module in _expert_modules(layer)
            for name, parameter in module.named_parameters(recurse=False)
        }
        for layer_index, in_layer in enumerate(weights):
            for index, tensor in enumerate(in_layer):
                if (found := known.get(tensor.data_ptr())) is not None:
                    layer_name, name, module = found
                    labels.names[layer_index, index] = f"{layer_name}.{name}"
                    labels.methods[layer_index] = _method(module)
    return labels


def _expert_modules(layer: Any) -> list[Any]:
    own = [layer, getattr(layer, "routed_experts", None)]
    return [module for module in own if hasattr(module, "quant_method")]


def _method(module: Any) -> str:
    method = module.quant_method
    backends = [
        str(getattr(value, "value", value))
        for name, value in vars(method).items()
        if name.endswith("_backend") and value is not None
    ]
    return " ".join([type(method).__name__, *backends])


def _digest(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()
