# SPDX-License-Identifier: Apache-2.0
"""Helpers of the probes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def overridden(module: ModuleType, **names: object) -> Iterator[None]:
    """Sets globals of a module for the length of a probe."""
    before = {name: getattr(module, name) for name in names}
    try:
        for name, value in names.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
