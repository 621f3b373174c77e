# SPDX-License-Identifier: Apache-2.0
"""Runs the doctor many times in one process: run_cases.py CASES OUTPUT

CASES is a JSON object of command lines by name, OUTPUT one of exit codes and what was printed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path

from vllm_moe_dp_fix import cli


def main(cases: Path, output: Path) -> None:
    found = {}
    before = dict(os.environ)
    for name, words in json.loads(cases.read_text()).items():
        said, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors):
            code = cli.main(["doctor", *words])
        found[name] = {"code": code, "said": said.getvalue(), "errors": errors.getvalue()}
        os.environ.clear()
        os.environ.update(before)
    output.write_text(json.dumps(found))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
