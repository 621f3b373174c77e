# SPDX-License-Identifier: Apache-2.0
"""The decision over a configuration, the size of a full copy, and the mark that travels."""

from __future__ import annotations

import copy
import logging
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    Gemma4TextConfig,
    GptOssConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from vllm_moe_dp_fix import settings
from vllm_moe_dp_fix.replicas import choice, engines, memory

GIB = 2**30


class Parallel(SimpleNamespace):
    """The part of ``ParallelConfig`` that is looked at."""


def config_of(**parallel: Any) -> Any:
    options = {
        "data_parallel_size": 2,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "distributed_executor_backend": None,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(is_moe=True),
        parallel_config=Parallel(**options | parallel),
        kv_transfer_config=None,
        load_config=SimpleNamespace(load_format="auto"),
    )


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    """Sets the size of a full copy, in GiB of 100."""
    logging.getLogger("vllm").propagate = True
    caplog.set_level(logging.INFO, "vllm.moe_dp_fix")

    def set_size(size: float) -> None:
        need = memory.FullCopy(size * GIB, 100 * GIB)
        monkeypatch.setattr(memory, "of_full_copy", lambda _: need)

    return set_size


@pytest.mark.parametrize(
    ("setting", "size", "wanted", "said"),
    [
        ("replicated", 90, True, "2 independent replicas, as VLLM_MOE_DP_FIX_EXPERTS asks"),
        ("auto", 50, True, "2 independent replicas, since a full copy of the weights takes"),
        (
            "auto",
            51,
            False,
            "sharded, since a full copy of the weights takes about 51.0 of",
        ),
        ("sharded", 50, False, "VLLM_MOE_DP_FIX_EXPERTS=replicated serves independent copies"),
        ("sharded", 51, False, ""),
    ],
)
def test_decision(
    setting: str,
    size: float,
    wanted: bool,
    said: str,
    fits: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fits(size)
    monkeypatch.setenv(settings.EXPERTS, setting)
    config = config_of()
    for _ in range(2):  # decided once
        assert choice.is_wanted(config) is wanted
    assert len(caplog.messages) == bool(said)
    assert said in "".join(caplog.messages)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"enable_expert_parallel": True}, "--enable-expert-parallel"),
        ({"distributed_executor_backend": "external_launcher"}, "external launcher"),
    ],
)
def test_obstacles(
    change: dict[str, Any],
    named: str,
    fits: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fits(1)
    monkeypatch.setenv(settings.EXPERTS, "replicated")
    with pytest.raises(engines.ReplicasRefusedError, match=named):
        choice.is_wanted(config_of(**change))
    monkeypatch.setenv(settings.EXPERTS, "auto")
    assert choice.is_wanted(config_of(**change)) is False
    (said,) = caplog.messages
    assert named in said
    monkeypatch.setenv(settings.EXPERTS, "sharded")
    assert choice.is_wanted(config_of(**change)) is False
    assert len(caplog.messages) == 1


def test_cached_weights_are_an_obstacle() -> None:
    config = config_of()
    config.load_config.load_format = "ipc_cache"
    (obstacle,) = choice.find_obstacles(config)
    assert "ipc_cache" in obstacle


@pytest.mark.parametrize("parallel", [{"data_parallel_size": 1}, {}])
def test_one_rank_and_dense_models_are_left_alone(
    parallel: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(settings.EXPERTS, "replicated")
    config = config_of(**parallel)
    config.model_config.is_moe = bool(parallel)
    assert choice.is_wanted(config) is False


@pytest.mark.parametrize("setting", ["auto", "sharded"])
def test_what_cannot_be_told_stays_sharded(
    setting: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm.moe_dp_fix")
    monkeypatch.setenv(settings.EXPERTS, setting)
    for error in (memory.UnknownSizeError("no width"), AttributeError("vocab_size")):

        def fail(_: Any, error: Exception = error) -> Any:
            raise error

        monkeypatch.setattr(memory, "of_full_copy", fail)
        assert choice.is_wanted(config_of()) is False
    said = [record.levelname for record in caplog.records]
    assert said == (["INFO", "ERROR"] if setting == "auto" else [])


def test_further_api_servers_say_nothing(
    fits: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    process = SimpleNamespace(name="ApiServer_1")
    monkeypatch.setattr("multiprocessing.current_process", lambda: process)
    monkeypatch.setenv(settings.EXPERTS, "replicated")
    assert choice.is_wanted(config_of()) is True
    assert caplog.messages == []


def test_the_mark_travels() -> None:
    parallel = Parallel(data_parallel_size=2)
    assert engines.decision(parallel) is None
    for replicated in (True, False):
        engines.mark(parallel, replicated)
        for other in (copy.deepcopy(parallel), pickle.loads(pickle.dumps(parallel))):
            assert engines.decision(other) is engines.is_replicated(other) is replicated


def test_as_one_rank_also_where_it_raises() -> None:
    parallel = Parallel(data_parallel_size=4)
    seen = []

    def fail() -> None:
        with engines.as_one_rank(parallel):
            seen.append(parallel.data_parallel_size)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen == [1]
    assert parallel.data_parallel_size == 4


# --- sizes ----------------------------------------------------------------------------------

SMALL = {"hidden_size": 256, "num_hidden_layers": 4, "vocab_size": 512, "head_dim": 32}
SMALL |= {"num_attention_heads": 8, "num_key_value_heads": 2}
GEMMA4 = SMALL | {"num_experts": 16, "moe_intermediate_size": 128, "intermediate_size": 512}
GEMMA4 |= {"enable_moe_block": True, "top_k_experts": 2, "hidden_size_per_layer_input": 0}
MODELS: dict[str, tuple[PretrainedConfig, int]] = {
    "qwen3-moe": (Qwen3MoeConfig(**SMALL, num_experts=16, moe_intermediate_size=128), 16),
    "qwen2-moe, shared expert": (
        Qwen2MoeConfig(
            **SMALL,
            num_experts=16,
            moe_intermediate_size=128,
            shared_expert_intermediate_size=512,
            intermediate_size=512,
            decoder_sparse_step=2,
        ),
        16,
    ),
    "mixtral": (MixtralConfig(**SMALL, num_local_experts=8, intermediate_size=384), 8),
    "gpt-oss": (GptOssConfig(**SMALL, num_local_experts=8, intermediate_size=384), 8),
    "deepseek, dense layers first": (
        DeepseekV3Config(
            **SMALL | {"num_key_value_heads": 8, "head_dim": 32},
            n_routed_experts=16,
            moe_intermediate_size=128,
            intermediate_size=768,
            n_shared_experts=1,
            first_k_dense_replace=1,
            q_lora_rank=64,
            kv_lora_rank=32,
            qk_nope_head_dim=32,
            qk_rope_head_dim=16,
            v_head_dim=32,
            n_group=1,
            topk_group=1,
        ),
        16,
    ),
    "gemma4, dense beside experts": (
        Gemma4TextConfig(
            **GEMMA4,
            global_head_dim=32,
            layer_types=["full_attention"] * 4,
        ),
        16,
    ),
    "gemma4, heads of two widths": (
        Gemma4TextConfig(
            **GEMMA4,
            global_head_dim=64,
            layer_types=["sliding_attention", "full_attention"] * 2,
        ),
        16,
    ),
}


def model_of(config: Any, experts: int, quantization: str | None = None) -> Any:
    return SimpleNamespace(
        hf_text_config=config,
        hf_config=config,
        dtype=torch.bfloat16,
        quantization=quantization,
        get_hidden_size=lambda: config.hidden_size,
        get_total_num_hidden_layers=lambda: config.num_hidden_layers,
        get_num_experts=lambda: experts,
    )


@pytest.mark.parametrize("name", MODELS)
def test_size_is_that_of_the_model(name: str) -> None:
    """Told from the configuration: no less than there is, and at most a tenth more."""
    from transformers import AutoModelForCausalLM

    config, experts = MODELS[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    real = 2 * sum(parameter.numel() for parameter in model.parameters())
    assert 0.99 * real <= memory.weights(model_of(config, experts)).total <= 1.1 * real


@pytest.mark.parametrize(
    ("method", "checkpoint", "bits"),
    [
        (None, None, 16),
        ("fp8", None, 8.25),
        ("mxfp4", None, 4.5),
        ("modelopt_fp4", None, 4.5),
        ("awq_marlin", {"bits": 4}, 4.25),
        ("compressed-tensors", {"config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, 8.25),
        ("something_new", {}, 16),
    ],
)
def test_quantized_experts(method: str | None, checkpoint: Any, bits: float) -> None:
    config, experts = MODELS["qwen3-moe"]
    quantized = copy.copy(config)
    quantized.quantization_config = checkpoint
    weights = 4 * 16 * 3 * 256 * 128
    plain = memory.weights(model_of(config, experts)).total
    got = memory.weights(model_of(quantized, experts, method)).total
    assert plain - got == pytest.approx(weights * (16 - bits) / 8)


def test_unknown_width() -> None:
    config = SimpleNamespace(num_attention_heads=8)
    model = model_of(SimpleNamespace(**vars(config), hidden_size=8, num_hidden_layers=2), 4)
    with pytest.raises(memory.UnknownSizeError, match="how wide an expert is"):
        memory.weights(model)
