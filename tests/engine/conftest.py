# SPDX-License-Identifier: Apache-2.0
"""Makes scripts/demo.py importable, which serves the models."""

from __future__ import annotations

import importlib.util
import signal
import sys
from pathlib import Path

import pytest

# As Ctrl-C does: the servers that run are ended, too.
signal.signal(signal.SIGTERM, signal.default_int_handler)
sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts import demo  # noqa: E402


@pytest.fixture(scope="session")
def serves() -> None:
    """Skips what needs a vLLM that can serve."""
    if reason := _lacks():
        pytest.skip(f"{reason}; scripts/engine_lane.sh makes an environment that serves")


def _lacks() -> str | None:
    """Why nothing can be served in this environment."""
    for name in ("torch", "transformers", "vllm"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed"
    vllm = importlib.util.find_spec("vllm")
    folders = list(vllm.submodule_search_locations or ()) if vllm else []
    if not any(path for folder in folders for path in Path(folder).glob("_C*.so")):
        return "vLLM is not compiled here, only its source is"
    try:
        demo.pick_lane()
    except demo.DemoError as error:
        return str(error)
    return None
