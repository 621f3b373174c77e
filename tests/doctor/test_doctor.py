# SPDX-License-Identifier: Apache-2.0
"""The doctor on vLLM's own code of several releases, with models that are no more than headers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import models
import pytest
from packaging.version import Version
from trees import tree_of

from vllm_moe_dp_fix.host import Host
from vllm_moe_dp_fix.releases import AFFECTED

RELEASES = ("0.19.0", "0.22.1", "0.26.0", "0.33.0")
ROOT = Path(__file__).parents[2]
CUDA = ("--json", "--platform", "cuda", "--")
CPU = ("--json", "--platform", "cpu", "--")
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
EPLB = ("--enable-expert-parallel", "--enable-eplb")
NIXL = "--eplb-config.communicator=nixl"


class Case(NamedTuple):
    """A command and what must be said of it.

    Attributes:
        words: ``{}`` is the directory of the models.
        will, may: The faults that hit, in the releases that have them.
        code: The exit code.
        says: Parts of the report, as text.
        evidence: Part of a fault's evidence, in the releases that have it.
    """

    words: tuple[str, ...]
    will: str = ""
    may: str = ""
    code: int = 0
    says: tuple[str, ...] = ()
    evidence: tuple[tuple[str, str], ...] = ()


SERVE = ("vllm", "serve")
CASES = {
    # First, since vLLM loads its plugins, which strict mode would stop, once a process.
    "strict mode": Case(
        (
            *(*CUDA, "VLLM_MOE_DP_FIX_STRICT=1", "VLLM_MOE_DP_FIX_EXPERTS=many"),
            *(*SERVE, "{}/qwen3 moe", "-dp", "2"),
        ),
        code=1,
        says=("VLLM_MOE_DP_FIX_STRICT=1: VLLM_MOE_DP_FIX_EXPERTS='many' is unknown",),
    ),
    "gemma4, fp8": Case(
        (*CUDA, *SERVE, "{}/gemma4", "-dp", "2", "--quantization", "fp8"),
        will="F1a F2a",
        may="F2b",
        evidence=(
            (
                "F1a",
                "one dynamic activation scale a tensor for all rows of a rank, gathered over 2",
            ),
        ),
    ),
    "gemma4, fp8, off": Case(
        (
            *(*CUDA, "VLLM_MOE_DP_FIX_DISABLE=moe_dp_dispatch", *SERVE, "{}/gemma4"),
            *("-dp", "2", "--quantization=fp8"),
        ),
        will="F1a F2a",
        may="F2b",
        code=1,
        says=(
            "nothing: switched off, by VLLM_MOE_DP_FIX_DISABLE",
            "VLLM_MOE_DP_FIX_DISABLE so that it does not name moe_dp_dispatch",
        ),
    ),
    "gemma4, fp8, hidden": Case(
        (
            *(*CUDA, "VLLM_PLUGINS=moe_dp_all_gather", *SERVE, "{}/gemma4"),
            *("-dp", "2", "--quantization=fp8"),
        ),
        will="F1a F2a",
        may="F2b",
        code=1,
        says=(
            "VLLM_PLUGINS='moe_dp_all_gather' does not name it",
            '"hidden": true',
            '"set": "VLLM_PLUGINS=moe_dp_all_gather,moe_dp_dispatch"',
        ),
    ),
    "gemma4, mxfp4, from bf16": Case(
        (*CUDA, *SERVE, "{}/gemma4", "-dp=4", "--quantization", "mxfp4"),
        will="F3c F3f",
        may="F1c F3a F3b",
        evidence=(("F3c", "expert-TP 4: 176 columns a rank"),),
    ),
    "gemma4, mxfp4, packed": Case(
        (*CUDA, *SERVE, "{}/gemma4 mxfp4", "--data-parallel-size", "2", "-tp", "2"),
        will="F3a F3c F3d",
        may="F1c F3b",
        evidence=(("F3d", "intermediate 704, expert-TP 4: 176 columns a rank, 5.5 blocks of 32"),),
    ),
    "gemma4, mxfp4, packed, dummy": Case(
        (*CUDA, *SERVE, "{}/gemma4 mxfp4", "-dp", "4", "--load-format", "dummy"),
        will="F3c",
        may="F1c F3b",
        evidence=(("F3h", "no checkpoint is loaded"),),
    ),
    "gemma4, mxfp4, packed, experts whole": Case(
        (*CUDA, *SERVE, "{}/gemma4 mxfp4", "-dp", "4", "--enable-expert-parallel"),
        will="F3a",
        may="F1c F3b",
        says=('"expert_tp": 1',),
        evidence=(("F3d", "every expert lies whole on its rank"),),
    ),
    "floating-point scales": Case(
        (*CUDA, *SERVE, "{}/float scales", "-dp", "2"),
        will="F3a F3c F3e",
        may="F1c F3b F3i",
        evidence=(("F3e", "weight_scale (F32, "),),
    ),
    "scales of another scheme": Case(
        (*CUDA, *SERVE, "{}/other scales", "-dp", "2"),
        will="F3a F3c F3h",
        may="F1c F3b",
        code=1,
        says=("the checkpoint does not fit: ", "should be 704x8 an expert"),
    ),
    "qwen3-moe, on the cpu": Case(
        (*CPU, "{}/qwen3 moe", "-dp", "2"),
        will="F2d",
        may="F1d",
        says=("VLLM_MOE_DP_FIX_EXPERTS=replicated, if",),
        evidence=(("F2d", "2 ranks on the CPU"),),
    ),
    "qwen3-moe, here": Case(
        ("--json", "--", *SERVE, "{}/qwen3 moe", "-dp", "2"), will="F2d", may="F1d"
    ),
    "qwen3-moe, one rank": Case((*CUDA, *SERVE, "{}/qwen3 moe", "--quantization", "fp8")),
    "qwen3-moe, blocks": Case(
        (*CUDA, *SERVE, "{}/qwen3 blocks", "-dp", "2"),
        evidence=(("F1a", "an activation scale a block"),),
    ),
    "qwen3-moe, static": Case(
        (*CUDA, *SERVE, "{}/qwen3 static", "-dp", "2"),
        will="F1b",
        evidence=(("F1a", "a static scale is a scalar and not gathered"),),
    ),
    "qwen3-moe, replicated": Case(
        (
            *(*CUDA, "VLLM_MOE_DP_FIX_EXPERTS=replicated", *SERVE, "{}/qwen3 moe"),
            *("-dp", "2", "-tp", "2", "--quantization", "fp8"),
        ),
        will="F1d",
        says=('"experts": "replicated"', '"expert_tp": 2'),
        evidence=(("F1a", "gathers nothing"),),
    ),
    "qwen3-moe, auto": Case(
        (*CPU, "VLLM_MOE_DP_FIX_EXPERTS=auto", *SERVE, "{}/qwen3 moe", "-dp", "2"),
        will="F1d",
        says=('"experts": "replicated"',),
    ),
    "qwen3-moe, refused": Case(
        (
            *(*CUDA, "VLLM_MOE_DP_FIX_EXPERTS=replicated", *SERVE, "{}/qwen3 moe"),
            *("-dp", "2", "--enable-expert-parallel"),
        ),
        code=1,
        says=("VLLM_MOE_DP_FIX_EXPERTS=replicated makes every", "--enable-expert-parallel spreads"),
    ),
    "qwen3-moe, cut unevenly": Case(
        (*CUDA, *SERVE, "{}/qwen3 moe", "-dp", "3"), code=1, says=("cannot be cut over 3 ranks",)
    ),
    "qwen3-moe, two schemes": Case(
        (*CUDA, *SERVE, "{}/qwen3 blocks", "-dp", "2", "--quantization", "mxfp4"),
        says=("the checkpoint is quantized as 'fp8' and --quantization asks for 'mxfp4'",),
    ),
    "eplb": Case((*CUDA, *SERVE, "{}/qwen3 moe", "-dp", "2", *EPLB, NIXL), may="F4a F4b F4c F4d"),
    "gpt-oss": Case(
        (*CUDA, *SERVE, "{}/gpt oss", "-dp", "4"),
        may="F1c",
        says=('"method": "mxfp4"',),
        evidence=(("F3d", "gpt-oss's own loader cuts into whole blocks"),),
    ),
    "gpt-oss, one expert a tensor": Case(
        (*CUDA, *SERVE, "{}/gpt oss single", "-dp", "2"), will="F3a F3c F3g", may="F1c"
    ),
    "a model of its own kind": Case(
        (*CUDA, *SERVE, "{}/unknown kind", "-dp", "2", "--trust-remote-code", "--api-key=SECRET"),
        says=("vLLM cannot read the configuration without", '"experts": 16', '"hidden": 256'),
    ),
    "configuration elsewhere": Case(
        (*CUDA, *SERVE, "{}/dense", "--hf-config-path", "{}/qwen3 moe", "-dp=3"),
        code=1,
        says=('"experts": 16', "cannot be cut over 3 ranks"),
    ),
    "overridden configuration": Case(
        (
            *(*CUDA, *SERVE, "{}/qwen3 moe", "-dp=3"),
            *("--hf-overrides", '{"moe_intermediate_size": 768}'),
        ),
        says=('"expert_widths": [768]',),
    ),
    "dense": Case(
        (*CUDA, *SERVE, "{}/dense", "-dp", "2", "--quantization", "fp8"),
        says=('"memory": null',),
        evidence=(("F1a", "the model is dense"),),
    ),
    "dense, as text": Case(("--", *SERVE, "{}/dense"), says=("Nothing will go wrong.",)),
    "qwen3-moe, as text": Case(
        ("--platform", "cuda", "--", *SERVE, "{}/qwen3 moe", "-dp", "2", "--quantization=fp8"),
        says=("will hit", "Repaired: F1a, F2a, F2b. Nothing is left."),
    ),
    "no model": Case((*CUDA, *SERVE, "owner/nothing"), code=2, says=("neither a directory nor",)),
    "no configuration": Case((*CUDA, *SERVE, "{}"), code=2, says=("config.json is missing",)),
    "broken configuration": Case(
        (*CUDA, *SERVE, "{}/broken config"), code=2, says=("broken config/config.json is no JSON",)
    ),
    "broken header": Case(
        (*CUDA, *SERVE, "{}/broken header"), code=2, says=("model.safetensors is truncated",)
    ),
    "broken, as text": Case(
        ("--", *SERVE, "{}/broken config"), code=2, says=("config.json is no JSON",)
    ),
    "unknown option": Case(
        (*CUDA, *SERVE, "{}/dense", "--no-such-option"),
        code=2,
        says=("vLLM cannot parse the command: unrecognized arguments: --no-such-option",),
    ),
    "no number": Case(
        (*CUDA, *SERVE, "{}/dense", "-dp", "two"), code=2, says=("cannot parse", "'two'")
    ),
    "another command": Case((*CUDA, "vllm", "bench"), code=2, says=("'vllm bench' is not judged",)),
}
# 0.19 has no choice of communicators.
SINCE = {"eplb": "0.20.0", "eplb, by default": "0.20.0"}


def _write_models(directory: Path) -> None:
    def write(name: str, config: dict[str, Any], tensors: models.Tensors | None = None) -> None:
        models.write_model(directory / name, config, tensors)

    packed = models.mxfp4_experts(256, 704)
    write("gemma4", models.GEMMA4)
    write("gemma4 mxfp4", models.GEMMA4 | MXFP4, packed)
    write("qwen3 moe", models.QWEN3_MOE)
    write("float scales", models.QWEN3_MOE | MXFP4, models.mxfp4_experts(256, 704, "F32"))
    write("other scales", models.QWEN3_MOE | MXFP4, models.mxfp4_experts(256, 704, "U8", (6, 2)))
    blocks = FP8 | {"weight_block_size": [128, 128]}
    write("qwen3 blocks", models.QWEN3_MOE | {"quantization_config": blocks})
    static = FP8 | {"activation_scheme": "static"}
    write("qwen3 static", models.QWEN3_MOE | {"quantization_config": static})
    write("gpt oss", models.GPT_OSS, models.gpt_oss_experts(256, 704, 8))
    write("gpt oss single", models.GPT_OSS, packed)
    write("dense", models.LLAMA)
    own = {"model_type": "own_kind", "auto_map": {"AutoConfig": "own.Config"}}
    write("unknown kind", models.QWEN3_MOE | own)
    (directory / "unknown kind" / "own.py").write_text("raise SystemExit('own code was run')")
    write("broken config", models.LLAMA)
    (directory / "broken config" / "config.json").write_text('{"model_type": ')
    write("broken header", models.LLAMA, packed)
    header = directory / "broken header" / "model.safetensors"
    header.write_bytes(header.read_bytes()[:50])


@pytest.fixture(scope="session")
def reports_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """All cases of a release, from one process."""
    home = tmp_path_factory.mktemp("doctor")
    _write_models(home / "models")
    found: dict[str, dict[str, Any]] = {}

    def reports(release: str) -> dict[str, Any]:
        if release not in found:
            cases, output = home / f"{release} cases", home / f"{release} output"
            words = {
                name: [word.replace("{}", str(home / "models")) for word in case.words]
                for name, case in CASES.items()
                if _is_in(name, release)
            }
            cases.write_text(json.dumps(words))
            run = subprocess.run(
                [sys.executable, str(ROOT / "tests/doctor/run_cases.py"), cases, output],
                env=_environ(home, ROOT, tree_of(release)),
                capture_output=True,
                text=True,
                timeout=600,
            )
            assert run.returncode == 0, run.stderr[-3000:]
            found[release] = json.loads(output.read_text())
        return found[release]

    return reports


@pytest.mark.parametrize("release", [RELEASES[0], RELEASES[-1]])
def test_cuda_without_a_gpu(release: str, tmp_path: Path) -> None:
    """A vLLM that is not for the CPU and finds nothing else: judged as on CUDA."""
    info = tmp_path / f"vllm-{release}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}\n")
    model = models.write_model(tmp_path / "model", models.QWEN3_MOE)
    run = subprocess.run(
        [
            *(sys.executable, "-m", "vllm_moe_dp_fix.cli", "doctor", "--json", "--"),
            *("vllm", "serve", model, "-dp", "2", "--quantization", "fp8"),
        ],
        env=_environ(tmp_path, tmp_path, ROOT, tree_of(release)),
        capture_output=True,
        text=True,
        timeout=600,
    )
    document = json.loads(run.stdout)
    assert run.returncode == 0, document["error"]
    assert document["vllm"]["platform"] == "unspecified"
    assert document["memory"]["usable"] is None
    verdicts = {fault["id"]: fault["verdict"] for fault in document["faults"]}
    assert (verdicts["F1a"], verdicts["F2d"]) == ("will hit", "will not")


STRANGER = """
import functools

