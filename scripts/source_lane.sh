#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes the source lane: one environment, and the Python source of every vLLM release.
# Prints the environment's python. What is there already is kept.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/vllm-moe-dp-fix
lane=$cache/source-lane
requirements=$root/tests/source/requirements.txt
python=${PYTHON:-python3}
nixl=(nixl==1.5.2 nixl-cu12==1.5.1)

say() { echo "source lane: $*" >&2; }
quietly() { "$@" >"$cache/source-lane.log" 2>&1 || { cat "$cache/source-lane.log" >&2; exit 1; }; }

# vLLM 0.33.0 and the pinned packages need 3.11, though the plugin itself runs on 3.10.
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  { say "$python is older than Python 3.11; set PYTHON"; exit 1; }

mkdir -p "$cache"
stamp=$lane/.stamp
wanted=$("$python" -V | cut -d. -f1,2)\ $(cat "$requirements" "${BASH_SOURCE[0]}" | sha256sum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
  say "making the environment (about a minute)"
  rm -f "$stamp"
  "$python" -m venv --clear "$lane"
  quietly "$lane/bin/python" -m pip install --disable-pip-version-check -r "$requirements"
  quietly "$lane/bin/python" -m pip uninstall -y triton
  # Without what it depends on: 5.9 GB of CUDA, which UCX in DRAM does not need.
  quietly "$lane/bin/python" -m pip install --disable-pip-version-check --no-deps "${nixl[@]}"
  echo "$wanted" >"$stamp"
fi
quietly "$lane/bin/python" -m pip install --disable-pip-version-check --no-deps -e "$root"
"$lane/bin/python" "$root/scripts/fetch_vllm.py" "$cache/sources"
echo "$lane/bin/python"
