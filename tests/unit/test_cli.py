# SPDX-License-Identifier: Apache-2.0
"""The command where there is no vLLM; with one, see tests/order."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from vllm_moe_dp_fix import __version__
from vllm_moe_dp_fix.registry import FIX_IDS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is not None, reason="there is a vLLM in this environment"
)


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vllm_moe_dp_fix.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def status(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command("status", *arguments)


def test_json_without_vllm() -> None:
    run = status("--json")
    document = json.loads(run.stdout)
    assert run.returncode == 2
    assert document["vllm"] is None
    assert [fix["id"] for fix in document["fixes"]] == list(FIX_IDS)
    assert "vllm" in document["problems"][0]
    assert document.keys() == {"schema", "plugin", "vllm", "fixes", "problems"}
    assert document["plugin"] == {"version": __version__}
    for fix in document["fixes"]:
        assert fix.keys() == {"id", "summary", "outcome", "reason", "switched_off_by", "faults"}
        assert fix["outcome"] == "target_missing"
        for fault in fix["faults"]:
            assert fault.keys() == {
                *("id", "summary", "affected", "releases", "used_here"),
                *("outcome", "reason", "upstream", "removable"),
            }
            assert (fault["affected"], fault["used_here"]) == (None, False)


def test_text_without_vllm() -> None:
    run = status()
    assert run.returncode == 2
    assert "cannot be imported" in run.stdout


def test_doctor_without_vllm() -> None:
    run = run_command("doctor", "--json", "--", "vllm", "serve", "model")
    document = json.loads(run.stdout)
    assert run.returncode == document["exit_code"] == 2
    assert "vLLM cannot be imported" in document["error"]
    text = run_command("doctor", "--", "vllm", "serve", "model")
    assert text.returncode == 2
    assert "vLLM cannot be imported" in text.stdout
    assert "Traceback" not in text.stderr


def test_doctor_without_a_command() -> None:
    run = run_command("doctor")
    assert run.returncode == 2
    assert "no command after '--'" in run.stdout


def test_doctor_says_its_exit_codes() -> None:
    run = run_command("doctor", "--help")
    assert run.returncode == 0
    for words in ("Exit code: 0 where", "1 where", "2 where", "--json", "--platform"):
        assert words in " ".join(run.stdout.split())
