# SPDX-License-Identifier: Apache-2.0
"""Calls back when a module has been imported, also where that import is already under way."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

Callback = Callable[[ModuleType], None]


def when_imported(name: str, callback: Callback) -> None:
    """Calls ``callback(module)`` once ``name`` is imported; at once where it already is."""
    module = sys.modules.get(name)
    if module is not None and _is_half_imported(module):
        _HalfImported.add(name, callback)
        return
    from wrapt.importer import register_post_import_hook

    register_post_import_hook(callback, name)


def when_imported_again(module: ModuleType, callback: Callback) -> None:
    """Calls back at the next import of a module whose present import is about to fail."""
    if _is_half_imported(module):
        _HalfImported.add(module.__name__, callback)


def _is_half_imported(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


class _HalfImported(MetaPathFinder):
    """Waits for modules whose import had begun before us; looks again at every later import.

    Stays on ``sys.meta_path``: taking a finder off while it is asked makes Python skip the next.
    """

    _waiting: tuple[tuple[str, Callback], ...] = ()
    _is_installed = False

    @classmethod
    def add(cls, name: str, callback: Callback) -> None:
        cls._waiting += ((name, callback),)
        if not cls._is_installed:
            cls._is_installed = True
            sys.meta_path.insert(0, cls())

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        cls = type(self)
        waiting, cls._waiting = cls._waiting, ()
        for name, callback in waiting:
            when_imported(name, callback)
        if any(name == fullname for name, _ in waiting):
            # Its first import failed, and this is the next: the finder that calls back may lie
            # before us, and has been asked already.
            return find_spec(fullname)
        return None
