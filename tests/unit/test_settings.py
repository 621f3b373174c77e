# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from vllm_moe_dp_fix import settings

IDS = ("moe_dp_dispatch", "moe_dp_all_gather")


def test_defaults() -> None:
    assert settings.read(IDS, {}) == settings.Settings()
    assert settings.fp8_dispatch({}) == "auto"
    assert settings.experts({}) == "sharded"


@pytest.mark.parametrize(
    ("value", "disabled"),
    [
        ("moe_dp_dispatch", {"moe_dp_dispatch"}),
        (" moe_dp_dispatch , moe_dp_all_gather,", set(IDS)),
        ("all", set(IDS)),
    ],
)
def test_disable(value: str, disabled: set[str]) -> None:
    found = settings.read(IDS, {settings.DISABLE: value})
    assert found.disabled == disabled
    assert found.problems == ()


@pytest.mark.parametrize(
    ("value", "strict"), [("1", True), ("true", True), ("TRUE", True), ("0", False), ("", False)]
)
def test_strict(value: str, strict: bool) -> None:
    found = settings.read(IDS, {settings.STRICT: value})
    assert found.strict is strict
    assert found.problems == ()


@pytest.mark.parametrize(
    "environ",
    [
        {settings.DISABLE: "moe_dp_dispach"},
        {settings.STRICT: "yes please"},
        {settings.FP8_DISPATCH: "shared-scale"},
        {settings.EXPERTS: "replicate"},
        {"VLLM_MOE_DP_FIX_DISABEL": "all"},
    ],
)
def test_what_is_misspelt_is_named(environ: dict[str, str]) -> None:
    (problem,) = settings.read(IDS, environ).problems
    ((name, value),) = environ.items()
    assert name in problem
    assert name not in settings._NAMES or repr(value.lower()) in problem
    assert "known" in problem or "neither" in problem


def test_a_misspelt_id_does_not_undo_the_others() -> None:
    found = settings.read(IDS, {settings.DISABLE: "moe_dp_dispatch,oops"})
    assert found.disabled == {"moe_dp_dispatch"}
    assert len(found.problems) == 1


def test_fp8_dispatch() -> None:
    assert settings.fp8_dispatch({settings.FP8_DISPATCH: "shared_scale"}) == "shared_scale"
    assert settings.fp8_dispatch({settings.FP8_DISPATCH: "oops"}) == "auto"


@pytest.mark.parametrize("choice", ["sharded", "replicated", "auto"])
def test_experts(choice: str) -> None:
    assert settings.experts({settings.EXPERTS: f" {choice} "}) == choice
    assert settings.read(IDS, {settings.EXPERTS: choice}).problems == ()


def test_unknown_experts_are_sharded() -> None:
    assert settings.experts({settings.EXPERTS: "replicate"}) == "sharded"
