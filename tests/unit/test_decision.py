# SPDX-License-Identifier: Apache-2.0
"""Each outcome, in the order in which they are decided, and what is left behind."""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
from hosting import HOST_SOURCE, HostPackage, fault, probe_double, probe_triple, wrap_minus_one

from vllm_moe_dp_fix import releases
from vllm_moe_dp_fix.decision import carry_out
from vllm_moe_dp_fix.host import Host
from vllm_moe_dp_fix.records import Outcome, Patch, Repair

OLD, NEW, UNKNOWN = Host.of("0.19.0"), Host.of("0.33.0"), Host.of("0.34.0")


def outcomes(repair: Repair, module: ModuleType, host: Host = OLD) -> dict[str, Outcome]:
    return {fault_id: v.outcome for fault_id, v in carry_out(repair, module, host)[0].items()}


def as_it_was(module: ModuleType) -> bool:
    return bool(module.Unit().double(2) == 5 and module.triple(2) == 7)


def test_applied(host: HostPackage) -> None:
    module = host.load()
    verdicts, replacements = carry_out(host.repair(), module, OLD)
    assert {v.outcome for v in verdicts.values()} == {Outcome.APPLIED}
    assert verdicts["D"].reason == "was faulty: double(2) is 5"
    assert len(replacements) == 2
    assert (module.Unit().double(2), module.triple(2)) == (4, 6)


def test_not_affected_comes_before_all_else(host: HostPackage) -> None:
    module = host.load()
    del module.triple
    repair = host.repair(Patch(("triple",), wrap_minus_one), faults=(fault("T", probe_triple),))
    assert outcomes(repair, module, NEW) == {"T": Outcome.NOT_AFFECTED}
    assert outcomes(repair, module, UNKNOWN) == {"T": Outcome.TARGET_MISSING}


def test_one_fault_of_a_repair_may_be_absent(host: HostPackage) -> None:
    found = outcomes(host.repair(), host.load(), NEW)
    assert found == {"D": Outcome.APPLIED, "T": Outcome.NOT_AFFECTED}


def test_target_missing(host: HostPackage) -> None:
    module = host.load()
    del module.triple
    verdicts, replacements = carry_out(host.repair(), module, OLD)
    assert {v.outcome for v in verdicts.values()} == {Outcome.TARGET_MISSING}
    assert "triple" in verdicts["D"].reason
    assert replacements == []
    assert module.Unit().double(2) == 5


def test_the_first_target_that_exists_is_taken(host: HostPackage) -> None:
    module = host.load()
    patch = Patch(("Unit._double", "Unit.double"), wrap_minus_one)
    repair = host.repair(patch, faults=(fault("D", probe_double),))
    assert outcomes(repair, module) == {"D": Outcome.APPLIED}


def test_an_optional_target_may_be_missing(host: HostPackage) -> None:
    module = host.load()
    patches = (
        Patch(("Unit.double",), wrap_minus_one),
        Patch(("Unit.halve",), wrap_minus_one, is_optional=True),
    )
    repair = host.repair(*patches, faults=(fault("D", probe_double),))
    verdicts, replacements = carry_out(repair, module, OLD)
    assert verdicts["D"].outcome is Outcome.APPLIED
    assert [replacement.target.path for replacement in replacements] == ["Unit.double"]


@pytest.mark.parametrize("replacement", [lambda *args, **kwargs: 0, functools.partial(int)])
def test_signature_unknown(host: HostPackage, replacement: Any) -> None:
    module = host.load()
    module.triple = replacement  # type: ignore[attr-defined]
    verdicts, _ = carry_out(host.repair(), module, OLD)
    assert {v.outcome for v in verdicts.values()} == {Outcome.SIGNATURE_UNKNOWN}
    assert module.triple is replacement
    assert "triple" in verdicts["T"].reason
    assert ("test_decision" in verdicts["T"].reason) is isinstance(replacement, FunctionType)


def test_healthy(host: HostPackage) -> None:
    """Somebody has cured it, with the same signature: nothing is touched."""
    module = host.load()

    def triple(number: int) -> int:
        return 3 * number

    module.triple = triple  # type: ignore[attr-defined]
    repair = host.repair(Patch(("triple",), wrap_minus_one), faults=(fault("T", probe_triple),))
    verdicts, replacements = carry_out(repair, module, OLD)
    assert verdicts["T"].outcome is Outcome.HEALTHY
    assert replacements == []
    assert module.triple is triple


