# SPDX-License-Identifier: Apache-2.0
"""Makes regression tests for vLLM's test tree of the plugin's probes and helpers."""

from __future__ import annotations

import re

from scripts.patches.extract import extract


def regression_test(
    summary: str, probe: tuple[str, str], target: str, name: str, extra: str = ""
) -> str:
    """A test that a probe finds no symptom in a module of vLLM.

    Args:
        probe: Module of the plugin, and function.
        target: The module that the probe runs.
        name: Of the test, after ``test_``.
    """
    text = _file(summary, probe[0], {probe[1]: name}, target) + extra
    return re.sub(r"_probe_f\d\w\b", "_symptom", text)


def regression_tests(summary: str, record: str, tests: dict[str, str], target: str) -> str:
    """A test for each of several probes.

    Args:
        record: Module of the plugin.
        tests: Name of a probe -> of its test, after ``test_``.
        target: The module that the probes run.
    """
    text = _file(summary, record, tests, target)
    for probe, name in tests.items():
        text = re.sub(rf"\b{probe}\b", f"_symptom_unless_{name}", text)
    return text


def _file(summary: str, record: str, tests: dict[str, str], target: str) -> str:
    found = extract(record, *tests)
    package, _, module = target.rpartition(".")
    imports = "\n".join([*found.imports, f"from {package} import {module}"])
    asserted = [
        f"def test_{name}() -> None:\n    assert {probe}({module}) is None\n"
        for probe, name in tests.items()
    ]
    code = "\n\n\n".join([*found.definitions, *asserted])
    text = f'"""{summary}"""\n\nfrom __future__ import annotations\n\n{imports}\n\n{code}'
    text = re.sub(r"^ +import torch\n+", "", text, flags=re.MULTILINE)
    return text.replace("\n\nimport ", "\n\nimport torch\nimport ", 1)
