# SPDX-License-Identifier: Apache-2.0
"""Makes regression tests for vLLM's test tree of the plugin's probes and helpers."""

from __future__ import annotations

import re
from collections.abc import Mapping

from scripts.patches.extract import PACKAGE, extract


def regression_test(
    summary: str, probe: tuple[str, str], target: str, name: str, extra: str = ""
) -> str:
    """A test that a probe finds no symptom in a module of vLLM.

    Args:
        probe: Module of the plugin, and function.
        target: The module that the probe runs.
        name: Of the test, after ``test_``.
    """
    text = regression_tests(summary, probe[0], {probe[1]: name}, target, extra=extra)
    return text.replace(f"_symptom_{name}", "_symptom")


def regression_tests(
    summary: str,
    module: str,
    probes: Mapping[str, str],
    target: str,
    helpers: tuple[str, ...] = (),
    imports: tuple[str, ...] = (),
    extra: str = "",
) -> str:
    """Tests that probes find no symptom in a module of vLLM.

    Args:
        module: Of the plugin.
        probes: Function in it -> name of its test, after ``test_``.
        target: The module that the probes run.
        helpers: Further names of the plugin's module, and
        imports: further imports that ``extra`` needs.
        extra: Further tests.
    """
    found = extract(module, *helpers, *probes)
    package, _, name = target.rpartition(".")
    hoisted = {line.strip() for line in re.findall(_INNER, "\n".join(found.definitions), re.M)}
    statements = {*found.imports, *imports, *hoisted, f"from {package} import {name}"}
    code = re.sub(rf"{_INNER}\n+", "", "\n\n\n".join(found.definitions), flags=re.M)
    code = re.sub(rf'"{PACKAGE}\.[\w.]+", ', "", code)  # modules that vLLM has by other names
    tests = "\n\n\n".join(
        f"def test_{test}() -> None:\n    assert {probe}({name}) is None"
        for probe, test in probes.items()
    )
    text = (
        f'"""{summary}"""\n\nfrom __future__ import annotations\n\n'
        + "\n".join(sorted(statements))
        + f"\n\n{code}\n\n\n{tests}\n{extra}"
    )
    for probe, test in probes.items():
        text = re.sub(rf"\b{probe}\b", f"_symptom_{test}", text)
    return text


_INNER = r"^ +import \w+$"  # the plugin's functions import torch themselves
