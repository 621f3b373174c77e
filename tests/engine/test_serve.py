# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` of an MoE model with two data-parallel ranks, with and without the plugin.

Runs where a compiled vLLM is installed; ``scripts/engine_lane.sh`` prints the python of one.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from scripts import demo


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


@pytest.fixture(scope="module", params=demo.MODELS)
def served(request: pytest.FixtureRequest) -> demo.Outcome:
    """What the three servers made of a model; they are started once a model."""
    if reason := _lacks():
        pytest.skip(f"{reason}; scripts/engine_lane.sh makes an environment that serves")
    lane = demo.pick_lane()
    return demo.demonstrate(demo.make_model(request.param, lane), lane)


def test_fails_without_the_plugin(served: demo.Outcome) -> None:
    """Otherwise the tests below say nothing about the plugin."""
    assert served.before.answered == 0
    assert any(error.startswith("HTTP 500") for error in served.before.errors)
    assert re.match(demo.pick_lane().fault, served.before.said), served.before.log
    assert served.before.plugin == []


def test_answers_every_request_with_the_plugin(served: demo.Outcome) -> None:
    assert served.after.errors == []
    counts = [len(tokens or ()) for tokens in served.after.tokens]
    assert counts == [count for _, count in demo.REQUESTS]


def test_gives_the_tokens_of_one_rank(served: demo.Outcome) -> None:
    if not demo.pick_lane().same_tokens:
        pytest.skip("the tokens depend on what is batched together")
    assert served.reference.errors == []
    assert served.reference.plugin == []
    assert served.after.tokens == served.reference.tokens


def test_tokens_tell_answers_apart(served: demo.Outcome) -> None:
    """A model that repeats one token, or one answer, would hide rows that went astray."""
    answers = [tuple(tokens or ()) for tokens in served.reference.tokens]
    assert len(set(answers)) == len(answers)
    assert all(len(set(answer)) > 1 for answer in answers), answers
    tokens = [token for answer in answers for token in answer]
    assert len(set(tokens)) > len(tokens) // 2, answers


@pytest.mark.parametrize("fix", demo.PLUGINS.split(","))
def test_every_rank_says_that_it_is_repaired(served: demo.Outcome, fix: str) -> None:
    lines = [line for line in served.after.plugin if f"{fix} on vLLM" in line]
    ranks = {match[1] for line in lines if (match := re.search(r"Worker.*?pid=(\d+)", line))}
    assert len(ranks) == 2, served.after.plugin
    assert all("applied" in line for line in lines)
