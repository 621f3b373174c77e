# SPDX-License-Identifier: Apache-2.0
"""Decides about one repair, and carries the decision out."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from vllm_moe_dp_fix.host import Host
from vllm_moe_dp_fix.patching import Replacement, Target, find, replace
from vllm_moe_dp_fix.records import Fault, Outcome, Patch, Repair, Verdict
from vllm_moe_dp_fix.releases import AFFECTED, SIGNATURES

Verdicts = dict[str, Verdict]


def carry_out(repair: Repair, module: ModuleType, host: Host) -> tuple[Verdicts, list[Replacement]]:
    """Judges a repair in this order and applies it where it is needed.

    Release not affected, target missing, signature unknown, probe healthy, apply, probe again.
    Where the second probe still sees a fault, everything is undone.

    Returns:
        A verdict for each fault of the repair, and what was replaced (nothing unless applied).
    """
    verdicts: Verdicts = {}
    candidates: list[Fault] = []
    for fault in repair.faults:
        if host.is_affected(AFFECTED[fault.id]) is False:
            reason = f"vLLM {host.version} does not have it ({AFFECTED[fault.id]} does)"
            verdicts[fault.id] = Verdict(Outcome.NOT_AFFECTED, reason)
        else:
            candidates.append(fault)
    if not candidates:
        return verdicts, []

    def conclude(outcome: Outcome, reason: str) -> tuple[Verdicts, list[Replacement]]:
        return verdicts | {fault.id: Verdict(outcome, reason) for fault in candidates}, []

    targets: list[tuple[Patch, Target]] = []
    for patch in repair.patches:
        try:
            place = import_module(patch.module) if patch.module else module
        except ModuleNotFoundError as error:
            return conclude(Outcome.TARGET_MISSING, str(error))
        target = find(patch, place)
        if target is None and patch.is_optional:
            continue
        if target is None:
            names = " or ".join(patch.targets)
            return conclude(Outcome.TARGET_MISSING, f"{place.__name__} has no {names}")
        if target.signature not in SIGNATURES[target.path]:
            shown = target.signature or f"no plain function: {target.function!r}"
            by = f", put there by {target.foreign_owner}" if target.foreign_owner else ""
            return conclude(
                Outcome.SIGNATURE_UNKNOWN, f"{target.path}({shown}){by} is none that was tested"
            )
        targets.append((patch, target))

    try:
        symptoms = {fault.id: fault.probe(module) for fault in candidates}
    except Exception as error:
        return conclude(Outcome.PROBE_FAILED, f"the probe could not judge: {error!r}")
    verdicts |= {
        fault_id: Verdict(Outcome.HEALTHY, "the probe finds the behaviour right")
        for fault_id, symptom in symptoms.items()
        if symptom is None
    }
    candidates = [fault for fault in candidates if symptoms[fault.id] is not None]
    if not candidates:
        return verdicts, []

    replacements: list[Replacement] = []
    try:
        for patch, target in targets:
            replacements.append(replace(patch, target))
        left = {fault.id: fault.probe(module) for fault in repair.faults if fault.id in symptoms}
        failure = "; ".join(f"{fault_id}: {text}" for fault_id, text in left.items() if text)
    except Exception as error:
        failure = repr(error)
    if failure:
        held = [text for r in reversed(replacements) if (text := r.undo())]
        return conclude(
            Outcome.DID_NOT_TAKE, "; ".join([f"undone, after applying: {failure}", *held])
        )

    note = "; ".join(
        f"{target.path} was already replaced by {target.foreign_owner}, chained on it"
        for _, target in targets
        if target.foreign_owner
    )
    for fault in candidates:
        verdicts[fault.id] = Verdict(Outcome.APPLIED, f"was faulty: {symptoms[fault.id]}", note)
    return verdicts, replacements
