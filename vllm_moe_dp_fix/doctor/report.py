# SPDX-License-Identifier: Apache-2.0
"""The report of ``vllm-moe-dp-fix doctor``."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import vllm_moe_dp_fix
from vllm_moe_dp_fix import settings, status
from vllm_moe_dp_fix.doctor import checkpoint, command, environment, schemes, verdicts
from vllm_moe_dp_fix.doctor.checkpoint import Checkpoint, CheckpointError
from vllm_moe_dp_fix.doctor.command import CommandError
from vllm_moe_dp_fix.doctor.facts import Facts
from vllm_moe_dp_fix.doctor.schemes import Scheme
from vllm_moe_dp_fix.doctor.verdicts import Finding, Likelihood
from vllm_moe_dp_fix.host import detect
from vllm_moe_dp_fix.records import Outcome
from vllm_moe_dp_fix.registry import FIX_IDS
from vllm_moe_dp_fix.replicas import choice, memory

SCHEMA = 1
# Weights -> a method from whose name ``replicas.memory`` tells their size.
_SIZES_OF = {"nvfp4": "modelopt_fp4", "mxfp4": "mxfp4", "fp8": "fp8", "mxfp8": "fp8"}
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


class Report(NamedTuple):
    """``document`` is the JSON form, documented in the README."""

    document: dict[str, Any]
    exit_code: int


class _Model(SimpleNamespace):
    """What ``replicas.memory`` and ``replicas.choice`` ask of vLLM's ``ModelConfig``."""

    hf_text_config: Any

    def get_hidden_size(self) -> int:
        return int(self.hf_text_config.hidden_size)

    def get_total_num_hidden_layers(self) -> int:
        return int(self.hf_text_config.num_hidden_layers)

    def get_num_experts(self) -> int:
        return memory.expert_count(self.hf_text_config)


def collect(words: Sequence[str], platform: str | None = None) -> Report:
    """Judges a serve command.

    Args:
        words: The command, settings before it included. They are put into this process's
            environment.
        platform: To judge for another machine; by default what vLLM finds here.
    """
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "plugin": {"version": vllm_moe_dp_fix.__version__},
        "error": None,
        "exit_code": 2,
        **dict.fromkeys(("command", "vllm", "environment", "model", "parallel", "memory")),
        **{name: [] for name in ("faults", "refusals", "problems")},
    }
    try:
        with status.quiet():
            _fill(document, words, platform)
    except (CommandError, CheckpointError) as error:
        document["error"] = str(error)
        return Report(document, 2)
    except Exception as error:
        document["error"] = f"the doctor could not go on: {error!r}"
        return Report(document, 2)
    failed = document["refusals"] or any(
        fault["verdict"] != Likelihood.NOT.value and not fault["repaired"]
        for fault in document["faults"]
    )
    document["exit_code"] = int(bool(failed))
    return Report(document, document["exit_code"])


def _fill(document: dict[str, Any], words: Sequence[str], platform: str | None) -> None:
    typed = command.split(words)
    os.environ.update(typed.environment | _OFFLINE)
    # Strict mode stops a process; here what stops it is part of the report.
    is_strict = settings.read(FIX_IDS).strict
    os.environ.pop(settings.STRICT, None)
    try:
        host = detect()
    except Exception as error:
        raise CommandError(f"vLLM cannot be imported: {error!r}") from error
    here = environment.platform()
    arguments = command.parse(typed.arguments)
    # Neither values nor arguments: there may be keys among them.
    document["command"] = {"environment": sorted(typed.environment), "model": arguments.model}
    found = _read(arguments)
    document["command"]["directory"] = str(found.directory)

    seen = status.collect().document
    document["vllm"] = seen["vllm"] | {"platform": here or "unspecified"}
    around = document["environment"] = environment.collect()
    fixes = {fault["id"]: (fix, fault) for fix in seen["fixes"] for fault in fix["faults"]}
    unoffered = environment.unoffered(around["plugins"])

    model = _model(found, arguments)
    facts = _facts(host.version, arguments, found, model, platform, around)
    is_applied = fixes["F1d"][1]["outcome"] == Outcome.APPLIED.value
    layout = _layout(model, arguments, facts, is_applied and "moe_dp_dispatch" not in unoffered)
    facts = layout.facts
    findings = {
        fault_id: verdicts.judge(fault_id, facts, fault["affected"])
        for fault_id, (_, fault) in fixes.items()
    }
    document["model"] = _model_document(found, model, facts)
    document["parallel"] = _parallel_document(facts)
    document["memory"] = _memory(model, found, facts)
    document["faults"] = list(_faults(findings, fixes, unoffered))
    document["problems"] += [
        *seen["problems"],
        *model.problems,
        *layout.problems,
        *schemes.conflict(found.quantization, arguments.quantization),
    ]
    document["refusals"] += [
        *verdicts.obstacles(facts),
        *layout.refusals,
        *(finding.refusal for finding in findings.values() if finding.refusal),
    ]
    if is_strict:
        document["refusals"] += _stopped_by_strict_mode(document, facts)


