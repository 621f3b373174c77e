# SPDX-License-Identifier: Apache-2.0
"""A plugin for vLLM that writes down what a worker holds and with whom it talks.

One JSON file a process in the folder $REPLICA_SPY: the shapes of the expert parameters once they
are loaded, and how often each collective of the DP and EP groups was called after that.
"""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch.distributed as dist

GROUP_CALLS = (
    *("all_reduce", "all_gather", "all_gatherv", "reduce_scatter", "reduce_scatterv"),
    *("broadcast", "broadcast_object", "broadcast_tensor_dict", "barrier", "dispatch", "combine"),
    "dispatch_router_logits",
)
TORCH_CALLS = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast"),
    *("barrier", "all_to_all_single", "send", "recv"),
)

shapes: dict[str, list[int]] = {}
calls: Counter[str] = Counter()


def watch() -> None:
    """The entry point."""
    if "REPLICA_SPY" not in os.environ:
        return
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    for name in GROUP_CALLS:
        method = getattr(GroupCoordinator, name)
        setattr(GroupCoordinator, name, _counted(name, method, lambda args, _: args[0]))
    for name in TORCH_CALLS:
        function = getattr(dist, name)
        setattr(dist, name, _counted(f"torch {name}", function, lambda _, options: options))
    load_model = BaseModelLoader.load_model

    @functools.wraps(load_model)
    def loaded(*args: Any, **kwargs: Any) -> Any:
        model = load_model(*args, **kwargs)
        for name, parameter in model.named_parameters():
            if name.endswith(("w13_weight", "w2_weight")):
                shapes[name] = list(parameter.shape)
        _write()
        return model

    BaseModelLoader.load_model = loaded


def _counted(name: str, function: Any, find: Any) -> Any:
    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        group = _group_name(find(args, kwargs))
        if shapes and group in ("dp", "ep"):
            calls[f"{group} {name}"] += 1
            _write()
        return function(*args, **kwargs)

    return counted


def _group_name(found: Any) -> str:
    """The name of a group of vLLM's, given itself or the options of a call of torch's."""
    if isinstance(found, dict):
        from vllm.distributed import parallel_state

        groups = (parallel_state._DP, parallel_state._EP)
        wanted = found.get("group")
        for group in filter(None, groups):
            if wanted is not None and wanted in (group.cpu_group, group.device_group):
                return str(group.unique_name).partition(":")[0]
        return ""
    return str(found.unique_name).partition(":")[0]


def _write() -> None:
    """In one step: a process that is killed as it writes leaves the file whole, as it was."""
    path = Path(os.environ["REPLICA_SPY"], f"{os.getpid()}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps({"shapes": shapes, "calls": calls}))
    draft.replace(path)
