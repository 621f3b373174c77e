#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the patch series that the package holds: make_patches.py SOURCES [RELEASE...]

SOURCES holds a folder vllm-RELEASE for each release, as ``fetch_vllm.py`` leaves it.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.patches.build import series
from vllm_moe_dp_fix.releases import RELEASES
from vllm_moe_dp_fix.upstream.series import FOLDER


def main(sources: Path, releases: Sequence[str]) -> None:
    for release in releases:
        made = series(sources / f"vllm-{release}", release)
        folder = FOLDER / release
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, text in made.items():
            (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2:] or RELEASES)
