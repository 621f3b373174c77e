# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of gpt-oss that hold a tensor an expert, not one for a whole layer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch

    Tensor: TypeAlias = torch.Tensor

_NAME = re.compile(r"(.*\.experts\.)(\d+)\.((w13|w2)_(?:weight|weight_scale|bias))")


def load_single_experts(
    weights: Iterable[tuple[str, Tensor]], parameters: Mapping[str, Any], loaded: set[str]
) -> Iterator[tuple[str, Tensor]]:
    """Loads the tensors of one expert, and yields all others.

    Args:
        parameters: Of the model, by name.
        loaded: Gets the names of those that something was loaded into.
    """
    for name, weight in weights:
        found = _one_expert(name, parameters)
        if found is None:
            yield name, weight
            continue
        stacked, projection, expert_id = found
        parameter = parameters[stacked]
        parameter.weight_loader(
            parameter, weight, weight_name=name, shard_id=projection, expert_id=expert_id
        )
        loaded.add(stacked)


def _one_expert(name: str, parameters: Mapping[str, Any]) -> tuple[str, str, int] | None:
    """Parameter, projection and expert of a tensor like ``experts.0.w13_weight``."""
    if (match := _NAME.fullmatch(name)) is None:
        return None
    prefix, expert_id, suffix, projection = match.groups()
    for stacked in (prefix + suffix, f"{prefix}routed_experts.{suffix}"):
        if stacked in parameters:
            return stacked, projection, int(expert_id)
    return None
