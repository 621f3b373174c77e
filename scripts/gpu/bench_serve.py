#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Serves one MoE model on two GPUs in several ways, and measures each over HTTP.

Sharded experts with either dispatch of FP8 rows, independent replicas behind one endpoint, and two
servers of one GPU each get the same requests from the same two ``vllm bench serve``. Every phase
runs twice; the second counts. Needs vLLM for CUDA beside the plugin, two GPUs, and no checkpoint:
the weights are random.
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
from scripts.gpu import machine  # noqa: E402
from vllm_moe_dp_fix import settings  # noqa: E402

# The settings of each; the two servers know of no ranks.
WAYS: dict[str, dict[str, str]] = {
    "sharded": {settings.FP8_DISPATCH: "quantize_after_gather"},
    "shared scale": {settings.FP8_DISPATCH: "shared_scale"},
    "replicated": {settings.EXPERTS: "replicated"},
    "two servers": {},
}
RATIOS = (("shared scale", "sharded"), ("replicated", "sharded"), ("replicated", "two servers"))
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
            names, visible, ranks = [way.replace(" ", "-")], [WAYS[way]], 2
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


# --- results --------------------------------------------------------------------------------


def speeds(report: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Load -> way -> tokens a second, prompts included; the last load is all of them."""
    found: dict[str, dict[str, float]] = {}
    for way, results in report["ways"].items():
        for x in results:
            name = f"{x['name']} {x['prompt']} + {x['answer']} | {x['concurrency']}"
            found.setdefault(name, {})[way] = x["tokens_per_s"]
    tokens, seconds = (
        {way: sum(x[key] for x in results) for way, results in report["ways"].items()}
        for key in ("tokens", "seconds")
    )
    return {**found, "all |": {way: tokens[way] / seconds[way] for way in tokens}}


def show(report: dict[str, Any]) -> None:
    """A row a load."""
    print(f"\n{machine.words(report)}\n")
    ways = [way for way in WAYS if way in report["ways"]]
    ratios = [(one, other) for one, other in RATIOS if one in ways and other in ways]
    heads = [*ways, *(f"{one} / {other}" for one, other in ratios)]
    print(f"| load | concurrency | {' | '.join(heads)} |")
    print("|---" * (2 + len(heads)) + "|")
    for load, speed in speeds(report).items():
        cells = [f"{speed[way]:,.0f}" for way in ways]
        cells += [f"{speed[one] / speed[other]:.2f}" for one, other in ratios]
        print(f"| {load} | {' | '.join(cells)} |")


def plot(report: dict[str, Any], path: Path) -> None:
    """Each load's speeds, over that of sharded experts."""
    from matplotlib import pyplot

    ways = [way for way in WAYS if way in report["ways"]]
    found = speeds(report)
    figure, axes = pyplot.subplots(figsize=(11, 4.5))
    width = 0.8 / len(ways)
    labels = [load.removesuffix(" |").replace(" |", "\nat") for load in found]
    for index, way in enumerate(ways):
        places = [row + width * (index - (len(ways) - 1) / 2) for row in range(len(found))]
        heights = [speed[way] / speed[ways[0]] for speed in found.values()]
        axes.bar(places, heights, width, label=way)
    axes.set_xticks(range(len(found)), labels, fontsize=8)
    axes.set_ylabel(f"tokens/s over {ways[0]}")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.legend()
    axes.set_title(
        f"{report['layers']} layers of Qwen3-30B-A3B's shape, FP8; {machine.words(report)}"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=24, help="of 48 in the model (default: 24)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument(
        "--loads", nargs="+", choices=sorted({load.name for load in LOADS}), help="(default: all)"
    )
    parser.add_argument("--json", type=Path, help="write to this file, and add to what it has")
    parser.add_argument("--plot", type=Path, help="draw into this file (needs matplotlib)")
    parser.add_argument("--read", type=Path, help="show the results in this file, measure nothing")
    parser.add_argument("--client", nargs=2, metavar=("MODEL", "INDEX"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        run_client(arguments.client[0], int(arguments.client[1]))
        return 0
    try:
        if arguments.read:
            report = json.loads(arguments.read.read_text())
        else:
            report = measure_all(arguments.ways, arguments.layers, arguments.loads, arguments.json)
    except demo.DemoError as error:
        print(f"FAILED: {error}")
        return 1
    show(report)
    if arguments.plot:
        plot(report, arguments.plot)
    return 0


def measure_all(
    ways: Sequence[str], layers: int, names: Sequence[str] | None, path: Path | None
) -> dict[str, Any]:
    """The loads of these names in these ways, beside the ways that the file has."""
    lane = demo.pick_lane()
    if lane is demo.CPU:
        print("on the CPU this shows that it runs, and nothing else")
        model, loads = demo.make_model("qwen3-moe", lane), TINY
    else:
        model = make_model(layers)
        loads = tuple(load for load in LOADS if not names or load.name in names)
        lane = demo.Lane("CUDA", SERVER_FLAGS, lane.environ, {}, "", same_tokens=False)
    known = json.loads(path.read_text())["ways"] if path and path.exists() else {}
    report: dict[str, Any] = {**machine.describe(), "layers": layers, "ways": known}
    clients = [Client(model, index) for index in range(CLIENTS)]
    try:
        for way in ways:
            print(f"\n{way}", flush=True)
            report["ways"][way] = []
            with served(model, lane, way) as servers:
                for load in loads:
                    measure(clients, servers, load)
                    found = measure(clients, servers, load)
                    report["ways"][way].append({**asdict(load), **found})
                    said = f"{load.name} {load.prompt} + {load.answer} at {load.concurrency}"
                    print(f"    {said}: {found['tokens_per_s']:,.0f} tokens/s", flush=True)
            if path:
                path.write_text(json.dumps(report, indent=1) + "\n")
    finally:
        for client in clients:
            client.process.kill()
    return report


if __name__ == "__main__":
    sys.exit(main())
