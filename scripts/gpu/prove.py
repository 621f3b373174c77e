#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Shows every fault on two ranks without the plugin, and the repair with it.

Each case runs twice, without any plugin and with all fixes. It is proven where the second run is
right and the first fails or is wrong, or, in a release that does not have the fault, is right too.
Engines are judged by the logprobs of their prompts' tokens: their distance to BF16 on one rank,
beside the one that quantization has there by itself. Several cases run at once; the models are
small and random. A GPU a rank is what it is for; on a single one both ranks share that, slowly. On
a CPU build of vLLM the parts that it can run show that this script does.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts import demo
from scripts.gpu import checkpoints, machine, marks, offline, sharing
from scripts.gpu.checkpoints import FIRST_OUTLIER
from vllm_moe_dp_fix import settings
from vllm_moe_dp_fix.host import detect
from vllm_moe_dp_fix.registry import FIX_IDS
from vllm_moe_dp_fix.releases import AFFECTED

PARTS = ("serve", "offline", "schemes", "replicas", "nixl", "bits")
CPU_PARTS = ("serve", "offline", "replicas")
PLUGINS = ",".join(FIX_IDS)
AT_ONCE = 14
SCRIPT_TIMEOUT_S = 300
LEAD_S = 0.2  # in which rank 0's answer begins

# How far logprobs may be, from BF16 and from one rank with the same quantization, in units of what
# that rank is from BF16, beside what rounding alone makes. Two ranks are not one: weights, and
# activations between the two projections, have a scale a shard, and rows that are batched together
# share one. So their errors are as large, but others: up to 1.21 was seen where all is right, and
# at least 1.48 with a fault.
AS_FAR, ROUNDING = 1.3, 0.02

GRAPH_SIZES = [1, 2, 4, 8, 16, 32, 64]
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "CUDA graphs": {"compilation_config": {"cudagraph_capture_sizes": GRAPH_SIZES}},
}
# No profiling, which the other engines on the GPU would disturb.
MEMORY = {"kv_cache_memory_bytes": 1 << 28, "gpu_memory_utilization": 0.1}


@dataclass(frozen=True)
class Finding:
    """What a case showed, without or with the plugin."""

    right: bool
    said: str


