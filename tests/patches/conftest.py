# SPDX-License-Identifier: Apache-2.0
"""What the series does, release by release."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from patched import Found, find

from vllm_moe_dp_fix.releases import RELEASES


@pytest.fixture(scope="session")
def found_on(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Found]]:
    """What was found on a release; those that were asked for run two at a time."""
    items: list[Any] = request.session.items
    using = [item for item in items if "found_on" in item.fixturenames]
    asked = {item.callspec.params["release"] for item in using}
    behaves = {i.callspec.params["release"] for i in using if "behaviour" in i.keywords}
    base = tmp_path_factory.mktemp("patched")
    with ThreadPoolExecutor(max_workers=2) as pool:
        running = {
            release: pool.submit(find, release, base / release, release in behaves)
            for release in RELEASES
            if release in asked
        }
        yield lambda release: running[release].result()
        pool.shutdown(cancel_futures=True)
