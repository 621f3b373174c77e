# SPDX-License-Identifier: Apache-2.0
"""Import orders, other patchers and unknown builds: real vLLM, a fresh process a case."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from trees import tree_of

RELEASES = ("0.19.0", "0.26.0", "0.33.0")
ABSENT = {  # faults that a release does not have
    "0.19.0": {"F2d", "F3d", "F3i", "F4a", "F4b", "F4c", "F4d"},
    "0.26.0": {"F1b", "F3a", "F3c", "F3i", "F4c", "F4d"},
    "0.33.0": {"F1b", "F3a", "F3b", "F3c", "F3e", "F3f", "F3g", "F4c", "F4d"},
}

# What every case starts with.
PRELUDE = """
import functools, importlib, json, logging, sys
import vllm, vllm_moe_dp_fix
from vllm.plugins import load_general_plugins
NAIVE = "vllm.model_executor.layers.fused_moe.prepare_finalize.naive_dp_ep"
CUDA = "vllm.distributed.device_communicators.cuda_communicator"
CPU = "vllm.distributed.device_communicators.cpu_communicator"
MXFP4 = "vllm.model_executor.layers.quantization.mxfp4"
GPT_OSS = "vllm.model_executor.models.gpt_oss"
EPLB = "vllm.distributed.eplb.eplb_communicator"
CLIENT = "vllm.v1.engine.core_client"
lines = []
class Listener(logging.Handler):
    def emit(self, record):
        lines.append((record.levelname, record.getMessage()))
logging.getLogger("vllm.moe_dp_fix").addHandler(Listener())
logging.getLogger("vllm.moe_dp_fix").setLevel(logging.INFO)
def targets():
    '''What the fixes replace: name -> what is there.'''
    modules = NAIVE, CUDA, CPU, MXFP4, GPT_OSS
    naive, cuda, cpu, mxfp4, gpt_oss = map(importlib.import_module, modules)
    owners = [naive.MoEPrepareAndFinalizeNaiveDPEPModular,
              naive.MoEPrepareAndFinalizeNaiveDPEPMonolithic, naive,
              cuda.CudaCommunicator, cpu.CpuCommunicator,
              mxfp4.Mxfp4Config, mxfp4.Mxfp4MoEMethod, mxfp4, gpt_oss.GptOssModel]
    if hasattr(mxfp4, "GptOssMxfp4MoEMethod"):  # from 0.20.0, as the module of EPLB
        owners += [mxfp4.GptOssMxfp4MoEMethod, importlib.import_module(EPLB).NixlEplbCommunicator]
    owners.append(importlib.import_module(CLIENT).EngineCoreClient)
    from vllm.config.vllm import VllmConfig
    from vllm.v1.engine import coordinator, core, utils
    owners += [VllmConfig, coordinator.DPCoordinator, core.EngineCoreProc, utils,
               utils.CoreEngineActorManager]
    names = ("prepare", "_unwrap_scale_and_prepare_for_moe", "all_gatherv", "reduce_scatterv",
             "_reduce_scatterv", "get_quant_method", "select_mxfp4_moe_backend",
             "select_deepseek_v4_mxfp4_moe_backend", "maybe_roundup_sizes", "create_weights",
             "process_weights_after_loading", "_load_weights_mxfp4", "__init__",
             "_init_remote_agents", "_exchange_remote_send_meta", "_ensure_remote_state",
             "add_recv", "_create_peer_xfer", "_wait_for_all_transfers", "execute",
             "make_async_mp_client", "__post_init__", "needs_dp_coordinator", "run_engine_core",
             "wait_for_engine_startup")
    return {f"{o.__name__}.{n}": vars(o)[n] for o in owners for n in names if n in vars(o)}
def ours():
    return sorted(n for n, f in targets().items()
                  if function(f).__globals__["__name__"].startswith("vllm_moe_dp_fix"))
def function(held):
    '''What a static method or a property holds.'''
    return getattr(held, "__func__", None) or getattr(held, "fget", None) or held
def outcomes():
    return {fault: verdict.outcome.value for fault, verdict in verdicts().items()}
def verdicts():
    return {fault: verdict for fix in vllm_moe_dp_fix.verdicts().values()
            for fault, verdict in fix.items()}
def say(**found):
    print("FOUND " + json.dumps(found))
