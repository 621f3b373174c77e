#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Serves one MoE model on two GPUs in three ways, and measures each over HTTP.

Sharded experts, independent replicas behind one endpoint, and two servers of one GPU each get the
same requests from the same two ``vllm bench serve``. Every phase runs twice; the second counts.
Needs vLLM for CUDA beside the plugin, two GPUs, and no checkpoint: the weights are random.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from scripts import demo  # noqa: E402

WAYS = ("sharded", "replicated", "two servers")
CLIENTS = 2
KEPT = (
    *("duration", "completed", "total_input_tokens", "total_output_tokens"),
    *("median_ttft_ms", "median_tpot_ms"),
)
VOCABULARY = 32_000


@dataclass(frozen=True)
class Load:
    """What is asked for: ``requests`` over all clients, ``concurrency`` of them at a time."""

    name: str
    prompt: int
    answer: int
    concurrency: int
    requests: int


LOADS: tuple[Load, ...] = (
    Load("prefill", 900, 1, 16, 512),
    Load("prefill", 900, 1, 128, 1024),
    Load("decode", 16, 128, 8, 64),
    Load("decode", 16, 128, 64, 512),
    Load("decode", 16, 128, 256, 1024),
    Load("mixed", 256, 128, 64, 512),
    Load("mixed", 256, 128, 256, 1024),
)
TINY: tuple[Load, ...] = (Load("prefill", 60, 1, 4, 8), Load("mixed", 20, 8, 4, 8))
SERVER_FLAGS = (
    *("--load-format", "dummy", "--seed", "0", "--max-model-len", "2048"),
    *("--max-num-seqs", "256", "--max-num-batched-tokens", "8192"),
    *("--gpu-memory-utilization", "0.8", "--no-enable-prefix-caching"),
    # Tokens leave in groups, so that the HTTP front end is not what is measured.
    *("--stream-interval", "32"),
)


def make_model(layers: int) -> Path:
    """A configuration of Qwen3-30B-A3B's shape in FP8, with a tokenizer of words."""
    folder = demo.CACHE / f"qwen3-30b-shape-{layers}"
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": VOCABULARY,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 4096,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    demo.make_tokenizer(VOCABULARY).save_pretrained(folder)
    return folder


# --- servers --------------------------------------------------------------------------------


@contextlib.contextmanager
def served(model: Path, lane: demo.Lane, way: str) -> Iterator[list[demo.Server]]:
    """The servers of one way, healthy."""
    with contextlib.ExitStack() as stack:
        if way == "two servers":
            names = ["alone-0", "alone-1"]
            visible = [{"CUDA_VISIBLE_DEVICES": str(gpu)} for gpu in range(2)]
            ranks = 1
        else:
            names, visible, ranks = [way], [{"VLLM_MOE_DP_FIX_EXPERTS": way}], 2
        servers = []
        for name, variables in zip(names, visible, strict=True):
            with mock.patch.dict(os.environ, variables):
                starting = demo.serve(model, lane, name, ranks, demo.PLUGINS)
                servers.append(stack.enter_context(starting))
        for server in servers:
            server.wait_until_healthy()
        yield servers


# --- clients --------------------------------------------------------------------------------


