# SPDX-License-Identifier: Apache-2.0
"""On what, with what and when the scripts beside this one measured."""

from __future__ import annotations

from datetime import date
from typing import Any


def describe() -> dict[str, Any]:
    import torch
    import triton
    import vllm

    return {
        "date": date.today().isoformat(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None,
    }


def words(report: dict[str, Any]) -> str:
    """One line, as for the title of a picture."""
    gpus = report["gpus"]
    where = f"{len(gpus)} x {gpus[0]}" if gpus else "CPU"
    return f"{where}, vLLM {report['vllm']}, {report['date']}"
