# SPDX-License-Identifier: Apache-2.0
"""Settings, all by environment variable."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

PREFIX = "VLLM_MOE_DP_FIX_"
DISABLE = PREFIX + "DISABLE"
STRICT = PREFIX + "STRICT"
FP8_DISPATCH = PREFIX + "FP8_DISPATCH"
EXPERTS = PREFIX + "EXPERTS"

_BOOLEANS = {"": False, "0": False, "false": False, "1": True, "true": True}
# The first of each is the default.
_CHOICES = {
    FP8_DISPATCH: ("auto", "quantize_after_gather", "shared_scale"),
    EXPERTS: ("sharded", "replicated", "auto"),
}
_NAMES = (DISABLE, STRICT, *_CHOICES)


class SettingsError(ValueError):
    """A setting that cannot be understood, under ``VLLM_MOE_DP_FIX_STRICT=1``."""


class Settings(NamedTuple):
    """The settings of this process.

    Attributes:
        disabled: Ids of the fixes that are switched off.
        strict: A fix that is needed and cannot be applied stops the process.
        problems: What could not be understood, in words, naming the value.
    """

    disabled: frozenset[str] = frozenset()
    strict: bool = False
    problems: tuple[str, ...] = ()


def read(fix_ids: tuple[str, ...], environ: Mapping[str, str] = os.environ) -> Settings:
    """Reads the settings; what it cannot understand is named in ``Settings.problems``."""
    problems = [
        f"{name} is no setting; known: {', '.join(_NAMES)}"
        for name in sorted(environ)
        if name.startswith(PREFIX) and name not in _NAMES
    ]

    named = [part.strip() for part in environ.get(DISABLE, "").split(",") if part.strip()]
    known = {"all", *fix_ids}
    problems += [
        f"{DISABLE}={word!r} names no fix; known: all, {', '.join(fix_ids)}"
        for word in named
        if word not in known
    ]
    disabled = frozenset(fix_ids if "all" in named else (w for w in named if w in known))

    raw = environ.get(STRICT, "").strip().lower()
    if raw not in _BOOLEANS:
        problems.append(f"{STRICT}={raw!r} is neither 1 nor 0; taken as 0")

    for name, choices in _CHOICES.items():
        choice = environ.get(name, "").strip()
        if choice and choice not in choices:
            problems.append(
                f"{name}={choice!r} is unknown; known: {', '.join(choices)}; taken as {choices[0]}"
            )

    return Settings(disabled, _BOOLEANS.get(raw, False), tuple(problems))


def fp8_dispatch(environ: Mapping[str, str] = os.environ) -> str:
    """How dynamic per-tensor FP8 activations travel. Must be equal on all ranks.

    ``quantize_after_gather`` gathers the rows as they are and quantizes them together;
    ``shared_scale`` agrees on a scale first and gathers FP8; ``auto`` (default) takes for each step
    the one that is faster for its number of rows. All give the same bits.
    """
    return _choice(FP8_DISPATCH, environ)


def experts(environ: Mapping[str, str] = os.environ) -> str:
    """Where the experts lie without expert parallelism. Must be equal on all nodes.

    ``sharded`` (default) is vLLM's own layout: over all data-parallel ranks. ``replicated`` makes
    every rank an engine of its own that holds them all; ``auto`` does so where they fit well.
    """
    return _choice(EXPERTS, environ)


def _choice(name: str, environ: Mapping[str, str]) -> str:
    choice = environ.get(name, "").strip()
    return choice if choice in _CHOICES[name] else _CHOICES[name][0]
