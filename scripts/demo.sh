#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Shows MoE serving with --data-parallel-size 2 before and after; see scripts/demo.py.
# Takes the vLLM of $PYTHON where that has CUDA and two GPUs, else makes one for the CPU.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}

has_two_gpus() {
  "$python" - 2>/dev/null <<'PY'
import importlib.util, sys, torch
fit = torch.version.cuda and torch.cuda.device_count() >= 2 and importlib.util.find_spec("vllm")
sys.exit(not fit)
PY
}

if has_two_gpus; then
  # The checkout and its entry points, without a change to that environment.
  beside=$(mktemp -d)
  trap 'rm -rf "$beside"' EXIT
  "$python" -m pip install --quiet --disable-pip-version-check --target "$beside" "$root" >&2
  PYTHONPATH=$beside${PYTHONPATH:+:$PYTHONPATH} "$python" "$root/scripts/demo.py" "$@"
else
  python=$("$root/scripts/engine_lane.sh")
  "$python" "$root/scripts/demo.py" "$@"
fi
