# SPDX-License-Identifier: Apache-2.0
"""What the fixes do in this environment: the decision of a vLLM process, made in this one."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import vllm_moe_dp_fix
from vllm_moe_dp_fix import runtime, settings
from vllm_moe_dp_fix.host import Host, detect
from vllm_moe_dp_fix.records import Fault, Fix, Outcome, Repair, Verdict, summarize
from vllm_moe_dp_fix.registry import FIX_IDS, load
from vllm_moe_dp_fix.releases import AFFECTED

SCHEMA = 1
_PLUGIN_GROUPS = tuple(
    f"vllm.{kind}_plugins"
    for kind in ("general", "platform", "io_processor", "stat_logger", "endpoint")
)


@dataclass(frozen=True)
class Status:
    """The report of ``vllm-moe-dp-fix status``.

    ``document`` is the JSON form, documented in the README; ``exit_code`` is 0 where all that is
    needed can be applied, 1 where something cannot, 2 without vLLM.
    """

    document: dict[str, Any]
    exit_code: int


def collect() -> Status:
    """Judges every fix against the vLLM that this environment imports."""
    chosen = settings.read(FIX_IDS)
    problems = [*chosen.problems, *_unknown_plugins()]
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "plugin": {"version": vllm_moe_dp_fix.__version__},
        "vllm": None,
        "fixes": [],
        "problems": problems,
    }
    with quiet():
        try:
            host = detect()
        except Exception as error:
            missing = f"vLLM cannot be imported: {error!r}"
            problems.append(missing)
            absent = Verdict(Outcome.TARGET_MISSING, missing)
            document["fixes"] = [
                _fix_document(fix, dict.fromkeys(_ids(fix), absent), None, None)
                for fix in map(load, FIX_IDS)
            ]
            return Status(document, 2)
        document["vllm"] = _vllm_document(host)
        for fix in map(load, FIX_IDS):
            judged, switch = _judge(fix)
            document["fixes"].append(_fix_document(fix, judged, host, switch))
    failed = any(
        Outcome(fault["outcome"]).is_failure and fault["used_here"]
        for fix in document["fixes"]
        for fault in fix["faults"]
    )
    return Status(document, int(failed))


def _judge(fix: Fix) -> tuple[dict[str, Verdict], str | None]:
    """The verdicts over a fix's faults, and what switches the fix off, if anything does."""
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and fix.id not in allowed.split(","):
        hidden = f"VLLM_PLUGINS={allowed!r} does not name it"
        return dict.fromkeys(_ids(fix), Verdict(Outcome.SWITCHED_OFF, hidden)), hidden
    failures: dict[str, Verdict] = {}
    for repair in fix.repairs:
        try:
            importlib.import_module(repair.module)
        except Exception as error:
            failures |= {fault.id: _without_module(fault, repair, error) for fault in repair.faults}
    # Strict mode and misspelt settings stop a vLLM process; here they are part of the report.
    with contextlib.suppress(runtime.FixNotAppliedError, settings.SettingsError):
        runtime.install(fix.id)
    by_fault = failures | runtime.verdicts()[fix.id]
    outcomes = {verdict.outcome for verdict in by_fault.values()}
    off = f"{settings.DISABLE} names it" if outcomes == {Outcome.SWITCHED_OFF} else None
    unsettled = Verdict(Outcome.PROBE_FAILED, "a setting stops the process in strict mode")
    return {fault_id: by_fault.get(fault_id, unsettled) for fault_id in _ids(fix)}, off


def _without_module(fault: Fault, repair: Repair, error: Exception) -> Verdict:
    host = detect()
    if isinstance(error, ModuleNotFoundError) and host.is_affected(AFFECTED[fault.id]) is False:
        return Verdict(Outcome.NOT_AFFECTED, f"vLLM {host.version} has no {repair.module}")
    return Verdict(Outcome.TARGET_MISSING, f"{repair.module} cannot be imported: {error!r}")


def _fix_document(
    fix: Fix, by_fault: dict[str, Verdict], host: Host | None, off: str | None
) -> dict[str, Any]:
    verdict = summarize(fix, by_fault)
    assert verdict is not None
    return {
        "id": fix.id,
        "summary": fix.summary,
        "outcome": verdict.outcome.value,
        "reason": verdict.reason,
        "switched_off_by": off,
        "faults": [
            _fault_document(fault, by_fault[fault.id], host, host is not None and repair.is_used())
            for repair in fix.repairs
            for fault in repair.faults
        ],
    }


def _fault_document(
    fault: Fault, verdict: Verdict, host: Host | None, used_here: bool
) -> dict[str, Any]:
    return {
        "id": fault.id,
        "summary": fault.summary,
        "affected": _is_affected(fault, verdict, host),
        "releases": AFFECTED[fault.id],
        "used_here": used_here,
        "outcome": verdict.outcome.value,
        "reason": "; ".join(filter(None, (verdict.reason, verdict.note))),
        "upstream": list(fault.upstream),
        "removable": fault.removable,
    }


def _is_affected(fault: Fault, verdict: Verdict, host: Host | None) -> bool | None:
    """What was seen comes before what the table says; None where neither tells."""
    seen = {Outcome.APPLIED: True, Outcome.DID_NOT_TAKE: True, Outcome.HEALTHY: False}
    if verdict.outcome in seen:
        return seen[verdict.outcome]
    return None if host is None else host.is_affected(AFFECTED[fault.id])


def _vllm_document(host: Host) -> dict[str, Any]:
    import vllm

    distributions = importlib.metadata.packages_distributions().get("vllm", [])
    if not distributions:  # a source tree, or metadata without a file list
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            distributions = [str(importlib.metadata.metadata("vllm")["Name"])]
    try:
        from vllm.platforms import current_platform

        platform = getattr(current_platform, "device_name", None) or "unspecified"
    except Exception as error:
        platform = f"unknown: {error!r}"
    return {
        "version": host.version,
        "tested": host.release is not None,
        "distribution": sorted(set(distributions)) or None,
        "platform": platform,
        "path": os.path.dirname(str(vllm.__file__)),
    }


def _unknown_plugins() -> list[str]:
    """Names in VLLM_PLUGINS that no installed plugin has: misspelt, or not installed."""
    allowed = os.environ.get("VLLM_PLUGINS")
    known = {
        entry.name
        for group in _PLUGIN_GROUPS
        for entry in importlib.metadata.entry_points(group=group)
    }
    return [
        f"VLLM_PLUGINS names {name!r}, which no installed plugin is called"
        for name in (allowed or "").split(",")
        if name and name not in known
    ]


def _ids(fix: Fix) -> list[str]:
    return [fault.id for fault in fix.faults]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps what vLLM prints, warns of and logs while it is imported out of the report."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    nowhere = io.StringIO()
    try:
        with (
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
