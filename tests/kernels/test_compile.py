# SPDX-License-Identifier: Apache-2.0
"""The kernels compile for the GPUs that vLLM runs on, and read and write 16 bytes at a time.

Triton needs no GPU for that. It runs in another process, without the interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from vllm_moe_dp_fix.fp8 import shared_scale, triton_kernel as fp8
from vllm_moe_dp_fix.mxfp4 import triton_kernel as mxfp4

dtype, capability = sys.argv[1], int(sys.argv[2])
rows, floats, octets, count = f"*{dtype}", "*fp32", "*u8", "i32"
kernels = {
    "find maxima": (
        fp8._find_maxima,
        {"rows": rows, "maxima": floats, "count": count},
        {"TILE": fp8._TILE},
    ),
    "quantize": (
        fp8._quantize,
        {"rows": rows, "maxima": floats, "quantized": "*fp8e4nv", "scale": floats, "count": count},
        {"MAXIMA": shared_scale.MAXIMA, "TILE": fp8._TILE},
    ),
    "mxfp4": (
        mxfp4._quantize,
        {"rows": rows, "packed": octets, "scales": octets, "count": count, "row_stride": count,
         "packed_stride": count, "scale_stride": count},
        {"column_stride": 1, "HEIGHT": 2, "COLUMNS": 2048, "EVEN": True},
    ),
}
for name, (kernel, known, constants) in kernels.items():
    # As the launcher tells it: pointers and sizes are multiples of 16.
    types = {argument: known.get(argument, "constexpr") for argument in kernel.arg_names}
    multiples = {
        (index,): [["tt.divisibility", 16]]
        for index, argument in enumerate(kernel.arg_names)
        if argument in known
    }
    warps = mxfp4._WARPS if name == "mxfp4" else fp8._WARPS
    source = ASTSource(kernel, types, constants, multiples)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": warps})
    print("FOUND " + json.dumps([name, compiled.asm["ptx"]]))
"""


@pytest.mark.parametrize("capability", [89, 90, 100], ids=lambda x: f"sm_{x}")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_compiles(dtype: str, capability: int, tmp_path: Path) -> None:
    environ = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    del environ["TRITON_INTERPRET"]
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, dtype, str(capability)],
        env=environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    codes = dict(json.loads(line.removeprefix("FOUND ")) for line in lines)
    assert set(codes) == {"find maxima", "quantize", "mxfp4"}
    for name, code in codes.items():
        assert "ld.global.v4" in code, name
    assert "cvt.rn.satfinite.e4m3x2.f32" in codes["quantize"]
    assert "st.global.v4" in codes["quantize"]
    # IEEE division: the scale and its reciprocal are vLLM's bits.
    assert codes["quantize"].count("div.rn.f32") == 2
    assert "div.full" not in codes["quantize"]