"""


def environment(release: str, *folders: Path, **environ: str) -> dict[str, str]:
    """This process's environment with that release's tree, and no settings but the given ones."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    path = os.pathsep.join(map(str, (tree_of(release), *folders)))
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environ}


def run(release: str, case: str, *folders: Path, **environ: str) -> dict[str, Any]:
    """Runs a case on a release and returns what it said."""
    process = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(case)],
        env=environment(release, *folders, **environ),
        capture_output=True,
        text=True,
        timeout=300,
    )
    said = [line for line in process.stdout.splitlines() if line.startswith("FOUND ")]
    assert said, process.stdout[-2000:] + process.stderr[-4000:]
    found: dict[str, Any] = json.loads(said[-1].removeprefix("FOUND "))
    return found


@pytest.mark.parametrize("release", RELEASES)
def test_import_first_twice_undo_twice_again(release: str) -> None:
    found = run(
        release,
        """
        before = targets()
        load_general_plugins()
        first = targets()
        vllm.plugins.plugins_loaded = False
        load_general_plugins()
        twice = targets()
        names, once = ours(), list(lines)
        undone = []
        for _ in range(2):
            held = [vllm_moe_dp_fix.uninstall(f) for f in vllm_moe_dp_fix.verdicts()]
            now = targets()
            undone.append(not any(held) and now.keys() == before.keys()
                          and all(now[n] is before[n] for n in now))
        for fix in vllm_moe_dp_fix.verdicts():
            vllm_moe_dp_fix.install(fix)
        say(names=names, stable=first == twice, undone=undone, again=ours(), lines=once)
        """,
    )
    assert found["names"] == sorted(_replaced(release))
    assert found["stable"]
    assert found["undone"] == [True, True]
    assert found["again"] == found["names"]
    # One line a module; those of the CUDA communicator and of NIXL are DEBUG on this platform.
    assert [level for level, _ in found["lines"]] == ["INFO"] * 5


REPLICAS = {
    *("VllmConfig.__post_init__", "VllmConfig.needs_dp_coordinator", "DPCoordinator.__init__"),
    *("vllm.v1.engine.utils.wait_for_engine_startup", "CoreEngineActorManager.__init__"),
    *("EngineCoreProc.run_engine_core", "EngineCoreClient.make_async_mp_client"),
}


def _replaced(release: str) -> set[str]:
    """The functions that the fixes replace."""
    scatter = "_reduce_scatterv" if release == "0.33.0" else "reduce_scatterv"
    names = {
        "MoEPrepareAndFinalizeNaiveDPEPModular.prepare",
        "MoEPrepareAndFinalizeNaiveDPEPMonolithic.prepare",
        "vllm.model_executor.layers.fused_moe.prepare_finalize.naive_dp_ep."
        "_unwrap_scale_and_prepare_for_moe",
        "CudaCommunicator.all_gatherv",
        f"CudaCommunicator.{scatter}",
        *REPLICAS,
    }
    methods = ["Mxfp4MoEMethod"]
    if release != "0.19.0":
        names |= {"CpuCommunicator.all_gatherv", "CpuCommunicator.reduce_scatterv"}
        methods += ["GptOssMxfp4MoEMethod"]
        communicator = {"__init__", "_init_remote_agents", "_exchange_remote_send_meta"}
        communicator |= {"add_recv", "_create_peer_xfer", "_wait_for_all_transfers"}
        communicator |= {"_ensure_remote_state"} if release == "0.26.0" else set()
        names |= {f"NixlEplbCommunicator.{name}" for name in communicator}
    names |= {
        f"{method}.{name}"
        for method in methods
        for name in ("maybe_roundup_sizes", "create_weights", "process_weights_after_loading")
    }
    if release != "0.33.0":
        select = "select_mxfp4" if release == "0.19.0" else "select_deepseek_v4_mxfp4"
        names |= {
            "Mxfp4Config.get_quant_method",
            f"vllm.model_executor.layers.quantization.mxfp4.{select}_moe_backend",
            "GptOssModel._load_weights_mxfp4",
        }
    return names


