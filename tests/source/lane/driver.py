# SPDX-License-Identifier: Apache-2.0
"""Runs all checks against the vLLM on PYTHONPATH: driver.py OUTPUT [CHECK...]

Each check runs twice, on freshly forked ranks: without the plugin, and with it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import checks_collectives as collectives
import checks_dispatch as dispatch
import checks_mxfp4 as mxfp4
import checks_nixl as nixl
import checks_replicas as replicas
import ports
import torch
import twins
import world
from packaging.version import Version

from vllm_moe_dp_fix.registry import EPLB_COMMUNICATOR, load

DISPATCH, GATHER = "moe_dp_dispatch", "moe_dp_all_gather"
MXFP4, NIXL = "mxfp4_weight_loader", "nixl_eplb_validator"


class Check(NamedTuple):
    """A check and its ranks.

    Attributes:
        fault: What it shows; several with blanks between, each in the releases that have it. None
            where it is about behaviour that must not change, or, if it ``shows`` something, that
            vLLM has in no release.
        shows: How it looks without the plugin (regular expression).
        since: The first release that has what is checked.
        until: The last release that shows it, where the fault has more to it.
        is_last: No other check can follow on the same ranks.
    """

    run: world.Check
    fault: str | None
    fix: str
    shows: str = ""
    dp_size: int = 2
    tp_size: int = 1
    since: str = ""
    until: str = ""
    environ: tuple[tuple[str, str], ...] = ()
    is_last: bool = False

    @property
    def is_of_patches(self) -> bool:
        """Not of the plugin's settings, nor of independent replicas."""
        return not self.environ and self.fault != "F1d" and self.dp_size > 0

    @property
    def faults(self) -> list[str]:
        return (self.fault or "").split()


