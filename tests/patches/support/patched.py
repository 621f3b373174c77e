# SPDX-License-Identifier: Apache-2.0
"""A git import of each release, with its series applied."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from trees import drive, lane, tree_of

from vllm_moe_dp_fix.upstream import series

GIT = ("git", "-c", "user.name=tester", "-c", "user.email=tester@example.com")
TIMEOUT_S = 600


def run(*command: str | Path, cwd: Path) -> str:
    """What a command says; it must end with 0."""
    done = subprocess.run(
        command,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout[-4000:]}"
    return done.stdout


def patched_tree(release: str, folder: Path) -> Path:
    """As a user makes it: import, write the series, git am."""
    tree, patches = folder / "vllm", folder / "patches"
    shutil.copytree(tree_of(release), tree)
    run(*GIT, "init", "-q", cwd=tree)
    (tree / ".git" / "info" / "exclude").write_text("__pycache__\n")
    run(*GIT, "add", "-A", cwd=tree)
    run(*GIT, "commit", "-q", "-m", f"vLLM {release}", cwd=tree)
    command = (sys.executable, "-m", "vllm_moe_dp_fix.cli", "patches", "--vllm", release)
    run(*command, "-o", patches, cwd=folder)
    run(*GIT, "am", "-q", "--keep-non-patch", *sorted(patches.glob("0*.patch")), cwd=tree)
    return tree


def regression_tests(release: str, tree: Path, patched: Path, report: Path) -> dict[str, bool]:
    """Whether each of the series' tests passes with the source in ``tree``."""
    files = [
        str(patched / file)
        for patch in series.load(release)
        for file in patch.files
        if file.startswith("tests/")
    ]
    subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *(f"--junitxml={report}", "--import-mode=prepend", f"--rootdir={patched / 'tests'}"),
            *files,
        ],
        cwd=report.parent,
        env={**lane(tree), "VLLM_PLUGINS": ""},
        capture_output=True,
        timeout=TIMEOUT_S,
    )
    cases = ElementTree.parse(report).getroot().iter("testcase")
    return {
        f"{case.get('classname')}::{case.get('name')}": case.find("failure") is None
        and case.find("error") is None
        for case in cases
    }


@dataclass(frozen=True)
class Found:
    """What was seen on one release.

    Attributes:
        before, after: Regression test -> whether it passes, without and with the series.
        behaviour: The source lane's report on the patched tree, on which no plugin was used;
            none where that was not asked for.
    """

    before: dict[str, bool]
    after: dict[str, bool]
    behaviour: dict[str, Any]


def find(release: str, folder: Path, behaves: bool) -> Found:
    folder.mkdir()
    patched = patched_tree(release, folder)
    before = regression_tests(release, tree_of(release), patched, folder / "before.xml")
    after = regression_tests(release, patched, patched, folder / "after.xml")
    behaviour = {}
    if behaves:
        behaviour = drive(patched, folder / "behaviour.json", "--patched")
    shutil.rmtree(patched)
    return Found(before, after, behaviour)
