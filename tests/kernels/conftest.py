# SPDX-License-Identifier: Apache-2.0
"""Runs Triton kernels on the CPU, and makes scripts/gpu importable."""

import os
import sys
from pathlib import Path

assert "triton" not in sys.modules, "it is too late to set TRITON_INTERPRET"
os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2]))
