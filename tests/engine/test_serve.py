# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` of an MoE model with two data-parallel ranks, with and without the plugin.

Runs where a compiled vLLM is installed; ``scripts/engine_lane.sh`` prints the python of one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from scripts import demo

SPY = Path(__file__).parent / "spy"
END_TIMEOUT_S = 120


@dataclass
class Replicas:
    """What a server with all experts on each rank made of a model.

    Attributes:
        done: The requests that each engine has answered.
        last_words: What it wrote once an engine was killed; ``exit_code`` is its own after that.
    """

    case: demo.Case
    log: str
    done: dict[str, float]
    last_words: str
    exit_code: int


@dataclass
class Served:
    """What the servers made of a model.

    Attributes:
        outcome: Without the plugin, with it and shared experts, and one rank.
        replicated: With the plugin, and all experts on each rank.
        wide: So too, with two workers a rank; its processes are spawned, its requests balanced.
        seen: What the workers of each server saw, one a worker.
    """

    outcome: demo.Outcome
    replicated: Replicas
    wide: Replicas
    seen: dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module", params=demo.MODELS)
def served(
    serves: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Served:
    """The servers are started once a model and module of tests."""
    lane = demo.pick_lane()
    model = demo.make_model(request.param, lane)
    folder = tmp_path_factory.mktemp("seen")
    with _spied(folder / "sharded"):
        outcome = demo.demonstrate(model, lane)
    with _spied(folder / "replicated", VLLM_MOE_DP_FIX_EXPERTS="replicated"):
        replicated = _serve_replicas(model, lane, "replicated")
    spawned = {"VLLM_MOE_DP_FIX_EXPERTS": "replicated", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    with _spied(folder / "wide", **spawned):
        wide = _serve_replicas(model, _with_two_workers(lane), "wide", is_balanced=True)
    seen = {
        kind: [json.loads(path.read_text()) for path in sorted((folder / kind).glob("*.json"))]
        for kind in ("sharded", "replicated", "wide")
    }
    return Served(outcome, replicated, wide, seen)


def _serve_replicas(model: Path, lane: demo.Lane, name: str, is_balanced: bool = False) -> Replicas:
    with demo.serve(model, lane, name, 2, demo.PLUGINS) as server:
        server.wait_until_healthy()
        case = demo.ask_all(server, f"DP=2, {name}", stream=False, is_balanced=is_balanced)
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as answer:
            metrics = answer.read().decode()
        log = server.text
        exit_code = _kill_engine(server, "EngineCore_DP1")
        last_words = server.text[len(log) :]
    done = {"0": 0.0, "1": 0.0}
    pattern = r'^vllm:request_success_total\{.*engine="(\d)".*\} ([\d.]+)$'
    for engine, count in re.findall(pattern, metrics, re.MULTILINE):
        done[engine] += float(count)
    return Replicas(case, log, done, last_words, exit_code)


def _kill_engine(server: demo.Server, name: str) -> int:
    """The exit code of the server, which ends without that engine."""
    import psutil  # comes with vLLM

    processes = psutil.Process(server.process.pid).children(recursive=True)
    (engine,) = (p for p in processes if name in " ".join(p.cmdline()))
    engine.kill()
    return server.process.wait(END_TIMEOUT_S)


def _with_two_workers(lane: demo.Lane) -> demo.Lane:
    """Tensor parallelism inside a rank; on the CPU without a core for each worker."""
    unbound = {"VLLM_CPU_SIM_MULTI_NUMA": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    flags = (*lane.flags, "--tensor-parallel-size", "2")
    return dataclasses.replace(lane, flags=flags, environ=lane.environ | unbound)


@contextlib.contextmanager
def _spied(folder: Path, **variables: str) -> Iterator[None]:
    """Servers that are started meanwhile, and load plugins, load the spy as well."""
    paths = [str(SPY), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables |= {"REPLICA_SPY": str(folder), "PYTHONPATH": os.pathsep.join(paths)}
    with (
        mock.patch.dict(os.environ, variables),
        mock.patch.object(demo, "PLUGINS", f"{demo.PLUGINS},replica_spy"),
    ):
        yield


def test_fails_without_the_plugin(served: Served) -> None:
    """Otherwise the tests below say nothing about the plugin."""
    assert served.outcome.before.answered == 0
    assert any(error.startswith("HTTP 500") for error in served.outcome.before.errors)
    assert re.match(demo.pick_lane().fault, served.outcome.before.said), served.outcome.before.log
    assert served.outcome.before.plugin == []


def test_answers_every_request_with_the_plugin(served: Served) -> None:
    assert served.outcome.after.errors == []
    counts = [len(tokens or ()) for tokens in served.outcome.after.tokens]
    assert counts == [count for _, count in demo.REQUESTS]


def test_gives_the_tokens_of_one_rank(served: Served) -> None:
    if not demo.pick_lane().same_tokens:
        pytest.skip("the tokens depend on what is batched together")
    assert served.outcome.reference.errors == []
    assert served.outcome.reference.plugin == []
    assert served.outcome.after.tokens == served.outcome.reference.tokens


def test_tokens_tell_answers_apart(served: Served) -> None:
    """A model that repeats one token, or one answer, would hide rows that went astray."""
    answers = [tuple(tokens or ()) for tokens in served.outcome.reference.tokens]
    assert len(set(answers)) == len(answers)
    assert all(len(set(answer)) > 1 for answer in answers), answers
    tokens = [token for answer in answers for token in answer]
    assert len(set(tokens)) > len(tokens) // 2, answers


@pytest.mark.parametrize("fix", demo.PLUGINS.split(","))
def test_every_rank_says_that_it_is_repaired(served: Served, fix: str) -> None:
    lines = [line for line in served.outcome.after.plugin if f"{fix} on vLLM" in line]
    ranks = {match[1] for line in lines if (match := re.search(r"Worker.*?pid=(\d+)", line))}
    assert len(ranks) == 2, served.outcome.after.plugin
    assert all("applied" in line for line in lines)


def test_replicas_give_the_tokens_of_one_rank(served: Served) -> None:
    for replicas in (served.replicated, served.wide):
        assert replicas.case.errors == []
        if demo.pick_lane().same_tokens:
            assert replicas.case.tokens == served.outcome.reference.tokens


def test_replicas_hold_all_experts(served: Served) -> None:
    """As wide as the model says, also shared by a rank's workers; else they have half of that."""
    width = demo.pick_lane().size["expert"]
    shares = {"sharded": (2, width // 2), "replicated": (2, width), "wide": (4, width // 2)}
    for kind, (count, share) in shares.items():
        workers = served.seen[kind]
        assert len(workers) == count
        for worker in workers:
            assert worker["shapes"]
            for name, shape in worker["shapes"].items():
                columns = shape[2] if "w2" in name else shape[1] // 2
                assert columns == share, (kind, name, shape)


def test_replicas_talk_to_nobody(served: Served) -> None:
    """No collective of the DP or EP group is called; with shared experts there are many."""
    assert [worker["calls"] for worker in served.seen["replicated"]] == [{}, {}]
    assert [worker["calls"] for worker in served.seen["wide"]] == [{}, {}, {}, {}]
    for worker in served.seen["sharded"]:
        assert sum(worker["calls"].values()) > 10 * len(demo.REQUESTS), worker["calls"]


def test_replicas_are_engines_of_their_own(served: Served) -> None:
    for log in (served.replicated.log, served.wide.log):
        assert log.count("2 independent replicas, as VLLM_MOE_DP_FIX_EXPERTS asks") == 1
        assert set(re.findall(r"\(EngineCore_DP(\d)", log)) == {"0", "1"}
        assert "wave" not in log.lower()


def test_shared_experts_are_said_to_have_another_choice(served: Served) -> None:
    said = [line for line in served.outcome.after.plugin if "experts: " in line]
    assert len(said) == 1
    assert "experts: sharded over 2 ranks, though a full copy" in said[0]
    assert "VLLM_MOE_DP_FIX_EXPERTS=replicated" in said[0]


def test_replicas_have_metrics_of_their_own(served: Served) -> None:
    """Each rank was asked for half of the requests."""
    half = len(demo.REQUESTS) / 2
    assert served.replicated.done == {"0": half, "1": half}


def test_requests_are_balanced_over_replicas(served: Served) -> None:
    """Each has its share where no request names a rank."""
    assert sum(served.wide.done.values()) == len(demo.REQUESTS)
    assert min(served.wide.done.values()) > 0, served.wide.done


def test_a_replica_that_dies_ends_the_server(served: Served) -> None:
    """As an engine of a dense model does; what is in front of it can send requests elsewhere."""
    for replicas in (served.replicated, served.wide):
        assert replicas.exit_code == 1
        assert "EngineCore_DP1 died unexpectedly" in replicas.last_words
