# SPDX-License-Identifier: Apache-2.0
"""What a fix is, and what can become of it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, ModuleType


class Outcome(enum.Enum):
    """What became of a fault in this process, in the order in which it is decided."""

    SWITCHED_OFF = "switched_off"
    NOT_AFFECTED = "not_affected"
    TARGET_MISSING = "target_missing"
    SIGNATURE_UNKNOWN = "signature_unknown"
    PROBE_FAILED = "probe_failed"
    HEALTHY = "healthy"
    DID_NOT_TAKE = "did_not_take"
    APPLIED = "applied"

    @property
    def is_failure(self) -> bool:
        """The fault may be there, and the fix could not be applied."""
        return self in _FAILURES

    @property
    def words(self) -> str:
        return _WORDS[self]


_FAILURES = frozenset(
    {
        Outcome.TARGET_MISSING,
        Outcome.SIGNATURE_UNKNOWN,
        Outcome.PROBE_FAILED,
        Outcome.DID_NOT_TAKE,
    }
)
_WORDS = {
    Outcome.SWITCHED_OFF: "switched off",
    Outcome.NOT_AFFECTED: "not in this release",
    Outcome.TARGET_MISSING: "cannot be applied",
    Outcome.SIGNATURE_UNKNOWN: "cannot be applied",
    Outcome.PROBE_FAILED: "cannot be judged",
    Outcome.HEALTHY: "not needed, already right",
    Outcome.DID_NOT_TAKE: "did not take",
    Outcome.APPLIED: "applied",
}


@dataclass(frozen=True)
class Verdict:
    """An outcome and why; ``note`` is said in any case: with whom a function is shared."""

    outcome: Outcome
    reason: str
    note: str = ""


@dataclass(frozen=True)
class Fault:
    """One fault of vLLM.

    Attributes:
        id: Row of the release table (``releases.AFFECTED``).
        summary: What a user meets.
        upstream: Issues and pull requests of vLLM about it.
        removable: When the fix can go.
        probe: Runs vLLM's code on a tiny input on the CPU. Takes the repaired module and returns
            the symptom, or None where the behaviour is right. Starts no collective and touches
            no device.
    """

    id: str
    summary: str
    upstream: tuple[str, ...]
    removable: str
    probe: Callable[[ModuleType], str | None]


@dataclass(frozen=True)
class Patch:
    """Replaces one function.

    Attributes:
        targets: Attribute paths in the repair's module; the first that exists is replaced.
        wrap: Takes the original function and its module, returns the replacement. What a static
            method or a property holds is a function, too.
        is_optional: Left out where the release has none of the targets.
        module: Where the targets are, if not in the repair's module, which imports that one.
    """

    targets: tuple[str, ...]
    wrap: Callable[[FunctionType, ModuleType], FunctionType]
    is_optional: bool = False
    module: str | None = None


@dataclass(frozen=True)
class Repair:
    """Patches that go in and out together once a module is imported, and the faults they cure.

    ``on_cpu`` tells on which platform vLLM uses the module: True for the CPU, False for all others,
    None for all. It is imported, and repaired, on the others too; but there nobody needs it.
    """

    module: str
    faults: tuple[Fault, ...]
    patches: tuple[Patch, ...]
    on_cpu: bool | None = None

    def is_used(self) -> bool:
        if self.on_cpu is None:
            return True
        from vllm.platforms import current_platform

        return bool(self.on_cpu == current_platform.is_cpu())


@dataclass(frozen=True)
class Fix:
    """What a user selects: an entry point, and the repairs behind it."""

    id: str
    summary: str
    repairs: tuple[Repair, ...]

    @property
    def faults(self) -> tuple[Fault, ...]:
        return tuple(fault for repair in self.repairs for fault in repair.faults)

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(repair.module for repair in self.repairs))


def summarize(fix: Fix, by_fault: dict[str, Verdict]) -> Verdict | None:
    """One verdict for a fix: a failure first, then what was applied; None while one is missing."""
    found = [by_fault[fault.id] for fault in fix.faults if fault.id in by_fault]
    if len(found) < len(fix.faults):
        return None
    failures = [verdict.outcome for verdict in found if verdict.outcome.is_failure]
    order = (Outcome.SWITCHED_OFF, Outcome.APPLIED, Outcome.HEALTHY, Outcome.NOT_AFFECTED)
    outcome = failures[0] if failures else min((v.outcome for v in found), key=order.index)
    reasons = dict.fromkeys(v.reason for v in found if v.outcome is outcome)
    return Verdict(outcome, "; ".join(reasons))
