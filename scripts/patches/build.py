# SPDX-License-Identifier: Apache-2.0
"""Makes a release's series: edits its source step by step, and writes each step as a mail."""

from __future__ import annotations

import difflib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet

from scripts.patches.edit import COLUMNS, Source
from scripts.patches.fold import fold
from vllm_moe_dp_fix import __version__
from vllm_moe_dp_fix.releases import AFFECTED
from vllm_moe_dp_fix.upstream.series import blob_name

PLUGIN = Path(__file__).parents[2] / "vllm_moe_dp_fix"
# What the plugin calls its own -> what vLLM has for that.
IN_VLLM = {
    "import logging\n": "from vllm.logger import init_logger\n",
    'logging.getLogger("vllm.moe_dp_fix")': "init_logger(__name__)",
}
AUTHOR = "vllm-moe-dp-fix <vllm-moe-dp-fix@users.noreply.github.com>"
DATE = "Mon, 30 Nov 2026 00:00:00 +0000"
SPDX = (
    "# SPDX-License-Identifier: Apache-2.0\n"
    "# SPDX-FileCopyrightText: Copyright contributors to the vLLM project\n"
)


class Tree:
    """A release's source, and what became of it."""

    def __init__(self, root: Path, release: str) -> None:
        self.root, self.release = root, release
        self.changed: dict[str, str] = {}

    def read(self, path: str) -> str | None:
        if path in self.changed:
            return self.changed[path]
        file = self.root / path
        return file.read_text() if file.exists() else None

    def vendor(self, module: str, source: Path, names: Mapping[str, str]) -> None:
        """A module of the plugin, word for word but for these names."""
        text = source.read_text().partition("\n")[2]  # after the license
        for own, theirs in names.items():
            text = text.replace(own, theirs)
        self.add(module.replace(".", "/") + ".py", text)

    def edit(self, path: str, change: Callable[[Source], None]) -> None:
        source = Source(self.read(path) or "")
        change(source)
        self.changed[path] = source.text

    def add(self, path: str, text: str) -> None:
        """A new file in vLLM's style."""
        self.changed[path] = formatted(SPDX + text)


@dataclass(frozen=True)
class Change:
    """What one patch does.

    Attributes:
        fix: Whose counterpart it is.
        faults: That it cures, in the releases that have them.
        title: With vLLM's tags.
        message: What goes wrong, and what is done about it.
        upstream: Issues and open pull requests about the same.
        make: Edits a release's source, and adds the regression test.
        notes: (Fault, line of the message), where the release has it.
    """

    fix: str
    faults: tuple[str, ...]
    title: str
    message: str
    upstream: tuple[str, ...]
    make: Callable[[Tree], None]
    notes: tuple[tuple[str, str], ...] = ()


def faults_in(faults: Sequence[str], release: str) -> tuple[str, ...]:
    """Those that the release has."""
    return tuple(fault for fault in faults if SpecifierSet(AFFECTED[fault]).contains(release))


def series(root: Path, release: str) -> dict[str, str]:
    """File name -> patch."""
    from scripts.patches import all_gather, dispatch, mxfp4, nixl

    tree = Tree(root, release)
    every = (*dispatch.CHANGES, *all_gather.CHANGES, *mxfp4.CHANGES, *nixl.CHANGES)
    changes = [change for change in every if faults_in(change.faults, release)]
    found = {}
    for number, change in enumerate(changes, 1):
        before = Tree(root, release)
        before.changed = dict(tree.changed)
        change.make(tree)
        diffs = [
            _diff(path, before.read(path), text)
            for path, text in sorted(tree.changed.items())
            if text != before.changed.get(path)
        ]
        name = f"{number:04}-{_slug(change.title)}.patch"
        found[name] = _mail(change, release, number, len(changes), "".join(diffs))
    return found


def formatted(text: str) -> str:
    """As ruff formats it, in vLLM's width; what it cannot make fit is an error."""
    options = ["--line-length", str(COLUMNS), "--target-version", "py310"]
    isort = ["--select", "I", "--fix", "--config", 'lint.isort.known-first-party=["vllm"]']
    for command in (["check", *isort], ["format"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--isolated", "-q", *options, "-"],
            input=text,
            capture_output=True,
            text=True,
            check=True,
        )
        text = done.stdout
    return fold(text, COLUMNS)


def _diff(path: str, before: str | None, after: str) -> str:
    is_new = before is None
    lines = difflib.unified_diff(
        (before or "").splitlines(keepends=True),
        after.splitlines(keepends=True),
        "/dev/null" if is_new else f"a/{path}",
        f"b/{path}",
    )
    mode = "new file mode 100644\n" if is_new else ""
    old = "0" * 40 if before is None else blob_name(before.encode())
    ids = f"{old}..{blob_name(after.encode())}"
    index = f"index {ids}" + ("" if is_new else " 100644")
    return f"diff --git a/{path} b/{path}\n{mode}{index}\n{''.join(lines)}"


def _mail(change: Change, release: str, number: int, count: int, diff: str) -> str:
    links = "".join(f"See {link}\n" for link in change.upstream)
    faults = faults_in(change.faults, release)
    notes = "".join(f"- {note.strip()}\n" for fault, note in change.notes if fault in faults)
    message = "\n\n".join(filter(None, [change.message.strip(), notes.strip(), links.strip()]))
    return (
        f"From {'0' * 40} Mon Sep 17 00:00:00 2001\n"
        f"From: {AUTHOR}\n"
        f"Date: {DATE}\n"
        f"Subject: [PATCH {number}/{count}] {change.title}\n"
        "\n"
        f"{message}\n"
        f"---\n"
        f"For vLLM {release}; cures {', '.join(faults)} of vllm-moe-dp-fix ({change.fix}).\n\n"
        f"{diff}"
        f"-- \nvllm-moe-dp-fix {__version__}\n"
    )


def _slug(title: str) -> str:
    words = "".join(c if c.isalnum() else " " for c in title.rpartition("]")[2]).split()
    return "-".join(words[:8])