@pytest.mark.parametrize("release", RELEASES)
def test_plugin_first(release: str) -> None:
    found = run(
        release,
        """
        load_general_plugins()
        early = [m for m in (NAIVE, CUDA, CPU, MXFP4, GPT_OSS, EPLB, CLIENT) if m in sys.modules]
        say(early=early, ours=len(ours()), outcomes=outcomes())
        """,
    )
    assert found["early"] == []
    assert found["ours"] == len(_replaced(release))
    assert set(found["outcomes"].values()) == {"applied", "not_affected"}


def test_entry_points_are_light() -> None:
    code = """
    import sys
    import vllm_moe_dp_fix.plugin as plugin
    plugin.moe_dp_dispatch(); plugin.moe_dp_all_gather()
    plugin.mxfp4_weight_loader(); plugin.nixl_eplb_validator()
    print([m for m in sys.modules if m == "torch" or m.startswith("vllm.")])
    """
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    assert process.stdout.strip() == "[]", process.stderr


def test_vllm_plugins_selects_and_import_by_name_is_rebound(tmp_path: Path) -> None:
    (tmp_path / "by_name.py").write_text(
        "from vllm.model_executor.layers.fused_moe.prepare_finalize.naive_dp_ep import (\n"
        "    _unwrap_scale_and_prepare_for_moe as unwrap,\n)\n"
    )
    found = run(
        "0.26.0",
        """
        import by_name
        naive = sys.modules[NAIVE]
        original = [by_name.unwrap]  # in a list: a global of this name would be bound anew, too
        load_general_plugins()
        bound = by_name.unwrap is naive._unwrap_scale_and_prepare_for_moe is not original[0]
        selected = ours()
        vllm_moe_dp_fix.uninstall("moe_dp_dispatch")
        say(bound=bound, selected=selected, restored=by_name.unwrap is original[0])
        """,
        tmp_path,
        VLLM_PLUGINS="moe_dp_dispatch",
    )
    assert found["bound"]
    assert found["restored"]
    assert len(found["selected"]) == 3 + len(REPLICAS)
    assert not any(name.startswith(("CudaC", "CpuC")) for name in found["selected"])


def test_a_wrapper_put_over_ours_stays() -> None:
    found = run(
        "0.26.0",
        """
        load_general_plugins()
        targets()
        cls = sys.modules[CUDA].CudaCommunicator
        ours_, other = cls.all_gatherv, lambda self, *a, **k: ours_(self, *a, **k)
        cls.all_gatherv = other
        held = vllm_moe_dp_fix.uninstall("moe_dp_all_gather")
        say(stays=cls.all_gatherv is other, held=held, ours=ours())
        """,
    )
    assert found["stays"]
    assert len(found["held"]) == 1
    assert "CudaCommunicator.all_gatherv is held by __main__" in found["held"][0]
    assert not any(name.startswith(("CudaC", "CpuC")) for name in found["ours"])


def test_a_wrapper_put_before_ours_is_chained_and_named() -> None:
    found = run(
        "0.26.0",
        """
        targets()
        module = sys.modules[NAIVE]
        original, calls = module._unwrap_scale_and_prepare_for_moe, []
        @functools.wraps(original)
        def other(*args, **kwargs):
            calls.append(1)
            return original(*args, **kwargs)
        module._unwrap_scale_and_prepare_for_moe = other
        load_general_plugins()
        calls.clear()
        import torch
        config = module.FusedMoEQuantConfig.make(quant_dtype="mxfp8")
        scale = module._unwrap_scale_and_prepare_for_moe([torch.ones(3, 4).byte()], config)
        found = dict(calls=len(calls), shape=list(scale.shape), lines=list(lines),
                     outcomes=outcomes(), note=verdicts()["F1c"].note)
        vllm_moe_dp_fix.uninstall("moe_dp_dispatch")
        say(**found, restored=module._unwrap_scale_and_prepare_for_moe is other)
        """,
    )
    assert found["calls"] == 1
    assert found["shape"] == [512]
    assert found["outcomes"]["F1c"] == "applied"
    assert "_unwrap_scale_and_prepare_for_moe was already replaced by __main__" in found["note"]
    (line,) = (text for _, text in found["lines"] if "F1c" in text)
    assert found["note"] in line
    assert found["restored"]


