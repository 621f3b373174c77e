# SPDX-License-Identifier: Apache-2.0
"""What is said of a fault, from the verdict over it and what its fix does here."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_moe_dp_fix.doctor import report
from vllm_moe_dp_fix.doctor.verdicts import Finding, Likelihood

FIX = "moe_dp_dispatch"
WILL = Finding(Likelihood.WILL, "evidence", "gathers first", "A=1")


def said(
    outcome: str,
    finding: Finding = WILL,
    switched_off_by: str | None = None,
    unoffered: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    fix = {"id": FIX, "switched_off_by": switched_off_by}
    fault = {"summary": "s", "outcome": outcome, "reason": "the reason"}
    (found,) = report._faults({"F1a": finding}, {"F1a": (fix, fault)}, set(unoffered))
    return found


@pytest.mark.parametrize(
    ("outcome", "repaired", "action", "to_set"),
    [
        ("applied", True, "gathers first", "A=1"),
        ("healthy", True, "nothing: already right here", "A=1"),
        ("did_not_take", False, "nothing: did not take, the reason", ""),
        ("target_missing", False, "nothing: cannot be applied, the reason", ""),
    ],
)
def test_outcomes(outcome: str, repaired: bool, action: str, to_set: str) -> None:
    found = said(outcome)
    assert (found["repaired"], found["action"], found["set"]) == (repaired, action, to_set)


def test_what_does_not_hit() -> None:
    found = said("switched_off", Finding(Likelihood.NOT, "evidence"), "VLLM_PLUGINS")
    assert (found["action"], found["set"]) == ("nothing to do", "")


def test_what_vllm_is_not_offered() -> None:
    found = said("applied", unoffered=frozenset({FIX}))
    assert not found["repaired"]
    assert found["outcome"] == "switched_off"
    assert "no installed package offers it" in found["action"]
    assert "install" in found["set"]


@pytest.mark.parametrize(("allowed", "to_set"), [("x", f"VLLM_PLUGINS=x,{FIX}"), ("", FIX)])
def test_hidden_fixes(allowed: str, to_set: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    assert said("switched_off", switched_off_by="VLLM_PLUGINS")["set"].endswith(to_set)


def test_disabled_fixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    found = said("switched_off", switched_off_by="VLLM_MOE_DP_FIX_DISABLE names it")
    assert found["set"] == f"VLLM_MOE_DP_FIX_DISABLE so that it does not name {FIX}"


@pytest.mark.parametrize(("cause", "repaired"), [("applied", True), ("switched_off", False)])
def test_a_fault_through_another(cause: str, repaired: bool) -> None:
    fix = {"id": FIX, "switched_off_by": None}
    fault = {"summary": "s", "outcome": "switched_off", "reason": "off"}
    fixes = {"F2a": (fix, fault), "F1a": (fix, fault | {"outcome": cause})}
    findings = {"F2a": WILL._replace(through="F1a"), "F1a": WILL}
    first, second = report._faults(findings, fixes, set())
    assert (first["id"], second["id"]) == ("F1a", "F2a")
    assert first["repaired"] is second["repaired"] is repaired
    assert ("F1a is repaired" in second["action"]) is repaired
