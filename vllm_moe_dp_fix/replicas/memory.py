# SPDX-License-Identifier: Apache-2.0
"""How much memory a full copy of a model takes, told from its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

_GIB = 2**30
# The names under which models keep the width of one expert, the most specific first.
_EXPERT_WIDTHS = (
    "moe_intermediate_size",
    "expert_intermediate_size",
    "moe_ffn_hidden_size",
    "expert_ffn_hidden_size",
    "intermediate_size",
)
_EXPERT_COUNTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_DENSE_FIRST = ("first_k_dense_replace", "num_dense_layers")
_EVERY_NTH = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq")
_BITS_KEYS = ("bits", "w_bit", "weight_bits", "num_bits")


class UnknownSizeError(ValueError):
    """The configuration does not tell how large the model is."""


class FullCopy(NamedTuple):
    """A full copy of the weights beside what one device has to give, both in bytes."""

    size: float
    usable: float

    @property
    def leaves_half(self) -> bool:
        """Whether half of the usable memory, at least, stays free for the KV cache."""
        return self.size <= self.usable / 2

    def __str__(self) -> str:
        return (
            f"a full copy of the weights takes about {self.size / _GIB:.1f} of the "
            f"{self.usable / _GIB:.1f} GiB that each device has to give"
        )


class Weights(NamedTuple):
    """The weights of a model in bytes: those of the routed experts, and all others."""

    experts: float
    others: float

    @property
    def total(self) -> float:
        return self.experts + self.others

    def a_device(self, devices: int, expert_ranks: int = 1) -> float:
        """On one of a rank's ``devices``, the experts spread over ``expert_ranks`` ranks."""
        return (self.experts / expert_ranks + self.others) / devices


def of_full_copy(vllm_config: Any) -> FullCopy:
    """The weights of one rank with all experts, a device.

    Raises:
        UnknownSizeError: The size of the model, or of the device, cannot be told.
    """
    parallel = vllm_config.parallel_config
    devices = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    return FullCopy(weights(vllm_config.model_config).a_device(devices), usable(vllm_config))


def weights(model_config: Any) -> Weights:
    """The weights of a model: quantized experts, all else in the model's dtype.

    Raises:
        UnknownSizeError: The configuration does not say how wide an expert is.
    """
    config = model_config.hf_text_config
    hidden = model_config.get_hidden_size()
    layers = model_config.get_total_num_hidden_layers()
    width = max(expert_widths(config), default=0)
    if not width:
        raise UnknownSizeError("the model's configuration does not say how wide an expert is")

    sparse = _sparse_layers(config, layers)
    dense = layers if getattr(config, "enable_moe_block", False) else layers - sparse
    experts = sparse * model_config.get_num_experts() * 3 * hidden * width
    shared = _first(config, _SHARED_EXPERTS) * width
    shared = shared or _first(config, ("shared_expert_intermediate_size",))
    others = (
        sparse * 3 * hidden * shared
        + dense * 3 * hidden * _first(config, ("intermediate_size",))
        + sum(_attention(layer, hidden) for layer in _layers(config, layers))
        + config.vocab_size * hidden * (1 if getattr(config, "tie_word_embeddings", False) else 2)
    )
    dtype_bits = model_config.dtype.itemsize * 8
    expert_bits = _weight_bits(model_config) or dtype_bits
    return Weights(experts * expert_bits / 8, others * dtype_bits / 8)


def expert_widths(config: Any) -> tuple[int, ...]:
    """The intermediate sizes of an expert, all that occur; none where nothing is said."""
    return _numbers(config, _EXPERT_WIDTHS)


def expert_count(config: Any) -> int:
    """The routed experts of a layer, 0 in a dense model."""
    return max(_numbers(config, _EXPERT_COUNTS), default=0)


def _layers(config: Any, layers: int) -> list[Any]:
    """A configuration for each layer; those of Gemma 4, for instance, differ."""
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config] * layers


def _attention(config: Any, hidden: int) -> int:
    heads = config.num_attention_heads
    key_value_heads = _first(config, ("num_key_value_heads",)) or heads
    head = _first(config, ("head_dim", "v_head_dim")) or hidden // heads
    return int(2 * hidden * head * (heads + key_value_heads))


def _sparse_layers(config: Any, layers: int) -> int:
    """The layers that have experts."""
    each = getattr(config, "moe_layer_freq", None)
    if isinstance(each, list | tuple):
        return sum(map(bool, each))
    every_nth = _first(config, _EVERY_NTH) or 1
    dense = getattr(config, "mlp_only_layers", None) or ()
    return max(1, (layers - _first(config, _DENSE_FIRST)) // every_nth - len(dense))


def _first(config: Any, names: tuple[str, ...]) -> int:
    """The first of these entries that is a number and not 0, or 0."""
    return max(_numbers(config, names), default=0)


def _numbers(config: Any, names: tuple[str, ...]) -> tuple[int, ...]:
    """The first of these entries that holds numbers but 0: one, or a list by layer."""
    for name in names:
        values = _values(config, name)
        found = {number for number in values if isinstance(number, int) and number}
        if found:
            return tuple(sorted(found))
    return ()


def _values(config: Any, name: str) -> Sequence[Any]:
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # transformers will not say what differs from layer to layer
        return [getattr(layer, name, None) for layer in config.per_layer_config]
    return value if isinstance(value, list | tuple) else [value]


def _weight_bits(model_config: Any) -> float | None:
    """Bits a weight with its share of the scales; None where the experts keep the dtype."""
    method = str(model_config.quantization or "")
    if "fp4" in method:
        return 4.5
    if "fp8" in method or "int8" in method or method == "modelopt":
        return 8.25
    checkpoint = getattr(model_config.hf_config, "quantization_config", None)
    bits = _find_bits(checkpoint) if method and isinstance(checkpoint, dict) else None
    return bits + 0.25 if bits else None


def _find_bits(settings: dict[str, Any]) -> int | None:
    """The most bits that a part of this quantization configuration names."""
    found = []
    for key, value in settings.items():
        if isinstance(value, dict):
            found.append(_find_bits(value) or 0)
        elif key in _BITS_KEYS and isinstance(value, int):
            found.append(value)
    return max(found, default=0) or None


def usable(vllm_config: Any) -> float:
    """The memory in bytes that a device has to give.

    Raises:
        UnknownSizeError: It cannot be told.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        import psutil

        ranks = max(1, vllm_config.parallel_config.data_parallel_size_local)
        return psutil.virtual_memory().total / ranks
    try:
        total = current_platform.get_device_total_memory()
    except Exception as error:
        raise UnknownSizeError(f"the memory of the devices cannot be told: {error!r}") from error
    return float(total * vllm_config.cache_config.gpu_memory_utilization)
