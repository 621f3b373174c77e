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
    found = extract(*probe)
    package, _, module = target.rpartition(".")
    imports = "\n".join([*found.imports, f"from {package} import {module}"])
    code = "\n\n\n".join(found.definitions)
    text = (
        f'"""{summary}"""\n\nfrom __future__ import annotations\n\n{imports}\n\n{code}\n\n\n'
        f"def test_{name}() -> None:\n    assert {probe[1]}({module}) is None\n{extra}"
    )
    text = re.sub(r"^ +import torch\n+", "", text, flags=re.MULTILINE)
    text = text.replace("\n\nimport ", "\n\nimport torch\nimport ", 1)
    return re.sub(r"_probe_f\d\w\b", "_symptom", text)