def run():
    from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator
    original = CudaCommunicator.all_gatherv

    @functools.wraps(original)
    def all_gatherv(self, input_, dim=0, sizes=None):
        return original(self, input_, dim, sizes)

    CudaCommunicator.all_gatherv = all_gatherv
"""


def test_a_function_of_somebody_else(tmp_path: Path) -> None:
    """A plugin of another package that replaces what a fix replaces is named."""
    (tmp_path / "stranger.py").write_text(STRANGER)
    info = tmp_path / "stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nstranger = stranger:run\n")
    model = models.write_model(tmp_path / "model", models.QWEN3_MOE)
    run = subprocess.run(
        [sys.executable, "-m", "vllm_moe_dp_fix.cli", "doctor", "--json", "--", model],
        env=_environ(tmp_path, tmp_path, ROOT, tree_of(RELEASES[-1])),
        capture_output=True,
        text=True,
        timeout=600,
    )
    around = json.loads(run.stdout)["environment"]
    (other,) = around["others"]
    assert other["target"] == "CudaCommunicator.all_gatherv"
    assert other["owner"].startswith("stranger (")
    assert ("stranger", False) in [(plugin["name"], plugin["ours"]) for plugin in around["plugins"]]


def _environ(home: Path, *path: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    return kept | {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(home),
        "COLUMNS": "200",
    }


def _is_in(name: str, release: str) -> bool:
    return Version(release) >= Version(SINCE.get(name, "0"))


@pytest.mark.parametrize(
    ("release", "name"),
    [(release, name) for release in RELEASES for name in CASES if _is_in(name, release)],
)
def test_doctor(release: str, name: str, reports_of: Callable[[str], dict[str, Any]]) -> None:
    case, found = CASES[name], reports_of(release)[name]
    said = found["said"]
    assert found["code"] == case.code, said
    assert found["errors"] == ""
    assert "SECRET" not in said
    if case.words[0] == "--json":
        document = json.loads(said)
        _check(document, case, release)
        said = json.dumps(document, ensure_ascii=False)
    said = " ".join(said.split())
    for part in case.says:
        assert part in said


def _check(document: dict[str, Any], case: Case, release: str) -> None:
    assert document["schema"] == 1
    assert document["exit_code"] == case.code
    assert document.keys() == {
        *("schema", "plugin", "error", "exit_code", "command", "vllm", "environment", "model"),
        *("parallel", "memory", "faults", "refusals", "problems"),
    }
    if case.code == 2:
        assert document["error"]
        assert document["faults"] == []
        return
    assert document["error"] is None
    assert document["vllm"]["version"].startswith(release)
    assert [fault["id"] for fault in document["faults"]] == sorted(AFFECTED)
    got = {fault["id"]: fault["verdict"] for fault in document["faults"]}
    want = dict.fromkeys(AFFECTED, "will not")
    want |= {fault: "will hit" for fault in case.will.split() if _has(release, fault)}
    want |= {fault: "may hit" for fault in case.may.split() if _has(release, fault)}
    assert got == want
    evidence = {fault["id"]: fault["evidence"] for fault in document["faults"]}
    for fault_id, part in case.evidence:
        assert not _has(release, fault_id) or part in evidence[fault_id]
    for fault in document["faults"]:
        assert fault["evidence"]
        assert (fault["action"] == "nothing to do") == (fault["verdict"] == "will not")


def _has(release: str, fault: str) -> bool:
    return bool(Host.of(release).is_affected(AFFECTED[fault]))
