#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Shows every fault on two ranks without the plugin, and the repair with it. Takes the python that
# has a vLLM for CUDA and the plugin, from $PYTHON or the PATH; the arguments are those of prove.py.
set -euo pipefail

export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/prove.py" "$@"
