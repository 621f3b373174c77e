#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks MXFP4 experts on one CUDA GPU, with vLLM's own kernels, without and with the plugin.

Layers: each rank of an expert-TP group is built in turn, loaded, converted and run; the sum over
the ranks is compared with the layer computed from the dequantized checkpoint. Packed checkpoints,
and BF16 ones that are quantized as they load. Model: a tiny random Qwen3-MoE in BF16, run as it is
and with ``--quantization mxfp4``. Prints a line a case.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.gpu import marks

HIDDEN, EXPERTS, TOKENS, TOP_K = 2048, 8, 64, 2
SIZES = (704, 768, 1408)
TP_SIZES = (1, 2, 4, 8)
TOLERANCE = 0.02  # of BF16 kernels against FP32 arithmetic, relative to the largest value
PART_TIMEOUT_S = 240
PLUGIN = "mxfp4_weight_loader"
Checkpoint: TypeAlias = dict[tuple[str, str], Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        for case in {"layers": _layers, "model": _model}[arguments.part]():
            marks.write(case)
        return 0
    jobs = [(part, plugin) for part in ("layers", "model") for plugin in ("", PLUGIN)]
    cases = []
    with ThreadPoolExecutor(max_workers=2) as pool:
        for found in pool.map(_run, *zip(*jobs, strict=True)):
            for case in found:
                print("{plugin:20} {case:36} {said}".format(**case), flush=True)
            cases += found
    if arguments.json:
        arguments.json.write_text(json.dumps(cases, indent=1))
    healed = [case for case in cases if case["plugin"] == PLUGIN]
    is_right = bool(healed) and all(case["right"] for case in healed)
    print("every case is right with the plugin" if is_right else "WRONG")
    return 0 if is_right else 1


def _run(part: str, plugin: str) -> list[dict[str, Any]]:
    """A part in a process of its own, with or without the plugin."""
    environ = {**os.environ, "VLLM_PLUGINS": plugin, "VLLM_LOGGING_LEVEL": "WARNING"}
    environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # errors come with their cause
    command = [sys.executable, __file__, "--part", part]
    with tempfile.TemporaryFile("w+") as output:
        try:
            subprocess.run(
                command, env=environ, stdout=output, stderr=output, timeout=PART_TIMEOUT_S
            )
            end = "ended early"
        except subprocess.TimeoutExpired:
            end = f"no end in {PART_TIMEOUT_S} s"
        output.seek(0)
        lines = output.read().splitlines()
    found = marks.read(lines)
    if len(found) < {"layers": len(SIZES) * len(TP_SIZES) * 2, "model": 1}[part]:
        errors = [line.strip() for line in lines if "Error" in line] or lines
        said = f"{end}: {' | '.join(errors[-2:])[:300]}"
        found.append({"case": part, "said": said, "right": False})
    return [{"plugin": plugin or "without", **case} for case in found]


# --- layers ---------------------------------------------------------------------------------


def _layers() -> Iterator[dict[str, Any]]:
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.plugins import load_general_plugins
    from vllm.v1.worker.workspace import init_workspace_manager

    load_general_plugins()
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("cuda")
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "nccl")
        initialize_model_parallel(1, 1)
        init_workspace_manager(torch.device("cuda"))
        for intermediate in SIZES:
            for kind in ("packed", "BF16"):
                for tp_size in TP_SIZES:
                    case = f"{kind} checkpoint, {intermediate} at TP {tp_size}"
                    yield {"case": case, **_judge(intermediate, tp_size, kind)}


def _judge(intermediate: int, tp_size: int, kind: str) -> dict[str, Any]:
    import torch

    checkpoint = _checkpoint(intermediate, kind)
    rows = torch.randn(TOKENS, HIDDEN) * 0.5
    logits = torch.randn(TOKENS, EXPERTS, dtype=torch.float32)
    weights, ids = torch.softmax(logits, -1).topk(TOP_K)
    ids = ids.to(torch.int32)
    try:
        total = sum(
            _one_rank(intermediate, tp_size, rank, checkpoint, rows, weights, ids).float()
            for rank in range(tp_size)
        )
    except Exception as failure:
        return {"said": f"{type(failure).__name__}: {str(failure)[:160]}", "right": False}
    want = _reference(checkpoint, rows, weights, ids)
    error = ((total - want).abs().max() / want.abs().max()).item()
    return {"said": f"relative error {error:.4f}", "error": error, "right": error < TOLERANCE}


def _one_rank(
    intermediate: int, tp_size: int, tp_rank: int, checkpoint: Checkpoint, *inputs: Any
) -> Any:
    from vllm.model_executor.layers.fused_moe import layer as layers
    from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4Config, Mxfp4MoEMethod

    class Config(Mxfp4Config):  # type: ignore[misc,unused-ignore]
        """Hands out the method that fits, as vLLM 0.27 and the plugin do, in both runs."""

        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            return Mxfp4MoEMethod(layer.moe_config)

    _one_rank.built += 1  # type: ignore[attr-defined]
    with _group(tp_size, tp_rank):
        made = layers.FusedMoE(
            num_experts=EXPERTS,
            top_k=TOP_K,
            hidden_size=HIDDEN,
            intermediate_size=intermediate,
            quant_config=Config(),
            prefix=f"layers.{_one_rank.built}.experts",  # type: ignore[attr-defined]
        )
    layer = getattr(made, "routed_experts", made)
    for expert in range(EXPERTS):
        for (name, shard), tensor in checkpoint.items():
            parameter = getattr(layer, name)
            parameter.weight_loader(
                parameter, tensor[expert].cpu(), f"experts.{name}", shard, expert
            )
    method = layer.quant_method
    method.process_weights_after_loading(layer)
    names = inspect.signature(method.apply).parameters
    rest = {name: None for name in names if name.startswith("shared_experts")}
    return method.apply(layer, *inputs, **rest)


