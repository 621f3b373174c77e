# SPDX-License-Identifier: Apache-2.0
"""Runs the driver once a release, and prints what was found as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from trees import drive, tree_of

from vllm_moe_dp_fix.registry import FIX_IDS, load
from vllm_moe_dp_fix.releases import RELEASES

Cell = tuple[str, str]  # a release, and a fault or a way to start replicas
Report = dict[str, Any]
_cells = pytest.StashKey[dict[Cell, bool]]()
_wanted = pytest.StashKey[set[Cell]]()


@pytest.fixture(scope="session")
def report_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Report]]:
    """The driver's report on a release; the releases that were asked for run two at a time."""
    asked = {cell.args[0] for item in request.session.items for cell in item.iter_markers("cell")}
    folder = tmp_path_factory.mktemp("reports")
    with ThreadPoolExecutor(max_workers=2) as pool:
        reports: dict[str, Future[Report]] = {
            release: pool.submit(drive, tree_of(release), folder / f"{release}.json")
            for release in RELEASES
            if release in asked
        }
        yield lambda release: reports[release].result()
        pool.shutdown(cancel_futures=True)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_cells] = {}
    config.stash[_wanted] = set()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is left after ``-k`` and the like is what must get a result."""
    cells = {cell.args for item in items for cell in item.iter_markers("cell")}
    config.stash[_wanted].update(cells)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    if (report.when == "call" and not report.skipped) or report.failed:
        cells = item.config.stash[_cells]
        for cell in item.iter_markers("cell"):
            cells[cell.args] = cells.get(cell.args, True) and report.passed


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A cell without a result fails the run."""
    config = session.config
    is_run = exitstatus == pytest.ExitCode.OK and not config.option.collectonly
    if is_run and config.stash[_wanted] - config.stash[_cells].keys():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    cells = config.stash[_cells]
    if not cells:
        return
    from vllm_moe_dp_fix.host import Host
    from vllm_moe_dp_fix.releases import AFFECTED

    terminalreporter.section("vLLM release and fault")
    terminalreporter.write_line(
        "✓ shown without the fix, gone with it · n.a. not in this release, right without the fix, "
        "not patched · ✗ wrong · HOLE no result · - not asked for"
    )
    faults = [(fix_id, fault.id) for fix_id in FIX_IDS for fault in load(fix_id).faults]
    terminalreporter.write_line(" " * 8 + "".join(f"{fault_id:>9}" for _, fault_id in faults))
    for release in RELEASES:
        line = f"{release:<8}"
        for _, fault_id in faults:
            right = "✓" if Host.of(release).is_affected(AFFECTED[fault_id]) else "n.a."
            line += f"{_mark(config, (release, fault_id), right):>9}"
        terminalreporter.write_line(line)
    fixes = {fix_id: [f for i, f in faults if i == fix_id] for fix_id in FIX_IDS}
    for fix_id, ids in fixes.items():
        terminalreporter.write_line(f"{fix_id}: {', '.join(ids)}")

    fault_ids = {fault_id for _, fault_id in faults}
    modes = sorted({name for _, name in config.stash[_wanted]} - fault_ids)
    if not modes:
        return
    terminalreporter.section("independent replicas and vLLM release")
    width = max(map(len, modes)) + 1
    terminalreporter.write_line(" " * width + "".join(f"{release:>7}" for release in RELEASES))
    for mode in modes:
        marks = (f"{_mark(config, (release, mode), '✓'):>7}" for release in RELEASES)
        terminalreporter.write_line(f"{mode:<{width}}{''.join(marks)}")


def _mark(config: pytest.Config, cell: Cell, right: str) -> str:
    passed = config.stash[_cells].get(cell)
    if passed is None:
        return "HOLE" if cell in config.stash[_wanted] else "-"
    return right if passed else "✗"
