#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Serves an MoE model with two data-parallel ranks, first without the plugin and then with it.

Needs a vLLM beside it; ``scripts/demo.sh`` brings one. On two CUDA GPUs the model is served with
``--quantization fp8``; else it is served in FP32 on the CPU. Exits 0 where vLLM failed without the
plugin and answered every request with it, with the tokens of a single rank.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PLUGINS = "moe_dp_dispatch,moe_dp_all_gather"
START_TIMEOUT_S = 420
ANSWER_TIMEOUT_S = 180
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "vllm-moe-dp-fix", "demo")

# (prompt tokens, answer tokens): unequal, so that the ranks' steps differ
REQUESTS = ((3, 8), (50, 8), (7, 20), (90, 30), (1, 5), (33, 17))


@dataclass(frozen=True)
class Lane:
    """Where the demo runs.

    Attributes:
        fault: What vLLM says there without the plugin (regular expression).
        same_tokens: Whether DP=2 must give the very tokens of DP=1. FP8 with one scale for all
            rows depends on what is batched together, so there they may differ.
    """

    name: str
    flags: tuple[str, ...]
    environ: dict[str, str]
    size: dict[str, int]
    fault: str
    same_tokens: bool


CPU = Lane(
    "CPU, FP32",
    ("--dtype", "float32", "--enforce-eager", "--max-model-len", "128", "--max-num-seqs", "8"),
    {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_SIM_MULTI_NUMA": "1", "OMP_NUM_THREADS": "1"},
    {"hidden": 128, "expert": 64, "experts": 8, "heads": 4, "head": 32},
    r"NotImplementedError",
    same_tokens=True,
)
CUDA = Lane(
    "CUDA, FP8",
    (
        *("--quantization", "fp8", "--enforce-eager", "--max-model-len", "512"),
        *("--max-num-seqs", "8", "--gpu-memory-utilization", "0.3"),
    ),
    {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0"},
    {"hidden": 1024, "expert": 512, "experts": 32, "heads": 8, "head": 128},
    r"AssertionError: \d+ != \d+",
    same_tokens=False,
)


# --- model ----------------------------------------------------------------------------------


def make_model(kind: str, lane: Lane) -> Path:
    """Writes a small checkpoint with random weights, once."""
    size = lane.size
    folder = CACHE / f"{kind}-{size['hidden']}"
    if (folder / "done").exists():
        return folder
    import torch
    import transformers

    shared: dict[str, Any] = {
        "vocab_size": 1000,
        "hidden_size": size["hidden"],
        "intermediate_size": size["hidden"],
        "num_hidden_layers": 2,
        "num_attention_heads": size["heads"],
        "num_key_value_heads": 2,
        "head_dim": size["head"],
        "num_experts": size["experts"],
        "moe_intermediate_size": size["expert"],
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if kind == "qwen3-moe":
        config = transformers.Qwen3MoeConfig(
            **shared, num_experts_per_tok=2, norm_topk_prob=True, tie_word_embeddings=False
        )
        build = transformers.Qwen3MoeForCausalLM
    else:
        config = transformers.Gemma4TextConfig(
            **shared,
            top_k_experts=2,
            enable_moe_block=True,
            global_head_dim=size["head"],
            sliding_window=64,
            layer_types=["sliding_attention", "full_attention"],
            vocab_size_per_layer_input=shared["vocab_size"],
            hidden_size_per_layer_input=0,
        )
        build = transformers.Gemma4ForCausalLM
    torch.manual_seed(0)
    model = build(config).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:  # wide enough that the largest logit stands out
            torch.nn.init.normal_(parameter, std=0.3 if lane is CPU else 0.05)
        elif kind == "gemma4-moe" and "post_" in name:
            # Layers that outweigh the embeddings, which the head is tied to; else it only echoes.
            torch.nn.init.constant_(parameter, 16.0)
    model.save_pretrained(folder)
    _make_tokenizer(shared["vocab_size"]).save_pretrained(folder)
    (folder / "done").touch()
    return folder


def _make_tokenizer(vocab_size: int) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    words = [*special, *(f"w{i}" for i in range(len(special), vocab_size))]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    )


# --- server ---------------------------------------------------------------------------------


@dataclass
class Server:
    """A running ``vllm serve``."""

    port: int
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def lines(self, pattern: str) -> list[str]:
        return [line.strip() for line in self.text.splitlines() if re.search(pattern, line)]


@contextlib.contextmanager
def serve(model: Path, lane: Lane, name: str, ranks: int, plugins: str) -> Iterator[Server]:
    """Starts a server, waits until it is healthy, and ends it with all its processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = CACHE / f"{model.name}-{name}.log"
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "demo"]
    command += ["--data-parallel-size", str(ranks), *lane.flags]
    environ = {
        **os.environ,
        **lane.environ,
        "VLLM_PLUGINS": plugins,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environ, stdout=output, stderr=output, start_new_session=True
        )
    server = Server(port, log, process)
    try:
        _wait_until_healthy(server)
        yield server
    finally:
        _stop(process)


def _wait_until_healthy(server: Server) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            break
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=5).close()
            return
        time.sleep(0.5)
    tail = "\n".join(server.text.splitlines()[-30:])
    raise RuntimeError(f"vllm serve did not become healthy; {server.log} ends with:\n{tail}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
    process.wait()


# --- requests -------------------------------------------------------------------------------


@dataclass
class Case:
    """What one server made of the requests.

    Attributes:
        tokens: The answers' token ids, None where there was none.
        errors: What the client got instead.
        said: vLLM's own error, from its log.
    """

    name: str
    tokens: list[list[int] | None] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    said: str = ""

    @property
    def answered(self) -> int:
        return sum(tokens is not None for tokens in self.tokens)


class Progress:
    """Shows tokens as they arrive, on one line where there is a terminal."""

    def __init__(self) -> None:
        self._counts = [0] * len(REQUESTS)
        self._lock = threading.Lock()

    def add(self, index: int, tokens: int, done: bool = False) -> None:
        with self._lock:
            self._counts[index] += tokens
            if sys.stdout.isatty():
                sys.stdout.write(f"\r    {self}")
                sys.stdout.flush()
            elif done:
                print(f"    {self}", flush=True)

    def __str__(self) -> str:
        shown = (f"{n}/{r[1]}" for n, r in zip(self._counts, REQUESTS, strict=True))
        return "tokens received: " + "  ".join(f"{text:>5}" for text in shown)


def ask_all(server: Server, name: str, stream: bool) -> Case:
    """Sends all requests at once."""
    case, progress = Case(name), Progress()

    def one(index: int) -> list[int] | str:
        try:
            return _ask(server.port, index, progress if stream else None)
        except urllib.error.HTTPError as error:
            return f"HTTP {error.code}: {error.read(200).decode(errors='replace')}"
        except (OSError, ValueError, KeyError) as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        for result in pool.map(one, range(len(REQUESTS))):
            failed = isinstance(result, str)
            case.tokens.append(None if isinstance(result, str) else result)
            case.errors += [str(result)] if failed else []
    if stream and sys.stdout.isatty():
        print()
    return case


def _ask(port: int, index: int, progress: Progress | None) -> list[int]:
    """One greedy completion, its tokens as they arrive where ``progress`` is given."""
    length, count = REQUESTS[index]
    body = {
        "model": "demo",
        "prompt": [10 + (37 * index + 7 * i) % 900 for i in range(length)],
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": progress is not None,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    tokens: list[int] = []
    with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as response:
        if progress is None:
            return list(json.load(response)["choices"][0]["token_ids"])
        for raw in response:
            data = raw.decode().removeprefix("data: ").strip()
            if not data or data == "[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise ValueError(chunk["error"]["message"])
            for choice in chunk["choices"]:
                tokens += choice["token_ids"] or []
                progress.add(index, len(choice["token_ids"] or []))
    if len(tokens) != count:
        raise ValueError(f"{len(tokens)} tokens of {count}")
    progress.add(index, 0, done=True)
    return tokens


# --- demo -----------------------------------------------------------------------------------


def run_before(model: Path, lane: Lane) -> Case:
    with serve(model, lane, "before", 2, plugins="") as server:
        case = ask_all(server, "DP=2 without the plugin", stream=False)
        found = server.lines(lane.fault)
        case.said = re.sub(r".*?(?=\w+Error)", "", found[-1], count=1) if found else ""
    return case


def run_after(model: Path, lane: Lane) -> tuple[Case, list[str]]:
    """The case, and the plugin's own lines in the log."""
    with serve(model, lane, "after", 2, plugins=PLUGINS) as server:
        case = ask_all(server, "DP=2 with the plugin", stream=True)
        return case, server.lines(r"moe_dp_\w+ on vLLM")


def run_reference(model: Path, lane: Lane) -> Case:
    with serve(model, lane, "reference", 1, plugins="") as server:
        return ask_all(server, "DP=1 without the plugin", stream=False)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", choices=("qwen3-moe", "gemma4-moe"), default="qwen3-moe")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args(argv)

    lane = pick_lane()
    CACHE.mkdir(parents=True, exist_ok=True)
    model = make_model(arguments.model, lane)
    print(f"{arguments.model} with random weights, {lane.name}; logs in {CACHE}\n")

    print("1. vllm serve --data-parallel-size 2, without the plugin")
    before = run_before(model, lane)
    print(f"    {before.errors[0] if before.errors else 'every request was answered'}")
    print(f"    vLLM says: {before.said or 'nothing of the fault'}\n", flush=True)

    print("2. the same with the plugin")
    after, lines = run_after(model, lane)
    for line in dict.fromkeys(re.sub(r".*(?=moe_dp_\w+ on vLLM)", "", line) for line in lines):
        print(f"    log: {line}")
    for error in after.errors:
        print(f"    {error}")

    print("\n3. one rank, for comparison")
    reference = run_reference(model, lane)
    held = report((before, after, reference), lane)
    if arguments.json:
        cases = [asdict(case) for case in (before, after, reference)]
        arguments.json.write_text(json.dumps({"held": held, "lane": lane.name, "cases": cases}))
    return 0 if held else 1


def pick_lane() -> Lane:
    import torch

    return CUDA if torch.version.cuda and torch.cuda.device_count() >= 2 else CPU


def report(cases: tuple[Case, Case, Case], lane: Lane) -> bool:
    """Prints the table and says whether the demonstration held."""
    before, after, reference = cases
    print(f"\n{'':26}{'answered':>10}  {'as DP=1':>8}  error")
    for case in cases:
        equal = sum(
            a is not None and a == b for a, b in zip(case.tokens, reference.tokens, strict=True)
        )
        total = len(REQUESTS)
        error = case.said or (case.errors[0] if case.errors else "")
        print(f"{case.name:26}{f'{case.answered}/{total}':>10}  {f'{equal}/{total}':>8}  {error}")
    problems = []
    if not before.errors or not before.said:
        problems.append(
            "vLLM did not fail as expected without the plugin; this one may be repaired"
        )
    if after.answered < len(REQUESTS):
        problems.append("not every request was answered with the plugin")
    if reference.answered < len(REQUESTS):
        problems.append("one rank did not answer every request")
    if lane.same_tokens and after.tokens != reference.tokens:
        problems.append("the tokens differ from those of one rank")
    if not lane.same_tokens:
        print("FP8 tokens may differ from DP=1: the one scale depends on what is batched together.")
    print("\n" + ("\n".join(f"FAILED: {text}" for text in problems) or "The demonstration held."))
    return not problems


if __name__ == "__main__":
    sys.exit(main())
