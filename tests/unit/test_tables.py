# SPDX-License-Identifier: Apache-2.0
"""The tables, the records and the metadata speak of the same things."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vllm_moe_dp_fix import plugin
from vllm_moe_dp_fix.registry import FIX_IDS, MODULES, load
from vllm_moe_dp_fix.releases import AFFECTED, RELEASES, SIGNATURES

FIXES = [load(fix_id) for fix_id in FIX_IDS]


def test_every_fault_has_a_row() -> None:
    ids = [fault.id for fix in FIXES for fault in fix.faults]
    assert sorted(ids) == sorted(AFFECTED)


def test_every_target_has_its_signatures() -> None:
    targets = {t for f in FIXES for r in f.repairs for p in r.patches for t in p.targets}
    assert targets == set(SIGNATURES)


@pytest.mark.parametrize("fix_id", FIX_IDS)
def test_modules_are_those_of_the_record(fix_id: str) -> None:
    assert load(fix_id).id == fix_id
    assert load(fix_id).modules == MODULES[fix_id]


def test_releases_are_ordered_and_every_row_holds_some() -> None:
    assert list(RELEASES) == sorted(RELEASES, key=Version)
    for fault, affected in AFFECTED.items():
        assert any(release in SpecifierSet(affected) for release in RELEASES), fault


def test_entry_points() -> None:
    ours = {
        e.name: e.load()
        for e in entry_points(group="vllm.general_plugins")
        if e.value.startswith("vllm_moe_dp_fix.")
    }
    assert ours == {fix_id: getattr(plugin, fix_id) for fix_id in FIX_IDS}


def test_unknown_fix() -> None:
    with pytest.raises(KeyError, match="moe_dp_dispatch"):
        load("moe_dp_dispach")