def test_probe_failed(host: HostPackage) -> None:
    def probe(module: ModuleType) -> str | None:
        raise OSError("no such thing")

    module = host.load()
    verdicts, replacements = carry_out(host.repair(faults=(fault("D", probe),)), module, OLD)
    assert verdicts["D"].outcome is Outcome.PROBE_FAILED
    assert "no such thing" in verdicts["D"].reason
    assert replacements == []
    assert as_it_was(module)


def test_did_not_take_leaves_all_as_it_was(host: HostPackage) -> None:
    module = host.load()
    double, triple = vars(module.Unit)["double"], module.triple

    def wrap(original: FunctionType, module: ModuleType) -> FunctionType:
        return lambda number: 0  # type: ignore[return-value]

    repair = host.repair(Patch(("Unit.double",), wrap_minus_one), Patch(("triple",), wrap))
    verdicts, replacements = carry_out(repair, module, OLD)
    assert {v.outcome for v in verdicts.values()} == {Outcome.DID_NOT_TAKE}
    assert "triple(2) is 0" in verdicts["T"].reason
    assert replacements == []
    assert vars(module.Unit)["double"] is double
    assert module.triple is triple


def test_a_patch_that_raises_leaves_all_as_it_was(host: HostPackage) -> None:
    def wrap(original: FunctionType, module: ModuleType) -> FunctionType:
        raise ImportError("half a host")

    module = host.load()
    repair = host.repair(Patch(("Unit.double",), wrap_minus_one), Patch(("triple",), wrap))
    verdicts, replacements = carry_out(repair, module, OLD)
    assert {v.outcome for v in verdicts.values()} == {Outcome.DID_NOT_TAKE}
    assert "half a host" in verdicts["D"].reason
    assert replacements == []
    assert as_it_was(module)


def test_another_patcher_is_chained_and_named(host: HostPackage) -> None:
    module = host.load()
    original, calls = module.triple, []

    @functools.wraps(original)
    def triple(number: int) -> int:
        calls.append(number)
        return int(original(number))

    module.triple = triple  # type: ignore[attr-defined]
    verdicts, _ = carry_out(host.repair(), module, OLD)
    assert verdicts["T"].outcome is Outcome.APPLIED
    assert "test_decision" in verdicts["T"].note
    calls.clear()
    assert module.triple(2) == 6
    assert calls == [2]


def test_importers_of_another_module_are_left_alone(host: HostPackage, tmp_path: Any) -> None:
    """The patched module has the function from elsewhere, and so has a third one."""
    (tmp_path / "source_c.py").write_text("def triple(number):\n    return number * 3 + 1\n")
    (tmp_path / "importer_c.py").write_text("from source_c import triple\n")
    importer = importlib.import_module("importer_c")
    module, original = host.load(), importer.triple
    module.triple = original  # type: ignore[attr-defined]
    _, replacements = carry_out(host.repair(), module, OLD)
    assert module.triple(2) == 6
    assert importer.triple is sys.modules["source_c"].triple is original
    assert [r.undo() for r in reversed(replacements)] == [None, None]
    assert module.triple is importer.triple is original
    for name in ("importer_c", "source_c"):
        del sys.modules[name]


def test_importers_are_rebound_and_restored(host: HostPackage, tmp_path: Any) -> None:
    (tmp_path / "importer_a.py").write_text(f"from {host.name} import triple as times_three\n")
    module, importer = host.load(), __import__("importer_a")
    original = module.triple
    _, replacements = carry_out(host.repair(), module, OLD)
    assert importer.times_three is module.triple is not original
    assert importer.times_three(2) == 6
    assert [r.undo() for r in reversed(replacements)] == [None, None]
    assert importer.times_three is module.triple is original
    del sys.modules["importer_a"]


def test_undo_leaves_what_somebody_else_put_there(host: HostPackage) -> None:
    module = host.load()
    _, replacements = carry_out(host.repair(), module, OLD)
    ours = module.triple

    def triple(number: int) -> int:
        return int(ours(number)) + 100

    module.triple = triple  # type: ignore[attr-defined]
    held = [text for r in reversed(replacements) if (text := r.undo())]
    assert len(held) == 1
    assert "triple" in held[0]
    assert "test_decision" in held[0]
    assert module.triple is triple
    assert module.Unit().double(2) == 5


