# SPDX-License-Identifier: Apache-2.0
"""Replaces functions so that it can be seen and taken back."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from vllm_moe_dp_fix.records import Patch

_ABSENT = object()


@dataclass(frozen=True)
class Target:
    """A function that can be replaced: ``owner.name`` is ``function``, or ``holder(function)``."""

    path: str
    owner: Any
    name: str
    function: Any
    module: ModuleType
    holder: type[staticmethod[Any, Any]] | type[property] | None = None

    @property
    def signature(self) -> str:
        """The parameter names, or '' where the object has none."""
        if not isinstance(self.function, FunctionType):
            return ""
        return ", ".join(inspect.signature(self.function).parameters)

    @property
    def foreign_owner(self) -> str | None:
        """The module that put its own function here before us, or None."""
        return _foreign(self.function, self.owner, self.module)


def find(patch: Patch, module: ModuleType) -> Target | None:
    """The first of the patch's targets that exists in ``module``."""
    for path in patch.targets:
        owner: Any = module
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent, None)
        held = inspect.getattr_static(owner, name, None)
        if isinstance(held, staticmethod):
            return Target(path, owner, name, held.__func__, module, staticmethod)
        if isinstance(held, property):
            return Target(path, owner, name, held.fget, module, property)
        if held is not None:
            return Target(path, owner, name, getattr(owner, name), module)
    return None


@dataclass(frozen=True)
class Replacement:
    """One function in place of another, with what is needed to take it back."""

    target: Target
    function: FunctionType
    held: object
    previous: object

    def undo(self) -> str | None:
        """Takes the function back where it is still ours; else says who holds the place."""
        owner, name = self.target.owner, self.target.name
        _rebind_importers(self.target, self.function, self.target.function)
        held = vars(owner).get(name)
        if held is not self.held:
            holder = _foreign(held, owner, self.target.module) or "someone else"
            return f"{self.target.path} is held by {holder} now and was left as it is"
        if self.previous is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, self.previous)
        return None


def replace(patch: Patch, target: Target) -> Replacement:
    """Puts the patch's function in the target's place and in every module that imported it."""
    function = patch.wrap(target.function, target.module)
    held = target.holder(function) if target.holder else function
    previous = vars(target.owner).get(target.name, _ABSENT)
    setattr(target.owner, target.name, held)
    _rebind_importers(target, target.function, function)
    return Replacement(target, function, held, previous)


def _rebind_importers(target: Target, old: object, new: object) -> None:
    """Binds the names under which other modules imported a function of a module anew.

    A function that the module itself imported is another's: who has it from there keeps it.
    """
    function = target.function
    home = sys.modules.get(function.__module__)
    is_imported = home is not target.module and vars(home or object).get(target.name) is function
    if target.owner is not target.module or is_imported:
        return
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and module is not target.module:
            for alias, value in list(vars(module).items()):
                if value is old:
                    setattr(module, alias, new)


def _foreign(function: object, owner: object, module: ModuleType) -> str | None:
    """The module a function comes from, where it is none of vLLM's own definition."""
    if not isinstance(function, FunctionType):
        return repr(function)
    home = function.__globals__.get("__name__", "")
    if home.partition(".")[0] == module.__name__.partition(".")[0]:
        return None
    classes = inspect.getmro(owner) if inspect.isclass(owner) else ()
    if home in {cls.__module__ for cls in classes}:
        return None
    return f"{home} ({function.__code__.co_filename})"


@contextlib.contextmanager
def overridden(module: ModuleType, **names: object) -> Iterator[None]:
    """Sets globals of a module for a while."""
    before = {name: getattr(module, name) for name in names}
    try:
        for name, value in names.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