# --- the model ------------------------------------------------------------------------------


def _read(arguments: argparse.Namespace) -> Checkpoint:
    revision, cache = arguments.revision, arguments.download_dir
    directory = checkpoint.find(arguments.model, revision, cache)
    elsewhere = getattr(arguments, "hf_config_path", None)
    return checkpoint.read(directory, checkpoint.find(elsewhere) if elsewhere else None)


def _model(found: Checkpoint, arguments: argparse.Namespace) -> _Model:
    """The model's configuration as vLLM reads it, or as it stands in the file.

    No code that comes with a model is run.
    """
    overrides = arguments.hf_overrides if isinstance(arguments.hf_overrides, dict) else {}
    config = found.config | overrides
    problems = []
    try:
        from vllm.transformers_utils.config import get_config, get_hf_text_config

        text = get_hf_text_config(
            get_config(str(found.directory), trust_remote_code=False, hf_overrides_kw=overrides)
        )
    except Exception as error:
        text = SimpleNamespace(**checkpoint.text_config(config))
        reason = " ".join(str(error).split())[:200]
        problems = [f"vLLM cannot read the configuration without the model's own code: {reason}"]
    scheme = schemes.of(found.quantization, arguments.quantization, config)
    return _Model(
        hf_text_config=text,
        hf_config=SimpleNamespace(quantization_config=found.quantization),
        # vLLM narrows a checkpoint in float32, unless that is asked for.
        dtype=SimpleNamespace(itemsize=4 if arguments.dtype in ("float", "float32") else 2),
        quantization=_SIZES_OF.get(scheme.weights or "", scheme.method),
        model_type=str(config.get("model_type") or config["architectures"][0]),
        scheme=scheme,
        is_moe=bool(memory.expert_count(text)),
        problems=problems,
    )


def _facts(
    version: str,
    arguments: argparse.Namespace,
    found: Checkpoint,
    model: _Model,
    platform: str | None,
    around: dict[str, Any],
) -> Facts:
    config = model.hf_text_config
    here = environment.platform()
    eplb, nixl = getattr(arguments, "eplb_config", None), around["nixl"]
    return Facts(
        version=version,
        platform=platform or here or "cuda",
        capability=environment.capability() if platform in (None, here) else None,
        model_type=model.model_type,
        experts=model.get_num_experts(),
        widths=memory.expert_widths(config) if model.is_moe else (),
        hidden=getattr(config, "hidden_size", 0),
        dp=arguments.data_parallel_size,
        tp=arguments.tensor_parallel_size,
        pcp=getattr(arguments, "prefill_context_parallel_size", 1),
        pp=arguments.pipeline_parallel_size,
        expert_parallel=_is_expert_parallel(arguments),
        setting=settings.experts(),
        all2all=arguments.all2all_backend or "allgather_reducescatter",
        moe_backend=_moe_backend(arguments),
        fp8_dispatch=settings.fp8_dispatch(),
        scheme=model.scheme,
        tensors=checkpoint.expert_tensors(found.tensors) or None,
        loads=arguments.load_format != "dummy",
        lora=bool(arguments.enable_lora),
        eplb=bool(arguments.enable_eplb),
        communicator=getattr(eplb, "communicator", None),
        nixl_by_default=_takes_nixl_by_default(),
        nixl_missing="" if nixl["imports"] else nixl["error"],
        nixl_failure="" if nixl["registers"] else nixl["error"],
    )


