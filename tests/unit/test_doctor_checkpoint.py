# SPDX-License-Identifier: Apache-2.0
"""Reading a model's files, its quantization, and a pasted command."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import pytest

from vllm_moe_dp_fix.doctor import checkpoint, command, schemes
from vllm_moe_dp_fix.doctor.checkpoint import CheckpointError
from vllm_moe_dp_fix.replicas import memory


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return models.write_model(
        tmp_path / "a model, with spaces", models.QWEN3_MOE, models.mxfp4_experts(256, 704)
    )


def test_headers(directory: Path) -> None:
    found = checkpoint.read(checkpoint.find(str(directory)))
    assert found.config["model_type"] == "qwen3_moe"
    assert found.quantization is None
    by_name = {tensor.name: tensor for tensor in found.tensors}
    assert len(by_name) == 6
    weight = by_name["model.layers.0.mlp.experts.0.down_proj.weight"]
    assert weight[1:] == ("U8", (256, 352), 256 * 352)


def test_index_names_the_files(directory: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    models.write_safetensors(directory / "other.safetensors", {"x": ("U8", (2,))})
    assert len(checkpoint.read(directory).tensors) == 6
    index["weight_map"]["c"] = "gone.safetensors"
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"gone\.safetensors is missing"):
        checkpoint.read(directory)
    (directory / "model.safetensors.index.json").write_text('{"weight_map": [1]}')
    with pytest.raises(CheckpointError, match="no weight_map"):
        checkpoint.read(directory)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "config.json is missing"),
        ("{", "config.json is no JSON: .* at line 1, column 2"),
        ("[]", "config.json holds no JSON object"),
        ("{}", "names neither model_type nor architectures"),
        (b"\xff\xfe{", "config.json is no UTF-8"),
        ('{"model_type": "x", "quantization_config": 4}', "quantization_config is no object"),
    ],
)
def test_broken_configuration(directory: Path, text: str | bytes | None, said: str) -> None:
    path = directory / "config.json"
    path.unlink()
    if text is not None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(CheckpointError, match=said) as error:
        checkpoint.read(directory)
    assert str(path) in str(error.value)


def _truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def _write_header(path: Path, header: Any) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: _truncate(path, 0), "does not begin as"),
        (lambda path: _truncate(path, 7), "does not begin as"),
        (lambda path: _truncate(path, 100), "is truncated: its header takes"),
        (lambda path: _truncate(path, 2000), "is truncated: its tensors end at byte"),
        (lambda path: path.write_bytes(b"\xff" * 64), "does not begin as"),
        (lambda path: path.write_bytes((8).to_bytes(8, "little") + b"not JSON"), "broken header"),
        (lambda path: _write_header(path, {"x": {"dtype": "U8"}}), "broken header"),
        (lambda path: _write_header(path, [1, 2]), "broken header"),
        (
            lambda path: _write_header(
                path, {"x": {"dtype": "U8", "shape": [2], "data_offsets": [2, 0]}}
            ),
            "broken header",
        ),
    ],
)
def test_broken_header(directory: Path, damage: Any, said: str) -> None:
    path = directory / "model.safetensors"
    damage(path)
    with pytest.raises(CheckpointError, match=said) as error:
        checkpoint.read(directory)
    assert str(path) in str(error.value)


def test_no_data_are_read(tmp_path: Path) -> None:
    """A hole of 1 TiB, which nobody can read in time."""
    shape = (2**20, 2**20)
    models.write_safetensors(tmp_path / "a.safetensors", {"x": ("U8", shape)})
    assert list(checkpoint.read_header(tmp_path / "a.safetensors")) == [("x", "U8", shape, 2**40)]


def test_a_model_that_is_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for model in ("nobody/nothing", "./no such directory", str(tmp_path / "gone")):
        with pytest.raises(CheckpointError, match="neither a directory nor in the local"):
            checkpoint.find(model)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        checkpoint.find("model.gguf")


def test_local_cache(tmp_path: Path) -> None:
    commit = "0" * 40
    home = tmp_path / "models--owner--name"
    snapshot = models.write_model(home / "snapshots" / commit, models.LLAMA)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(commit)
    assert checkpoint.find("owner/name", cache=str(tmp_path)) == snapshot


def test_configuration_elsewhere(directory: Path, tmp_path: Path) -> None:
    other = models.write_model(tmp_path / "other", models.LLAMA)
    found = checkpoint.read(directory, other)
    assert (found.config["model_type"], len(found.tensors)) == ("llama", 6)


def test_quantization_of_modelopt(directory: Path) -> None:
    path = directory / "hf_quant_config.json"
    path.write_text('{"producer": {}, "quantization": {"quant_algo": "NVFP4"}}')
    found = checkpoint.read(directory).quantization
    assert schemes.of(found, None, {}).weights == "nvfp4"
    path.write_text('{"quantization": 1}')
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json has no object"):
        checkpoint.read(directory)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("model.layers.0.mlp.experts.3.gate_proj.weight", (True, "w13", 1, "weight")),
        ("model.layers.0.mlp.experts.3.up_proj.weight_scale", (True, "w13", 1, "scale")),
        ("model.layers.0.block_sparse_moe.experts.1.w2.weight", (True, "w2", 1, "weight")),
        ("model.layers.0.mlp.experts.gate_up_proj_blocks", (False, "w13", 2, "weight")),
        ("model.layers.0.mlp.experts.gate_up_proj_scales", (False, "w13", 2, "scale")),
        ("model.layers.0.mlp.experts.down_proj_bias", (False, "w2", 1, "bias")),
        ("model.layers.0.mlp.experts.5.w13_weight_scale", (True, "w13", 2, "scale")),
        ("model.language_model.layers.0.experts.down_proj", (False, "w2", 1, "weight")),
        ("model.layers.0.mlp.experts.3.up_proj.input_scale", None),
        ("model.layers.0.mlp.shared_experts.up_proj.weight", None),
        ("model.layers.0.mlp.up_proj.weight", None),
    ],
)
def test_expert_tensors(name: str, wanted: Any) -> None:
    found = checkpoint.expert_tensors([checkpoint.Tensor(name, "U8", (2, 2), 4)])
    assert [tensor[1:] for tensor in found] == ([wanted] if wanted else [])


FP8_GROUP = {"num_bits": 8, "type": "float"}


def group(weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    inner = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": inner}}


@pytest.mark.parametrize(
    ("said", "asked", "wanted"),
    [
        (None, None, (None, None, None, False, False)),
        (None, "fp8", ("fp8", "fp8", "tensor", False, True)),
        (None, "fp8_per_block", ("fp8_per_block", "fp8", "block", False, True)),
        (None, "mxfp4", ("mxfp4", "mxfp4", None, False, True)),
        (None, "something_new", ("something_new", "unknown", "unknown", False, True)),
        (
            {"quant_method": "fp8", "activation_scheme": "dynamic"},
            None,
            ("fp8", "fp8", "tensor", False, False),
        ),
        (
            {"quant_method": "fp8", "activation_scheme": "static"},
            "fp8",
            ("fp8", "fp8", "tensor", True, False),
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            None,
            ("fp8", "fp8", "block", False, False),
        ),
        ({"quant_method": "mxfp4"}, None, ("mxfp4", "mxfp4", None, False, False)),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8"},
            None,
            ("modelopt", "fp8", "tensor", True, False),
        ),
        (
            {"quant_method": "modelopt", "quantization": {"quant_algo": "MXFP8"}},
            None,
            ("modelopt", "mxfp8", "mxfp8", False, False),
        ),
        ({"quant_method": "awq", "bits": 4}, None, ("awq", "int", None, False, False)),
        ({"quant_method": "new"}, None, ("new", "unknown", "unknown", False, False)),
        (
            group(FP8_GROUP, FP8_GROUP | {"strategy": "token", "dynamic": True}),
            None,
            ("compressed-tensors", "fp8", "token", False, False),
        ),
        (
            group(FP8_GROUP, FP8_GROUP | {"strategy": "tensor", "dynamic": False}),
            None,
            ("compressed-tensors", "fp8", "tensor", True, False),
        ),
        (
            group(FP8_GROUP, FP8_GROUP | {"strategy": "tensor", "dynamic": True}),
            None,
            ("compressed-tensors", "fp8", "tensor", False, False),
        ),
        (
            group({"num_bits": 4, "type": "float", "group_size": 32}, None),
            None,
            ("compressed-tensors", "mxfp4", None, False, False),
        ),
        (
            {
                "quant_method": "quark",
                "global_quant_config": {
                    "weight": {"dtype": "fp8_e4m3"},
                    "input_tensors": {
                        "dtype": "fp8_e4m3",
                        "qscheme": "per_tensor",
                        "is_dynamic": True,
                    },
                },
            },
            None,
            ("quark", "fp8", "tensor", False, False),
        ),
    ],
)
def test_scheme(said: dict[str, Any] | None, asked: str | None, wanted: Any) -> None:
    found = schemes.of(said, asked, {})
    assert tuple(found) == wanted
    assert found.is_own_mxfp4 == (wanted[:2] == ("mxfp4", "mxfp4"))
    assert (found.method or "no quantization") in str(found)


def test_scheme_of_deepseek_v4() -> None:
    config = {"model_type": "deepseek_v4"}
    assert schemes.of({"quant_method": "fp8"}, None, config).is_own_mxfp4
    assert not schemes.of(
        {"quant_method": "fp8"}, None, config | {"expert_dtype": "fp8"}
    ).is_own_mxfp4


@pytest.mark.parametrize(
    ("own", "asked", "is_odd"),
    [
        (None, "fp8", False),
        ("fp8", None, False),
        ("mxfp4", "gpt_oss_mxfp4", False),
        ("gptq", "gptq_marlin", False),
        ("mxfp4", "fp8", True),
    ],
)
def test_conflicts(own: str | None, asked: str | None, is_odd: bool) -> None:
    said = {"quant_method": own} if own else None
    assert bool(schemes.conflict(said, asked)) is is_odd


@pytest.mark.parametrize(
    ("config", "experts", "widths"),
    [
        (models.QWEN3_MOE, 16, (704,)),
        (models.GEMMA4, 16, (704,)),
        (models.GPT_OSS, 8, (704,)),
        (models.MIXTRAL, 8, (384,)),
        (models.DEEPSEEK, 16, (128,)),
        (models.LLAMA, 0, (512,)),
        (models.QWEN3_MOE | {"moe_intermediate_size": [704, 512, 704]}, 16, (512, 704)),
    ],
)
def test_experts_of_models(config: dict[str, Any], experts: int, widths: tuple[int, ...]) -> None:
    text = SimpleNamespace(**checkpoint.text_config(config))
    assert memory.expert_count(text) == experts
    assert memory.expert_widths(text) == widths


@pytest.mark.parametrize(
    ("words", "environment", "arguments"),
    [
        (["vllm", "serve", "M", "-tp", "2"], {}, ["M", "-tp", "2"]),
        (["M", "--x=A=B"], {}, ["M", "--x=A=B"]),
        (["A=1", "B=x=y", "/usr/bin/vllm", "serve", "M"], {"A": "1", "B": "x=y"}, ["M"]),
        (["env", "A=", "vllm", "serve", "M"], {"A": ""}, ["M"]),
        (["A=1 vllm serve 'a b' \\\n  -tp 2"], {"A": "1"}, ["a b", "-tp", "2"]),
        (
            ["python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "M"],
            {},
            ["--model", "M"],
        ),
        (["a directory/with spaces"], {}, ["a directory/with spaces"]),
    ],
)
def test_split(words: list[str], environment: dict[str, str], arguments: list[str]) -> None:
    assert command.split(words) == (environment, arguments)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no command after '--'"),
        (["A=1", "vllm", "serve"], "no command"),
        (["vllm", "bench"], "'vllm bench' is not judged"),
        (["vllm serve 'M"], "cannot be split"),
    ],
)
def test_split_refuses(words: list[str], said: str) -> None:
    with pytest.raises(command.CommandError, match=said):
        command.split(words)