class Client:
    """A process that runs vLLM's serving benchmark once a line."""

    def __init__(self, model: Path, index: int) -> None:
        command = [sys.executable, __file__, "--client", str(model), str(index)]
        self.index = index
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def tell(self, text: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def hear(self, wanted: str) -> str:
        """What follows ``wanted`` on the next line that begins with it."""
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith(wanted):
                return line[len(wanted) :]
        raise demo.DemoError(f"client {self.index} ended with code {self.process.wait()}")


def measure(clients: list[Client], servers: list[demo.Server], load: Load) -> dict[str, float]:
    """One load, half of it by each client; tokens a second over all, latencies of the slower."""
    for client in clients:
        port = servers[client.index % len(servers)].port
        client.tell(json.dumps(asdict(load) | {"port": port}))
    for client in clients:
        client.hear("READY")
    for client in clients:
        client.tell("go")
    found: list[dict[str, Any]] = []
    for client in clients:
        result = json.loads(client.hear("RESULT"))
        if result["completed"] != load.requests // CLIENTS:
            raise demo.DemoError(f"{result['completed']} of {load.requests // CLIENTS} answered")
        found.append(result)
    seconds = max(result["duration"] for result in found)
    tokens = sum(r["total_input_tokens"] + r["total_output_tokens"] for r in found)
    return {
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "output_tokens_per_s": sum(r["total_output_tokens"] for r in found) / seconds,
        "median_ttft_ms": max(result["median_ttft_ms"] for result in found),
        "median_tpot_ms": max(result["median_tpot_ms"] for result in found),
        "seconds": seconds,
    }


def run_client(model: str, index: int) -> None:
    """The client's process: reads loads from stdin, says READY before and RESULT after each."""
    import asyncio

    from vllm.benchmarks import serve

    benchmark = serve.benchmark

    async def together(*args: Any, **kwargs: Any) -> Any:
        print("READY", flush=True)
        sys.stdin.readline()
        return await benchmark(*args, **kwargs)

    serve.benchmark = together
    for line in iter(sys.stdin.readline, ""):
        load = json.loads(line)
        parser = argparse.ArgumentParser()
        serve.add_cli_args(parser)
        arguments = [
            *("--backend", "openai", "--base-url", f"http://127.0.0.1:{load['port']}"),
            *("--model", "demo", "--tokenizer", model, "--dataset-name", "random"),
            *("--random-input-len", str(load["prompt"]), "--ignore-eos"),
            *("--random-output-len", str(load["answer"]), "--seed", str(index)),
            *("--num-prompts", str(load["requests"] // CLIENTS), "--disable-tqdm"),
            *("--max-concurrency", str(load["concurrency"] // CLIENTS)),
            *("--ready-check-timeout-sec", "0"),
        ]
        result = asyncio.run(serve.main_async(parser.parse_args(arguments)))
        print("RESULT" + json.dumps({name: result[name] for name in KEPT}), flush=True)


# --- table ----------------------------------------------------------------------------------


def show(results: dict[str, list[dict[str, Any]]], loads: Sequence[Load]) -> None:
    """A row a load, and one over all of them; in tokens a second, prompts included."""
    print("\n| load | concurrency | " + " | ".join(WAYS) + " | / two servers | / sharded |")
    print("|---|---|---|---|---|---|---|")
    rows = [
        (f"{x.name} {x.prompt} + {x.answer}", f"{x.concurrency}", [i]) for i, x in enumerate(loads)
    ]
    for name, concurrency, members in [*rows, ("all", "", list(range(len(loads))))]:
        seconds = {w: sum(results[w][i]["seconds"] for i in members) for w in results}
        tokens = {w: sum(results[w][i]["tokens"] for i in members) for w in results}
        speeds = {way: tokens[way] / seconds[way] for way in results}
        cells = [
            name,
            concurrency,
            *(f"{speeds[way]:,.0f}" if way in speeds else "" for way in WAYS),
        ]
        for other in ("two servers", "sharded"):
            is_known = other in speeds and "replicated" in speeds
            cells.append(f"{speeds['replicated'] / speeds[other]:.2f}" if is_known else "")
        print("| " + " | ".join(cells) + " |")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=24, help="of 48 in the model (default: 24)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--json", type=Path, help="write to this file, and add to what it has")
    parser.add_argument("--client", nargs=2, metavar=("MODEL", "INDEX"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        run_client(arguments.client[0], int(arguments.client[1]))
        return 0

    lane = demo.pick_lane()
    if lane is demo.CPU:
        print("on the CPU this shows that it runs, and nothing else")
        model, loads = demo.make_model("qwen3-moe", lane), TINY
    else:
        model, loads = make_model(arguments.layers), LOADS
        lane = demo.Lane("CUDA", SERVER_FLAGS, lane.environ, {}, "", same_tokens=False)
    clients = [Client(model, index) for index in range(CLIENTS)]
    results: dict[str, list[dict[str, Any]]] = {}
    if arguments.json and arguments.json.exists():
        results = json.loads(arguments.json.read_text())
    try:
        for way in arguments.ways:
            print(f"\n{way}", flush=True)
            with served(model, lane, way) as servers:
                results[way] = []
                for load in loads:
                    measure(clients, servers, load)
                    found = measure(clients, servers, load)
                    results[way].append({**asdict(load), **found})
                    said = f"{load.name} {load.prompt} + {load.answer} at {load.concurrency}"
                    print(f"    {said}: {found['tokens_per_s']:,.0f} tokens/s", flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    except demo.DemoError as error:
        print(f"FAILED: {error}")
        return 1
    finally:
        for client in clients:
            client.process.kill()
    show(results, loads)
    return 0


if __name__ == "__main__":
    sys.exit(main())