def test_a_replacement_that_is_not_known_is_left_alone() -> None:
    """Named in the verdict; warned of for the communicator that this platform, CPU, uses."""
    found = run(
        "0.26.0",
        """
        targets()
        classes = sys.modules[CUDA].CudaCommunicator, sys.modules[CPU].CpuCommunicator
        others = [lambda *args, **kwargs: None for _ in classes]
        for cls, other in zip(classes, others):
            cls.all_gatherv = other
        load_general_plugins()
        say(stays=[vars(c)["all_gatherv"] is o for c, o in zip(classes, others)], ours=ours(),
            outcomes=outcomes(), reasons={k: v.reason for k, v in verdicts().items()}, lines=lines)
        """,
    )
    assert found["stays"] == [True, True]
    assert not any(name.startswith(("CudaC", "CpuC")) for name in found["ours"])
    for fault in ("F2a", "F2b", "F2c", "F2d"):
        assert found["outcomes"][fault] == "signature_unknown"
        assert "all_gatherv(args, kwargs), put there by __main__" in found["reasons"][fault]
    assert found["outcomes"]["F1a"] == "applied"
    (warning,) = (text for level, text in found["lines"] if level == "WARNING")
    assert "F2d" in warning
    assert "put there by __main__" in warning


HEALTHY = {"F1b", "F3a", "F3c", "F4c", "F4d"}  # what a probe finds right in 0.26.0
UNKNOWN_BUILDS = ("0.34.0", "0.33.1.dev7+g1a2b", "0.26.0+cu130", "0.26.0+corp3", "dev")


def test_an_unknown_build_is_judged_by_probe() -> None:
    found = run(
        "0.26.0",
        f"""
        builds = {{}}
        for version in {UNKNOWN_BUILDS!r}:
            vllm.__version__, vllm.plugins.plugins_loaded = version, False
            lines.clear()
            load_general_plugins()
            builds[version] = dict(ours=len(ours()), outcomes=outcomes(),
                                   warnings=[text for level, text in lines if level == "WARNING"])
            for fix in vllm_moe_dp_fix.verdicts():
                vllm_moe_dp_fix.uninstall(fix)
            builds[version]["left"] = ours()
        say(**builds)
        """,
    )
    assert found.keys() == set(UNKNOWN_BUILDS)
    for version, build in found.items():
        assert build["ours"] == len(_replaced("0.26.0"))
        assert build["left"] == []
        # F3i shows in a build of any release before 0.28.0, where F3e is its cause.
        assert {f for f, o in build["outcomes"].items() if o == "healthy"} == HEALTHY
        assert set(build["outcomes"].values()) == {"applied", "healthy"}
        (warning,) = build["warnings"]
        assert f"vLLM {version} is no release this package was tested with" in warning


def test_a_build_that_is_repaired_already_is_left_alone() -> None:
    """The plugin's own repair, as if the image had brought it."""
    found = run(
        "0.26.0",
        """
        from vllm_moe_dp_fix.registry import load
        from vllm_moe_dp_fix import patching
        for fix in vllm_moe_dp_fix.verdicts():
            for repair in load(fix).repairs:
                for patch in repair.patches:
                    module = importlib.import_module(patch.module or repair.module)
                    if target := patching.find(patch, module):
                        patching.replace(patch, target)
        before = targets()
        load_general_plugins()
        say(same=before == targets(), outcomes=outcomes())
        """,
    )
    assert found["same"]
    assert {f for f, o in found["outcomes"].items() if o == "not_affected"} == ABSENT["0.26.0"]
    assert set(found["outcomes"].values()) == {"healthy", "not_affected"}


def test_strict_mode_stops_the_import_and_the_start() -> None:
    """A target is gone: first in a module that is imported after the plugin, then before it."""
    found = run(
        "0.26.0",
        """
        from wrapt.importer import register_post_import_hook
        FixNotAppliedError = vllm_moe_dp_fix.runtime.FixNotAppliedError
        target = "_unwrap_scale_and_prepare_for_moe"
        register_post_import_hook(lambda module: delattr(module, target), NAIVE)
        load_general_plugins()
        at_import = at_start = None
        try:
            importlib.import_module(NAIVE)
        except FixNotAppliedError as error:
            at_import = str(error)
        imported, F1c = NAIVE in sys.modules, outcomes()["F1c"]
        vllm_moe_dp_fix.uninstall("moe_dp_all_gather")
        del importlib.import_module(CPU).CpuCommunicator
        vllm.plugins.plugins_loaded = False
        try:
            load_general_plugins()
        except FixNotAppliedError as error:
            at_start = str(error)
        say(at_import=at_import, imported=imported, F1c=F1c, at_start=at_start)
        """,
        VLLM_MOE_DP_FIX_STRICT="1",
    )
    assert "moe_dp_dispatch could not be applied to vLLM 0.26.0: F1c" in found["at_import"]
    assert "has no _unwrap_scale_and_prepare_for_moe" in found["at_import"]
    assert not found["imported"]
    assert found["F1c"] == "target_missing"
    assert "moe_dp_all_gather could not be applied to vLLM 0.26.0: F2d" in found["at_start"]
    assert "has no CpuCommunicator.all_gatherv" in found["at_start"]


