# SPDX-License-Identifier: Apache-2.0
"""Models of which there is no more than the doctor reads."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

BITS = {"U8": 8, "F8_E4M3": 8, "F8_E8M0": 8, "BF16": 16, "F32": 32}
Tensors = dict[str, tuple[str, tuple[int, ...]]]


def write_model(directory: Path, config: dict[str, Any], tensors: Tensors | None = None) -> Path:
    """A directory with a configuration, and a safetensors file where there are tensors."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if tensors:
        write_safetensors(directory / "model.safetensors", tensors)
    return directory


def write_safetensors(path: Path, tensors: Tensors) -> None:
    """A file whose data are a hole."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def mxfp4_experts(
    hidden: int, width: int, scale: str = "U8", scale_shape: tuple[int, int] | None = None
) -> Tensors:
    """One expert of one layer, a tensor each for gate, up and down."""
    found: Tensors = {}
    shapes = {
        "gate_proj": (width, hidden),
        "up_proj": (width, hidden),
        "down_proj": (hidden, width),
    }
    for name, (rows, columns) in shapes.items():
        prefix = f"model.layers.0.mlp.experts.0.{name}.weight"
        found[prefix] = ("U8", (rows, columns // 2))
        found[f"{prefix}_scale"] = (scale, scale_shape or (rows, columns // 32))
    return found


def gpt_oss_experts(hidden: int, width: int, experts: int) -> Tensors:
    """One layer as gpt-oss stores it."""
    prefix = "model.layers.0.mlp.experts"
    return {
        f"{prefix}.gate_up_proj_blocks": ("U8", (experts, 2 * width, hidden // 32, 16)),
        f"{prefix}.gate_up_proj_scales": ("U8", (experts, 2 * width, hidden // 32)),
        f"{prefix}.gate_up_proj_bias": ("BF16", (experts, 2 * width)),
        f"{prefix}.down_proj_blocks": ("U8", (experts, hidden, width // 32, 16)),
        f"{prefix}.down_proj_scales": ("U8", (experts, hidden, width // 32)),
        f"{prefix}.down_proj_bias": ("BF16", (experts, hidden)),
        "model.embed_tokens.weight": ("BF16", (512, hidden)),
    }


SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "vocab_size": 512,
    "head_dim": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}
QWEN3_MOE = SIZES | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 704,
    "intermediate_size": 512,
}
GEMMA4_TEXT = SIZES | {
    "model_type": "gemma4_text",
    "enable_moe_block": True,
    "num_experts": 16,
    "top_k_experts": 2,
    "moe_intermediate_size": 704,
    "intermediate_size": 512,
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
GEMMA4 = {
    "model_type": "gemma4",
    "architectures": ["Gemma4ForConditionalGeneration"],
    "text_config": GEMMA4_TEXT,
}
GPT_OSS = SIZES | {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 704,
    "layer_types": ["full_attention"] * 4,
    "quantization_config": {"quant_method": "mxfp4"},
}
MIXTRAL = SIZES | {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 8,
    "intermediate_size": 384,
}
DEEPSEEK = SIZES | {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "n_routed_experts": 16,
    "moe_intermediate_size": 128,
    "intermediate_size": 768,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
LLAMA = SIZES | {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "intermediate_size": 512,
}
