#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Serves an MoE model with two data-parallel ranks, first without the plugin and then with it.

Needs a vLLM beside it; ``scripts/demo.sh`` brings one. On two CUDA GPUs the model is served with
``--quantization fp8``; else it is served in FP32 on the CPU. Each rank holds all experts under
``VLLM_MOE_DP_FIX_EXPERTS=replicated``. Exits 0 where vLLM failed without the plugin and answered
every request with it, with the tokens of a single rank.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import inspect
import itertools
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
from hashlib import sha256
from pathlib import Path
from typing import Any

from vllm_moe_dp_fix import settings

MODELS = ("qwen3-moe", "gemma4-moe")
PLUGINS = "moe_dp_dispatch,moe_dp_all_gather"
PLUGIN_LINE = r"(moe_dp_\w+ on vLLM|experts: )"
START_TIMEOUT_S = 420
ANSWER_TIMEOUT_S = 180
STOP_TIMEOUT_S = 8
TAIL_LINES = 30
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "vllm-moe-dp-fix", "demo")

_PORTS = itertools.count(20_000 + 60 * (os.getpid() % 150), step=10)

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
    """Writes a small checkpoint with random weights, once for every state of this function."""
    size = lane.size
    recipe = inspect.getsource(make_model) + inspect.getsource(make_tokenizer) + repr(size)
    folder = CACHE / f"{kind}-{size['hidden']}-{sha256(recipe.encode()).hexdigest()[:8]}"
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
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    model = build(config).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:  # wide enough that the largest logit stands out
            torch.nn.init.normal_(parameter, std=0.3 if lane is CPU else 0.05)
        elif kind == "gemma4-moe" and "post_" in name:
            # Layers that outweigh the embeddings, which the head is tied to; else it only echoes.
            torch.nn.init.constant_(parameter, 16.0)
    model.save_pretrained(folder)
    make_tokenizer(shared["vocab_size"]).save_pretrained(folder)
    (folder / "done").touch()
    return folder


def make_tokenizer(vocab_size: int) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    words = [*special, *(f"w{i}" for i in range(len(special), vocab_size))]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template="{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}",
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    )


# --- server ---------------------------------------------------------------------------------


class DemoError(RuntimeError):
    """The demonstration could not be carried out; the text is for the user."""


@dataclass
class Server:
    """A ``vllm serve``."""

    port: int
    ranks: int
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def tail(self) -> str:
        return f"{self.log} ends with:\n" + "\n".join(self.text.splitlines()[-TAIL_LINES:])

    def lines(self, pattern: str) -> list[str]:
        return [line.strip() for line in self.text.splitlines() if re.search(pattern, line)]

    def wait_until_healthy(self, quiet: bool = False) -> None:
        if not quiet:
            print("    starting, a minute or two ...", end="", flush=True)
        began = time.monotonic()
        while time.monotonic() < began + START_TIMEOUT_S:
            if self.process.poll() is not None:
                raise DemoError(f"vllm serve ended at its start; {self.tail}")
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
                if not quiet:
                    print(f" healthy after {time.monotonic() - began:.0f} s", flush=True)
                return
            time.sleep(0.5)
        raise DemoError(f"vllm serve was not healthy after {START_TIMEOUT_S} s; {self.tail}")


