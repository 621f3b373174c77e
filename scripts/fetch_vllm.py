#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Unpacks the Python source of vLLM releases: fetch_vllm.py DESTINATION [RELEASE...]

Leaves DESTINATION/vllm-RELEASE, ready for PYTHONPATH, for each release named or else for every
release of the table. What is there already stays. vLLM takes the CPU platform from the metadata
that is written beside the package.
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from pypi_simple import DistributionPackage, PyPISimple

from vllm_moe_dp_fix.releases import RELEASES


def main(destination: Path, releases: list[str]) -> None:
    destination.mkdir(parents=True, exist_ok=True)
    missing = [r for r in releases if not (destination / f"vllm-{r}").is_dir()]
    if not missing:
        return
    with PyPISimple() as index:
        packages = index.get_project_page("vllm").packages
        sdists = {p.version: p for p in packages if p.package_type == "sdist"}
        for release in missing:
            if release not in sdists:
                sys.exit(f"the index has no sdist of vLLM {release}")
            _unpack(index, sdists[release], release, destination)
            print(f"vLLM {release}: source unpacked", file=sys.stderr, flush=True)


def _unpack(index: PyPISimple, sdist: DistributionPackage, release: str, destination: Path) -> None:
    with tempfile.TemporaryDirectory(dir=destination) as scratch:
        archive = Path(scratch, "sdist.tar.gz")
        index.download_package(sdist, archive)
        with tarfile.open(archive) as tar:
            inside = [m for m in tar.getmembers() if PurePosixPath(m.name).parts[1:2] == ("vllm",)]
            tar.extractall(scratch, members=inside, filter="data")
        tree = Path(scratch, f"vllm-{release}")
        metadata = tree / f"vllm-{release}+cpu.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n")
        tree.rename(destination / tree.name)  # whole or not at all


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2:] or list(RELEASES))
