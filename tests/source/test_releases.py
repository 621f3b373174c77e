# SPDX-License-Identifier: Apache-2.0
"""Every release: each fault is shown without the plugin and gone with it.

The driver runs vLLM's own code on several ranks; here its report is judged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from driver import CHECKS, Check, is_in
from packaging.version import Version
from trees import tree_of

from vllm_moe_dp_fix.host import Host
from vllm_moe_dp_fix.registry import FIX_IDS, load
from vllm_moe_dp_fix.releases import AFFECTED, RELEASES

FAULTS = [fault.id for fix_id in FIX_IDS for fault in load(fix_id).faults]
Report = dict[str, Any]


def _is_affected(release: str, fault: str) -> bool:
    return bool(Host.of(release).is_affected(AFFECTED[fault]))


def _shown(check: Check, release: str) -> list[str]:
    """The faults that the check shows without the plugin; without any, it must be right."""
    if check.until and Version(release) > Version(check.until):
        return []
    return [fault for fault in check.faults if _is_affected(release, fault)]


def _cases() -> Iterator[Any]:
    for release in RELEASES:
        for name, check in CHECKS.items():
            if is_in(check, release):
                # What must not change counts for all faults of the fix.
                faults = _shown(check, release) or check.faults
                faults = faults or [fault.id for fault in load(check.fix).faults]
                modes = [name] if name.startswith("replicas") else []
                marks = [pytest.mark.cell(release, shown) for shown in (*faults, *modes)]
                yield pytest.param(release, name, marks=marks, id=f"{release}-{name}")


@pytest.mark.parametrize(("release", "name"), list(_cases()))
def test_behaviour(release: str, name: str, report_of: Callable[[str], Report]) -> None:
    check = CHECKS[name]
    found = report_of(release)["checks"][name]
    if _shown(check, release) or (not check.faults and check.shows):
        assert found["without"], "the fault does not show without the plugin"
        for line in found["without"]:
            assert re.search(check.shows, line), f"another symptom than {check.shows!r}"
    else:
        assert found["without"] == []
    assert found["with"] == []


@pytest.mark.parametrize(
    ("release", "fault"),
    [
        pytest.param(release, fault, marks=pytest.mark.cell(release, fault))
        for release in RELEASES
        for fault in FAULTS
    ],
)
def test_verdict(release: str, fault: str, report_of: Callable[[str], Report]) -> None:
    """The fix is applied exactly where the table says."""
    outcome, reason = report_of(release)["verdicts"][fault]
    want = "applied" if _is_affected(release, fault) else "not_affected"
    assert outcome == want, reason


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("fault", FAULTS)
def test_is_checked(release: str, fault: str) -> None:
    """No fault goes without a check in any release.

    Where a release has another fault in the place of this one, it is that one's symptom that shows.
    """
    found = [check for check in CHECKS.values() if fault in check.faults and is_in(check, release)]
    if _is_affected(release, fault):
        assert any(fault in _shown(check, release) for check in found)
    elif _has_module(release, fault):
        assert found


def _has_module(release: str, fault: str) -> bool:
    repairs = [repair for fix_id in FIX_IDS for repair in load(fix_id).repairs]
    (module,) = {r.module for r in repairs if fault in [f.id for f in r.faults]}
    return (tree_of(release) / f"{module.replace('.', '/')}.py").exists()
