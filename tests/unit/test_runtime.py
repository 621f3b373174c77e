# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging

import pytest
from hosting import FIX_ID, HostPackage

from vllm_moe_dp_fix import runtime, settings
from vllm_moe_dp_fix.host import Host
from vllm_moe_dp_fix.records import Outcome


def test_plugin_first(unit_fix: HostPackage) -> None:
    assert runtime.install(FIX_ID) is None
    module = unit_fix.load()
    assert (module.Unit().double(2), module.triple(2)) == (4, 6)
    assert {v.outcome for v in runtime.verdicts()[FIX_ID].values()} == {Outcome.APPLIED}


def test_import_first_twice_undo_twice_and_again(unit_fix: HostPackage) -> None:
    module = unit_fix.load()
    double, triple = vars(module.Unit)["double"], module.triple
    for _ in range(2):
        verdict = runtime.install(FIX_ID)
        assert verdict is not None
        assert verdict.outcome is Outcome.APPLIED
    ours = module.triple
    assert ours(2) == 6
    for _ in range(2):
        assert runtime.uninstall(FIX_ID) == []
        assert vars(module.Unit)["double"] is double
        assert module.triple is triple
    assert runtime.verdicts()[FIX_ID] == {}
    verdict = runtime.install(FIX_ID)
    assert verdict is not None
    assert module.triple(2) == 6
    assert module.triple is not ours


def test_uninstalled_before_the_import(unit_fix: HostPackage) -> None:
    runtime.install(FIX_ID)
    runtime.uninstall(FIX_ID)
    assert unit_fix.load().triple(2) == 7


def test_unknown_id() -> None:
    with pytest.raises(KeyError, match="moe_dp_dispatch"):
        runtime.install("moe_dp_dispach")


def test_disabled(unit_fix: HostPackage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.DISABLE, FIX_ID)
    module = unit_fix.load()
    verdict = runtime.install(FIX_ID)
    assert verdict is not None
    assert verdict.outcome is Outcome.SWITCHED_OFF
    assert module.triple(2) == 7


def test_one_line_a_fix_and_process(
    unit_fix: HostPackage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm.moe_dp_fix")
    unit_fix.load()
    runtime.install(FIX_ID)
    runtime.install(FIX_ID)
    (record,) = caplog.records
    assert record.name == "vllm.moe_dp_fix"
    assert record.levelno == logging.INFO
    assert record.getMessage() == f"{FIX_ID} on vLLM 0.19.0: D, T applied"


def test_an_untested_vllm_is_warned_of_once(
    unit_fix: HostPackage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_moe_dp_fix.host.detect", lambda: Host.of("0.33.1.dev7+g1a2b"))
    unit_fix.load()
    runtime.install(FIX_ID)
    runtime.uninstall(FIX_ID)
    runtime.install(FIX_ID)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "0.33.1.dev7+g1a2b" in warnings[0]


def test_what_cannot_be_applied_is_said_and_vllm_goes_on(
    unit_fix: HostPackage, caplog: pytest.LogCaptureFixture
) -> None:
    unit_fix.path.write_text("class Unit: pass\n")
    runtime.activate(FIX_ID)
    module = unit_fix.load()
    assert not hasattr(module, "triple")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "has no Unit.double" in record.getMessage()


def test_strict_stops_what_cannot_be_applied(
    unit_fix: HostPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(settings.STRICT, "1")
    unit_fix.path.write_text("class Unit: pass\n")
    runtime.activate(FIX_ID)
    with pytest.raises(runtime.FixNotAppliedError, match=r"has no Unit\.double.*Unset"):
        unit_fix.load()


def test_a_misspelt_setting_is_warned_of_and_in_strict_mode_an_error(
    unit_fix: HostPackage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(settings.DISABLE, "moe_dp_dispach")
    runtime.activate(FIX_ID)
    assert "'moe_dp_dispach'" in caplog.text
    monkeypatch.setenv(settings.STRICT, "1")
    with pytest.raises(settings.SettingsError, match="moe_dp_dispach"):
        runtime.activate(FIX_ID)


def test_nothing_unexpected_reaches_vllm(
    unit_fix: HostPackage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Host:
        raise RuntimeError("no vLLM today")

    monkeypatch.setattr("vllm_moe_dp_fix.host.detect", broken)
    module = unit_fix.load()
    runtime.activate(FIX_ID)
    assert "could not be judged" in caplog.text
    assert module.triple(2) == 7
