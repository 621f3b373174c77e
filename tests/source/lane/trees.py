# SPDX-License-Identifier: Apache-2.0
"""Where the source of each vLLM release lies."""

from __future__ import annotations

import os
from pathlib import Path

SOURCES = Path(
    os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "vllm-moe-dp-fix", "sources"
)


def tree_of(release: str) -> Path:
    """The folder for PYTHONPATH."""
    tree = SOURCES / f"vllm-{release}"
    if not tree.is_dir():
        raise FileNotFoundError(f"{tree} is missing; scripts/source_lane.sh brings it")
    return tree
