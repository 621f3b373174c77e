# SPDX-License-Identifier: Apache-2.0
"""Makes a release's series: edits its source step by step, and writes each step as a mail."""

from __future__ import annotations

import difflib
import hashlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet

from scripts.patches.edit import COLUMNS, Source
from scripts.patches.fold import fold
from vllm_moe_dp_fix import __version__
from vllm_moe_dp_fix.releases import AFFECTED

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
        self.changed: dict[str, str | None] = {}

    def read(self, path: str) -> str | None:
        if path in self.changed:
            return self.changed[path]
        file = self.root / path
        return file.read_text() if file.exists() else None

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
        before = dict(tree.changed)
        change.make(tree)
        diffs = [
            _diff(path, before.get(path) if path in before else _pristine(root, path), text)
            for path, text in sorted(tree.changed.items())
            if text != before.get(path)
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


def _pristine(root: Path, path: str) -> str | None:
    file = root / path
    return file.read_text() if file.exists() else None


def _diff(path: str, before: str | None, after: str | None) -> str:
    assert after is not None
    is_new = before is None
    lines = difflib.unified_diff(
        (before or "").splitlines(keepends=True),
        after.splitlines(keepends=True),
        "/dev/null" if is_new else f"a/{path}",
        f"b/{path}",
    )
    mode = "new file mode 100644\n" if is_new else ""
    ids = f"{'0' * 40 if before is None else blob(before)}..{blob(after)}"
    index = f"index {ids}" + ("" if is_new else " 100644")
    return f"diff --git a/{path} b/{path}\n{mode}{index}\n{''.join(lines)}"


def blob(text: str) -> str:
    """The name that git gives to a file."""
    data = text.encode()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


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