def _is_expert_parallel(arguments: argparse.Namespace) -> bool:
    sizes = (
        arguments.data_parallel_size,
        arguments.tensor_parallel_size,
        getattr(arguments, "prefill_context_parallel_size", 1),
    )
    return bool(arguments.enable_expert_parallel) and max(sizes) > 1


def _moe_backend(arguments: argparse.Namespace) -> str:
    options = (arguments, getattr(arguments, "kernel_config", None))
    named = (getattr(option, "moe_backend", None) for option in options)
    return str(next((name for name in named if name and name != "auto"), "auto"))


def _takes_nixl_by_default() -> bool:
    from vllm.config import parallel

    return "is_nixl_available" in inspect.getsource(parallel)


# --- where the experts lie ------------------------------------------------------------------


class _Layout(NamedTuple):
    facts: Facts
    refusals: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def _layout(
    model: _Model, arguments: argparse.Namespace, facts: Facts, is_applied: bool
) -> _Layout:
    """Sharded or replicated, decided as ``replicas.choice`` does in vLLM."""
    is_here = facts.platform == environment.platform()
    with contextlib.suppress(Exception):
        need = memory.of_full_copy(_vllm_config(model, arguments)) if is_here else None
        facts = replace(facts, full_copy=need)
    if not facts.experts or facts.dp == 1 or facts.setting == "sharded":
        return _Layout(facts)
    if not is_applied:
        return _Layout(facts, problems=(f"{settings.EXPERTS}={facts.setting} has no effect here",))
    found = list(choice.find_obstacles(_vllm_config(model, arguments)))
    if facts.setting == "replicated":
        return _Layout(replace(facts, replicated=True), (choice.refusal(found),) if found else ())
    if found or facts.full_copy is None:
        reason = " and ".join(found) or "the memory of the devices cannot be told here"
        return _Layout(facts, problems=(f"{settings.EXPERTS}=auto shards, since {reason}",))
    return _Layout(replace(facts, replicated=facts.full_copy.leaves_half))


def _vllm_config(model: _Model, arguments: argparse.Namespace) -> Any:
    """What ``replicas`` asks of a ``VllmConfig``."""
    parallel = SimpleNamespace(**vars(arguments))
    parallel.data_parallel_size_local = (
        arguments.data_parallel_size_local or arguments.data_parallel_size
    )
    return SimpleNamespace(
        model_config=model,
        parallel_config=parallel,
        kv_transfer_config=arguments.kv_transfer_config,
        load_config=arguments,
        cache_config=arguments,
    )


# --- documents ------------------------------------------------------------------------------


def _model_document(found: Checkpoint, model: _Model, facts: Facts) -> dict[str, Any]:
    scheme: Scheme = model.scheme
    return {
        "type": facts.model_type,
        "experts": facts.experts,
        "expert_widths": list(facts.widths),
        "hidden": facts.hidden,
        "quantization": {
            "method": scheme.method,
            "weights": scheme.weights,
            "activations": scheme.activations,
            "static": scheme.is_static,
            "online": scheme.is_online,
        },
        "checkpoint": {
            "tensors": len(found.tensors),
            "bytes": sum(tensor.size for tensor in found.tensors),
            "expert_bytes": sum(t.tensor.size for t in facts.tensors or ()),
        }
        if found.tensors
        else None,
    }


def _parallel_document(facts: Facts) -> dict[str, Any]:
    return {
        "data": facts.dp,
        "tensor": facts.tp,
        "pipeline": facts.pp,
        "prefill_context": facts.pcp,
        "expert_parallel": facts.expert_parallel,
        "expert_tp": facts.expert_tp if facts.experts else None,
        "experts": "replicated" if facts.replicated else "sharded",
    }


