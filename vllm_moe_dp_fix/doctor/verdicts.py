# SPDX-License-Identifier: Apache-2.0
"""Whether a deployment will meet a fault: one function a fault, from the facts alone."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from math import prod
from typing import NamedTuple

from vllm_moe_dp_fix import settings
from vllm_moe_dp_fix.doctor.checkpoint import ExpertTensor
from vllm_moe_dp_fix.doctor.facts import Facts
from vllm_moe_dp_fix.doctor.schemes import UNKNOWN
from vllm_moe_dp_fix.host import Host
from vllm_moe_dp_fix.mxfp4.sharding import BLOCK, ExpertLayout, ExpertShard, cdiv
from vllm_moe_dp_fix.releases import AFFECTED

_FLOATS = ("BF16", "F16", "F32", "F64")
_PACKED = ("U8", "I8", "F4")
_BYTE_SCALES = ("U8", "F8_E8M0")
_STACKED = "all experts of a layer are stacked in one tensor"
_MARLIN = 128  # columns to which its experts are padded; the widest padding of a kernel is twice it
_WEIGHT_ONLY_BACKENDS = ("marlin", "humming", "emulation", "cpu")


class Likelihood(enum.Enum):
    WILL = "will hit"
    MAY = "may hit"
    NOT = "will not"


class Finding(NamedTuple):
    """A verdict.

    Attributes:
        evidence: One sentence.
        remedy: What the fix does about it where it is applied.
        to_set: What must or can be set, '' where nothing.
        through: The fault that leads to this one; without it, it does not show.
        refusal: Why the deployment does not start with the fix either, '' where it does.
    """

    likelihood: Likelihood
    evidence: str
    remedy: str = ""
    to_set: str = ""
    through: str | None = None
    refusal: str = ""


def _will(evidence: str, remedy: str, to_set: str = "", refusal: str = "") -> Finding:
    return Finding(Likelihood.WILL, evidence, remedy, to_set, refusal=refusal)


def _may(evidence: str, remedy: str, to_set: str = "") -> Finding:
    return Finding(Likelihood.MAY, evidence, remedy, to_set)


def _not(evidence: str) -> Finding:
    return Finding(Likelihood.NOT, evidence)


def judge(fault_id: str, facts: Facts, affected: bool | None = None) -> Finding:
    """The verdict over a fault.

    Args:
        affected: Whether this vLLM has the fault, where that was seen; else the table tells.
    """
    if affected is None:
        affected = Host.of(facts.version).is_affected(AFFECTED[fault_id])
    if affected is False:
        return _not(f"vLLM {facts.version} does not have it")
    finding = JUDGES[fault_id](facts)
    if affected is None and finding.likelihood is Likelihood.WILL:
        unsure = f"vLLM {facts.version} is none of the tested releases; if it has the fault, "
        return finding._replace(likelihood=Likelihood.MAY, evidence=unsure + finding.evidence)
    return finding


# --- dispatch and collectives ---------------------------------------------------------------


def _quantizes_before_gather(facts: Facts) -> str:
    """Why activations do not travel quantized, '' where they do."""
    if facts.no_gather:
        return facts.no_gather
    if facts.scheme.activations is None:
        return f"activations travel in full precision ({facts.scheme})"
    if facts.platform == "cpu":
        return "experts on the CPU take activations in full precision"
    if facts.moe_backend in _WEIGHT_ONLY_BACKENDS:
        return f"--moe-backend {facts.moe_backend} takes activations in full precision"
    return ""


def _f1a(facts: Facts) -> Finding:
    reason = _quantizes_before_gather(facts)
    if reason:
        return _not(reason)
    remedy = "gathers first, then quantizes with one scale"
    if facts.fp8_dispatch == "shared_scale":
        remedy = "agrees on one scale first, then gathers FP8"
    elif facts.fp8_dispatch == "auto" and facts.platform == "cuda":
        remedy += "; for many rows it agrees on one first, and gathers FP8"
    scheme = facts.scheme
    if scheme.activations == UNKNOWN:
        return _may(f"what shares an activation scale in {scheme.method} cannot be told", remedy)
    if scheme.activations != "tensor":
        return _not(f"every row brings its scale along ({scheme})")
    if scheme.weights != "fp8":
        return _not(f"the one activation scale is none of FP8 experts ({scheme})")
    if scheme.is_static:
        return _not(f"a static scale is a scalar and not gathered ({scheme})")
    evidence = f"{scheme} for all rows of a rank, gathered over {facts.ranks} ranks"
    if facts.capability and facts.capability < (8, 9):
        return _may(f"{evidence}, unless this GPU runs Marlin, as it has no FP8", remedy)
    if facts.moe_backend not in ("auto", "triton", "cutlass"):
        return _may(f"{evidence}, unless --moe-backend {facts.moe_backend} quantizes later", remedy)
    if facts.platform == "rocm" and facts.moe_backend == "auto":
        return _may(f"{evidence}, unless AITER runs the experts and quantizes later", remedy)
    return _will(evidence, remedy)


def _f1b(facts: Facts) -> Finding:
    reason = _quantizes_before_gather(facts)
    if reason:
        return _not(reason)
    scheme, remedy = facts.scheme, "hands the scale on to the experts"
    if scheme.activations == UNKNOWN:
        return _may(f"whether {scheme.method} has static activation scales is unknown", remedy)
    if not (scheme.activations == "tensor" and scheme.is_static):
        return _not(f"there is no static activation scale ({scheme})")
    evidence = f"{scheme}, gathered over {facts.ranks} ranks"
    if facts.moe_backend.startswith("flashinfer"):
        return _may(f"{evidence}, unless --moe-backend {facts.moe_backend} quantizes later", remedy)
    return _will(evidence, remedy)


def _f1c(facts: Facts) -> Finding:
    scheme, remedy = facts.scheme, "puts the gathered scales into the layout that the experts want"
    if scheme.weights == "mxfp4" and not facts.no_gather and facts.platform == "cuda":
        if facts.capability and facts.capability < (10, 0):
            return _not("kernels before Blackwell take MXFP4's activations in full precision")
        return _may("on Blackwell, MXFP4 experts can take MXFP8 activations", remedy)
    reason = _quantizes_before_gather(facts)
    if reason:
        return _not(reason)
    if scheme.activations == UNKNOWN:
        return _may(f"whether {scheme.method} has MXFP8 activations is unknown", remedy)
    if scheme.activations != "mxfp8":
        return _not(f"the activations are not MXFP8 ({scheme})")
    evidence = f"{scheme}, gathered over {facts.ranks} ranks"
    return _may(f"{evidence}; hits where the kernel wants swizzled scales", remedy)


def _f1d(facts: Facts) -> Finding:
    if not facts.experts:
        return _not("the model is dense")
    if facts.dp == 1:
        return _not("there is one data-parallel rank")
    if facts.expert_parallel:
        return _not("--enable-expert-parallel shares whole experts out, as asked")
    cut = f"vLLM cuts the experts over {facts.dp * facts.pcp * facts.tp} ranks"
    if facts.setting == "replicated" or facts.replicated:
        return _will(
            f"{cut}, and {settings.EXPERTS}={facts.setting} wants a full copy on each",
            "makes every rank an engine of its own that holds all experts",
        )
    if facts.full_copy is None:
        return _not(f"{cut}, as is the default; whether a full copy fits cannot be told here")
    if not facts.full_copy.leaves_half:
        return _not(f"{cut}, and {facts.full_copy}")
    return _may(
        f"{cut}, though {facts.full_copy}",
        "keeps a full copy on each rank where that is set",
        f"{settings.EXPERTS}=replicated, if independent replicas are wanted",
    )


def _gathers_on_cuda(facts: Facts) -> str:
    return facts.no_gather or ("CPU ranks gather otherwise" if facts.platform == "cpu" else "")


def _through_f1a(facts: Facts, evidence: str, remedy: str, at_most: Likelihood) -> Finding:
    reason = _gathers_on_cuda(facts)
    if reason:
        return _not(reason)
    cause = judge("F1a", facts)
    if cause.likelihood is Likelihood.NOT:
        return _not("every tensor that is gathered has a row a token")
    likelihood = Likelihood.MAY if Likelihood.MAY in (cause.likelihood, at_most) else at_most
    return Finding(likelihood, evidence, remedy, through="F1a")


def _f2c(facts: Facts) -> Finding:
    reason = _gathers_on_cuda(facts)
    return _not(reason or "the experts give a row for each row that they get")


def _f2d(facts: Facts) -> Finding:
    if facts.no_gather:
        return _not(facts.no_gather)
    if facts.platform != "cpu":
        return _not(f"the platform is {facts.platform}, not the CPU")
    return _will(
        f"{facts.ranks} ranks on the CPU gather their tokens",
        "brings both collectives, over gloo",
    )


# --- MXFP4 ----------------------------------------------------------------------------------


def _no_mxfp4(facts: Facts) -> str:
    """Why vLLM's own MXFP4 methods do not load the experts, '' where they do."""
    if not facts.experts:
        return "the model is dense"
    if not facts.scheme.is_own_mxfp4:
        return f"vLLM's own MXFP4 methods are not used ({facts.scheme})"
    return ""


