# SPDX-License-Identifier: Apache-2.0
"""How a model's experts are quantized, told from its configuration and ``--quantization``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

UNKNOWN = "unknown"
_MXFP4_METHODS = ("mxfp4", "gpt_oss_mxfp4")
# Quantized as they load, by --quantization: weights, and how finely activations are scaled.
_ONLINE = {
    "fp8": ("fp8", "tensor"),
    "fp8_per_tensor": ("fp8", "tensor"),
    "fp8_per_block": ("fp8", "block"),
    "fp8_per_channel": ("fp8", "token"),
    "mxfp8": ("mxfp8", "mxfp8"),
    "mxfp4": ("mxfp4", None),
    "nvfp4_per_token": ("nvfp4", "token"),
    "int8_per_channel_weight_only": ("int8", None),
    "experts_int8": ("int8", None),
    "bitsandbytes": ("int4", None),
}
_WEIGHT_ONLY = ("awq", "gptq", "moe_wna16", "gguf", "inc", "bitsandbytes", "int8")
_MODELOPT = {
    "FP8": ("fp8", "tensor", True),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8", "token", False),
    "FP8_PB_WO": ("fp8", "block", False),
    "NVFP4": ("nvfp4", "nvfp4", True),
    "MXFP8": ("mxfp8", "mxfp8", False),
}


class Scheme(NamedTuple):
    """How experts are quantized.

    Attributes:
        method: vLLM's name of the method, or None.
        weights: ``fp8``, ``mxfp4``, ``mxfp8``, ``nvfp4`` and so on; None in full precision.
        activations: What shares a scale: ``tensor``, ``token``, ``block``, or ``mxfp8``, ``nvfp4``;
            None where they stay in full precision, ``unknown`` where it cannot be told.
        is_static: The activation scales are in the checkpoint.
        is_online: The checkpoint is in full precision and quantized as it loads.
    """

    method: str | None = None
    weights: str | None = None
    activations: str | None = None
    is_static: bool = False
    is_online: bool = False

    @property
    def is_own_mxfp4(self) -> bool:
        """Whether vLLM's own MXFP4 methods load the experts."""
        own = (*_MXFP4_METHODS, "deepseek_v4_fp8")
        return self.weights == "mxfp4" and self.method in own

    def __str__(self) -> str:
        if self.method is None:
            return "no quantization"
        kind = "static" if self.is_static else "dynamic"
        scaled = {
            None: "weights only",
            UNKNOWN: "activations of an unknown scheme",
            "tensor": f"one {kind} activation scale a tensor",
            "token": "an activation scale a token",
            "block": "an activation scale a block",
        }.get(self.activations, f"{str(self.activations).upper()} activations")
        return f"{self.method}, {scaled}"


def of(checkpoint: dict[str, Any] | None, asked: str | None, config: Mapping[str, Any]) -> Scheme:
    """The scheme of a checkpoint's own quantization, or of the one that is asked for."""
    if checkpoint is None:
        if asked is None:
            return Scheme()
        weights, activations = _ONLINE.get(asked, (UNKNOWN, UNKNOWN))
        return Scheme(asked, weights, activations, is_online=True)
    own = str(checkpoint.get("quant_method") or "").lower() or _unnamed(checkpoint)
    method = asked or own
    if config.get("model_type") == "deepseek_v4" and config.get("expert_dtype", "fp4") == "fp4":
        return Scheme("deepseek_v4_fp8", "mxfp4", None)
    if own in _MXFP4_METHODS:
        return Scheme(method, "mxfp4")
    if own == "mxfp8":
        return Scheme(method, "mxfp8", "mxfp8")
    if own.startswith("modelopt"):
        return _of_modelopt(method, checkpoint)
    if own == "compressed-tensors":
        return _of_groups(method, checkpoint)
    if own == "quark":
        return _of_quark(method, checkpoint)
    if "fp8" in own:
        if checkpoint.get("weight_block_size"):
            return Scheme(method, "fp8", "block")
        is_static = checkpoint.get("activation_scheme") == "static"
        return Scheme(method, "fp8", "tensor", is_static)
    if any(name in own for name in _WEIGHT_ONLY):
        return Scheme(method, "int")
    return Scheme(method, UNKNOWN, UNKNOWN)


def conflict(checkpoint: dict[str, Any] | None, asked: str | None) -> list[str]:
    """What is said twice, and differently."""
    own = str((checkpoint or {}).get("quant_method") or "").lower()
    if not own or not asked or asked in own or own in asked:
        return []
    return [
        f"the checkpoint is quantized as {own!r} and --quantization asks for {asked!r}: vLLM may "
        "refuse that"
    ]


def _unnamed(checkpoint: dict[str, Any]) -> str:
    return "modelopt" if "quant_algo" in checkpoint else UNKNOWN


def _of_modelopt(method: str, checkpoint: dict[str, Any]) -> Scheme:
    inner = checkpoint.get("quantization")
    algorithm = checkpoint.get("quant_algo") or (
        inner.get("quant_algo") if isinstance(inner, dict) else None
    )
    weights, activations, is_static = _MODELOPT.get(
        str(algorithm).upper(), (UNKNOWN, UNKNOWN, False)
    )
    return Scheme(method, weights, activations, is_static)


def _of_groups(method: str, checkpoint: dict[str, Any]) -> Scheme:
    """compressed-tensors: the group that names experts, or the first."""
    found = checkpoint.get("config_groups")
    groups = [g for g in found.values() if isinstance(g, dict)] if isinstance(found, dict) else []
    if not groups:
        return Scheme(method, UNKNOWN, UNKNOWN)
    group = next((g for g in groups if "expert" in str(g.get("targets"))), groups[0])
    weights, activations = group.get("weights") or {}, group.get("input_activations")
    kind = _kind_of(weights)
    if not activations:
        return Scheme(method, kind)
    scale = _kind_of(activations)
    if scale in ("fp8", "int8"):
        strategy = str(activations.get("strategy") or "tensor")
        scale = "block" if strategy == "group" else strategy
        scale = scale if kind in ("fp8", "int8", "mxfp4") else UNKNOWN
    return Scheme(method, kind, scale, not activations.get("dynamic"))


def _kind_of(said: dict[str, Any]) -> str:
    bits, group = said.get("num_bits"), said.get("group_size")
    if said.get("type") == "float" and bits == 4:
        return "mxfp4" if group == 32 else "nvfp4"
    if said.get("type") == "float" and bits == 8:
        return "mxfp8" if group == 32 else "fp8"
    return f"int{bits}" if said.get("type") == "int" else UNKNOWN


def _of_quark(method: str, checkpoint: dict[str, Any]) -> Scheme:
    said = checkpoint.get("global_quant_config") or {}
    weight, inputs = said.get("weight") or {}, said.get("input_tensors")
    kinds = {"fp8_e4m3": "fp8", "fp4": "mxfp4", "int4": "int4", "int8": "int8"}
    kind = kinds.get(str(weight.get("dtype")), UNKNOWN)
    if not isinstance(inputs, dict):
        return Scheme(method, kind)
    scales = {"per_tensor": "tensor", "per_channel": "token", "per_group": "block"}
    scale = scales.get(str(inputs.get("qscheme")), UNKNOWN)
    if inputs.get("dtype") != "fp8_e4m3" and scale == "tensor":
        scale = UNKNOWN
    return Scheme(method, kind, scale, not inputs.get("is_dynamic"))
