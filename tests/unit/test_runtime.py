# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import logging
import sys

import pytest
from hosting import FIX_ID, HOST_SOURCE, HostPackage

from vllm_moe_dp_fix import runtime, settings
from vllm_moe_dp_fix.host import Host
from vllm_moe_dp_fix.records import Outcome


def no_vllm() -> Host:
    raise RuntimeError("no vLLM today")


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
    monkeypatch.setattr("vllm_moe_dp_fix.host.detect", no_vllm)
    module = unit_fix.load()
    runtime.activate(FIX_ID)
    assert "could not be judged" in caplog.text
    assert module.triple(2) == 7


def test_uninstall_names_who_holds_a_function_now(
    unit_fix: HostPackage, caplog: pytest.LogCaptureFixture
) -> None:
    module = unit_fix.load()
    runtime.install(FIX_ID)
    ours = module.triple

    def triple(number: int) -> int:
        return int(ours(number)) + 100

    module.triple = triple  # type: ignore[attr-defined]
    (held,) = runtime.uninstall(FIX_ID)
    assert "triple is held by" in held
    assert "test_runtime.py" in held
    assert held in caplog.text
    assert module.triple is triple
    assert module.Unit().double(2) == 5
    assert runtime.uninstall(FIX_ID) == []


def test_uninstalled_before_the_import_and_installed_again(unit_fix: HostPackage) -> None:
    for _ in range(2):
        assert runtime.install(FIX_ID) is None
        assert runtime.uninstall(FIX_ID) == []
    runtime.install(FIX_ID)
    assert unit_fix.load().triple(2) == 6


def test_a_second_install_during_the_import(unit_fix: HostPackage) -> None:
    """The host's import calls the plugins again: too early to judge, and not the last word."""
    unit_fix.path.write_text(
        f"from vllm_moe_dp_fix import runtime\nruntime.install({FIX_ID!r})\n" + HOST_SOURCE
    )
    assert runtime.install(FIX_ID) is None
    module = unit_fix.load()
    assert {v.outcome for v in runtime.verdicts()[FIX_ID].values()} == {Outcome.APPLIED}
    assert module.triple(2) == 6


def test_disabled_after_it_was_applied(
    unit_fix: HostPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What install() says is what is there."""
    module = unit_fix.load()
    runtime.install(FIX_ID)
    monkeypatch.setenv(settings.DISABLE, FIX_ID)
    verdict = runtime.install(FIX_ID)
    assert verdict is not None
    assert (verdict.outcome is Outcome.APPLIED) is (module.triple(2) == 6)


def test_strict_leaves_alone_what_is_switched_off(
    unit_fix: HostPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(settings.STRICT, "1")
    monkeypatch.setenv(settings.DISABLE, "all")
    unit_fix.path.write_text("class Unit: pass\n")
    runtime.activate(FIX_ID)
    assert not hasattr(unit_fix.load(), "triple")
    assert {v.outcome for v in runtime.verdicts()[FIX_ID].values()} == {Outcome.SWITCHED_OFF}


@pytest.mark.parametrize("strict", ["0", "1"])
def test_what_cannot_be_armed(
    unit_fix: HostPackage,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    strict: str,
) -> None:
    """Said, and vLLM goes on; in strict mode it does not."""
    monkeypatch.setenv(settings.STRICT, strict)
    monkeypatch.setitem(sys.modules, "wrapt.importer", None)
    raised = pytest.raises(ImportError) if strict == "1" else contextlib.nullcontext()
    with raised:
        runtime.activate(FIX_ID)
    if strict == "0":
        assert f"{FIX_ID}: could not be armed" in caplog.text
    assert unit_fix.load().triple(2) == 7


@pytest.mark.parametrize("imported_first", [True, False])
def test_strict_stops_what_cannot_be_judged(
    unit_fix: HostPackage, monkeypatch: pytest.MonkeyPatch, imported_first: bool
) -> None:
    monkeypatch.setenv(settings.STRICT, "1")
    monkeypatch.setattr("vllm_moe_dp_fix.host.detect", no_vllm)
    if imported_first:
        unit_fix.load()
    else:
        runtime.activate(FIX_ID)
    with pytest.raises(RuntimeError, match="no vLLM today"):
        runtime.activate(FIX_ID) if imported_first else unit_fix.load()


def test_strict_stops_the_second_import_as_well(
    unit_fix: HostPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM catches what the import of a model raises, and may import again."""
    monkeypatch.setenv(settings.STRICT, "1")
    unit_fix.path.write_text("class Unit: pass\n")
    runtime.activate(FIX_ID)
    for _ in range(2):
        with pytest.raises(runtime.FixNotAppliedError):
            unit_fix.load()


def test_arming_is_tried_again(unit_fix: HostPackage, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as context:
        context.setitem(sys.modules, "wrapt.importer", None)
        runtime.activate(FIX_ID)
    runtime.activate(FIX_ID)
    assert unit_fix.load().triple(2) == 6
