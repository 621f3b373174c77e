#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Shows MoE serving with --data-parallel-size 2 before and after; see scripts/demo.py.
# Takes the vLLM of $PYTHON where that has CUDA and two GPUs, else makes one for the CPU.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/vllm-moe-dp-fix
python=${PYTHON:-python3}

has_two_gpus() {
  "$python" - 2>/dev/null <<'PY'
import importlib.util, sys, torch
fit = torch.version.cuda and torch.cuda.device_count() >= 2 and importlib.util.find_spec("vllm")
sys.exit(not fit)
PY
}

# Requirements of the plugin that the environment does not meet.
missing_requirements() {
  "$python" - <<'PY'
from importlib.metadata import PackageNotFoundError, requires, version
from packaging.requirements import Requirement

for text in requires("vllm-moe-dp-fix") or ():
    wanted = Requirement(text)
    if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
        continue
    try:
        met = wanted.specifier.contains(version(wanted.name), prereleases=True)
    except PackageNotFoundError:
        met = False
    if not met:
        print(text)
PY
}

if has_two_gpus; then
  # The checkout and its entry points lie beside that environment, which stays as it is.
  beside=$cache/beside
  install=("$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$beside")
  rm -rf "$beside"
  "${install[@]}" "$root" >&2
  export PYTHONPATH=$beside${PYTHONPATH:+:$PYTHONPATH}
  missing=$(missing_requirements)
  if [ -n "$missing" ]; then
    mapfile -t names <<<"$missing"
    "${install[@]}" "${names[@]}" >&2
  fi
else
  python=$("$root/scripts/engine_lane.sh")
fi
exec "$python" "$root/scripts/demo.py" "$@"
