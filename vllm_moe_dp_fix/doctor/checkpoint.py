# SPDX-License-Identifier: Apache-2.0
"""The files of a model: its configuration and the headers of its weights, never their data."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

CONFIG = "config.json"
_QUANTIZATION = "hf_quant_config.json"
_INDEX = "model.safetensors.index.json"
_LONGEST_HEADER = 100_000_000  # bytes; the format allows no more
# Where models of several modalities keep the language model.
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
_EXPERT = re.compile(r"\.experts\.(?:(\d+)\.)?(.+)")
_PROJECTIONS = (
    ("w13", 2, ("gate_up_proj", "w13", "w1w3")),
    ("w13", 1, ("gate_proj", "up_proj", "w1", "w3")),
    ("w2", 1, ("down_proj", "w2")),
)


class CheckpointError(ValueError):
    """A file of the model is missing or broken: which one, and what is wrong with it."""


class Tensor(NamedTuple):
    """What a safetensors header says of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int


class ExpertTensor(NamedTuple):
    """A tensor of routed experts.

    Attributes:
        is_single: Of one expert; else all are stacked along the first dimension.
        projection: ``w13`` or ``w2``.
        parts: Of w13 in it: gate and up are 2.
        kind: ``weight``, ``scale`` or ``bias``.
    """

    tensor: Tensor
    is_single: bool
    projection: str
    parts: int
    kind: str


class Checkpoint(NamedTuple):
    """What the files of a model say.

    Attributes:
        directory: Where ``config.json`` lies; the weights may lie in another one.
        config: ``config.json``.
        quantization: How the checkpoint is quantized, in its own words, or None.
        tensors: All tensors; empty where there are no safetensors files.
    """

    directory: Path
    config: dict[str, Any]
    quantization: dict[str, Any] | None
    tensors: tuple[Tensor, ...]


def find(model: str, revision: str | None = None, cache: str | None = None) -> Path:
    """The directory of a model: the one that is named, or that in the local cache.

    Raises:
        CheckpointError: There is neither.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise CheckpointError(f"{path} is a file, and only directories of a model are read")
    wrong = f"{model} is neither a directory nor in the local Hugging Face cache"
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, CONFIG, cache_dir=cache, revision=revision)
    except Exception as error:
        raise CheckpointError(wrong) from error
    if not isinstance(found, str):
        raise CheckpointError(wrong)
    return Path(found).parent


def read(directory: Path, config_directory: Path | None = None) -> Checkpoint:
    """Reads the model in ``directory``; its configuration may lie in another one.

    Raises:
        CheckpointError: A file is missing or broken.
    """
    home = config_directory or directory
    config = _json(home / CONFIG)
    if not (config.get("model_type") or config.get("architectures")):
        raise CheckpointError(f"{home / CONFIG} names neither model_type nor architectures")
    return Checkpoint(home, config, _quantization(home, config), tuple(_headers(directory)))


def expert_tensors(tensors: Iterable[Tensor]) -> tuple[ExpertTensor, ...]:
    """Those of routed experts, told by their names."""
    return tuple(found for tensor in tensors if (found := _expert_tensor(tensor)))


def _expert_tensor(tensor: Tensor) -> ExpertTensor | None:
    match = _EXPERT.search(tensor.name)
    if match is None or "input_scale" in tensor.name or tensor.name.endswith("scale_2"):
        return None
    number, name = match.groups()
    for projection, parts, names in _PROJECTIONS:
        if any(re.match(rf"{known}(?:[._]|$)", name) for known in names):
            kind = "scale" if "scale" in name else "bias" if "bias" in name else "weight"
            return ExpertTensor(tensor, number is not None, projection, parts, kind)
    return None


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a configuration that is about the language model."""
    for name in _TEXT_CONFIGS:
        inner = config.get(name)
        if isinstance(inner, dict):
            return text_config(inner)
    return config


def _quantization(directory: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    for place in (config, text_config(config)):
        for name in ("quantization_config", "compression_config"):
            found = place.get(name)
            if found and not isinstance(found, dict):
                raise CheckpointError(f"{directory / CONFIG}: {name} is no object")
            if found:
                return dict(found)
    path = directory / _QUANTIZATION
    if not path.exists():
        return None
    found = _json(path)
    inner = found.get("quantization")
    if not isinstance(inner, dict):
        raise CheckpointError(f"{path} has no object 'quantization'")
    return {"quant_method": "modelopt", **inner}


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is no UTF-8: {error.reason}") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise CheckpointError(f"{path} is no JSON: {error.msg} at {where}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return found


def _headers(directory: Path) -> Iterator[Tensor]:
    index = directory / _INDEX
    if index.exists():
        files = _json(index).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()):
            raise CheckpointError(f"{index} has no weight_map from tensors to files")
        names = sorted(set(files.values()))
    else:
        names = sorted(path.name for path in directory.glob("*.safetensors"))
    for name in names:
        yield from read_header(directory / name)


def read_header(path: Path) -> Iterator[Tensor]:
    """The tensors of a safetensors file.

    Raises:
        CheckpointError: The file is missing, truncated, or no safetensors file.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= _LONGEST_HEADER:
                raise CheckpointError(f"{path} does not begin as a safetensors file does")
            if 8 + length > size:
                raise CheckpointError(
                    f"{path} is truncated: its header takes {length:,} bytes, the file {size:,}"
                )
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors = [
            Tensor(name, said["dtype"], tuple(map(int, said["shape"])), _span(said))
            for name, said in header.items()
        ]
        end = max((int(said["data_offsets"][1]) for said in header.values()), default=0)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} has a broken header: {error!r}") from error
    if 8 + length + end > size:
        raise CheckpointError(
            f"{path} is truncated: its tensors end at byte {8 + length + end:,}, the file has "
            f"{size:,}"
        )
    yield from tensors


def _span(said: dict[str, Any]) -> int:
    begin, end = said["data_offsets"]
    if end < begin or (end == begin) != (prod(said["shape"]) == 0):
        raise ValueError("data_offsets do not fit the shape")
    return int(end - begin)