def status(release: str, **environ: str) -> tuple[int, dict[str, Any]]:
    process = subprocess.run(
        [sys.executable, "-m", "vllm_moe_dp_fix.cli", "status", "--json"],
        env=environment(release, **environ),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.stdout.startswith("{"), process.stdout[-2000:] + process.stderr[-4000:]
    return process.returncode, json.loads(process.stdout)


@pytest.mark.parametrize("release", RELEASES)
def test_status(release: str) -> None:
    code, document = status(release)
    assert code == 0
    assert document["vllm"]["version"] == release
    assert document["vllm"]["tested"]
    assert document["vllm"]["distribution"] == ["vllm"]
    last = "not_affected" if release == "0.19.0" else "applied"
    assert [fix["outcome"] for fix in document["fixes"]] == ["applied"] * 3 + [last]
    faults = {fault["id"]: fault for fix in document["fixes"] for fault in fix["faults"]}
    absent = ABSENT[release]
    assert {f for f, row in faults.items() if row["outcome"] == "not_affected"} == absent
    assert {f for f, row in faults.items() if row["affected"]} == faults.keys() - absent
    assert document["problems"] == []


@pytest.mark.parametrize("allowed", ["", "moe_dp_dispach"])
def test_status_where_vllm_plugins_names_none(allowed: str) -> None:
    code, document = status("0.26.0", VLLM_PLUGINS=allowed)
    assert code == 0
    for fix in document["fixes"]:
        assert fix["outcome"] == "switched_off"
        assert f"VLLM_PLUGINS={allowed!r}" in fix["switched_off_by"]
        assert {fault["outcome"] for fault in fix["faults"]} == {"switched_off"}
    problems = [f"VLLM_PLUGINS names {allowed!r}, which no installed plugin is called"]
    assert document["problems"] == (problems if allowed else [])


def test_status_where_a_fix_is_disabled() -> None:
    code, document = status("0.26.0", VLLM_MOE_DP_FIX_DISABLE="moe_dp_dispatch")
    assert code == 0
    dispatch, *others = document["fixes"]
    assert dispatch["outcome"] == "switched_off"
    assert {fix["outcome"] for fix in others} == {"applied"}
    assert "VLLM_MOE_DP_FIX_DISABLE" in dispatch["switched_off_by"]


@pytest.mark.parametrize("imported", ["vllm.engine.arg_utils", "vllm.v1.worker.worker_base"])
def test_replicas_are_ready_before_there_is_a_configuration(imported: str) -> None:
    """In a front end; a worker does not import more than it needs."""
    found = run(
        "0.26.0",
        f"""
        import {imported}
        load_general_plugins()
        say(is_imported=CLIENT in sys.modules, F1d=outcomes().get("F1d"))
        """,
    )
    is_front_end = imported.endswith("arg_utils")
    assert found["is_imported"] is is_front_end
    assert found["F1d"] == ("applied" if is_front_end else None)


def test_replicas_that_cannot_be_had_are_an_error_line() -> None:
    found = run(
        "0.26.0",
        """
        from vllm.engine import arg_utils
        from vllm.v1.engine import core
        core.EngineCoreProc.run_engine_core = staticmethod(lambda *args, **kwargs: None)
        load_general_plugins()
        say(errors=[text for level, text in lines if level == "ERROR"], ours=ours())
        """,
        VLLM_MOE_DP_FIX_EXPERTS="replicated",
    )
    (error,) = found["errors"]
    assert "VLLM_MOE_DP_FIX_EXPERTS has no effect here" in error
    assert "EngineCoreProc.run_engine_core(args, kwargs)" in error
    assert not REPLICAS & {*found["ours"]}
