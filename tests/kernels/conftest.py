# SPDX-License-Identifier: Apache-2.0
"""Runs Triton kernels on the CPU, and makes scripts/gpu importable."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

assert "triton" not in sys.modules, "it is too late to set TRITON_INTERPRET"
os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2]))


@pytest.fixture
def exact_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions as GPUs make them.

    The interpreter of Triton 3.9 widens subnormal bfloat16 to other values, and loses the carry
    where a float32 rounds up to the next power of two in FP8.
    """
    import ml_dtypes
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    def convert(given: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (tl.bfloat16, tl.float32):
            return given.view(np.uint16).astype(np.uint32) << 16
        if (source, target) == (tl.float32, tl.float8e4nv):
            return given.view(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        return original(given, source, target, rounding)

    original = interpreter._convert_float
    monkeypatch.setattr(interpreter, "_convert_float", convert)
