# SPDX-License-Identifier: Apache-2.0
"""Each release's series: made of the plugin's code, applied by git, and as good as the plugin."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from patched import Found
from trees import tree_of

from scripts.patches.build import series as build
from vllm_moe_dp_fix.host import Host
from vllm_moe_dp_fix.registry import FIX_IDS, load
from vllm_moe_dp_fix.releases import AFFECTED, RELEASES
from vllm_moe_dp_fix.upstream import series, tree

EACH = pytest.mark.parametrize("release", RELEASES)
# One of each generation of the code that is patched.
GENERATIONS = ("0.19.0", "0.20.0", "0.22.1", "0.23.0", "0.26.0", "0.28.0", "0.31.0", "0.33.0")
OF_THE_PLUGIN_ALONE = {"F1d"}  # independent replicas, a feature


def faults_of(release: str, fix_ids: tuple[str, ...] = FIX_IDS) -> set[str]:
    host = Host.of(release)
    ids = {fault.id for fix_id in fix_ids for fault in load(fix_id).faults} - OF_THE_PLUGIN_ALONE
    return {fault for fault in ids if host.is_affected(AFFECTED[fault])}


def test_every_release_has_one() -> None:
    assert series.releases() == list(RELEASES)


@EACH
def test_is_what_the_code_makes(release: str) -> None:
    """Else: scripts/make_patches.py."""
    made = build(tree_of(release), release)
    assert {patch.name: patch.text for patch in series.load(release)} == made


@EACH
def test_cures_every_fault(release: str) -> None:
    cured = {fault for patch in series.load(release) for fault in patch.faults}
    assert cured == faults_of(release)


@EACH
def test_style(release: str) -> None:
    for patch in series.load(release):
        assert re.match(r"(\[[\w-]+\])+ \S", patch.title)
        assert "Signed-off-by" not in patch.text
        added = [line[1:] for line in patch.text.splitlines() if re.match(r"\+(?!\+\+ )", line)]
        assert not [line for line in added if len(line) > 88]
        assert not [line for line in added if line != line.rstrip()]
        assert sum(file.startswith("tests/") for file in patch.files) == 1
        header = "+# SPDX-License-Identifier: Apache-2.0\n+# SPDX-FileCopyrightText: "
        assert patch.text.count("\n--- /dev/null\n") == patch.text.count(header)


@EACH
@pytest.mark.parametrize("fix", FIX_IDS)
def test_each_fix_fits_alone(release: str, fix: str) -> None:
    if not faults_of(release, (fix,)):
        with pytest.raises(series.SeriesError, match="none of the faults"):
            series.load(release, [fix])
        return
    patches = series.load(release, [fix])
    assert {patch.fix for patch in patches} == {fix}
    assert tree.state(tree_of(release), patches) is tree.State.FITS


@EACH
def test_regression_tests(release: str, found_on: Callable[[str], Found]) -> None:
    """All fail without the series and pass with it."""
    found = found_on(release)
    assert found.after
    assert found.before.keys() == found.after.keys()
    assert [name for name, passed in found.before.items() if passed] == []
    assert [name for name, passed in found.after.items() if not passed] == []


@pytest.mark.behaviour
@pytest.mark.parametrize("release", GENERATIONS)
def test_behaves_as_with_the_plugin(release: str, found_on: Callable[[str], Found]) -> None:
    """The checks of the source lane, without any plugin."""
    checks = found_on(release).behaviour["checks"]
    assert checks
    assert {name: found["without"] for name, found in checks.items() if found["without"]} == {}


@pytest.mark.behaviour
@pytest.mark.parametrize("release", GENERATIONS)
def test_the_plugin_steps_aside(release: str, found_on: Callable[[str], Found]) -> None:
    verdicts = found_on(release).behaviour["verdicts"]
    outcomes = {fault: verdicts[fault][0] for fault in faults_of(release)}
    assert set(outcomes.values()) == {"healthy"}, outcomes