SHARED = (("VLLM_MOE_DP_FIX_FP8_DISPATCH", "shared_scale"),)
REPLICATED = (("VLLM_MOE_DP_FIX_EXPERTS", "replicated"),)
AUTO = (("VLLM_MOE_DP_FIX_EXPERTS", "auto"),)
ALONE = "does not come up"
SHARDED = r"has experts shared among \d ranks"
ROWS = r"AssertionError: 1 != \d+ \[cuda_communicator"
WRONG = r"rows: \d+% of the bytes differ"
GATHERED = "get 2 scales"
NO_GATHER = r"^rank \d: NotImplementedError"
INDEX = "IndexError: tuple index out of range"
DIFFER = r"(values|bytes) differ"
SHARDS = rf"{INDEX}|more than the \d+ rows and columns|{DIFFER}|is \(.*\) in all, not"
SIZES = rf"{INDEX}|The size of tensor a|more than the \d+ rows and columns"
NOT_KNOWN = rf"{INDEX}|shard_id must be|\"copy_\" not implemented"
TAKEN = "taken without a word|no ValueError but IndexError"
UNSEEN = "taken without a word"
UNCLEAR = (
    "taken without a word|this rank alone says: RuntimeError: NIXL EPLB init failed: send meta"
)

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
    "replicas": Check(replicas.one_server, "F1d", DISPATCH, SHARDED, 0, environ=REPLICATED),
    "replicas spawned": Check(replicas.spawned, "F1d", DISPATCH, ALONE, 0, environ=REPLICATED),
    "replicas, a server for each rank": Check(
        replicas.server_for_each_rank, "F1d", DISPATCH, ALONE, 0, environ=REPLICATED
    ),
    "replicas, a server for each node": Check(
        replicas.server_for_each_node, "F1d", DISPATCH, SHARDED, 0, environ=REPLICATED
    ),
    "replicas, headless node": Check(
        replicas.headless, "F1d", DISPATCH, SHARDED, 0, environ=REPLICATED
    ),
    "replicas, a node that was not told": Check(replicas.sharded_node, "F1d", DISPATCH, ALONE, 0),
    "replicas, a front end that was not told": Check(
        replicas.sharded_front_end, "F1d", DISPATCH, ALONE, 0, environ=REPLICATED
    ),
    "replicas offline": Check(replicas.offline, "F1d", DISPATCH, ALONE, 0, environ=REPLICATED),
    "replicas offline, in process": Check(
        replicas.offline_in_process, "F1d", DISPATCH, "would wait", 0, environ=REPLICATED
    ),
    "replicas on Ray": Check(replicas.ray_actors, "F1d", DISPATCH, SHARDED, 0, environ=REPLICATED),
    "replicas refused": Check(
        replicas.refusals, "F1d", DISPATCH, "ties ranks together", 0, environ=REPLICATED
    ),
    "replicas by memory": Check(
        replicas.by_memory, "F1d", DISPATCH, "sharded, though", 0, environ=AUTO
    ),
    "replicas not asked for": Check(replicas.without_setting, None, DISPATCH, dp_size=0),
    "replicas not asked for, a server for each rank": Check(
        replicas.server_for_each_rank_without_setting, None, DISPATCH, dp_size=0
    ),
    "replicas not asked for, a server for each node": Check(
        replicas.server_for_each_node_without_setting, None, DISPATCH, dp_size=0
    ),
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
    "mxfp4 one rank": Check(mxfp4.per_expert, "F3a", MXFP4, INDEX, 1),
    "mxfp4 expert parallel": Check(mxfp4.expert_map, "F3a", MXFP4, INDEX, 1),
    "mxfp4 pruned experts": Check(mxfp4.pruned, "F3a", MXFP4, INDEX, 1),
    "mxfp4 method": Check(
        mxfp4.method, "F3b", MXFP4, "experts with silu get", 1, since="0.20.0", until="0.26.0"
    ),
    "mxfp4 kernel": Check(mxfp4.kernel, "F3b", MXFP4, "experts with SiLU get", 1, until="0.26.0"),
    "mxfp4 redundant experts": Check(
        mxfp4.redundant_experts, "F3b", MXFP4, "EPLB is not", 1, since="0.24.0", until="0.26.0"
    ),
    "mxfp4 no kernel": Check(mxfp4.no_kernel, "F3b", MXFP4, "without a kernel|does not name", 1),
    "mxfp4 balance": Check(mxfp4.balanced, "F3c", MXFP4, rf"lopsided|{INDEX}", 1),
    "mxfp4 whole blocks": Check(mxfp4.whole_blocks, "F3a F3c", MXFP4, SHARDS, 1),
    "mxfp4 unequal shares": Check(mxfp4.unequal_shares, "F3a F3c F3d", MXFP4, SHARDS, 1),
    "mxfp4 load_weights": Check(mxfp4.through_layer, "F3a F3c F3d", MXFP4, SHARDS, 1),
    "mxfp4 two ranks": Check(mxfp4.data_parallel, "F3d", MXFP4, "outputs differ", 2),
    "mxfp4 four ranks": Check(mxfp4.data_parallel, "F3d", MXFP4, "outputs differ", 4),
    "mxfp4 scales by value": Check(mxfp4.scales_by_value, "F3e", MXFP4, SHARDS, 1),
    "mxfp4 full precision": Check(mxfp4.full_precision, "F3f", MXFP4, SIZES, 1),
    "mxfp4 gpt-oss per expert": Check(mxfp4.gpt_oss_per_expert, "F3g", MXFP4, "KeyError", 1),
    "mxfp4 other schemes": Check(mxfp4.other_schemes, "F3h", MXFP4, TAKEN, 1),
    "mxfp4 other types": Check(mxfp4.other_types, "F3h", MXFP4, TAKEN, 1),
    "mxfp4 other places": Check(mxfp4.other_places, "F3h", MXFP4, TAKEN, 1),
    "mxfp4 full precision among packed": Check(
        mxfp4.full_precision_of_mxfp4, "F3h", MXFP4, TAKEN, 1, since="0.28.0"
    ),
    "mxfp4 twice": Check(mxfp4.twice, "F3h", MXFP4, TAKEN, 1),
    "mxfp4 incomplete": Check(mxfp4.incomplete, "F3h", MXFP4, TAKEN, 1),
    "mxfp4 damaged": Check(mxfp4.damaged, "F3h", MXFP4, TAKEN, 1),
    "mxfp4 rounded scales": Check(mxfp4.no_rounding, "F3i", MXFP4, "is rounded", 1),
    "mxfp4 odd scales": Check(mxfp4.odd_scales, "F3e F3i", MXFP4, TAKEN, 1),
    "mxfp4 layouts": Check(mxfp4.layouts, None, MXFP4, NOT_KNOWN, 1),
    "mxfp4 float4 views": Check(mxfp4.float4_views, None, MXFP4, NOT_KNOWN, 1),
    "mxfp4 any layer": Check(mxfp4.any_layer, None, MXFP4, NOT_KNOWN, 1),
    "mxfp4 biases": Check(mxfp4.biases, None, MXFP4, rf"{INDEX}|_bias: .* differ", 1),
    "mxfp4 gpt-oss widths": Check(mxfp4.gpt_oss_widths, None, MXFP4, SHARDS, 1),
    "mxfp4 reload": Check(mxfp4.reloaded, None, MXFP4, SHARDS, 1),
    "mxfp4 reload after dummy": Check(mxfp4.reloaded_dummy, None, MXFP4, SHARDS, 1),
    "mxfp4 CPU kernel": Check(mxfp4.cpu_kernel, None, MXFP4, dp_size=1, since="0.22.0"),
    "mxfp4 LoRA": Check(mxfp4.lora, None, MXFP4, TAKEN, 1),
    "mxfp4 gpt-oss": Check(mxfp4.gpt_oss_stacked, None, MXFP4, dp_size=1),
    "mxfp4 shared expert": Check(mxfp4.shared_expert, None, MXFP4, dp_size=1, since="0.32.0"),
    "mxfp4 padded by the model": Check(
        mxfp4.padded_by_model, None, MXFP4, dp_size=1, since="0.27.0"
    ),
    "mxfp4 without biases": Check(mxfp4.without_biases, None, MXFP4, dp_size=1),
    "mxfp4 never loaded": Check(mxfp4.never_loaded, None, MXFP4, dp_size=1),
    "nixl moves": Check(nixl.moves, None, NIXL, since="0.20.0"),
    "nixl moves, three ranks": Check(nixl.moves, None, NIXL, dp_size=3, since="0.20.0"),
    "nixl deferred": Check(nixl.moves_when_deferred, None, NIXL, since="0.20.0"),
    "nixl other version": Check(nixl.other_version, None, NIXL, since="0.20.0"),
    "nixl one rank": Check(nixl.one_rank, None, NIXL, dp_size=1, since="0.20.0"),
    "nixl other dtype": Check(nixl.other_dtype, "F4a F4c", NIXL, UNSEEN, since="0.20.0"),
    "nixl other dtype, three ranks": Check(
        nixl.other_dtype, "F4a F4c", NIXL, UNSEEN, 3, since="0.20.0"
    ),
    "nixl other bytes": Check(nixl.other_bytes, "F4a F4c", NIXL, UNCLEAR, since="0.20.0"),
    "nixl other layers": Check(nixl.other_layers, "F4a", NIXL, UNCLEAR, since="0.23.0"),
    "nixl real layers": Check(nixl.real_layers, "F4a F4c", NIXL, UNCLEAR, since="0.20.0"),
    "nixl several at once": Check(
        nixl.several_at_once, "F4a F4c", NIXL, UNCLEAR, 3, since="0.20.0"
    ),
    "nixl fails alone": Check(nixl.fails_alone, "F4b", NIXL, "left waiting|alone", since="0.20.0"),
    "nixl fails alone, three ranks": Check(
        nixl.fails_alone, "F4b", NIXL, "left waiting|alone", 3, since="0.20.0"
    ),
    "nixl dies": Check(
        nixl.dies,
        "F4b",
        NIXL,
        "the others say: NIXL EPLB init failed",
        since="0.20.0",
        is_last=True,
    ),
    "nixl dies, three ranks": Check(
        nixl.dies, "F4b", NIXL, "the others say: NIXL", 3, since="0.20.0", is_last=True
    ),
    "nixl waits for readers": Check(
        nixl.waits_for_readers, "F4d", NIXL, "goes on while", since="0.20.0"
    ),
    "nixl transfer fails": Check(nixl.transfer_fails, None, NIXL, "does not name", since="0.20.0"),
}

