# SPDX-License-Identifier: Apache-2.0
"""NIXL in a process of its own, plugins, and functions of others."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import FunctionType

import pytest
from hosting import HostPackage, wrap_minus_one

from vllm_moe_dp_fix.doctor import environment
from vllm_moe_dp_fix.patching import find
from vllm_moe_dp_fix.records import Patch
from vllm_moe_dp_fix.registry import FIX_IDS


def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> str:
    folder = tmp_path / "odd_nixl"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "_api.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return folder.name


@pytest.mark.parametrize(
    ("source", "timeout", "said"),
    [
        ("import time; time.sleep(60)", 2.0, "no answer within 2 seconds"),
        ("import os; os.abort()", 30.0, "its process ended with -6"),
        ("raise OSError('libucp.so.0 is missing')", 30.0, "OSError: libucp.so.0 is missing"),
    ],
)
def test_nixl_that_hangs_or_crashes(
    source: str, timeout: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = _package(tmp_path, monkeypatch, source)
    found = environment.probe_nixl.__wrapped__(package, timeout)
    assert (found["imports"], found["registers"]) == (False, False)
    assert said in found["error"]


def test_nixl_that_cannot_register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = _package(tmp_path, monkeypatch, "nixl_agent_config = dict")
    found = environment.probe_nixl.__wrapped__(package, 60.0)
    assert (found["imports"], found["registers"]) == (True, False)
    assert "nixl_agent" in found["error"]


def test_nixl_that_is_not_there() -> None:
    found = environment.probe_nixl.__wrapped__("no_such_nixl")
    assert not found["imports"]
    assert "No module named 'no_such_nixl'" in found["error"]


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed")
def test_nixl() -> None:
    found = environment.probe_nixl.__wrapped__()
    assert found == {"imports": True, "registers": True, "error": ""}


def test_hidden_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "another-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: another\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nother = another:run\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("VLLM_PLUGINS", "moe_dp_dispatch")
    found = {plugin["name"]: plugin for plugin in environment.plugins()}
    assert found["other"] == {
        "name": "other",
        "value": "another:run",
        "distribution": "another",
        "ours": False,
        "hidden": True,
    }
    monkeypatch.delenv("VLLM_PLUGINS")
    assert not any(plugin["hidden"] for plugin in environment.plugins())


def test_fixes_that_are_not_offered() -> None:
    offered = [{"name": "moe_dp_dispatch", "ours": True}, {"name": FIX_IDS[1], "ours": False}]
    assert environment.unoffered(offered) == set(FIX_IDS) - {"moe_dp_dispatch"}


def test_functions_of_others(host: HostPackage) -> None:
    """Another package's function is seen, below this one's too, and this one's is not."""
    module = host.load()
    patch = Patch(("Unit.double",), wrap_minus_one)

    def owners() -> list[str]:
        target = find(patch, module)
        assert target is not None
        return list(environment._foreign_owners(target))

    assert owners() == []
    foreign = FunctionType(module.Unit.double.__code__, {"__name__": "somebody.patches"})
    module.Unit.double = foreign
    assert [owner.partition(" ")[0] for owner in owners()] == ["somebody.patches"]

    def ours(self: object, number: int) -> int:
        return 2 * number

    own = FunctionType(ours.__code__, {"__name__": "vllm_moe_dp_fix.fixes.x"})
    own.__wrapped__ = foreign  # type: ignore[attr-defined]
    module.Unit.double = own
    assert [owner.partition(" ")[0] for owner in owners()] == ["somebody.patches"]
