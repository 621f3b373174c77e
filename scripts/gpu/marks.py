# SPDX-License-Identifier: Apache-2.0
"""How a process tells the script that started it what it found, between lines of vLLM's."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

_MARK = "FOUND "


def write(found: Any) -> None:
    print(_MARK + json.dumps(found), flush=True)


def read(lines: Iterable[str]) -> list[Any]:
    """All that was written, in order."""
    return [json.loads(line.removeprefix(_MARK)) for line in lines if line.startswith(_MARK)]
