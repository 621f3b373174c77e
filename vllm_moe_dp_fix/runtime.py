# SPDX-License-Identifier: Apache-2.0
"""The fixes of this process: armed at start, applied when their modules are imported."""

from __future__ import annotations

import logging
import sys
import threading
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType

from vllm_moe_dp_fix import settings
from vllm_moe_dp_fix.decision import carry_out
from vllm_moe_dp_fix.host import Host, detect
from vllm_moe_dp_fix.importhook import when_imported
from vllm_moe_dp_fix.patching import Replacement
from vllm_moe_dp_fix.records import Fix, Outcome, Repair, Verdict
from vllm_moe_dp_fix.registry import FIX_IDS, FIXES

logger = logging.getLogger("vllm.moe_dp_fix")


class FixNotAppliedError(RuntimeError):
    """A fix is needed and cannot be applied, under ``VLLM_MOE_DP_FIX_STRICT=1``."""


@dataclass
class _State:
    """What this process did about one fix."""

    active: bool = False
    armed: bool = False
    judged: set[str] = field(default_factory=set)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    replacements: list[Replacement] = field(default_factory=list)


_states = {fix_id: _State() for fix_id in FIX_IDS}
_said: set[str] = set()
_lock = threading.RLock()


def activate(fix_id: str) -> None:
    """Installs a fix on behalf of vLLM: raises nothing but under ``VLLM_MOE_DP_FIX_STRICT=1``."""
    try:
        install(fix_id)
    except (FixNotAppliedError, settings.SettingsError):
        raise
    except Exception:
        logger.exception("%s: could not be armed; vLLM is as it was", fix_id)


def install(fix_id: str) -> Verdict | None:
    """Applies a fix, now where its modules are imported and else when they will be.

    Returns:
        The verdict over the whole fix, or None while one of its modules is not imported.

    Raises:
        KeyError: There is no such fix.
        SettingsError: A setting cannot be understood, and strict mode is on.
        FixNotAppliedError: The fix is needed and cannot be applied, and strict mode is on.
    """
    fix, state = FIXES[fix_id], _states[fix_id]
    chosen = settings.read(FIX_IDS)
    if chosen.problems:
        if chosen.strict:
            raise settings.SettingsError("; ".join(chosen.problems))
        for problem in chosen.problems:
            _say_once(logging.WARNING, problem)
    with _lock:
        if fix_id in chosen.disabled:
            verdict = Verdict(Outcome.SWITCHED_OFF, f"by {settings.DISABLE}")
            state.verdicts = {fault.id: verdict for fault in fix.faults}
            _say_once(logging.INFO, f"{fix_id}: switched off by {settings.DISABLE}")
            return verdict
        state.active = True
        first, state.armed = not state.armed, True
    for name in fix.modules:
        if first:
            when_imported(name, partial(_on_import, fix))
        elif name in sys.modules:
            _on_import(fix, sys.modules[name])
    return summarize(fix, state.verdicts)


def uninstall(fix_id: str) -> list[str]:
    """Takes a fix back where the functions are still ours.

    Returns:
        What could not be restored because somebody else replaced it since, in words.
    """
    state = _states[fix_id]
    with _lock:
        held = [text for r in reversed(state.replacements) if (text := r.undo())]
        state.active = False
        state.judged.clear()
        state.verdicts.clear()
        state.replacements.clear()
    for text in held:
        logger.warning("%s: %s", fix_id, text)
    return held


def verdicts() -> dict[str, dict[str, Verdict]]:
    """The verdicts of this process so far: fix id -> fault id -> verdict."""
    with _lock:
        return {fix_id: dict(state.verdicts) for fix_id, state in _states.items()}


def summarize(fix: Fix, by_fault: dict[str, Verdict]) -> Verdict | None:
    """One verdict for a fix: a failure first, then what was applied; None while one is missing."""
    found = [by_fault[fault.id] for fault in fix.faults if fault.id in by_fault]
    if len(found) < len(fix.faults):
        return None
    failures = [verdict for verdict in found if verdict.outcome.is_failure]
    order = (Outcome.SWITCHED_OFF, Outcome.APPLIED, Outcome.HEALTHY, Outcome.NOT_AFFECTED)
    outcome = failures[0].outcome if failures else min((v.outcome for v in found), key=order.index)
    reasons = dict.fromkeys(v.reason for v in found if v.outcome is outcome)
    return Verdict(outcome, "; ".join(reasons))


def _on_import(fix: Fix, module: ModuleType) -> None:
    """Judges and applies what concerns ``module``. Raises nothing but in strict mode."""
    state = _states[fix.id]
    with _lock:
        if not state.active or module.__name__ in state.judged:
            return
        state.judged.add(module.__name__)
    new: dict[str, Verdict] = {}
    replacements: list[Replacement] = []
    host = Host("unknown", None)
    try:
        host = detect()
        if host.release is None:
            _say_once(
                logging.WARNING,
                f"vLLM {host.version} is no release this package was tested with; "
                "its functions are judged by signature and probe alone",
            )
        for repair in _repairs_of(fix, module):
            found, replaced = carry_out(repair, module, host)
            new |= found
            replacements += replaced
    except Exception as error:
        logger.debug("%s: unexpected", fix.id, exc_info=True)
        failed = Verdict(Outcome.PROBE_FAILED, f"unexpected: {error!r}")
        missing = [f.id for r in _repairs_of(fix, module) for f in r.faults if f.id not in new]
        new |= dict.fromkeys(missing, failed)
    with _lock:
        state.verdicts |= new
        state.replacements += replacements
    _report(fix, host, new)
    failures = [f"{fault}: {v.reason}" for fault, v in new.items() if v.outcome.is_failure]
    if failures and settings.read(FIX_IDS).strict:
        raise FixNotAppliedError(
            f"{fix.id} could not be applied to vLLM {host.version}: {'; '.join(failures)}. "
            f"Unset {settings.STRICT} to start without it, or set {settings.DISABLE}={fix.id}."
        )


def _repairs_of(fix: Fix, module: ModuleType) -> list[Repair]:
    return [repair for repair in fix.repairs if repair.module == module.__name__]


def _report(fix: Fix, host: Host, new: dict[str, Verdict]) -> None:
    """One line a fix and process; a later module of the same fix speaks up only if it failed."""
    groups: dict[str, list[str]] = {}
    for fault_id, verdict in new.items():
        details = [verdict.reason] if verdict.outcome.is_failure else []
        details += [verdict.note] if verdict.note else []
        said = _WORDS[verdict.outcome] + "".join(f" ({text})" for text in details)
        groups.setdefault(said, []).append(fault_id)
    text = "; ".join(f"{', '.join(ids)} {said}" for said, ids in groups.items())
    failed = any(verdict.outcome.is_failure for verdict in new.values())
    first = f"line:{fix.id}" not in _said
    _said.add(f"line:{fix.id}")
    level = logging.WARNING if failed else logging.INFO if first else logging.DEBUG
    logger.log(level, "%s on vLLM %s: %s", fix.id, host.version, text)


_WORDS = {
    Outcome.SWITCHED_OFF: "switched off",
    Outcome.NOT_AFFECTED: "not needed in this release",
    Outcome.TARGET_MISSING: "could not be applied",
    Outcome.SIGNATURE_UNKNOWN: "could not be applied",
    Outcome.PROBE_FAILED: "could not be judged",
    Outcome.HEALTHY: "not needed, already right",
    Outcome.DID_NOT_TAKE: "did not take",
    Outcome.APPLIED: "applied",
}


def _say_once(level: int, text: str) -> None:
    if text not in _said:
        _said.add(text)
        logger.log(level, text)
