# SPDX-License-Identifier: Apache-2.0
"""A small host module with two faults, and what cures them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from vllm_moe_dp_fix.records import Fault, Patch, Repair

HOST_SOURCE = """
class Unit:
    def double(self, number):
        return number + number + 1      # the fault

def triple(number):
    return 3 * number + 1               # the fault
"""
FIX_ID = "unit_fix"


def probe_double(module: ModuleType) -> str | None:
    got = module.Unit().double(2)
    return None if got == 4 else f"double(2) is {got}"


def probe_triple(module: ModuleType) -> str | None:
    got = module.triple(2)
    return None if got == 6 else f"triple(2) is {got}"


def wrap_minus_one(original: FunctionType, module: ModuleType) -> FunctionType:
    if original.__code__.co_argcount == 2:

        def double(self: Any, number: int) -> int:
            return int(original(self, number)) - 1

        return double  # type: ignore[return-value]

    def triple(number: int) -> int:
        return int(original(number)) - 1

    return triple  # type: ignore[return-value]


def fault(fault_id: str, probe: Callable[[ModuleType], str | None]) -> Fault:
    return Fault(fault_id, "wrong by one", (), "never", probe)


@dataclass
class HostPackage:
    """A host module that is not imported yet."""

    name: str
    path: Path

    def load(self) -> ModuleType:
        return importlib.import_module(self.name)

    def repair(self, *patches: Patch, faults: tuple[Fault, ...] | None = None) -> Repair:
        default = (
            Patch(("Unit.double",), wrap_minus_one),
            Patch(("triple",), wrap_minus_one),
        )
        both = (fault("D", probe_double), fault("T", probe_triple))
        return Repair(self.name, faults or both, patches or default)
