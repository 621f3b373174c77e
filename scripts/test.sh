#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs every check: lint, types, unit tests, the package, import orders, doctor, releases, patches,
# kernels, servers.
# Makes the environments it needs, under $XDG_CACHE_HOME. Stops at the first part that fails.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
part() { printf '\n== %s\n' "$*"; }

python=$(scripts/source_lane.sh)

part "lint and types"
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy

part "core"
"$python" -m pytest -q tests/unit

part "wheel and source distribution"
"$python" -m pytest -q tests/package

part "import orders, on real vLLM"
"$python" -m pytest -q tests/order

part "doctor, on real vLLM"
"$python" -m pytest -q tests/doctor

part "every release, on two and four ranks"
"$python" -m pytest -q tests/source

part "patch series for vLLM"
"$python" -m pytest -q tests/patches

engine=$(scripts/engine_lane.sh)
part "Triton kernels, interpreted"
"$engine" -m pytest -q tests/kernels

part "real servers"
"$engine" -m pytest -q tests/engine

part "all passed"
