# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from vllm_moe_dp_fix.importhook import _HalfImported, when_imported


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def write_arms(folder: Path, name: str) -> None:
    """A module that waits for the host of that name, and keeps its value."""
    (folder / f"{name}_arms.py").write_text(
        "from vllm_moe_dp_fix.importhook import when_imported\n"
        "seen = []\n"
        f"when_imported('{name}_host', lambda module: seen.append(module.value))\n"
    )


def test_a_later_import(write: Path) -> None:
    (write / "later_host.py").write_text("value = 1\n")
    seen: list[int] = []
    when_imported("later_host", lambda module: seen.append(module.value))
    assert seen == []
    importlib.import_module("later_host")
    assert seen == [1]


def test_an_earlier_import(write: Path) -> None:
    (write / "earlier_host.py").write_text("value = 2\n")
    importlib.import_module("earlier_host")
    seen: list[int] = []
    when_imported("earlier_host", lambda module: seen.append(module.value))
    assert seen == [2]


def test_an_import_that_is_under_way(write: Path) -> None:
    """Armed from inside the host's own import, before it defines what is patched."""
    (write / "half_host.py").write_text("import half_arms\nvalue = 3\n")
    write_arms(write, "half")
    (write / "half_next.py").write_text("")
    importlib.import_module("half_host")
    arms: ModuleType = sys.modules["half_arms"]
    assert arms.seen == []
    importlib.import_module("half_next")
    assert arms.seen == [3]
    assert _HalfImported._waiting == ()


def test_an_import_under_way_that_fails(write: Path) -> None:
    """The module is gone again; a second, good import is still seen."""
    (write / "bad_host.py").write_text("import bad_arms\nraise ImportError\n")
    write_arms(write, "bad")
    with pytest.raises(ImportError):
        importlib.import_module("bad_host")
    (write / "bad_host.py").write_text("value = 4\n")
    importlib.invalidate_caches()
    importlib.import_module("bad_host")
    (write / "bad_next.py").write_text("")
    importlib.import_module("bad_next")
    assert sys.modules["bad_arms"].seen == [4]


def test_armed_for_itself_among_others(write: Path) -> None:
    """A package arms the hook in its own ``__init__``, for itself and for its submodule."""
    package = write / "self_host"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from vllm_moe_dp_fix.importhook import when_imported\n"
        "seen = []\n"
        "for name in (__name__, __name__ + '.part'):\n"
        "    when_imported(name, lambda module: seen.append((module.__name__, module.value)))\n"
        "from self_host import part\n"
        "value = 5\n"
    )
    (package / "part.py").write_text("value = 6\n")
    (write / "self_next.py").write_text("")
    seen = importlib.import_module("self_host").seen
    assert seen == [("self_host.part", 6)]
    importlib.import_module("self_next")
    assert seen == [("self_host.part", 6), ("self_host", 5)]
    assert _HalfImported._waiting == ()