def _no_loading(facts: Facts) -> str:
    """As ``_no_mxfp4``, and why no checkpoint is loaded."""
    return _no_mxfp4(facts) or ("" if facts.loads else "no checkpoint is loaded")


def _named(tensor: ExpertTensor) -> str:
    shape = "x".join(map(str, tensor.tensor.shape))
    return f"{tensor.tensor.name} ({tensor.tensor.dtype}, {shape})"


def _of(facts: Facts, kind: str, dtypes: tuple[str, ...]) -> ExpertTensor | None:
    """The first expert tensor of a kind with one of these dtypes."""
    return next(
        (t for t in facts.tensors or () if t.kind == kind and t.tensor.dtype in dtypes), None
    )


def _full_precision(facts: Facts) -> str:
    """What says that the experts are in full precision, '' where they are packed."""
    found = _of(facts, "weight", _FLOATS)
    if found:
        return _named(found)
    return "a checkpoint without quantization" if facts.scheme.is_online else ""


def _columns(facts: Facts) -> Iterator[tuple[int, str]]:
    """Columns of an expert on each rank, and how to say so."""
    for width in facts.widths:
        columns = width / facts.expert_tp
        yield (
            width,
            (
                f"intermediate {width}, expert-TP {facts.expert_tp}: {columns:g} columns a rank, "
                f"{columns / BLOCK:g} blocks of {BLOCK}"
            ),
        )


