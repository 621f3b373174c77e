# SPDX-License-Identifier: Apache-2.0
"""Which method MXFP4 experts get that are not gpt-oss's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

_TAKE_ANY = ("CPU", "XPU", "EMULATION")  # back ends that take the weights as they are


def with_kernel(make: Callable[[], Any], make_for_gpt_oss: Callable[[], Any]) -> Any:
    """The first method; where that has no kernel, gpt-oss's may have one for all."""
    try:
        return make()
    except ValueError:
        with suppress(Exception):
            method = make_for_gpt_oss()
            if method.mxfp4_backend.name in _TAKE_ANY:
                return method
        raise
