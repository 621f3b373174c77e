# SPDX-License-Identifier: Apache-2.0
"""The verdicts, from facts alone."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from vllm_moe_dp_fix.doctor.checkpoint import ExpertTensor, Tensor
from vllm_moe_dp_fix.doctor.facts import Facts
from vllm_moe_dp_fix.doctor.schemes import Scheme
from vllm_moe_dp_fix.doctor.verdicts import JUDGES, Likelihood, judge, obstacles
from vllm_moe_dp_fix.releases import AFFECTED
from vllm_moe_dp_fix.replicas.memory import FullCopy

WILL, MAY, NOT = Likelihood.WILL, Likelihood.MAY, Likelihood.NOT
DYNAMIC = Scheme("fp8", "fp8", "tensor")
STATIC = Scheme("fp8", "fp8", "tensor", is_static=True)
BLOCK = Scheme("fp8", "fp8", "block")
MXFP8 = Scheme("mxfp8", "mxfp8", "mxfp8")
MXFP4 = Scheme("mxfp4", "mxfp4")
ONLINE = Scheme("mxfp4", "mxfp4", is_online=True)
QUARK = Scheme("quark", "unknown", "unknown")
BASE = Facts(
    version="0.33.0",
    capability=(9, 0),
    model_type="qwen3_moe",
    experts=16,
    widths=(704,),
    hidden=256,
    dp=4,
)


def tensor(
    dtype: str, shape: tuple[int, ...], kind: str = "weight", projection: str = "w2", **other: Any
) -> ExpertTensor:
    single = other.get("is_single", True)
    return ExpertTensor(Tensor("experts.0.x", dtype, shape, 0), single, projection, 1, kind)


PACKED = tensor("U8", (256, 352))
SCALE = tensor("U8", (256, 22), "scale")
STACKED = tensor("U8", (16, 256, 22, 16), is_single=False)
BF16 = tensor("BF16", (256, 704))
LOADED: dict[str, Any] = {"scheme": MXFP4, "tensors": (PACKED, SCALE)}


def test_every_fault_has_a_judge() -> None:
    assert JUDGES.keys() == AFFECTED.keys()


@pytest.mark.parametrize("fault", AFFECTED)
def test_dense_models_are_not_hit(fault: str) -> None:
    for version in ("0.19.0", "0.22.1", "0.33.0"):
        facts = replace(BASE, version=version, experts=0, widths=(), scheme=DYNAMIC, eplb=True)
        finding = judge(fault, facts)
        assert finding.likelihood is NOT
        assert finding.evidence in ("the model is dense", f"vLLM {version} does not have it")


CASES: list[tuple[str, str, dict[str, Any], Likelihood, str]] = [
    ("F1a", "0.33.0", {"scheme": DYNAMIC}, WILL, "gathered over 4 ranks"),
    ("F1a", "0.33.0", {"scheme": DYNAMIC, "tp": 2}, WILL, "gathered over 8 ranks"),
    ("F1a", "0.33.0", {"scheme": DYNAMIC, "expert_parallel": True}, WILL, "4 ranks"),
    ("F1a", "0.33.0", {}, NOT, "no quantization"),
    ("F1a", "0.33.0", {"scheme": BLOCK}, NOT, "an activation scale a block"),
    ("F1a", "0.33.0", {"scheme": STATIC}, NOT, "static scale is a scalar"),
    ("F1a", "0.33.0", {"scheme": QUARK}, MAY, "quark cannot be told"),
    ("F1a", "0.33.0", {"scheme": DYNAMIC, "dp": 1}, NOT, "one data-parallel rank"),
    ("F1a", "0.33.0", {"scheme": DYNAMIC, "replicated": True}, NOT, "every rank holds all"),
    ("F1a", "0.33.0", {"scheme": DYNAMIC, "platform": "cpu"}, NOT, "experts on the CPU"),
    ("F1a", "0.33.0", {"scheme": DYNAMIC, "platform": "rocm"}, MAY, "unless AITER"),
    ("F1a", "0.33.0", {"scheme": DYNAMIC, "capability": (8, 0)}, MAY, "unless this GPU runs"),
    ("F1a", "0.33.0", {"scheme": DYNAMIC, "moe_backend": "marlin"}, NOT, "marlin"),
    ("F1a", "0.33.0", {"scheme": DYNAMIC, "moe_backend": "aiter"}, MAY, "unless --moe-backend"),
    (
        "F1a",
        "0.33.0",
        {"scheme": DYNAMIC, "expert_parallel": True, "all2all": "deepep_low_latency"},
        NOT,
        "deepep_low_latency has a dispatch of its own",
    ),
    # without expert parallelism the back end is not asked
    ("F1a", "0.33.0", {"scheme": DYNAMIC, "all2all": "deepep_low_latency"}, WILL, ""),
    ("F1a", "0.34.0", {"scheme": DYNAMIC}, MAY, "none of the tested releases"),
    ("F1b", "0.22.1", {"scheme": STATIC}, WILL, "one static activation scale"),
    ("F1b", "0.22.1", {"scheme": DYNAMIC}, NOT, "no static"),
    ("F1b", "0.22.1", {"scheme": STATIC, "moe_backend": "flashinfer_cutlass"}, MAY, "unless"),
    ("F1b", "0.22.1", {"scheme": STATIC, "dp": 1}, NOT, "one data-parallel rank"),
    ("F1b", "0.23.0", {"scheme": STATIC}, NOT, "does not have it"),
    ("F1c", "0.33.0", {"scheme": MXFP8}, MAY, "swizzled"),
    ("F1c", "0.33.0", {"scheme": MXFP8, "dp": 1}, NOT, "one data-parallel rank"),
    ("F1c", "0.33.0", {"scheme": DYNAMIC}, NOT, "not MXFP8"),
    ("F1c", "0.33.0", {"scheme": MXFP4}, NOT, "before Blackwell"),
    ("F1c", "0.33.0", {"scheme": MXFP4, "capability": (10, 0)}, MAY, "on Blackwell"),
    ("F1c", "0.33.0", {"scheme": MXFP4, "capability": None}, MAY, "on Blackwell"),
    ("F1d", "0.33.0", {}, NOT, "cannot be told"),
    ("F1d", "0.33.0", {"full_copy": FullCopy(1, 2)}, MAY, "over 4 ranks"),
    ("F1d", "0.33.0", {"full_copy": FullCopy(1.1, 2)}, NOT, "full copy of the weights takes"),
    ("F1d", "0.33.0", {"setting": "replicated"}, WILL, "wants a full copy"),
    ("F1d", "0.33.0", {"setting": "auto", "replicated": True}, WILL, "=auto wants"),
    ("F1d", "0.33.0", {"setting": "replicated", "dp": 1}, NOT, "one data-parallel rank"),
    ("F1d", "0.33.0", {"full_copy": FullCopy(1, 2), "expert_parallel": True}, NOT, "as asked"),
    ("F2a", "0.33.0", {"scheme": DYNAMIC}, WILL, "unequally"),
    ("F2a", "0.33.0", {"scheme": QUARK}, MAY, "unequally"),
    ("F2a", "0.33.0", {"scheme": BLOCK}, NOT, "a row a token"),
    ("F2a", "0.33.0", {"scheme": DYNAMIC, "platform": "cpu"}, NOT, "CPU"),
    ("F2b", "0.33.0", {"scheme": DYNAMIC}, MAY, "equally many"),
    ("F2c", "0.33.0", {"scheme": DYNAMIC}, NOT, "a row for each row"),
    ("F2d", "0.33.0", {"platform": "cpu"}, WILL, "4 ranks on the CPU"),
    ("F2d", "0.33.0", {"platform": "cpu", "replicated": True}, NOT, "gathers nothing"),
    ("F2d", "0.33.0", {}, NOT, "not the CPU"),
    ("F2d", "0.19.1", {"platform": "cpu"}, NOT, "does not have it"),
    ("F3a", "0.19.1", LOADED, WILL, r"experts.0.x \(U8, 256x352\)"),
    ("F3a", "0.19.1", {"scheme": MXFP4, "tensors": (STACKED,)}, NOT, "stacked"),
    ("F3a", "0.19.1", {"scheme": MXFP4}, MAY, "without safetensors headers"),
    ("F3a", "0.19.1", {"scheme": MXFP4, "model_type": "gpt_oss"}, NOT, "stacked"),
    ("F3a", "0.19.1", LOADED | {"loads": False}, NOT, "no checkpoint is loaded"),
    ("F3a", "0.19.1", {"tensors": (PACKED,), "scheme": DYNAMIC}, NOT, "not used"),
    ("F3b", "0.26.0", {"scheme": MXFP4}, MAY, "qwen3_moe"),
    ("F3b", "0.26.0", {"scheme": MXFP4, "model_type": "gpt_oss"}, NOT, "made for it"),
    ("F3c", "0.22.1", LOADED, WILL, "256, 256, 192, 0"),
    ("F3c", "0.22.1", LOADED | {"widths": (512,)}, MAY, "pad more"),
    ("F3c", "0.22.1", LOADED | {"widths": (1024,)}, NOT, "no kernel pads"),
    ("F3c", "0.22.1", LOADED | {"expert_parallel": True}, NOT, "whole on its rank"),
    ("F3c", "0.22.1", LOADED | {"model_type": "gpt_oss", "tensors": None}, NOT, "own loader"),
    (
        "F3d",
        "0.33.0",
        LOADED,
        WILL,
        "intermediate 704, expert-TP 4: 176 columns a rank, 5.5 blocks of 32",
    ),
    ("F3d", "0.33.0", LOADED | {"dp": 2}, NOT, "expert-TP 2: 352 columns a rank, 11 blocks"),
    ("F3d", "0.33.0", LOADED | {"dp": 2, "tp": 2}, WILL, "expert-TP 4"),
    ("F3d", "0.33.0", LOADED | {"tp": 2, "replicated": True}, NOT, "expert-TP 2"),
    ("F3d", "0.33.0", LOADED | {"expert_parallel": True}, NOT, "whole on its rank"),
    ("F3d", "0.33.0", LOADED | {"widths": (1024, 704)}, WILL, "704"),
    ("F3d", "0.33.0", {"scheme": ONLINE}, NOT, "quantized after they are cut"),
    ("F3d", "0.33.0", {"scheme": MXFP4, "tensors": (BF16,)}, NOT, "quantized after"),
    ("F3d", "0.33.0", LOADED | {"model_type": "gpt_oss", "tensors": (STACKED,)}, NOT, "own"),
    ("F3d", "0.33.0", LOADED | {"model_type": "gpt_oss"}, WILL, "5.5 blocks"),
    ("F3d", "0.33.0", LOADED | {"loads": False}, NOT, "no checkpoint"),
    ("F3d", "0.22.1", LOADED, NOT, "does not have it"),
    (
        "F3e",
        "0.27.1",
        {"scheme": MXFP4, "tensors": (tensor("F32", (256, 22), "scale"),)},
        WILL,
        "F32, 256x22",
    ),
    (
        "F3e",
        "0.27.1",
        {"scheme": MXFP4, "tensors": (tensor("F8_E8M0", (256, 22), "scale"),)},
        WILL,
        "by value",
    ),
    ("F3e", "0.27.1", LOADED, NOT, "bytes already"),
    ("F3e", "0.27.1", {"scheme": MXFP4}, MAY, "dtype is unknown"),
    ("F3e", "0.27.1", {"scheme": ONLINE}, NOT, "no scales"),
    ("F3f", "0.27.1", {"scheme": ONLINE}, WILL, "without quantization is to be MXFP4"),
    ("F3f", "0.27.1", {"scheme": MXFP4, "tensors": (BF16,)}, WILL, "BF16, 256x704"),
    ("F3f", "0.27.1", LOADED, NOT, "packed already"),
    ("F3f", "0.28.0", {"scheme": ONLINE}, NOT, "does not have it"),
    ("F3g", "0.28.0", LOADED | {"model_type": "gpt_oss"}, WILL, "one tensor an expert"),
    ("F3g", "0.28.0", LOADED | {"model_type": "gpt_oss", "tensors": (STACKED,)}, NOT, "stacked"),
    ("F3g", "0.28.0", LOADED | {"model_type": "gpt_oss", "tensors": None}, MAY, "without"),
    ("F3g", "0.28.0", LOADED, NOT, "not gpt-oss"),
    ("F3h", "0.33.0", LOADED, NOT, "shapes and dtypes of MXFP4"),
    ("F3h", "0.33.0", LOADED | {"tensors": (STACKED,)}, NOT, "shapes and dtypes"),
    ("F3h", "0.33.0", {"scheme": MXFP4}, MAY, "shapes are unknown"),
    (
        "F3h",
        "0.33.0",
        {"scheme": MXFP4, "tensors": (PACKED, tensor("U8", (2, 6), "scale"))},
        WILL,
        "U8, 2x6.* should be 256x22 an expert",
    ),
    (
        "F3h",
        "0.33.0",
        {"scheme": MXFP4, "tensors": (tensor("F8_E4M3", (256, 704)),)},
        WILL,
        "no packed weight",
    ),
    (
        "F3h",
        "0.33.0",
        {"scheme": MXFP4, "tensors": (tensor("F8_E4M3", (256, 22), "scale"),)},
        WILL,
        "no E8M0 scale",
    ),
    ("F3h", "0.33.0", {"scheme": MXFP4, "tensors": (BF16,)}, WILL, "not packed"),
    ("F3h", "0.27.1", {"scheme": MXFP4, "tensors": (BF16,)}, NOT, ""),
    ("F3h", "0.33.0", {"scheme": ONLINE, "tensors": (BF16,)}, NOT, "full precision"),
    ("F3h", "0.33.0", {"scheme": ONLINE}, NOT, "full precision"),
    (
        "F3i",
        "0.33.0",
        {"scheme": MXFP4, "tensors": (tensor("BF16", (256, 22), "scale"),)},
        MAY,
        "power of two",
    ),
    (
        "F3i",
        "0.33.0",
        {"scheme": MXFP4, "tensors": (tensor("F8_E8M0", (256, 22), "scale"),)},
        NOT,
        "bytes already",
    ),
]
EPLB: dict[str, Any] = {"eplb": True, "expert_parallel": True}
CASES += [
    ("F4a", "0.33.0", EPLB, MAY, "where NIXL is installed"),
    ("F4a", "0.33.0", EPLB | {"communicator": "nixl"}, MAY, "as asked"),
    ("F4a", "0.33.0", EPLB | {"communicator": "torch_gloo"}, NOT, "torch_gloo"),
    ("F4a", "0.33.0", EPLB | {"nixl_by_default": False}, NOT, "only where it is named"),
    ("F4a", "0.33.0", EPLB | {"nixl_missing": "no module"}, NOT, "no module"),
    ("F4a", "0.33.0", EPLB | {"platform": "cpu"}, NOT, "no EPLB"),
    ("F4a", "0.33.0", {}, NOT, "--enable-eplb is not set"),
    ("F4b", "0.33.0", EPLB, MAY, "fails alone"),
    ("F4c", "0.22.1", EPLB, MAY, "differ"),
    ("F4d", "0.22.1", EPLB, MAY, "faster"),
    ("F4d", "0.23.0", EPLB, NOT, "does not have it"),
]


@pytest.mark.parametrize(("fault", "version", "changes", "likelihood", "evidence"), CASES)
def test_verdict(
    fault: str, version: str, changes: dict[str, Any], likelihood: Likelihood, evidence: str
) -> None:
    finding = judge(fault, replace(BASE, version=version, **changes))
    assert finding.likelihood is likelihood, finding.evidence
    assert re.search(evidence, finding.evidence)
    assert bool(finding.remedy) == (likelihood is not NOT)


def test_every_judge_is_tried() -> None:
    tried = {fault: {case[3] for case in CASES if case[0] == fault} for fault in AFFECTED}
    assert {fault for fault, found in tried.items() if NOT not in found} <= {"F4b", "F4c", "F2b"}
    assert {fault for fault, found in tried.items() if found == {NOT}} == {"F2c"}


def test_what_was_seen_comes_before_the_table() -> None:
    facts = replace(BASE, scheme=DYNAMIC)
    assert judge("F1a", facts, affected=False).likelihood is NOT
    untested = replace(facts, version="0.34.0")
    assert judge("F1a", untested, affected=True).likelihood is WILL


def test_what_leads_to_it_is_named() -> None:
    facts = replace(BASE, scheme=DYNAMIC)
    assert judge("F2a", facts).through == judge("F2b", facts).through == "F1a"
    assert judge("F1a", facts).through is None


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("shared_scale", "agrees on one scale first, then"),
        ("quantize_after_gather", "gathers first, then quantizes with one scale"),
        ("auto", "for many rows it agrees on one first"),
    ],
)
def test_strategy_of_the_dispatch(setting: str, said: str) -> None:
    assert said in judge("F1a", replace(BASE, scheme=DYNAMIC, fp8_dispatch=setting)).remedy


def test_cut_of_the_fix() -> None:
    assert "192, 192, 192, 128 columns" in judge("F3d", replace(BASE, **LOADED)).remedy


def test_refusals() -> None:
    with_lora = replace(BASE, **LOADED, lora=True)
    assert "LoRA" in judge("F3d", with_lora).refusal
    assert judge("F3d", replace(with_lora, dp=2)).refusal == ""
    misfit = replace(BASE, scheme=MXFP4, tensors=(tensor("U8", (2, 6), "scale"),))
    assert "does not fit" in judge("F3h", misfit).refusal


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"dp": 3}, "704 cannot be cut over 3 ranks"),
        ({"dp": 3, "expert_parallel": True}, None),
        ({"dp": 3, "replicated": True}, None),
        ({"dp": 3, "experts": 0}, None),
        ({"eplb": True}, "needs --enable-expert-parallel"),
        (EPLB | {"nixl_missing": "gone"}, None),
        (EPLB | {"communicator": "nixl", "nixl_missing": "gone"}, "EPLB is to use NIXL, and"),
        (EPLB | {"nixl_failure": "no device"}, "no device"),
        (EPLB | {"nixl_failure": "no device", "communicator": "torch_gloo"}, None),
        ({"eplb": True, "platform": "cpu"}, "needs GPUs"),
    ],
)
def test_obstacles(changes: dict[str, Any], said: str | None) -> None:
    found = list(obstacles(replace(BASE, **changes)))
    assert len(found) == (said is not None)
    assert (said or "") in "".join(found)


@pytest.mark.parametrize(
    ("changes", "ranks", "expert_tp"),
    [
        ({"dp": 2, "tp": 2}, 4, 4),
        ({"dp": 2, "tp": 2, "pcp": 2}, 8, 8),
        ({"dp": 2, "tp": 2, "expert_parallel": True}, 4, 1),
        ({"dp": 2, "tp": 2, "replicated": True}, 2, 2),
    ],
)
def test_expert_tp(changes: dict[str, Any], ranks: int, expert_tp: int) -> None:
    facts = replace(BASE, **changes)
    assert (facts.ranks, facts.expert_tp) == (ranks, expert_tp)