def _whole_blocks(facts: Facts, width: int) -> str:
    ranks = range(facts.expert_tp)
    shares = [ExpertShard(facts.hidden, width, facts.expert_tp, rank).width for rank in ranks]
    return f"cuts into whole blocks: {', '.join(map(str, shares))} columns"


def _f3a(facts: Facts) -> Finding:
    reason = _no_loading(facts)
    if reason:
        return _not(reason)
    if facts.tensors is None and facts.is_gpt_oss:
        return _not(_STACKED)
    return _one_by_one(facts)


def _one_by_one(facts: Facts) -> Finding:
    """What follows where a loader cannot take one tensor an expert."""
    remedy = "loads experts one by one and stacked"
    if facts.tensors is None:
        return _may("without safetensors headers it is unknown how the experts are stored", remedy)
    single = next((tensor for tensor in facts.tensors if tensor.is_single), None)
    return _will(f"one tensor an expert: {_named(single)}", remedy) if single else _not(_STACKED)


def _f3b(facts: Facts) -> Finding:
    reason = _no_mxfp4(facts)
    if reason:
        return _not(reason)
    if facts.is_gpt_oss:
        return _not("gpt-oss gets the method that is made for it")
    return _may(
        f"the experts of {facts.model_type or 'this model'} do not have gpt-oss's activation; "
        "whether it shows depends on the kernel",
        "chooses the method that fits, or says why no kernel does",
    )


def _f3c(facts: Facts) -> Finding:
    reason = _no_mxfp4(facts) or _not_cut(facts)
    if reason:
        return _not(reason)
    for width, said in _columns(facts):
        stride = cdiv(cdiv(width, facts.expert_tp), _MARLIN) * _MARLIN
        if stride * facts.expert_tp != width:
            ends = [min(rank * stride, width) for rank in range(facts.expert_tp + 1)]
            held = ", ".join(str(b - a) for a, b in pairwise(ends))
            return _will(
                f"{said}, padded to {stride} by Marlin: the ranks hold {held}",
                _whole_blocks(facts, width),
            )
        if stride % (2 * _MARLIN):
            return _may(f"{said}; some kernels pad more", _whole_blocks(facts, width))
    return _not(f"{said}, which no kernel pads" if facts.widths else "no width is known")


