# SPDX-License-Identifier: Apache-2.0
"""Tries the plugin on a vLLM release; see ``check_release.sh``."""

from __future__ import annotations

import argparse
import ast
import difflib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import Version

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "source" / "lane")]

from trees import SOURCES, drive, tree_of  # noqa: E402

from scripts import fetch_vllm  # noqa: E402
from scripts.patches.edit import EditError, Source  # noqa: E402
from vllm_moe_dp_fix.records import Outcome  # noqa: E402
from vllm_moe_dp_fix.registry import FIX_IDS, load  # noqa: E402
from vllm_moe_dp_fix.releases import RELEASES, SIGNATURES  # noqa: E402


class Change(NamedTuple):
    """What became of one function that a fix replaces."""

    fix: str
    target: str
    words: str
    diff: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(";")[0])
    parser.add_argument("release", metavar="VERSION")
    parser.add_argument("--targets", action="store_true", help="compare the functions alone")
    arguments = parser.parse_args()
    release = arguments.release
    known = [r for r in RELEASES if Version(r) < Version(release)]
    if not known:
        parser.error(f"no known release is older than {release}")
    fetch_vllm.main(SOURCES, [release, known[-1]])

    print(f"\nFunctions that the fixes replace, in vLLM {release} beside {known[-1]}:")
    for change in compare(known[-1], release):
        print(f"  {change.fix:21} {change.target}: {change.words}")
        for line in change.diff.splitlines():
            print(f"      {line}")
    if arguments.targets:
        return 0
    report = _drive(release)
    is_fine = _show(report)
    print(
        f"\nvLLM {release} {'is in the table' if release in RELEASES else 'is not in the table'};"
        f" {'all checks pass with the plugin' if is_fine else 'NOT all is right'}."
    )
    return 0 if is_fine else 1


def compare(old: str, new: str) -> Iterator[Change]:
    """Each target that either release has."""
    for fix_id in FIX_IDS:
        seen = set()
        for repair in load(fix_id).repairs:
            for patch in repair.patches:
                file = (patch.module or repair.module).replace(".", "/") + ".py"
                for target in patch.targets:
                    before, after = (_function(tree_of(r) / file, target) for r in (old, new))
                    if (before or after) and target not in seen:
                        seen.add(target)
                        yield Change(fix_id, target, *_judge(target, before, after))


def _function(file: Path, path: str) -> str | None:
    if not file.is_file():
        return None
    source = Source(file.read_text())
    try:
        return ast.get_source_segment(source.text, source.find(path))
    except EditError:
        return None


def _judge(target: str, before: str | None, after: str | None) -> tuple[str, str]:
    if after is None:
        return "is gone", ""
    parameters = ", ".join(Source(after).parameters(target.rpartition(".")[2]))
    unknown = "" if parameters in SIGNATURES.get(target, ()) else f"; NEW SIGNATURE: {parameters}"
    if before is None:
        return f"is new{unknown}", ""
    if before == after:
        return f"unchanged{unknown}", ""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=1)
    return f"changed{unknown}", "\n".join([*lines][2:])


def _drive(release: str) -> dict[str, Any]:
    """The source lane's report."""
    print(f"\nRunning vLLM {release}'s own code on several ranks; this takes minutes.", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            return drive(tree_of(release), Path(folder, "report.json"), timeout=None)
        except RuntimeError as error:
            sys.exit(f"the checks cannot be run on vLLM {release}: {error}")


def _show(report: dict[str, Any]) -> bool:
    """Whether all faults that are here are cured, and all checks pass with the plugin."""
    print("\nFaults, as the plugin judges them there:")
    is_fine = True
    for fault, (outcome, reason) in sorted(report["verdicts"].items()):
        print(f"  {fault}: {Outcome(outcome).words} ({reason})")
        is_fine = is_fine and not Outcome(outcome).is_failure
    print("\nChecks without and with the plugin:")
    for name, found in report["checks"].items():
        without = found["without"][0] if found["without"] else "right"
        print(f"  {name}: {without[:120]} / {'WRONG' if found['with'] else 'right'}")
        for line in found["with"]:
            print(f"      {line}")
        is_fine = is_fine and not found["with"]
    return is_fine


if __name__ == "__main__":
    sys.exit(main())
