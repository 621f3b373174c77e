# SPDX-License-Identifier: Apache-2.0
"""Imports NIXL and registers 1 MiB, in a process of its own: it may hang, or crash.

Prints one line of JSON: what ``environment.probe_nixl`` returns.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module

SIZE = 2**20


def main(package: str) -> dict[str, str | bool]:
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    try:
        api = import_module(f"{package}._api")
    except Exception as error:
        return {"imports": False, "registers": False, "error": f"{type(error).__name__}: {error}"}
    try:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        agent = api.nixl_agent("doctor", api.nixl_agent_config(backends=["UCX"]))
        memory = torch.zeros(SIZE, dtype=torch.uint8, device=device)
        agent.deregister_memory(agent.register_memory(agent.get_reg_descs([memory])))
    except Exception as error:
        return {"imports": True, "registers": False, "error": f"{type(error).__name__}: {error}"}
    return {"imports": True, "registers": True, "error": ""}


if __name__ == "__main__":
    found = json.dumps(main(sys.argv[1]))
    sys.stdout.write(f"\n{found}\n")
    sys.stdout.flush()
    os._exit(0)  # what NIXL does at exit tells nothing
