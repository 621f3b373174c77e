# SPDX-License-Identifier: Apache-2.0
"""Runs all checks against the vLLM on PYTHONPATH: driver.py OUTPUT [CHECK...]

Each check runs twice, on freshly forked ranks: without the plugin, and with it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import checks_collectives as collectives
import checks_dispatch as dispatch
import torch
import twins
import world
from packaging.version import Version

DISPATCH, GATHER = "moe_dp_dispatch", "moe_dp_all_gather"


class Check(NamedTuple):
    """A check and its ranks.

    Attributes:
        fault: What it shows, or None where it is about behaviour that must not change.
        shows: How the fault looks without the plugin (regular expression).
        since: The first release that has what is checked.
    """

    run: world.Check
    fault: str | None
    fix: str
    shows: str = ""
    dp_size: int = 2
    tp_size: int = 1
    since: str = ""
    environ: tuple[tuple[str, str], ...] = ()


SHARED = (("VLLM_MOE_DP_FIX_FP8_DISPATCH", "shared_scale"),)
ROWS = r"AssertionError: 1 != \d+ \[cuda_communicator"
WRONG = r"rows: \d+% of the bytes differ"
GATHERED = "get 2 scales"
NO_GATHER = r"^rank \d: NotImplementedError"

CHECKS = {
    "fp8 1 and 36 tokens": Check(dispatch.uneven, "F1a", DISPATCH, ROWS),
    "fp8 0 and 5 tokens": Check(dispatch.none_on_rank_0, "F1a", DISPATCH, ROWS),
    "fp8 equal tokens": Check(dispatch.even, "F1a", DISPATCH, GATHERED),
    "fp8 four ranks": Check(dispatch.four_ranks, "F1a", DISPATCH, ROWS, 4),
    "fp8 sequence parallel": Check(dispatch.sequence_parallel, "F1a", DISPATCH, ROWS, 2, 2),
    "fp8 from float16": Check(dispatch.half_precision, "F1a", DISPATCH, ROWS),
    "fp8 with LoRA": Check(dispatch.with_lora, "F1a", DISPATCH, ROWS, since="0.21.0"),
    "fp8 weighted input": Check(dispatch.router_weight_on_input, "F1a", DISPATCH, ROWS),
    "fp8 static, 1 element": Check(dispatch.static_one_element, "F1a", DISPATCH, ROWS),
    "fp8 static, 1 element, equal tokens": Check(
        dispatch.static_one_element_even, "F1a", DISPATCH, GATHERED
    ),
    "fp8 shared scale": Check(dispatch.fp8_on_the_wire, "F1a", DISPATCH, ROWS, environ=SHARED),
    "fp8 shared scale, 0 and 5 tokens": Check(
        dispatch.none_on_rank_0, "F1a", DISPATCH, ROWS, environ=SHARED
    ),
    "fp8 shared scale, four ranks": Check(
        dispatch.four_ranks, "F1a", DISPATCH, ROWS, 4, environ=SHARED
    ),
    "fp8 shared scale, sequence parallel": Check(
        dispatch.sequence_parallel, "F1a", DISPATCH, ROWS, 2, 2, environ=SHARED
    ),
    "fp8 static, 0-dim": Check(dispatch.static_0_dim, "F1b", DISPATCH, "get no scale"),
    "mxfp8 swizzled": Check(dispatch.mxfp8_swizzled, "F1c", DISPATCH, r"scales: .*, not \(512,\)"),
    "mxfp8 row-major": Check(dispatch.mxfp8_row_major, None, DISPATCH),
    "unquantized": Check(dispatch.unquantized, None, DISPATCH),
    "fp8 per token": Check(dispatch.per_token, None, DISPATCH),
    "fp8 per token, shared scale": Check(dispatch.per_token, None, DISPATCH, environ=SHARED),
    "fp8 per block": Check(dispatch.per_block, None, DISPATCH),
    "fp8 deferred": Check(dispatch.deferred, None, DISPATCH),
    "wrong rows, uneven": Check(collectives.wrong_rows_uneven, "F2a", GATHER, "group left open"),
    "wrong rows, four ranks": Check(
        collectives.wrong_rows_uneven, "F2a", GATHER, "group left open", 4
    ),
    "unfit tensors": Check(collectives.unfit_tensors, "F2a", GATHER, "group left open"),
    "wrong rows, even": Check(collectives.wrong_rows_even, "F2b", GATHER, "without a word"),
    "strided tensors": Check(collectives.strided, "F2b", GATHER, WRONG),
    "reduce-scatter": Check(collectives.scatter_refuses, "F2c", GATHER, "bare assertion"),
    "reduce-scatter, four ranks": Check(
        collectives.scatter_refuses, "F2c", GATHER, "bare assertion", 4
    ),
    "CPU gather": Check(collectives.cpu_gather, "F2d", GATHER, NO_GATHER, since="0.20.0"),
    "CPU gather, four ranks": Check(
        collectives.cpu_gather, "F2d", GATHER, NO_GATHER, 4, since="0.20.0"
    ),
    "CPU scatter": Check(collectives.cpu_scatter, "F2d", GATHER, NO_GATHER, since="0.20.0"),
    "CPU scatter, four ranks": Check(
        collectives.cpu_scatter, "F2d", GATHER, NO_GATHER, 4, since="0.20.0"
    ),
    "CPU dispatch and combine": Check(
        collectives.cpu_dispatch_and_combine, "F2d", GATHER, NO_GATHER
    ),
    "CPU dispatch and combine, four ranks": Check(
        collectives.cpu_dispatch_and_combine, "F2d", GATHER, NO_GATHER, 4
    ),
}

IMPORTS = (
    "vllm.config",
    "vllm.distributed.device_communicators.all2all",
    "vllm.distributed.device_communicators.cpu_communicator",
    "vllm.distributed.device_communicators.cuda_communicator",
    "vllm.forward_context",
    "vllm.model_executor.layers.fused_moe.prepare_finalize.naive_dp_ep",
    "vllm.v1.executor.multiproc_executor",
    "vllm_moe_dp_fix.decision",
    "vllm_moe_dp_fix.fixes.moe_dp_all_gather",
    "vllm_moe_dp_fix.fixes.moe_dp_dispatch",
    "wrapt.importer",
)


def main(output: Path, names: list[str]) -> None:
    import vllm

    for name in IMPORTS:
        importlib.import_module(name)
    vllm.config.VllmConfig()  # imports the rest, which each rank would import by itself
    torch.set_num_threads(1)
    twins.register_fp8_ops()
    twins.install_block_quantizer()
    twins.install_flashinfer()
    chosen = [name for name in names or CHECKS if is_in(CHECKS[name], vllm.__version__)]
    without = {name: alone(name, []) for name in chosen}
    healed = cured(chosen)
    results = {name: {"without": without[name], "with": healed[name]} for name in chosen}
    report = {"vllm": vllm.__version__, "verdicts": verdicts(), "checks": results}
    output.write_text(json.dumps(report, indent=1))


def alone(name: str, fixes: list[str]) -> list[str]:
    """Runs a check on ranks of its own: where it fails, they are out of step afterwards."""
    check = CHECKS[name]
    with environment(check.environ):
        return world.run({name: check.run}, check.dp_size, check.tp_size, fixes)[name]


def cured(names: list[str]) -> dict[str, list[str]]:
    """Runs checks with their fix; those that need the same ranks share them while all is right."""
    groups: dict[Any, list[str]] = {}
    for name in names:
        check = CHECKS[name]
        key = (check.dp_size, check.tp_size, check.fix, check.environ)
        groups.setdefault(key, []).append(name)
    found: dict[str, list[str]] = {}
    for (dp_size, tp_size, fix, environ), members in groups.items():
        with environment(environ):
            checks = {name: CHECKS[name].run for name in members}
            found |= world.run(checks, dp_size, tp_size, [fix])
        found |= {name: alone(name, [fix]) for name in members if name not in found}
    return found


@contextlib.contextmanager
def environment(variables: tuple[tuple[str, str], ...]) -> Iterator[None]:
    os.environ.update(variables)
    yield
    for variable, _ in variables:
        del os.environ[variable]


def is_in(check: Check, release: str) -> bool:
    return not check.since or Version(release) >= Version(check.since)


def verdicts() -> dict[str, tuple[str, str]]:
    """What the plugin says of each fault; the checks before ran in processes of their own."""
    from vllm.plugins import load_general_plugins

    import vllm_moe_dp_fix

    load_general_plugins()
    return {
        fault: (verdict.outcome.value, verdict.reason)
        for faults in vllm_moe_dp_fix.verdicts().values()
        for fault, verdict in faults.items()
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
