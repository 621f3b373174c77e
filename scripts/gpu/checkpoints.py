# SPDX-License-Identifier: Apache-2.0
"""Small checkpoints that show what a wrong activation scale or a wrong cut of the experts does."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts import demo

Tensors: TypeAlias = dict[str, Any]

# Tokens from here on have next to nothing but one channel, and so another scale than the others.
FIRST_OUTLIER = 500
_CHANNEL, _SIZE = 7, 30.0
_RANGES = {"gate_proj": 40.0, "up_proj": 40.0, "down_proj": 20.0}  # of a static scale


def with_outliers(kind: str, lane: demo.Lane, expert: int | None = None) -> Path:
    """The demo's model; its ``expert``, where given, is the width of one expert."""
    if expert:
        lane = dataclasses.replace(lane, size={**lane.size, "expert": expert})

    def change(tensors: Tensors) -> Tensors:
        (name,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
        rows = tensors[name][FIRST_OUTLIER:]
        rows *= 0.02
        rows[:, _CHANNEL] = _SIZE
        if kind == "gemma4-moe":
            _uncover_experts(tensors)
        return tensors

    return _derived(demo.make_model(kind, lane), "outliers", change, None)


def _uncover_experts(tensors: Tensors) -> None:
    """Makes Gemma 4 say what its experts do.

    Its head is the embedding, where the outlier would be all that shows, and a norm behind the
    experts takes every wrong factor away but for what the activation function makes of it.
    """
    for name, tensor in tensors.items():
        if name.endswith("model.norm.weight"):
            tensor[_CHANNEL] = 0
        elif name.endswith("experts.gate_up_proj"):
            tensor[:, : tensor.shape[1] // 2] *= 0.1
        elif name.endswith("post_feedforward_layernorm_2.weight"):
            tensor *= 2
        elif name.endswith(
            ("post_attention_layernorm.weight", "post_feedforward_layernorm_1.weight")
        ):
            tensor *= 0.5


def static_fp8(source: Path) -> Path:
    """Experts in FP8, with a scale for each weight and each of its inputs; all else as it is."""
    import torch

    skipped = set()

    def change(tensors: Tensors) -> Tensors:
        changed: Tensors = {}
        for name, tensor in tensors.items():
            layer = name.removesuffix(".weight")
            if ".experts." not in name:
                changed[name] = tensor
                if tensor.ndim == 2:
                    skipped.add(layer)
                continue
            scale = tensor.float().abs().amax() / 448
            changed[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
            changed[f"{layer}.weight_scale"] = scale
            changed[f"{layer}.input_scale"] = torch.tensor(_RANGES[layer.split(".")[-1]] / 448)
        return changed

    def settings() -> dict[str, Any]:
        scheme = {"quant_method": "fp8", "activation_scheme": "static"}
        return {**scheme, "ignored_layers": sorted(skipped)}

    return _derived(source, "static-fp8", change, settings)


def mxfp4(source: Path) -> Path:
    """Experts in MXFP4, a packed weight and block scales for each; all else as it is."""
    import torch

    from vllm_moe_dp_fix.mxfp4.quantize import quantize

    def change(tensors: Tensors) -> Tensors:
        changed: Tensors = {}
        for name, tensor in tensors.items():
            if ".experts." not in name:
                changed[name] = tensor
                continue
            rows, columns = tensor.shape
            packed = torch.empty(rows, columns // 2, dtype=torch.uint8)
            scales = torch.empty(rows, columns // 32, dtype=torch.uint8)
            quantize(tensor, packed, scales)
            changed[name] = packed
            changed[f"{name}_scale"] = scales
        return changed

    return _derived(source, "mxfp4", change, lambda: {"quant_method": "mxfp4"})


def _derived(
    source: Path,
    name: str,
    change: Callable[[Tensors], Tensors],
    settings: Callable[[], dict[str, Any]] | None,
) -> Path:
    """A copy with other tensors and, where ``settings`` are given, a quantization config."""
    from safetensors.torch import load_file, save_file

    folder = source.with_name(f"{source.name}-{name}")
    if (folder / "done").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("done"))
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
    if settings:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = settings()
        (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "done").touch()
    return folder
