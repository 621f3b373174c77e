#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tries the plugin on a vLLM release, as a rule one that is not in the table yet: check_release.sh
# VERSION [--targets]. Prints what changed in the functions that the fixes replace, since the newest
# release before it, and what each fault and each check does there.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$("$root/scripts/source_lane.sh")
exec "$python" "$root/scripts/check_release.py" "$@"
