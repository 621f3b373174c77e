# SPDX-License-Identifier: Apache-2.0
"""Where the source of each vLLM release lies, and the driver's report on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SOURCES = Path(
    os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "vllm-moe-dp-fix", "sources"
)


def tree_of(release: str) -> Path:
    """The folder for PYTHONPATH."""
    tree = SOURCES / f"vllm-{release}"
    if not tree.is_dir():
        raise FileNotFoundError(f"{tree} is missing; scripts/source_lane.sh brings it")
    return tree


def lane(tree: Path) -> dict[str, str]:
    """The environment of a process that runs a tree."""
    return {
        **os.environ,
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


def drive(tree: Path, output: Path, *options: str, timeout: float | None = 600) -> dict[str, Any]:
    """The driver's report, which it writes to ``output``.

    Raises:
        RuntimeError: The driver failed; the end of what it said.
    """
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("driver.py")), str(output), *options],
        env=lane(tree),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    if run.returncode != 0:
        raise RuntimeError(f"driver on {tree.name}, code {run.returncode}:\n{run.stdout[-4000:]}")
    report: dict[str, Any] = json.loads(output.read_text())
    return report