def _memory(model: _Model, found: Checkpoint, facts: Facts) -> dict[str, Any] | None:
    """The weights on a GPU in bytes, with the experts sharded and replicated."""
    weights, source = None, "configuration"
    with contextlib.suppress(Exception):  # configurations differ in what they name
        weights = memory.weights(model)
    if found.tensors and facts.loads and not facts.scheme.is_online:
        experts = sum(t.tensor.size for t in facts.tensors or ())
        total = sum(tensor.size for tensor in found.tensors)
        weights, source = memory.Weights(experts, total - experts), "checkpoint"
    if weights is None or not facts.experts:
        return None
    devices = facts.tp * facts.pp
    usable = facts.full_copy.usable if facts.full_copy else None
    return {
        "source": source,
        "sharded": round(weights.a_device(devices, facts.dp * facts.pcp)),
        "replicated": round(weights.a_device(devices)),
        "usable": None if usable is None else round(usable),
    }


def _faults(
    findings: Mapping[str, Finding], fixes: Mapping[str, Any], unoffered: set[str]
) -> Iterator[dict[str, Any]]:
    repaired: dict[str, bool] = {}
    for fault_id, finding in sorted(findings.items()):
        fix, fault = fixes[fault_id]
        outcome = Outcome(fault["outcome"])
        is_active = fix["id"] not in unoffered
        is_repaired = is_active and outcome in (Outcome.APPLIED, Outcome.HEALTHY)
        repaired[fault_id] = is_repaired or repaired.get(finding.through or "", False)
        yield {
            "id": fault_id,
            "fix": fix["id"],
            "summary": fault["summary"],
            "verdict": finding.likelihood.value,
            "evidence": finding.evidence,
            "outcome": fault["outcome"] if is_active else Outcome.SWITCHED_OFF.value,
            "repaired": repaired[fault_id],
            "action": _action(finding, fault, is_active, repaired[fault_id]),
            "set": finding.to_set if repaired[fault_id] else _switch(fix, finding, is_active),
        }


def _switch(fix: Mapping[str, Any], finding: Finding, is_active: bool) -> str:
    """What would have the fix applied."""
    if finding.likelihood is Likelihood.NOT:
        return ""
    if not is_active:
        return "nothing, but install vllm-moe-dp-fix beside vLLM"
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and fix["id"] not in allowed.split(","):
        return f"VLLM_PLUGINS={','.join(filter(None, (allowed, fix['id'])))}"
    if fix["switched_off_by"]:
        return f"{settings.DISABLE} so that it does not name {fix['id']}"
    return ""


def _action(finding: Finding, fault: Mapping[str, Any], is_active: bool, is_repaired: bool) -> str:
    """What the fix does here about a fault that can hit."""
    if finding.likelihood is Likelihood.NOT:
        return "nothing to do"
    outcome = Outcome(fault["outcome"])
    if is_active and outcome is Outcome.APPLIED:
        return finding.remedy
    if is_active and outcome is Outcome.HEALTHY:
        return "nothing: already right here"
    if is_repaired:
        return f"nothing itself, but {finding.through} is repaired"
    if not is_active:
        return "nothing: no installed package offers it to vLLM"
    return f"nothing: {outcome.words}, {fault['reason']}"


def _stopped_by_strict_mode(document: dict[str, Any], facts: Facts) -> Iterator[str]:
    for problem in settings.read(FIX_IDS).problems:
        yield f"{settings.STRICT}=1: {problem}"
    for fault in document["faults"]:
        if Outcome(fault["outcome"]).is_failure and _is_used(fault["id"], facts.platform):
            yield f"{settings.STRICT}=1: {fault['fix']} cannot be applied, {fault['action']}"


def _is_used(fault_id: str, platform: str) -> bool:
    from vllm_moe_dp_fix.registry import load

    repairs = (repair for fix_id in FIX_IDS for repair in load(fix_id).repairs)
    repair = next(r for r in repairs if fault_id in [fault.id for fault in r.faults])
    return repair.on_cpu is None or repair.on_cpu == (platform == "cpu")