IMPORTS = (
    "vllm.config",
    "vllm.distributed.device_communicators.all2all",
    "vllm.distributed.device_communicators.cpu_communicator",
    "vllm.distributed.device_communicators.cuda_communicator",
    "vllm.forward_context",
    "vllm.model_executor.layers.fused_moe.prepare_finalize.naive_dp_ep",
    "vllm.model_executor.layers.quantization.mxfp4",
    "vllm.model_executor.models.gpt_oss",
    "vllm.v1.engine.core_client",
    "vllm.v1.executor.multiproc_executor",
    "vllm_moe_dp_fix.decision",
    "vllm_moe_dp_fix.fixes.moe_dp_all_gather",
    "vllm_moe_dp_fix.fixes.moe_dp_dispatch",
    "vllm_moe_dp_fix.fixes.mxfp4_weight_loader",
    "vllm_moe_dp_fix.fixes.nixl_eplb_validator",
    "vllm_moe_dp_fix.mxfp4.loading",
    "vllm_moe_dp_fix.nixl.report",
    "wrapt.importer",
)


def main(output: Path, names: list[str]) -> None:
    import vllm

    ports.hand_out()
    for name in IMPORTS:
        importlib.import_module(name)
    if importlib.util.find_spec(EPLB_COMMUNICATOR):  # from 0.20.0
        importlib.import_module(EPLB_COMMUNICATOR)
    vllm.config.VllmConfig()  # imports the rest, which each rank would import by itself
    torch.set_num_threads(1)
    twins.register_fp8_ops()
    twins.install_block_quantizer()
    twins.install_flashinfer()
    replicas.model_config()
    is_patched = "--patched" in names
    names = [name for name in names if name != "--patched"]
    chosen = [name for name in names or CHECKS if is_in(CHECKS[name], vllm.__version__)]
    if is_patched:  # what the patches for vLLM's source do, on a tree that has them
        chosen = [name for name in chosen if CHECKS[name].is_of_patches]
    without = right(chosen, with_fix=False) if is_patched else uncured(chosen)
    healed = {name: [] for name in chosen} if is_patched else right(chosen)
    results = {name: {"without": without[name], "with": healed[name]} for name in chosen}
    report = {"vllm": vllm.__version__, "verdicts": verdicts(), "checks": results}
    output.write_text(json.dumps(report, indent=1))