@dataclass(frozen=True)
class Case:
    """Something that is right with the plugin, and wrong without it where the release has a fault.

    Attributes:
        run: Takes the plugins to load, and finds something for each of ``names``.
        releases: Where the fault shows here (PEP 440), if not in all that have it.
    """

    part: str
    fault: str
    names: tuple[str, ...]
    run: Callable[[str], Sequence[Finding]]
    releases: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--json", type=Path, help="write to this file, and add to what it has")
    parser.add_argument("--nixl", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.nixl:
        return _nixl_main(arguments.nixl)
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")

    os.environ["VLLM_DISABLE_COMPILE_CACHE"] = "1"  # two engines at once would write one entry
    on_cpu = demo.pick_lane(gpus=1) is demo.CPU
    sharing.share_a_single_gpu()
    parts = [part for part in arguments.parts or PARTS if not on_cpu or part in CPU_PARTS]
    report: dict[str, Any] = {**machine.describe(), "cases": []}
    if arguments.json and arguments.json.exists():
        known = json.loads(arguments.json.read_text())["cases"]
        report["cases"] = [case for case in known if case["part"] not in parts]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        references = References(pool, min(2, len(report["gpus"])) or 1)
        for case in _prove(_cases(parts, references, on_cpu), pool):
            report["cases"].append(case)
            _show(case)
            if arguments.json:
                arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    proven = sum(case["proven"] for case in report["cases"])
    print(f"\n{machine.words(report)}: {proven} of {len(report['cases'])} cases proven")
    return 0 if report["cases"] and proven == len(report["cases"]) else 1


def _prove(cases: Sequence[Case], pool: ThreadPoolExecutor) -> Iterator[dict[str, Any]]:
    running = [
        (case, [pool.submit(_run, case, plugins) for plugins in ("", PLUGINS)]) for case in cases
    ]
    host = detect()
    for case, (without, with_) in running:
        is_affected = host.is_affected(case.releases or AFFECTED[case.fault]) is not False
        for name, before, after in zip(case.names, without.result(), with_.result(), strict=True):
            yield {
                "part": case.part,
                "case": name,
                "fault": case.fault if is_affected else f"{case.fault}, which does not show here",
                "proven": after.right and before.right != is_affected,
                "without": asdict(before),
                "with": asdict(after),
            }


def _run(case: Case, plugins: str) -> Sequence[Finding]:
    try:
        return case.run(plugins)
    except Exception as failure:
        said = f"{type(failure).__name__}: {str(failure)[:300]}"
        return [Finding(False, said)] * len(case.names)


def _show(case: dict[str, Any]) -> None:
    verdict = "proven" if case["proven"] else "NOT PROVEN"
    print(f"\n{verdict}: {case['part']}, {case['case']} ({case['fault']})")
    for run in ("without", "with"):
        finding = case[run]
        print(
            f"  {run:8} {'right' if finding['right'] else 'wrong'}: {finding['said']}", flush=True
        )


# --- what is right --------------------------------------------------------------------------


class References:
    """What one rank makes of a model, each run once, as soon as a judge is made that needs it."""

    def __init__(self, pool: ThreadPoolExecutor, gpus: int) -> None:
        self._pool, self._gpus = pool, gpus
        self._runs: dict[tuple[Any, ...], Any] = {}

    def judge(
        self,
        plain: Path,
        model: Path,
        quantization: str | None,
        plugins: str = "",
        mode: str = "eager",
    ) -> Judge:
        """Of ``model``, quantized and run so; one rank may need plugins for it."""
        self._start(plain, None, "", "eager")
        self._start(model, quantization, plugins, mode)
        return Judge(self, plain, model, quantization, mode)

    def _start(self, model: Path, quantization: str | None, plugins: str, mode: str) -> None:
        key = (model, quantization, mode)
        if key not in self._runs:
            gpu = {"CUDA_VISIBLE_DEVICES": str(len(self._runs) % self._gpus)}
            name = f"reference-{quantization}-{mode}".replace(" ", "-")
            options = _options(quantization, mode)
            run = partial(offline.generate, model, 1, plugins, name, environ=gpu, **options)
            self._runs[key] = self._pool.submit(run)

    def get(self, model: Path, quantization: str | None = None, mode: str = "eager") -> offline.Run:
        run: offline.Run = self._runs[model, quantization, mode].result()
        if run.errors:
            raise RuntimeError(f"one rank failed: {run.errors[0]}")
        return run


@dataclass(frozen=True)
class Judge:
    """Compares logprobs with those of one rank.

    Attributes:
        plain: The model in BF16, of which the quantized one is made.
        model, quantization, mode: What is run, and how: compiled kernels round otherwise.
    """

    references: References
    plain: Path
    model: Path
    quantization: str | None
    mode: str

    def __call__(self, shape: str, logprobs: offline.Logprobs) -> Finding:
        plain = self.references.get(self.plain).logprobs[shape]
        quantized = self.references.get(self.model, self.quantization, self.mode).logprobs[shape]
        own = _distance(quantized, plain)
        distance, apart = _distance(logprobs, plain), _distance(logprobs, quantized)
        right = max(apart, distance) <= AS_FAR * own + ROUNDING
        said = f"{apart:.3f} from one rank, {distance:.3f} from BF16; one rank from that {own:.3f}"
        return Finding(right, said)


def _distance(one: offline.Logprobs, other: offline.Logprobs) -> float:
    """The mean over the tokens, of the rank for which it is the largest."""
    worst = 0.0
    for ours, theirs in zip(one, other, strict=True):
        gaps = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
        mean = sum(gaps) / len(gaps)
        worst = mean if math.isnan(mean) else max(worst, mean)
    return worst


# --- cases ----------------------------------------------------------------------------------


def _cases(parts: Sequence[str], references: References, on_cpu: bool) -> list[Case]:
    lane = demo.CPU if on_cpu else demo.CUDA
    fp8 = None if on_cpu else "fp8"
    models = {kind: checkpoints.with_outliers(kind, lane) for kind in demo.MODELS}
    modes = ("eager",) if on_cpu else tuple(MODES)
    layouts = ("sharded",) if on_cpu else ("sharded", "expert parallel")
    cases = []
    for part, run in (("serve", _serve), ("offline", _offline)):
        shapes = ("unequal",) if part == "serve" else tuple(offline.PROMPTS)
        for kind, mode, layout in itertools.product(models, modes, layouts):
            if part in parts:
                judge = references.judge(models[kind], models[kind], fp8, mode=mode)
                name = f"{kind}, FP8, {layout}, {mode}"
                names = tuple(f"{name}, {shape} ranks" for shape in shapes)
                fault = "F2d" if on_cpu else "F1a"
                cases.append(Case(part, fault, names, partial(run, judge, layout)))
    if "replicas" in parts:
        for kind, model in models.items():
            run_one = partial(_replicated, references.judge(model, model, fp8))
            cases.append(Case("replicas", "F1d", (f"{kind}, FP8, replicated experts",), run_one))
    qwen = models[demo.MODELS[0]]
    if "schemes" in parts:
        cases += _scheme_cases(references, qwen)
    if "nixl" in parts:
        cases += _nixl_cases(references.judge(qwen, qwen, fp8))
    if "bits" in parts:
        cases.append(Case("bits", "F1a", ("rows and scale as one rank's quantizer",), _bits))
    return cases


def _options(quantization: str | None, mode: str, layout: str = "sharded") -> dict[str, Any]:
    """Of ``LLM``; the flags of a server are made of them."""
    options: dict[str, Any] = {**MODES[mode], "enable_expert_parallel": layout != "sharded"}
    if quantization:
        options["quantization"] = quantization
    if demo.pick_lane(gpus=1) is demo.CPU:
        return {**options, "dtype": "float32"}
    return {**options, **MEMORY}


def _offline(judge: Judge, layout: str, plugins: str) -> list[Finding]:
    """Equal ranks first: unequal ones end the engine where it has the fault."""
    options = _options(judge.quantization, judge.mode, layout)
    name = f"{layout}-{judge.mode}-{bool(plugins)}".replace(" ", "-")
    run = offline.generate(judge.model, 2, plugins, name, **options)
    return [
        judge(shape, run.logprobs[shape])
        if shape in run.logprobs
        else Finding(False, (run.errors or ["no answer"])[0])
        for shape in offline.PROMPTS
    ]


def _serve(judge: Judge, layout: str, plugins: str) -> list[Finding]:
    options = _options(judge.quantization, judge.mode, layout)
    return _served(judge, options, plugins, f"{layout}-{judge.mode}")


def _served(
    judge: Judge,
    options: dict[str, Any],
    plugins: str,
    name: str,
    environ: dict[str, str] | None = None,
    log: str = "",
) -> list[Finding]:
    """``vllm serve``; ``log`` is what its log must say to be right."""
    flags = ["--max-model-len", "128", "--max-num-seqs", "32", "--no-enable-prefix-caching"]
    flags += ["--api-server-count", "1"]
    for key, value in options.items():
        flag = "--" + key.replace("_", "-")
        if isinstance(value, bool):
            flags += [flag] if value else []
        else:
            flags += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    picked = demo.pick_lane(gpus=1)
    environ = {**picked.environ, **(environ or {})}
    lane = dataclasses.replace(picked, flags=tuple(flags), environ=environ)
    name = f"{name}-{bool(plugins)}".replace(" ", "-")
    with demo.serve(judge.model, lane, name, 2, plugins) as server:
        server.wait_until_healthy(quiet=True)
        try:
            logprobs = _ask_both(server)
        except OSError as failure:
            said = demo.last_error(server, lane) or "; ".join(server.lines(r"\w+Error\b")[-1:])
            return [Finding(False, f"{failure}: {said[-300:]}")]
        text = server.text
    finding = judge("unequal", logprobs)
    if log not in text:
        finding = Finding(False, f"the log does not say {log!r}; {finding.said}")
    return [finding]


def _ask_both(server: demo.Server) -> offline.Logprobs:
    """Rank 1 is asked while rank 0 answers: its rows are always batched with outliers."""
    asked = [[(rank, prompt) for prompt in offline.prompts("unequal", rank)] for rank in range(2)]
    with ThreadPoolExecutor(sum(map(len, asked))) as pool:
        running = [pool.submit(_ask, server, *request) for request in asked[0]]
        time.sleep(LEAD_S)
        running += [pool.submit(_ask, server, *request) for request in asked[1]]
        found = [request.result() for request in running]
    logprobs: offline.Logprobs = [[], []]
    for (rank, _), values in zip(itertools.chain(*asked), found, strict=True):
        logprobs[rank] += values
    return logprobs


def _ask(server: demo.Server, rank: int, prompt: list[int]) -> list[float]:
    """The logprobs of the prompt's tokens; rank 0 goes on with outliers for a while."""
    options: dict[str, Any] = {"max_tokens": 8}
    if rank == 0:
        options = {"max_tokens": 110, "allowed_token_ids": list(range(FIRST_OUTLIER, 1000))}
    with demo.complete(server, rank, prompt, prompt_logprobs=0, **options) as response:
        tokens = json.load(response)["choices"][0]["prompt_logprobs"][1:]
    return [next(iter(token.values()))["logprob"] for token in tokens]


def _replicated(judge: Judge, plugins: str) -> list[Finding]:
    options, environ = _options(judge.quantization, "eager"), {settings.EXPERTS: "replicated"}
    return _served(judge, options, plugins, "replicated", environ, "2 independent replicas")


def _scheme_cases(references: References, plain: Path) -> list[Case]:
    """Quantized checkpoints, and BF16 that is quantized as it loads."""
    narrow = checkpoints.with_outliers("qwen3-moe", demo.CUDA, expert=352)  # 5.5 blocks a rank
    static, packed = checkpoints.static_fp8(plain), checkpoints.mxfp4(narrow)
    judges = {
        ("F1b", "FP8 checkpoint with static scales"): references.judge(plain, static, None),
        ("F3d", "MXFP4 checkpoint, experts of 352"): references.judge(
            narrow, packed, None, PLUGINS
        ),
        ("F3f", "BF16 checkpoint with mxfp4, experts of 352"): references.judge(
            narrow, narrow, "mxfp4", PLUGINS
        ),
    }
    return [
        Case(
            "schemes",
            fault,
            tuple(f"{name}, {shape} ranks" for shape in offline.PROMPTS),
            partial(_offline, judge, "sharded"),
            # From 0.22.0 Triton's experts take the scale from elsewhere where it is lost.
            releases="<0.22" if fault == "F1b" else "",
        )
        for (fault, name), judge in judges.items()
    ]


def _bits(plugins: str) -> list[Finding]:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        said = _script(plugins, "check_dispatch.py", "--json", file.name)
        text = Path(file.name).read_text()
    cases = json.loads(text) if text else []
    right = sum(case["right"] == "right" for case in cases)
    if not cases:
        return [Finding(False, _last_error(said))]
    return [Finding(right == len(cases), f"{right} of {len(cases)} cases are right")]


def _script(plugins: str, name: str, *arguments: str) -> list[str]:
    """The lines that a script beside this one says."""
    command = [sys.executable, str(Path(__file__).with_name(name)), *arguments]
    environ = {**os.environ, "VLLM_PLUGINS": plugins, "VLLM_LOGGING_LEVEL": "WARNING"}
    done = subprocess.run(
        command,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SCRIPT_TIMEOUT_S,
    )
    return done.stdout.splitlines()


def _last_error(lines: Sequence[str]) -> str:
    errors = [line for line in lines if "Error" in line]
    return next((line[-300:] for line in reversed([*lines, *errors]) if line.strip()), "no result")


# --- EPLB over NIXL -------------------------------------------------------------------------

PLANTED = {"dtype": "another dtype of the same size", "size": "another number of bytes an expert"}


def _nixl_cases(judge: Judge) -> list[Case]:
    fault = "F4a" if detect().is_affected(AFFECTED["F4a"]) else "F4c"
    planted = [
        Case("nixl", fault, (f"EPLB over NIXL, planted: {words}",), partial(_planted, plant))
        for plant, words in PLANTED.items()
    ]
    name = "EPLB over NIXL, FP8, experts have moved"
    return [Case("nixl", "F1a", (name,), partial(_moved, judge)), *planted]


def _moved(judge: Judge, plugins: str) -> list[Finding]:
    """The logprobs are still those of one rank once experts have moved between ranks."""
    options = _options(judge.quantization, "eager", "expert parallel")
    balancing: dict[str, Any] = {"window_size": 4, "step_interval": 4, "num_redundant_experts": 4}
    balancing |= {"communicator": "nixl", "use_async": False}  # only then the log says when
    options |= {"enable_eplb": True, "eplb_config": balancing}
    run = offline.generate(
        judge.model, 2, plugins, f"eplb-{bool(plugins)}", ("unequal",), rounds=6, **options
    )
    if "unequal" not in run.logprobs:
        return [Finding(False, (run.errors or ["no answer"])[0])]
    times = run.log.count("Rearranged experts   in")
    finding = judge("unequal", run.logprobs["unequal"])
    return [Finding(finding.right and times > 0, f"moved {times} times; {finding.said}")]


def _planted(plant: str, plugins: str) -> list[Finding]:
    """Both ranks must say the same, and name the odd one and what differs."""
    lines = _script(plugins, Path(__file__).name, "--nixl", plant)
    found = marks.read(lines)
    if len(found) != 2:
        return [Finding(False, _last_error(lines))]
    if not all(found):
        return [Finding(False, "taken without a word")]
    alike = found[0] == found[1]
    wanted = {"dtype": "float8_e4m3fn on rank 1", "size": "bytes an expert"}[plant]
    right = alike and wanted in found[0] and "rank 1" in found[0]
    said = found[0].replace("\n", " ") if alike else f"rank 0: {found[0]} / rank 1: {found[1]}"
    return [Finding(right, said[:400])]


def _nixl_main(plant: str) -> int:
    from scripts.gpu.ranks import spawn

    for said in spawn(_set_up_nixl, plant):
        marks.write(said[0])
    return 0


def _set_up_nixl(rank: int, config: Any, plant: str) -> list[str]:
    """What the communicator of this rank raises; rank 1 has other experts than rank 0."""
    import torch
    from vllm.distributed import get_dp_group
    from vllm.distributed.eplb import eplb_communicator

    dtype = torch.float8_e4m3fn if rank == 1 and plant == "dtype" else torch.uint8
    width = 128 if rank == 1 and plant == "size" else 96
    layers = [
        [torch.zeros(4, width, dtype=torch.uint8, device="cuda").view(dtype)] for _ in range(2)
    ]
    made = eplb_communicator.NixlEplbCommunicator
    group = get_dp_group().cpu_group
    try:
        if "expert_weights" in inspect.signature(made).parameters:  # to 0.22
            made(group, layers[0])
        else:
            made(group, layers, [torch.zeros_like(tensor) for tensor in layers[0]])
    except Exception as failure:
        cause: BaseException = failure
        while cause.__cause__:
            cause = cause.__cause__
        return [str(cause)]
    return [""]


if __name__ == "__main__":
    sys.exit(main())