def _not_cut(facts: Facts) -> str:
    """Why vLLM's generic loader does not cut the experts, '' where it does."""
    if facts.expert_tp == 1:
        return "every expert lies whole on its rank"
    if facts.is_gpt_oss and not any(tensor.is_single for tensor in facts.tensors or ()):
        return "gpt-oss's own loader cuts into whole blocks"
    return ""


def _f3d(facts: Facts) -> Finding:
    reason = _no_loading(facts) or _not_cut(facts)
    if reason:
        return _not(reason)
    if full := _full_precision(facts):
        return _not(f"weights are quantized after they are cut ({full})")
    if not facts.widths:
        return _may("the configuration does not say how wide an expert is", "cuts whole blocks")
    for width, said in _columns(facts):
        if width % (BLOCK * facts.expert_tp):
            refusal = ""
            if facts.lora:
                refusal = (
                    f"LoRA needs equal parts of whole blocks, and {said}: use "
                    "--enable-expert-parallel, another TP or DP size, or no LoRA"
                )
            return _will(said, _whole_blocks(facts, width), refusal=refusal)
    return _not(said)


def _scales(
    facts: Facts, dtypes: tuple[str, ...], likelihood: Likelihood, what: str, remedy: str
) -> Finding:
    reason = _no_loading(facts)
    if reason:
        return _not(reason)
    scale = _of(facts, "scale", dtypes)
    if scale:
        return Finding(likelihood, f"{_named(scale)} {what}", remedy)
    if full := _full_precision(facts):
        return _not(f"there are no scales in the checkpoint ({full})")
    if facts.tensors is None:
        return _may("without safetensors headers the scales' dtype is unknown", remedy)
    return _not("the scales are bytes already")


def _f3f(facts: Facts) -> Finding:
    reason = _no_loading(facts)
    if reason:
        return _not(reason)
    found = _full_precision(facts)
    if found:
        return _will(f"{found} is to be MXFP4", "quantizes the experts as they load")
    return _not("the experts are packed already")


def _f3g(facts: Facts) -> Finding:
    reason = _no_loading(facts)
    if reason or not facts.is_gpt_oss:
        return _not(reason or "the model is not gpt-oss")
    return _one_by_one(facts)


def _f3h(facts: Facts) -> Finding:
    reason = _no_loading(facts)
    if reason:
        return _not(reason)
    remedy = "refuses what does not fit, with shapes and dtypes"
    if facts.scheme.is_online:
        return _not("a checkpoint in full precision has no scheme that could be another one")
    if facts.tensors is None:
        return _may("without safetensors headers the shapes are unknown", remedy)
    quantizes = Host.of(facts.version).is_affected(AFFECTED["F3f"])
    for tensor in facts.tensors:
        problem = _misfit(tensor, facts, bool(quantizes))
        if problem:
            said = f"{_named(tensor)} {problem}"
            return _will(said, remedy, refusal=f"the checkpoint does not fit: {said}")
    return _not("all expert tensors in the headers have the shapes and dtypes of MXFP4")


def _misfit(tensor: ExpertTensor, facts: Facts, quantizes: bool) -> str:
    """What is wrong with a tensor of MXFP4 experts, '' where it fits."""
    dtype, shape = tensor.tensor.dtype, tensor.tensor.shape
    if tensor.kind == "weight" and dtype in _FLOATS:
        return "" if quantizes else "is not packed, and the configuration says MXFP4"
    if tensor.kind == "weight" and dtype not in _PACKED:
        return "is no packed weight"
    if tensor.kind == "scale" and dtype not in (*_BYTE_SCALES, *_FLOATS):
        return "is no E8M0 scale"
    if not facts.hidden or not facts.widths:
        return ""
    per_element = {"weight": 2, "scale": BLOCK, "bias": 0}[tensor.kind]
    wanted = [
        ExpertLayout(ExpertShard(facts.hidden, width, 1, 0)).shape(
            tensor.projection, tensor.parts, per_element
        )
        for width in facts.widths
    ]
    own = shape if tensor.is_single else shape[1:]
    if tensor.kind == "weight" and len(own) == 3 and own[-1] == BLOCK // 2:
        own = (own[0], prod(own[1:]))
    if own in wanted:
        return ""
    return f"should be {' or '.join('x'.join(map(str, shape)) for shape in wanted)} an expert"


