# SPDX-License-Identifier: Apache-2.0
"""Lets ranks of vLLM share a GPU, in every Python that finds this folder first; see ``sharing.py``.

NCCL refuses two ranks of one host on one GPU, so each process is a host of its own to it. vLLM's
workers take the GPU that their local rank counts to, so each is told that it is the first.
"""

import os
from typing import Any

from wrapt.importer import register_post_import_hook


def _be_a_host() -> None:
    os.environ["NCCL_HOSTID"] = f"rank-{os.getpid()}"


def _take_the_first_gpu(gpu_worker: Any) -> None:
    init_device = gpu_worker.Worker.init_device

    def init_first_device(self: Any) -> Any:
        self.parallel_config.data_parallel_rank_local = 0
        return init_device(self)

    gpu_worker.Worker.init_device = init_first_device


_be_a_host()
os.register_at_fork(after_in_child=_be_a_host)
register_post_import_hook(_take_the_first_gpu, "vllm.v1.worker.gpu_worker")