_one_rank.built = 0  # type: ignore[attr-defined]


@contextlib.contextmanager
def _group(tp_size: int, tp_rank: int) -> Iterator[None]:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

    make = FusedMoEParallelConfig.make

    def made(*args: Any, **kwargs: Any) -> Any:
        return dataclasses.replace(make(*args, **kwargs), tp_size=tp_size, tp_rank=tp_rank)

    with mock.patch.object(FusedMoEParallelConfig, "make", made):
        yield


def _checkpoint(intermediate: int, kind: str) -> Checkpoint:
    """(parameter, shard) -> [experts, rows, columns], with scales that differ block by block."""
    import torch

    torch.manual_seed(intermediate)
    shapes = [
        ("w13", "w1", intermediate, HIDDEN),
        ("w13", "w3", intermediate, HIDDEN),
        ("w2", "w2", HIDDEN, intermediate),
    ]
    checkpoint: Checkpoint = {}
    for projection, shard, rows, columns in shapes:
        scales = torch.randint(117, 124, (EXPERTS, rows, columns // 32), dtype=torch.uint8)
        if kind == "packed":
            shape = (EXPERTS, rows, columns // 2)
            checkpoint[f"{projection}_weight", shard] = torch.randint(256, shape).to(torch.uint8)
            checkpoint[f"{projection}_weight_scale", shard] = scales
        else:
            spread = torch.exp2(scales.float() - 127).repeat_interleave(32, -1)
            values = torch.randn(EXPERTS, rows, columns, dtype=torch.float32) * spread
            checkpoint[f"{projection}_weight", shard] = values.to(torch.bfloat16)
    return checkpoint


def _reference(checkpoint: Checkpoint, rows: Any, weights: Any, ids: Any) -> Any:
    """The layer in FP32, from the checkpoint as MXFP4 holds it."""
    import torch

    gate, up = (_values(checkpoint, "w13", shard) for shard in ("w1", "w3"))
    down = _values(checkpoint, "w2", "w2")
    rows = rows.float()
    output = torch.zeros(TOKENS, HIDDEN, dtype=torch.float32)
    for expert in range(EXPERTS):
        inner = torch.nn.functional.silu(rows @ gate[expert].T) * (rows @ up[expert].T)
        share = (weights.float() * (ids == expert)).sum(-1, keepdim=True)
        output += share * (inner @ down[expert].T)
    return output


def _values(checkpoint: Checkpoint, projection: str, shard: str) -> Any:
    import torch

    from vllm_moe_dp_fix.mxfp4.quantize import quantize

    packed = checkpoint[f"{projection}_weight", shard]
    if packed.dtype == torch.uint8:
        scales = checkpoint[f"{projection}_weight_scale", shard]
    else:
        full, (experts, rows, columns) = packed, packed.shape
        packed = torch.empty(experts, rows, columns // 2, dtype=torch.uint8)
        scales = torch.empty(experts, rows, columns // 32, dtype=torch.uint8)
        for expert in range(experts):
            quantize(full[expert], packed[expert], scales[expert])
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float32)
    table = torch.cat([sizes, -sizes])
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    return table[codes.long()] * torch.exp2(scales.float() - 127).repeat_interleave(32, -1)


# --- models ---------------------------------------------------------------------------------


def _model() -> Iterator[dict[str, Any]]:
    """Prompt logprobs of a BF16 checkpoint with and without quantization."""
    case = "Qwen3-MoE, --quantization mxfp4"
    with tempfile.TemporaryDirectory() as folder:
        _write_model(Path(folder))
        try:
            quantized = _logprobs(folder, "mxfp4")
        except Exception as failure:
            said = f"{type(failure).__name__}: {str(failure)[:160]}"
            yield {"case": case, "said": said, "right": False}
            return
        plain = _logprobs(folder, None)
    gap = sum(abs(a - b) for a, b in zip(plain, quantized, strict=True)) / len(plain)
    spread = sum(abs(a - sum(plain) / len(plain)) for a in plain) / len(plain)
    said = f"mean distance to BF16 logprobs {gap:.3f}, their own spread {spread:.3f}"
    yield {"case": case, "said": said, "right": gap < spread / 2}


def _logprobs(model: str, quantization: str | None) -> list[float]:
    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        gpu_memory_utilization=0.3,
        kv_cache_memory_bytes=1 << 30,  # no profiling, which other processes would disturb
        quantization=quantization,
        enable_prefix_caching=False,
    )
    prompts = [{"prompt_token_ids": [(37 * i + 11 * j) % 900 for j in range(64)]} for i in range(4)]
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate(prompts, sampling, use_tqdm=False)  # type: ignore[arg-type,unused-ignore]
    found = [
        next(iter(token.values())).logprob
        for output in outputs
        for token in output.prompt_logprobs[1:]
    ]
    del llm
    torch.cuda.empty_cache()
    return found


def _write_model(folder: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=512,
        moe_intermediate_size=704,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
