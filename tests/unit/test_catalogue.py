# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from scripts import make_catalogue


def test_is_what_the_records_say() -> None:
    """Else: scripts/make_catalogue.py."""
    assert make_catalogue.FILE.read_text(encoding="utf-8") == make_catalogue.catalogue()
