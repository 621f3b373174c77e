# SPDX-License-Identifier: Apache-2.0
"""The wheel works in a clean environment, and the source distribution holds what makes it."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from vllm_moe_dp_fix.registry import FIX_IDS
from vllm_moe_dp_fix.releases import RELEASES
from vllm_moe_dp_fix.upstream import series

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True)


def must(*command: str | Path, cwd: Path) -> str:
    done = run(*command, cwd=cwd)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def environment(folder: Path, *packages: str | Path) -> Path:
    """The python of a new environment that has these packages."""
    must(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    must(python, "-m", "pip", "install", "-q", *packages, cwd=folder.parent)
    return python


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of wheel and source distribution."""
    folder = tmp_path_factory.mktemp("package")
    python = environment(folder / "builder", "hatchling")
    must(python, "-m", "hatchling", "build", "-d", folder, cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def scripts(built: Path) -> Path:
    """Where the commands of an environment lie that has the wheel alone."""
    (wheel,) = built.glob("*.whl")
    return environment(built / "clean", wheel).parent


def test_source_distribution_holds_the_tests(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    tracked = must("git", "ls-files", "tests", "scripts", "vllm_moe_dp_fix", "docs", cwd=ROOT)
    wanted = {*tracked.split(), "README.md", "CHANGELOG.md", "LICENSE", ".ci/run"}
    assert wanted - names == set()


def test_wheel_of_the_source_distribution_is_the_same(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    (wheel,) = built.glob("*.whl")
    with tarfile.open(sdist) as tar:
        tar.extractall(built / "unpacked", filter="data")
    (source,) = (built / "unpacked").iterdir()
    python = built / "builder" / "bin" / "python"
    must(python, "-m", "hatchling", "build", "-t", "wheel", "-d", built / "again", cwd=source)
    (again,) = (built / "again").glob("*.whl")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        assert {i.filename: i.CRC for i in one.infolist()} == {
            i.filename: i.CRC for i in other.infolist()
        }


def test_commands_without_vllm(scripts: Path, tmp_path: Path) -> None:
    command = scripts / "vllm-moe-dp-fix"
    must(scripts / "python", "-m", "pip", "check", cwd=tmp_path)
    assert run(command, "status", cwd=tmp_path).returncode == 2
    assert run(command, "doctor", "--", "vllm", "serve", "nothing", cwd=tmp_path).returncode == 2
    for release in RELEASES:
        written = must(command, "patches", "--vllm", release, cwd=tmp_path)
        assert written.count("\nSubject: [PATCH ") == len(series.load(release))


def test_entry_points(scripts: Path, tmp_path: Path) -> None:
    code = (
        "from importlib.metadata import entry_points\n"
        "for point in entry_points(group='vllm.general_plugins'):\n"
        "    print(point.name, callable(point.load()))\n"
    )
    lines = must(scripts / "python", "-c", code, cwd=tmp_path).splitlines()
    assert sorted(lines) == sorted(f"{fix_id} True" for fix_id in FIX_IDS)
