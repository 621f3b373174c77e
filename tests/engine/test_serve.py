# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` of an MoE model with two data-parallel ranks, with and without the plugin.

Runs where a compiled vLLM is installed; ``scripts/engine_lane.sh`` prints the python of one.
"""

from __future__ import annotations

import contextlib
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


@dataclass
class Served:
    """What the servers made of a model.

    Attributes:
        outcome: Without the plugin, with it and shared experts, and one rank.
        replicated: With the plugin, and all experts on each rank.
        log, metrics: Of the replicated server.
        seen: What the workers with shared and with replicated experts saw, one a worker.
    """

    outcome: demo.Outcome
    replicated: demo.Case
    log: str
    metrics: str
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
    with (
        _spied(folder / "replicated", VLLM_MOE_DP_FIX_EXPERTS="replicated"),
        demo.serve(model, lane, "replicated", 2, demo.PLUGINS) as server,
    ):
        server.wait_until_healthy()
        case = demo.ask_all(server, "DP=2, replicated", stream=False)
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as answer:
            metrics = answer.read().decode()
        log = server.text
    seen = {
        kind: [json.loads(path.read_text()) for path in sorted((folder / kind).glob("*.json"))]
        for kind in ("sharded", "replicated")
    }
    return Served(outcome, case, log, metrics, seen)


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
    assert served.replicated.errors == []
    if demo.pick_lane().same_tokens:
        assert served.replicated.tokens == served.outcome.reference.tokens


def test_replicas_hold_all_experts(served: Served) -> None:
    """As wide as the model says; shared experts have half of that on each of two ranks."""
    width = demo.pick_lane().size["expert"]
    for kind, share in (("sharded", width // 2), ("replicated", width)):
        workers = served.seen[kind]
        assert len(workers) == 2
        for worker in workers:
            assert worker["shapes"]
            for name, shape in worker["shapes"].items():
                columns = shape[2] if "w2" in name else shape[1] // 2
                assert columns == share, (kind, name, shape)


def test_replicas_talk_to_nobody(served: Served) -> None:
    """No collective of the DP or EP group is called; with shared experts there are many."""
    assert [worker["calls"] for worker in served.seen["replicated"]] == [{}, {}]
    for worker in served.seen["sharded"]:
        assert sum(worker["calls"].values()) > 10 * len(demo.REQUESTS), worker["calls"]


def test_replicas_are_engines_of_their_own(served: Served) -> None:
    assert served.log.count("2 independent replicas, as VLLM_MOE_DP_FIX_EXPERTS asks") == 1
    engines = set(re.findall(r"\(EngineCore_DP(\d)", served.log))
    assert engines == {"0", "1"}
    assert "wave" not in served.log.lower()


def test_shared_experts_are_said_to_have_another_choice(served: Served) -> None:
    said = [line for line in served.outcome.after.plugin if "experts: " in line]
    assert len(said) == 1
    assert "experts: sharded over 2 ranks, though a full copy" in said[0]
    assert "VLLM_MOE_DP_FIX_EXPERTS=replicated" in said[0]


def test_replicas_have_metrics_of_their_own(served: Served) -> None:
    """Each rank was asked for half of the requests."""
    pattern = r'^vllm:request_success_total\{.*engine="(\d)".*\} ([\d.]+)$'
    counts = {"0": 0.0, "1": 0.0}
    for engine, count in re.findall(pattern, served.metrics, re.MULTILINE):
        counts[engine] += float(count)
    half = len(demo.REQUESTS) / 2
    assert counts == {"0": half, "1": half}
