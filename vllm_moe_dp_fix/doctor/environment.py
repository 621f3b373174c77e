# SPDX-License-Identifier: Apache-2.0
"""What a deployment finds here: torch, GPUs, NIXL, plugins, and who else replaces functions."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from importlib.metadata import entry_points
from types import FunctionType
from typing import Any

from vllm_moe_dp_fix.patching import Target, find
from vllm_moe_dp_fix.registry import FIX_IDS, load

GROUP = "vllm.general_plugins"
_PACKAGE = __name__.partition(".")[0]
_NIXL_TIMEOUT = 60.0  # seconds, of which importing torch takes some


def collect() -> dict[str, Any]:
    """All of it, as in the JSON report."""
    return {
        **_torch(),
        "gpus": list(_gpus()),
        "nixl": probe_nixl(_nixl_package()),
        "plugins": plugins(),
        "others": others(),
    }


@functools.cache
def platform() -> str:
    """vLLM's name of the platform, '' where it finds none: one for CUDA without a GPU, say.

    vLLM cannot parse a command then; its CPU platform takes the place, as in ``vllm bench``.
    """
    from vllm import platforms

    current = platforms.current_platform
    for name in ("cuda", "rocm", "cpu", "xpu", "tpu"):
        if getattr(current, f"is_{name}", bool)():
            return name
    if current.is_unspecified():
        from vllm.platforms.cpu import CpuPlatform

        platforms.current_platform = CpuPlatform()
        return ""
    return str(current.device_type)


def capability() -> tuple[int, int] | None:
    """Of the first GPU."""
    from vllm.platforms import current_platform

    try:
        found = current_platform.get_device_capability()
    except Exception:
        return None
    return None if found is None else (found.major, found.minor)


def _torch() -> dict[str, str | None]:
    try:
        import torch
    except Exception:
        return {"torch": None, "cuda": None}
    return {"torch": torch.__version__, "cuda": torch.version.cuda}


def _gpus() -> Iterator[dict[str, Any]]:
    try:
        import torch
        from vllm.platforms import current_platform

        for index in range(torch.cuda.device_count()):
            found = current_platform.get_device_capability(index)
            yield {
                "name": current_platform.get_device_name(index),
                "capability": None if found is None else f"{found.major}.{found.minor}",
                "bytes": current_platform.get_device_total_memory(index),
            }
    except Exception:
        return


def _nixl_package() -> str:
    return "nixl_rocm" if platform() == "rocm" else "nixl"


@functools.cache
def probe_nixl(package: str = "nixl", timeout: float = _NIXL_TIMEOUT) -> dict[str, Any]:
    """Whether NIXL imports and registers memory, tried in another process.

    Returns:
        ``imports``, ``registers``, and ``error``, '' where both are true.
    """
    command = [sys.executable, "-m", f"{_PACKAGE}.doctor.nixl_probe", package]
    failed = {"imports": False, "registers": False}
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return failed | {"error": f"no answer within {timeout:g} seconds"}
    except OSError as error:
        return failed | {"error": str(error)}
    try:
        answer: dict[str, Any] = json.loads(run.stdout.rstrip().rpartition("\n")[2])
    except ValueError:
        said = run.stderr.strip().rpartition("\n")[2]
        return failed | {"error": f"its process ended with {run.returncode}: {said}"}
    return answer


def plugins() -> list[dict[str, Any]]:
    """The plugins that vLLM would load in every process, and those that are hidden from it."""
    allowed = os.environ.get("VLLM_PLUGINS")
    return [
        {
            "name": entry.name,
            "value": entry.value,
            "distribution": entry.dist.name if entry.dist else None,
            "ours": entry.value.partition(".")[0] == _PACKAGE,
            "hidden": allowed is not None and entry.name not in allowed.split(","),
        }
        for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
    ]


def unoffered(found: list[dict[str, Any]]) -> set[str]:
    """The fixes that no installed distribution offers to vLLM."""
    return set(FIX_IDS) - {plugin["name"] for plugin in found if plugin["ours"]}


def others() -> list[dict[str, str]]:
    """Functions that the fixes replace, and that are neither vLLM's own nor this package's."""
    found = {
        (target.path, owner): {"fix": fix_id, "target": target.path, "owner": owner}
        for fix_id, target in _targets()
        for owner in _foreign_owners(target)
    }
    return list(found.values())


def _targets() -> Iterator[tuple[str, Target]]:
    """What each fix replaces, where this vLLM has it."""
    for fix_id in FIX_IDS:
        for repair in load(fix_id).repairs:
            for patch in repair.patches:
                try:
                    module = import_module(patch.module or repair.module)
                except Exception:
                    continue
                target = find(patch, module)
                if target is not None:
                    yield fix_id, target


def _foreign_owners(target: Target) -> Iterator[str]:
    """Who put a function in place, below what was put there by this package too."""
    function: Any = target.function
    while function is not None:
        owner = replace(target, function=function).foreign_owner
        if owner is not None and not _is_ours(function):
            yield owner
        function = getattr(function, "__wrapped__", None)


def _is_ours(function: Any) -> bool:
    if not isinstance(function, FunctionType):
        return False
    return str(function.__globals__.get("__name__", "")).partition(".")[0] == _PACKAGE