@contextlib.contextmanager
def serve(model: Path, lane: Lane, name: str, ranks: int, plugins: str) -> Iterator[Server]:
    """Starts a server, and ends it with all its processes."""
    port = free_port()
    CACHE.mkdir(parents=True, exist_ok=True)
    log = CACHE / f"{model.name}-{name}.log"
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "demo"]
    command += ["--data-parallel-size", str(ranks), *lane.flags]
    environ = {
        **os.environ,
        **lane.environ,
        "VLLM_PLUGINS": plugins,  # "" loads none
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with log.open("wb") as output:
        # Not in the checkout's folder: the plugin that is installed counts.
        process = subprocess.Popen(
            command, cwd=CACHE, env=environ, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield Server(port, ranks, log, process)
    finally:
        _stop(process)


def free_port(count: int = 1) -> int:
    """The first of ``count`` free ports, below those that the system hands out by itself."""
    while True:
        first = next(_PORTS)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the process group, also where a second Ctrl-C comes while it is waited for."""
    try:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(STOP_TIMEOUT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# --- requests -------------------------------------------------------------------------------


@dataclass
class Case:
    """What one server made of the requests.

    Attributes:
        tokens: The answers' token ids, None where there was none.
        errors: What the client got instead.
        said: vLLM's own error, from its log.
        plugin: The plugin's lines in the log.
        log: The server's log.
    """

    name: str
    log: str
    tokens: list[list[int] | None] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    said: str = ""
    plugin: list[str] = field(default_factory=list)

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


def ask_all(server: Server, name: str, stream: bool, is_balanced: bool = False) -> Case:
    """Sends all requests at once, to the ranks in turn or where vLLM balances them."""
    case, progress = Case(name, str(server.log)), Progress()

    def one(index: int) -> list[int] | str:
        try:
            rank = None if is_balanced else index % server.ranks
            return _ask(server, index, rank, progress if stream else None)
        except urllib.error.HTTPError as error:
            return f"HTTP {error.code}: {error.read(200).decode(errors='replace')}"
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            return f"{type(error).__name__}: {error}"

    pool = ThreadPoolExecutor(len(REQUESTS))
    try:
        for result in pool.map(one, range(len(REQUESTS))):
            case.tokens.append(None if isinstance(result, str) else result)
            case.errors += [result] if isinstance(result, str) else []
    finally:
        pool.shutdown(wait=False)  # on Ctrl-C the server goes first, and the requests with it
    if stream and sys.stdout.isatty():
        print()
    case.plugin = server.lines(PLUGIN_LINE)
    return case


def complete(server: Server, rank: int | None, prompt: list[int], **options: Any) -> Any:
    """The response to a greedy completion, by that rank if any; ``options`` are its fields."""
    body = {"model": "demo", "prompt": prompt, "temperature": 0, "ignore_eos": True, **options}
    headers = {"Content-Type": "application/json"}
    headers |= {} if rank is None else {"X-data-parallel-rank": str(rank)}
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/completions", json.dumps(body).encode(), headers
    )
    return urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S)


def _ask(server: Server, index: int, rank: int | None, progress: Progress | None) -> list[int]:
    """One greedy completion, its tokens as they arrive where ``progress`` is given."""
    length, count = REQUESTS[index]
    options = {"max_tokens": count, "return_token_ids": True, "stream": progress is not None}
    prompt = [10 + (37 * index + 7 * i) % 900 for i in range(length)]
    tokens: list[int] = []
    with complete(server, rank, prompt, **options) as response:
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


@dataclass
class Outcome:
    """What the three servers made of the same requests."""

    before: Case
    after: Case
    reference: Case

    @property
    def cases(self) -> tuple[Case, Case, Case]:
        return self.before, self.after, self.reference

    def problems(self, lane: Lane) -> list[str]:
        """What keeps the demonstration from holding, in words."""
        found = []
        if not self.before.errors:
            found.append("vLLM does not fail without the plugin: this one seems to be repaired")
        elif not self.before.said or not any("HTTP 500" in e for e in self.before.errors):
            found.append("vLLM fails in another way than expected without the plugin")
        if self.after.answered < len(REQUESTS):
            found.append("not every request was answered with the plugin")
        if self.reference.answered < len(REQUESTS):
            found.append("one rank did not answer every request")
        if lane.same_tokens and self.after.tokens != self.reference.tokens:
            found.append("the tokens differ from those of one rank")
        are_replicas = any("independent replicas" in line for line in self.after.plugin)
        if settings.experts() == "replicated" and not are_replicas:
            found.append(f"the ranks were no replicas, though {settings.EXPERTS} asks for them")
        return found


def demonstrate(model: Path, lane: Lane) -> Outcome:
    """Serves the model in the three ways, and says on the way what happens."""
    # The reference starts up while the first server fails.
    with serve(model, lane, "reference", 1, plugins="") as alone:
        _title("1. vllm serve --data-parallel-size 2, without the plugin")
        with serve(model, lane, "before", 2, plugins="") as server:
            server.wait_until_healthy()
            if lane is CUDA:  # memory that another server frees disturbs vLLM's profiling
                alone.wait_until_healthy()
            before = ask_all(server, "DP=2 without the plugin", stream=False)
            before.said = last_error(server, lane)
        print(f"    {before.errors[0] if before.errors else 'every request was answered'}")
        print(f"    vLLM says: {before.said or 'nothing of the fault'}", flush=True)

        _title("2. one rank, without the plugin, for comparison")
        alone.wait_until_healthy()
        reference = ask_all(alone, "DP=1 without the plugin", stream=False)
        _show_failure(reference, alone)
        print(f"    {reference.answered} of {len(REQUESTS)} requests answered", flush=True)

    _title("3. vllm serve --data-parallel-size 2, with the plugin")
    with serve(model, lane, "after", 2, plugins=PLUGINS) as server:
        server.wait_until_healthy()
        after = ask_all(server, "DP=2 with the plugin", stream=True)
        for line in dict.fromkeys(re.sub(f".*?(?={PLUGIN_LINE})", "", x) for x in after.plugin):
            print(f"    log: {line}", flush=True)
        _show_failure(after, server)
    return Outcome(before, after, reference)


def _title(text: str) -> None:
    print(f"\n{text}", flush=True)


def last_error(server: Server, lane: Lane) -> str:
    """vLLM's error, and the function that raised it."""
    found = [re.sub(r".*?(?=\w+Error)", "", x, count=1) for x in server.lines(f"{lane.fault}$")]
    places = server.lines(r'File ".*", line \d+, in (all_gatherv|reduce_scatterv|dispatch)')
    place = re.search(r"([\w.]+)\", line (\d+), in (\w+)", places[-1]) if places else None
    where = f", in {place[3]} ({place[1]}:{place[2]})" if place else ""
    return found[-1] + where if found else ""


def _show_failure(case: Case, server: Server) -> None:
    for error in case.errors:
        print(f"    {error}")
    if case.errors:
        print(f"    {server.tail}", flush=True)


def pick_lane(gpus: int = 2) -> Lane:
    """The lane for the vLLM that is installed here; CUDA's needs that many GPUs."""
    import torch

    if not torch.version.cuda:
        return CPU
    if torch.cuda.device_count() < gpus:
        raise DemoError(
            f"a vLLM for CUDA needs {gpus} GPUs here; scripts/demo.sh takes one for CPU"
        )
    return CUDA


def report(outcome: Outcome, lane: Lane) -> bool:
    """Prints the table and says whether the demonstration held."""
    print(f"\n{'server':26}{'answered':>10}{'as DP=1':>10}  error")
    total = len(REQUESTS)
    for case in outcome.cases:
        pairs = zip(case.tokens, outcome.reference.tokens, strict=True)
        equal = sum(ours is not None and ours == theirs for ours, theirs in pairs)
        error = case.said or (case.errors[0] if case.errors else "-")
        print(f"{case.name:26}{f'{case.answered}/{total}':>10}{f'{equal}/{total}':>10}  {error}")
    print("\nlogs:", *(f"  {case.log}" for case in outcome.cases), sep="\n")
    if not lane.same_tokens:
        print("FP8 tokens may differ from DP=1: the one scale depends on what is batched together.")
        pairs = zip(outcome.after.tokens, outcome.reference.tokens, strict=True)
        first = sum(bool(ours and theirs and ours[0] == theirs[0]) for ours, theirs in pairs)
        print(f"First tokens that agree with DP=1: {first} of {total}.")
    problems = outcome.problems(lane)
    print("\n" + ("\n".join(f"FAILED: {text}" for text in problems) or "The demonstration held."))
    return not problems


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args(argv)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        lane = pick_lane()
        print(f"{arguments.model} with random weights, {lane.name}; logs in {CACHE}", flush=True)
        outcome = demonstrate(make_model(arguments.model, lane), lane)
    except DemoError as error:
        print(f"\nFAILED: {error}")
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the servers are stopped")
        return 128 + signal.SIGINT
    held = report(outcome, lane)
    if arguments.json:
        result = {"held": held, "lane": lane.name, "model": arguments.model}
        result["cases"] = [asdict(case) for case in outcome.cases]
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