# --- EPLB over NIXL -------------------------------------------------------------------------


def _no_nixl(facts: Facts) -> str:
    if not facts.experts:
        return "the model is dense"
    if not facts.eplb:
        return "--enable-eplb is not set"
    if facts.platform == "cpu":
        return "the CPU has no EPLB"
    if facts.communicator not in (None, "nixl"):
        return f"EPLB's communicator is {facts.communicator}"
    if facts.communicator is None and not facts.nixl_by_default:
        return f"vLLM {facts.version} takes NIXL only where it is named"
    if facts.communicator is None and facts.nixl_missing:
        return f"EPLB takes another communicator, as NIXL is missing here: {facts.nixl_missing}"
    return ""


def _over_nixl(facts: Facts, when: str, remedy: str) -> Finding:
    reason = _no_nixl(facts)
    if reason:
        return _not(reason)
    named = "as asked" if facts.communicator else "as vLLM does where NIXL is installed"
    return _may(f"EPLB moves experts over NIXL, {named}; hits {when}", remedy)


JUDGES: dict[str, Callable[[Facts], Finding]] = {
    "F1a": _f1a,
    "F1b": _f1b,
    "F1c": _f1c,
    "F1d": _f1d,
    "F2a": partial(
        _through_f1a,
        evidence="F1a's scale does not fit where the ranks hold unequally many tokens",
        remedy="checks every tensor before the NCCL group is opened",
        at_most=Likelihood.WILL,
    ),
    "F2b": partial(
        _through_f1a,
        evidence="F1a's scale passes unnoticed where all ranks hold equally many tokens",
        remedy="checks every tensor also where the sizes are equal",
        at_most=Likelihood.MAY,
    ),
    "F2c": _f2c,
    "F2d": _f2d,
    "F3a": _f3a,
    "F3b": _f3b,
    "F3c": _f3c,
    "F3d": _f3d,
    "F3e": partial(
        _scales,
        dtypes=(*_FLOATS, "F8_E8M0"),
        likelihood=Likelihood.WILL,
        what="is cast by value",
        remedy="encodes them as E8M0",
    ),
    "F3f": _f3f,
    "F3g": _f3g,
    "F3h": _f3h,
    "F3i": partial(
        _scales,
        dtypes=_FLOATS,
        likelihood=Likelihood.MAY,
        what="is rounded where a value is no power of two; values are not read here",
        remedy="takes exact powers of two and refuses others",
    ),
    "F4a": partial(
        _over_nixl,
        when="where the ranks' expert weights differ",
        remedy="compares all ranks, and all raise the same report",
    ),
    "F4b": partial(
        _over_nixl,
        when="where one rank fails alone",
        remedy="has the ranks exchange their status before anybody waits",
    ),
    "F4c": partial(
        _over_nixl,
        when="where the ranks' expert weights differ",
        remedy="compares a digest of them over all ranks",
    ),
    "F4d": partial(
        _over_nixl,
        when="where a rank is faster than those that read from it",
        remedy="waits until the peers have read",
    ),
}


def obstacles(facts: Facts) -> Iterator[str]:
    """Why vLLM itself would refuse the deployment."""
    if not facts.experts:
        return
    for width in facts.widths:
        if width % facts.expert_tp:
            yield (
                f"an expert of intermediate size {width} cannot be cut over {facts.expert_tp} "
                "ranks: use another TP or DP size, or --enable-expert-parallel"
            )
    if facts.eplb and facts.platform == "cpu":
        yield "--enable-eplb needs GPUs"
    elif facts.eplb and not facts.expert_parallel:
        yield "--enable-eplb needs --enable-expert-parallel and more than one rank"
    elif not _no_nixl(facts) and (facts.nixl_missing or facts.nixl_failure):
        yield f"EPLB is to use NIXL, and here: {facts.nixl_missing or facts.nixl_failure}"
