# SPDX-License-Identifier: Apache-2.0
"""An executor without a model, which says what an engine process is.

It joins the groups that a worker would join, makes the experts that a worker would hold, and writes
down what it saw. A module of its own: spawned engine processes import it by name.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import experts
import torch
import torch.distributed as dist
from checks_mxfp4 import GPT_OSS_STACKED
from checks_replicas import INTERMEDIATE, REPORTS
from mxfp4_oracle import Checkpoint
from vllm.v1.executor.abstract import Executor


class Recorder(Executor):  # type: ignore[misc]
    """An executor without a model."""

    supports_pp = True
    max_concurrent_batches = 1

    def _init_executor(self) -> None:
        parallel = self.vllm_config.parallel_config
        with worker_groups(self.vllm_config):
            report = {
                "engine": _engine_above(sys._getframe()),
                "dp_size": parallel.data_parallel_size,
                "index": parallel.data_parallel_index,
                "local": parallel.data_parallel_rank_local,
                "world": dist.get_world_size(),
                "instance": self.vllm_config.instance_id,
                "is_moe": self.vllm_config.model_config.is_moe,
                "experts": _experts(),
            }
        path = Path(os.environ[REPORTS], f"{parallel.data_parallel_index}.json")
        path.with_suffix(".tmp").write_text(json.dumps(report))
        path.with_suffix(".tmp").rename(path)

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        return [None]

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
        return [{"model.layers.0.self_attn.attn": spec}]

    def determine_available_memory(self) -> list[int]:
        return [2**24]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [["LBNHC"]]

    def initialize_from_config(self, kv_cache_configs: Any) -> None:
        pass

    def compile_or_warm_up_model(self) -> None:
        pass

    def check_health(self) -> None:
        pass


@contextlib.contextmanager
def worker_groups(config: Any) -> Iterator[None]:
    """The groups that this engine's worker joins."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )

    # With several ranks vLLM takes the address of rank 0 instead.
    meeting = f"file://{os.environ[REPORTS]}/{os.getpid()}.store"
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, meeting, 0, "gloo")
        initialize_model_parallel(1, 1, backend="gloo")
        yield
    destroy_model_parallel()
    destroy_distributed_environment()


def _experts() -> str:
    """What the experts of this rank hold of a layer, loaded by the model's own loader."""
    checkpoint = Checkpoint.random(INTERMEDIATE, has_bias=True)
    layer = experts.build_gpt_oss(INTERMEDIATE, None, experts=checkpoint.experts)
    experts.load_gpt_oss(layer, checkpoint, GPT_OSS_STACKED, None)
    ranks = layer.moe_config.moe_parallel_config.tp_size
    if ranks != 1:
        return f"shared among {ranks} ranks"
    got = experts.held(layer, checkpoint.hidden, is_whole=True).values()
    same = all((got[name] == values).all() for name, values in checkpoint.values().items())
    return "whole" if same else "of another checkpoint"


def _engine_above(frame: Any) -> str:
    while frame is not None:
        name = type(frame.f_locals.get("self")).__name__
        if "EngineCore" in name:
            return name
        frame = frame.f_back
    return "none"
