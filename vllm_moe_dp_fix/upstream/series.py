# SPDX-License-Identifier: Apache-2.0
"""The patch series that come with this package."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_moe_dp_fix.registry import FIX_IDS

FOLDER = Path(__file__).parent / "series"
COVER = "0000-cover-letter.txt"
_CURES = r"cures (.+) of vllm-moe-dp-fix \((\w+)\)"


class SeriesError(ValueError):
    """There is no such series, or it cannot be used as asked."""


@dataclass(frozen=True)
class Patch:
    """One mail of a series, as ``git am`` takes it."""

    name: str
    text: str

    @property
    def title(self) -> str:
        return self._found(r"^Subject: \[PATCH [^]]*\] (.+)$")

    @property
    def fix(self) -> str:
        return self._found(_CURES, 2)

    @property
    def faults(self) -> tuple[str, ...]:
        return tuple(self._found(_CURES).split(", "))

    @property
    def pull_requests(self) -> tuple[str, ...]:
        """Of vLLM, about the same fault."""
        return tuple(re.findall(r"^See (https\S+/pull/\d+)$", self.text, re.MULTILINE))

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(re.findall(r"^diff --git a/(\S+) ", self.text, re.MULTILINE))

    @property
    def before(self) -> dict[str, str]:
        """File -> the name that git gives to its content before the patch; zeros for new ones."""
        found = re.findall(
            r"^diff --git a/(\S+) .*\n(?:new file.*\n)?index (\w+)\.\.", self.text, re.MULTILINE
        )
        return dict(found)

    def numbered(self, number: int, count: int) -> Patch:
        name = f"{number:04}{self.name[4:]}"
        text = re.sub(r"\[PATCH \d+/\d+\]", f"[PATCH {number}/{count}]", self.text, count=1)
        return Patch(name, text)

    def _found(self, pattern: str, group: int = 1) -> str:
        match = re.search(pattern, self.text, re.MULTILINE)
        assert match is not None, self.name
        return match[group]


def releases() -> list[str]:
    """Those that have a series, oldest first."""
    names = [folder.name for folder in FOLDER.iterdir() if folder.is_dir()]
    return sorted(names, key=lambda name: [int(part) for part in name.split(".")])


def load(release: str, fixes: Sequence[str] = ()) -> list[Patch]:
    """The series of a release, of all fixes or of these.

    Raises:
        SeriesError: No such release or fix, or none of the fixes' faults is in the release.
    """
    if unknown := [fix for fix in fixes if fix not in FIX_IDS]:
        raise SeriesError(f"no such fix: {', '.join(unknown)}; there are {', '.join(FIX_IDS)}")
    if release not in releases():
        raise SeriesError(f"there is no series for vLLM {release}, but for {', '.join(releases())}")
    files = sorted((FOLDER / release).glob("*.patch"))
    patches = [Patch(file.name, file.read_text(encoding="utf-8")) for file in files]
    chosen = [patch for patch in patches if not fixes or patch.fix in fixes]
    if not chosen:
        raise SeriesError(f"vLLM {release} has none of the faults of {', '.join(fixes)}")
    return [patch.numbered(i, len(chosen)) for i, patch in enumerate(chosen, 1)]


def originals(patches: Sequence[Patch]) -> dict[str, str]:
    """File of the release -> the name that git gives to its content."""
    first: dict[str, str] = {}
    for patch in patches:
        first = {**patch.before, **first}
    return {file: name for file, name in first.items() if name.strip("0")}


def blob_name(data: bytes) -> str:
    """The name that git gives to a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def cover_letter(release: str, patches: Sequence[Patch]) -> str:
    """What the series is, how to use it, and what is open upstream for the same faults."""
    listed = "\n".join(
        f"  {i:2}  {p.title} ({', '.join(p.faults)})" for i, p in enumerate(patches, 1)
    )
    pulls = {url: patch for patch in patches for url in patch.pull_requests}
    if pulls:
        known = "\n".join(f"  {url}  ({', '.join(p.faults)})" for url, p in pulls.items())
        upstream = (
            "Pull requests are open in vLLM for some of the same faults. Look there before you\n"
            f"submit a patch, so that nobody files a duplicate:\n\n{known}\n"
        )
    else:
        upstream = "No pull request of vLLM was known for these faults when this was written.\n"
    return (
        f"MoE serving under data parallelism: repairs for vLLM {release}\n\n"
        f"{listed}\n\n"
        f"Made for the source of vLLM {release}; each patch has its regression test. Apply with\n\n"
        "  git am --keep-non-patch 0*.patch\n\n"
        "which keeps the tags of the titles. They have no Signed-off-by: whoever submits one adds\n"
        "it (git am --signoff), and stands for it. On a patched vLLM the plugin vllm-moe-dp-fix\n"
        "finds the faults gone and steps aside. Independent replicas (F1d) are a feature of the\n"
        "plugin alone; for vLLM see https://github.com/vllm-project/vllm/pull/51130.\n\n"
        f"{upstream}"
    )
