#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes docs/catalogue.md, what each fix does to vLLM and why, from the fixes' records."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from vllm_moe_dp_fix.records import Fault, Repair  # noqa: E402
from vllm_moe_dp_fix.registry import FIX_IDS, load  # noqa: E402
from vllm_moe_dp_fix.releases import AFFECTED  # noqa: E402

FILE = ROOT / "docs" / "catalogue.md"
HEAD = """# Catalogue of the fixes

Written by `scripts/make_catalogue.py` from the fixes' records; do not edit. A repair goes in where
the probe of one of its faults sees that fault, and out again where it does not take.
"""


def catalogue() -> str:
    return "\n".join([HEAD, *(line for fix_id in FIX_IDS for line in _fix(fix_id))]).rstrip() + "\n"


def _fix(fix_id: str) -> Iterator[str]:
    fix = load(fix_id)
    module = importlib.import_module(f"vllm_moe_dp_fix.fixes.{fix_id}")
    _, _, how = (inspect.getdoc(module) or "").partition("\n\n")
    yield f"## {fix_id}\n\n{fix.summary}.\n\n{how}\n"
    for repair in fix.repairs:
        yield from _repair(repair)


def _repair(repair: Repair) -> Iterator[str]:
    yield f"### {', '.join(fault.id for fault in repair.faults)}: `{repair.module}`\n\nReplaces\n"
    for patch in repair.patches:
        names = " or ".join(f"`{target}`" for target in patch.targets)
        where = f" in `{patch.module}`" if patch.module else ""
        yield f"- {names}{where}{', where it exists' if patch.is_optional else ''}"
    yield "\n| Fault | vLLM | Why | Upstream | Can go |\n|---|---|---|---|---|"
    for fault in repair.faults:
        yield _fault(fault)
    yield ""


def _fault(fault: Fault) -> str:
    links = ", ".join(f"[{link.rpartition('/')[2]}]({link})" for link in fault.upstream)
    releases = AFFECTED[fault.id].replace(">=", "").replace(",<=", " to ")
    cells = [fault.id, releases, fault.summary, links or "not reported", fault.removable]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    FILE.write_text(catalogue(), encoding="utf-8")