def test_an_inherited_method_is_added_and_removed(host: HostPackage) -> None:
    module = host.load()
    module.Sub = type("Sub", (module.Unit,), {})  # type: ignore[attr-defined]
    patch = Patch(("Sub.double",), wrap_minus_one)

    def probe(module: ModuleType) -> str | None:
        return None if module.Sub().double(2) == 4 else "wrong"

    from vllm_moe_dp_fix import releases

    releases.SIGNATURES["Sub.double"] = {"self, number"}
    try:
        _, (replacement,) = carry_out(host.repair(patch, faults=(fault("D", probe),)), module, OLD)
    finally:
        del releases.SIGNATURES["Sub.double"]
    assert (module.Sub().double(2), module.Unit().double(2)) == (4, 5)
    assert replacement.undo() is None
    assert "double" not in vars(module.Sub)


def test_a_fix_that_breaks_what_was_right_is_undone(host: HostPackage) -> None:
    """The host has cured one of the two by itself, and the repair would spoil it."""
    host.path.write_text(HOST_SOURCE.replace("number + number + 1", "number + number    "))
    module = host.load()
    verdicts, replacements = carry_out(host.repair(), module, OLD)
    assert module.Unit().double(2) == 4
    assert module.triple(2) == 7
    assert replacements == []
    assert verdicts["D"].outcome is Outcome.HEALTHY
    assert verdicts["T"].outcome is Outcome.DID_NOT_TAKE
    assert "double(2) is 3" in verdicts["T"].reason


def test_a_second_probe_that_raises_leaves_all_as_it_was(host: HostPackage, tmp_path: Path) -> None:
    (tmp_path / "importer_b.py").write_text(f"from {host.name} import triple\n")
    module, importer = host.load(), importlib.import_module("importer_b")
    double, triple = vars(module.Unit)["double"], module.triple

    def probe(module: ModuleType) -> str | None:
        if module.triple is not triple:
            raise OSError("no second time")
        return "faulty"

    verdicts, replacements = carry_out(host.repair(faults=(fault("T", probe),)), module, OLD)
    assert verdicts["T"].outcome is Outcome.DID_NOT_TAKE
    assert "no second time" in verdicts["T"].reason
    assert replacements == []
    assert vars(module.Unit)["double"] is double
    assert importer.triple is module.triple is triple
    del sys.modules["importer_b"]


def test_undo_reaches_who_imported_ours(host: HostPackage, tmp_path: Path) -> None:
    """Imported by name while the fix was in: also taken back."""
    (tmp_path / "importer_c.py").write_text(f"from {host.name} import triple\n")
    module = host.load()
    original = module.triple
    _, replacements = carry_out(host.repair(), module, OLD)
    importer = importlib.import_module("importer_c")
    assert importer.triple is module.triple is not original
    for replacement in reversed(replacements):
        replacement.undo()
    assert importer.triple is module.triple is original
    del sys.modules["importer_c"]


KINDS = """
class Unit:
    @property
    def size(self):
        return 3

    @staticmethod
    def triple(number):
        return 3 * number + 1
"""


def test_properties_and_static_methods(
    host: HostPackage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They stay what they are, in another module as well."""
    (tmp_path / "kinds.py").write_text(KINDS)
    for path, signature in (("Unit.size", "self"), ("Unit.triple", "number")):
        monkeypatch.setitem(releases.SIGNATURES, path, {signature})
    kinds = importlib.import_module("kinds")
    before = dict(vars(kinds.Unit))

    def wrap(original: FunctionType, module: ModuleType) -> FunctionType:
        assert module is kinds

        def less(value: Any) -> Any:
            return original(value) - 1

        return less  # type: ignore[return-value]

    patches = [Patch((path,), wrap, module="kinds") for path in ("Unit.size", "Unit.triple")]
    probe = fault("D", lambda _: None if kinds.Unit.triple(2) == 6 else "wrong")
    verdicts, replacements = carry_out(host.repair(*patches, faults=(probe,)), host.load(), OLD)
    assert verdicts["D"].outcome is Outcome.APPLIED
    assert (kinds.Unit().size, kinds.Unit.triple(2), kinds.Unit().triple(2)) == (2, 6, 6)
    assert [replacement.undo() for replacement in replacements] == [None, None]
    assert all(vars(kinds.Unit)[name] is before[name] for name in ("size", "triple"))
    sys.modules.pop("kinds")


def test_another_module_that_is_missing(host: HostPackage) -> None:
    patch = Patch(("triple",), wrap_minus_one, module="no_such_module")
    verdicts, _ = carry_out(host.repair(patch), host.load(), OLD)
    assert {v.outcome for v in verdicts.values()} == {Outcome.TARGET_MISSING}
    assert "no_such_module" in verdicts["D"].reason