def uncured(names: list[str]) -> dict[str, list[str]]:
    """Runs checks without the plugin; those that need one rank share it."""
    one_rank = [name for name in names if CHECKS[name].dp_size * CHECKS[name].tp_size == 1]
    found = {name: alone(name, []) for name in names if name not in one_rank}
    if one_rank:
        found |= world.run({name: CHECKS[name].run for name in one_rank}, 1, 1, [])
    return found


def alone(name: str, fixes: list[str]) -> list[str]:
    """Runs a check on ranks of its own: where it fails, they are out of step afterwards."""
    check = CHECKS[name]
    with environment(check.environ):
        return world.run({name: check.run}, check.dp_size, check.tp_size, fixes)[name]


def right(names: list[str], with_fix: bool = True) -> dict[str, list[str]]:
    """Runs checks that should be right; those that need the same ranks share them while all are.

    Those that start processes themselves begin in one that has no threads.
    """
    fixes = {name: (CHECKS[name].fix,) if with_fix else () for name in names}
    groups: dict[Any, list[str]] = {}
    for name in names:
        check = CHECKS[name]
        if check.is_last or check.dp_size == 0:
            continue
        key = (check.dp_size, check.tp_size, fixes[name], check.environ)
        groups.setdefault(key, []).append(name)
    found: dict[str, list[str]] = {}
    for (dp_size, tp_size, shared, environ), members in groups.items():
        with environment(environ):
            checks = {name: CHECKS[name].run for name in members}
            found |= world.run(checks, dp_size, tp_size, list(shared))
    return found | {name: alone(name, list(fixes[name])) for name in names if name not in found}


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
    found = {
        fault: (verdict.outcome.value, verdict.reason)
        for faults in vllm_moe_dp_fix.verdicts().values()
        for fault, verdict in faults.items()
    }
    if not importlib.util.find_spec(EPLB_COMMUNICATOR):
        absent = ("not_affected", f"there is no {EPLB_COMMUNICATOR}")
        found |= {fault.id: absent for fault in load(NIXL).faults}
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
