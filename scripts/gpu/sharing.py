# SPDX-License-Identifier: Apache-2.0
"""Two ranks of vLLM on one GPU, over NCCL's sockets: to see what is right, not what is fast."""

from __future__ import annotations

import os
from pathlib import Path

_FOLDER = Path(__file__).with_name("one_gpu")


def share_a_single_gpu() -> None:
    """Sets the environment of the processes that this one starts, where there is one GPU."""
    import torch

    if not torch.version.cuda or torch.cuda.device_count() != 1:
        return
    path = filter(None, [str(_FOLDER), os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    os.environ |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0"}
