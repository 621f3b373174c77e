# SPDX-License-Identifier: Apache-2.0
"""A small host module and a fix for it, in place of vLLM and its fixes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hosting import FIX_ID, HOST_SOURCE, HostPackage

from vllm_moe_dp_fix import registry, releases, runtime
from vllm_moe_dp_fix.host import Host
from vllm_moe_dp_fix.records import Fix


@pytest.fixture
def host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[HostPackage]:
    """A fresh host module, with its row in the release tables."""
    name = f"host_{abs(hash(request.node.name)) % 10**9}"
    path = tmp_path / f"{name}.py"
    path.write_text(HOST_SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(releases.AFFECTED, "D", ">=0.19.0,<=0.33.0")
    monkeypatch.setitem(releases.AFFECTED, "T", "==0.19.0")
    monkeypatch.setitem(releases.SIGNATURES, "Unit.double", {"self, number"})
    monkeypatch.setitem(releases.SIGNATURES, "triple", {"number"})
    yield HostPackage(name, path)
    sys.modules.pop(name, None)


@pytest.fixture
def unit_fix(host: HostPackage, monkeypatch: pytest.MonkeyPatch) -> HostPackage:
    """The host with a registered fix, ``FIX_ID``, on a vLLM 0.19.0."""
    fix = Fix(FIX_ID, "counts right", (host.repair(),))
    holder = ModuleType(f"vllm_moe_dp_fix.fixes.{FIX_ID}")
    holder.FIX = fix  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, holder.__name__, holder)
    monkeypatch.setitem(registry.MODULES, FIX_ID, (host.name,))
    monkeypatch.setattr(runtime, "FIX_IDS", (*registry.FIX_IDS, FIX_ID))
    monkeypatch.setitem(runtime._states, FIX_ID, runtime._State())
    monkeypatch.setattr(runtime, "_said", set())
    monkeypatch.setattr("vllm_moe_dp_fix.host.detect", lambda: Host.of("0.19.0"))
    return host
