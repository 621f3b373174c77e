# SPDX-License-Identifier: Apache-2.0
"""The fixes of this process: armed at start, applied when their modules are imported."""

from __future__ import annotations

import logging
import threading
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

from vllm_moe_dp_fix import settings
from vllm_moe_dp_fix.importhook import when_imported, when_imported_again
from vllm_moe_dp_fix.registry import FIX_IDS, load, modules_of

# What judges and patches is imported when there is something to judge: vLLM waits for us at start.
if TYPE_CHECKING:
    from vllm_moe_dp_fix.patching import Replacement
    from vllm_moe_dp_fix.records import Verdict

logger = logging.getLogger("vllm.moe_dp_fix")


class FixNotAppliedError(RuntimeError):
    """A fix is needed and cannot be applied, under ``VLLM_MOE_DP_FIX_STRICT=1``."""


class _State:
    """What this process did about one fix."""

    def __init__(self) -> None:
        self.active = False
        self.judged: set[str] = set()
        self.verdicts: dict[str, Verdict] = {}
        self.replacements: list[Replacement] = []


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
        if settings.read(FIX_IDS).strict:
            raise


def install(fix_id: str) -> Verdict | None:
    """Applies a fix, now where its modules are imported and else when they will be.

    Returns:
        The verdict over the whole fix, or None while one of its modules is not imported.

    Raises:
        KeyError: There is no such fix.
        SettingsError: A setting cannot be understood, and strict mode is on.
        FixNotAppliedError: The fix is needed and cannot be applied, and strict mode is on.
    """
    modules = modules_of(fix_id)
    state = _states[fix_id]
    chosen = settings.read(FIX_IDS)
    if chosen.problems:
        if chosen.strict:
            raise settings.SettingsError("; ".join(chosen.problems))
        for problem in chosen.problems:
            _say_once(logging.WARNING, problem)
    if fix_id in chosen.disabled:
        from vllm_moe_dp_fix.records import Outcome, Verdict

        uninstall(fix_id)
        verdict = Verdict(Outcome.SWITCHED_OFF, f"by {settings.DISABLE}")
        state.verdicts = {fault.id: verdict for fault in load(fix_id).faults}
        _say_once(logging.INFO, f"{fix_id}: switched off by {settings.DISABLE}")
        return verdict
    state.active = True
    for name in modules:
        when_imported(name, partial(_on_import, fix_id))
    if not state.judged:
        return None
    from vllm_moe_dp_fix.records import summarize

    return summarize(load(fix_id), state.verdicts)


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


def _on_import(fix_id: str, module: ModuleType) -> None:
    """Judges and applies what concerns ``module``. Raises nothing but in strict mode."""
    state = _states[fix_id]
    with _lock:
        if not state.active or module.__name__ in state.judged:
            return
        state.judged.add(module.__name__)
    new: dict[str, Verdict] = {}
    version, is_used = "unknown", False
    try:
        from vllm_moe_dp_fix.decision import carry_out
        from vllm_moe_dp_fix.host import detect

        host = detect()
        version = host.version
        if host.release is None:
            _say_once(
                logging.WARNING,
                f"vLLM {version} is no release this package was tested with; "
                "its functions are judged by signature and probe alone",
            )
        for repair in load(fix_id).repairs:
            if repair.module == module.__name__:
                is_used = is_used or repair.is_used()
                found, replacements = carry_out(repair, module, host)
                new |= found
                with _lock:
                    state.verdicts |= found
                    state.replacements += replacements
    except Exception:
        logger.exception("%s: could not be judged on vLLM %s", fix_id, version)
        if settings.read(FIX_IDS).strict:
            _judge_again(fix_id, module)
            raise
        return
    failures = [f"{fault}: {v.reason}" for fault, v in new.items() if v.outcome.is_failure]
    level = logging.DEBUG if not is_used else logging.WARNING if failures else logging.INFO
    logger.log(level, "%s on vLLM %s: %s", fix_id, version, _in_words(new))
    if failures and is_used and settings.read(FIX_IDS).strict:
        _judge_again(fix_id, module)
        raise FixNotAppliedError(
            f"{fix_id} could not be applied to vLLM {version}: {'; '.join(failures)}. "
            f"Unset {settings.STRICT} to start without it, or set {settings.DISABLE}={fix_id}."
        )


def _judge_again(fix_id: str, module: ModuleType) -> None:
    """Strict mode stops this import; vLLM may catch that and import the module once more."""
    _states[fix_id].judged.discard(module.__name__)
    when_imported_again(module, partial(_on_import, fix_id))


def _in_words(verdicts: dict[str, Verdict]) -> str:
    groups: dict[str, list[str]] = {}
    for fault_id, verdict in verdicts.items():
        details = [verdict.reason] if verdict.outcome.is_failure else []
        details += [verdict.note] if verdict.note else []
        said = verdict.outcome.words + "".join(f" ({text})" for text in details)
        groups.setdefault(said, []).append(fault_id)
    return "; ".join(f"{', '.join(ids)} {said}" for said, ids in groups.items())


def _say_once(level: int, text: str) -> None:
    if text not in _said:
        _said.add(text)
        logger.log(level, text)
