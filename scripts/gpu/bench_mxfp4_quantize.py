#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Speed of the MXFP4 quantizer beside vLLM's own, on one CUDA GPU.

Prints GB/s, of the bytes read and written, of a kernel on its own (a CUDA graph over more data than
the L2 cache holds), and of the calls that fill a layer expert by expert, launches included. Each is
the median of repeats. Fails where the bytes of the two differ. The smallest scale is apart: vLLM's
kernel flushes it to zero on CUDA, see ``vllm_moe_dp_fix/mxfp4/quantize.py``.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

ENTRY = "downcast_to_mxfp"
MODULE = "vllm.model_executor.layers.quantization.utils.mxfp4_utils"
SHAPES = ((768, 2048), (2048, 768), (14336, 4096), (4096, 14336), (1408, 2048), (704, 2816))
EXPERTS = 128
EXPERT_SHAPES = ((768, 2048), (2048, 768))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--vllm-source",
        type=Path,
        metavar="FILE",
        help="mxfp4_utils.py of vLLM 0.28 or newer; the installed vLLM's without",
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", type=Path, metavar="PATH")
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("there is no CUDA GPU", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        downcast = load_downcast(arguments.vllm_source, Path(folder))
        dtype = getattr(torch, arguments.dtype)
        edges = compare_edges(downcast, dtype)
        cases = [bench_kernel(downcast, shape, dtype, arguments.repeats) for shape in SHAPES]
        cases += [
            bench_experts(downcast, shape, dtype, arguments.repeats) for shape in EXPERT_SHAPES
        ]
    report = {**_machine(), "dtype": arguments.dtype, "edges": edges, "cases": cases}
    _print(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))
    right = edges["other_blocks_differ"] == 0 and all(case["equal"] for case in cases)
    print("the bytes are equal" if right else "BYTES DIFFER")
    return 0 if right else 1


def load_downcast(source: Path | None, folder: Path) -> Callable[..., Any]:
    """``downcast_to_mxfp`` of the installed vLLM, or of a ``mxfp4_utils.py`` without its vLLM.

    Triton reads its functions' source while it compiles, so ``folder`` must outlive the calls.
    Exits where there is no such function, as before vLLM 0.28.
    """
    if source is None:
        module: ModuleType = importlib.import_module(MODULE)
    else:
        path = folder / "vllm_downcast.py"
        path.write_text(_extract(ast.parse(source.read_text())))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    found: Callable[..., Any] | None = getattr(module, ENTRY, None)
    if found is None:
        raise SystemExit(f"no {ENTRY} in {source or MODULE}; give --vllm-source of vLLM >= 0.28")
    return found


def _extract(tree: ast.Module) -> str:
    """A module of the entry and the functions that it needs."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    needed: set[str] = set()
    reached = {ENTRY} & functions.keys()
    while reached:
        needed |= reached
        nodes = [node for name in reached for node in ast.walk(functions[name])]
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        reached = names & functions.keys() - needed
    lines = ["import torch", "import triton", "import triton.language as tl"]
    lines += [ast.unparse(node) for name, node in functions.items() if name in needed]
    return "\n\n\n".join(lines) + "\n"


def bench_kernel(
    downcast: Callable[..., Any], shape: tuple[int, int], dtype: Any, repeats: int
) -> dict[str, Any]:
    """Both kernels on one expert, many copies of which are more than the L2 cache holds."""
    import torch

    from vllm_moe_dp_fix.mxfp4.quantize import quantize

    cache = torch.cuda.get_device_properties(0).L2_cache_size
    copies = max(2, -(-4 * cache // (2 * shape[0] * shape[1])))
    rows = _weights(copies, shape, dtype)
    ours, theirs = _outputs(copies, shape), _outputs(copies, shape)

    def run_ours(copy: int) -> None:
        quantize(rows[copy], ours[0][copy], ours[1][copy])

    def run_theirs(copy: int) -> None:
        downcast(rows[copy], -1, theirs[0][copy], theirs[1][copy])

    seconds = [_graph_seconds(run, copies, repeats) for run in (run_ours, run_theirs)]
    return _case("kernel", shape, copies, (rows, *ours), seconds, _equal(ours, theirs))


def bench_experts(
    downcast: Callable[..., Any], shape: tuple[int, int], dtype: Any, repeats: int
) -> dict[str, Any]:
    """A layer expert by expert: ours into the first half of w13, vLLM's through a copy."""
    import torch

    from vllm_moe_dp_fix.mxfp4.quantize import quantize

    count = shape[0]
    rows = _weights(EXPERTS, shape, dtype)
    ours, theirs = (
        tuple(tensor[:, :count] for tensor in _outputs(EXPERTS, (2 * count, shape[1])))
        for _ in range(2)
    )

    def run_ours() -> None:
        for expert in range(EXPERTS):
            quantize(rows[expert], ours[0][expert], ours[1][expert])

    def run_theirs() -> None:
        for expert in range(EXPERTS):
            theirs[0][expert], theirs[1][expert], _ = downcast(rows[expert], -1)

    seconds = []
    for run in (run_ours, run_theirs):
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        seconds.append(_median_seconds(run, repeats))
    return _case("experts", shape, EXPERTS, (rows, *ours), seconds, _equal(ours, theirs))


def compare_edges(downcast: Callable[..., Any], dtype: Any) -> dict[str, int]:
    """Blocks that differ, over all exponents of the type, with the smallest scale on its own."""
    import torch

    from vllm_moe_dp_fix.mxfp4.quantize import quantize

    bits = {torch.bfloat16: 7, torch.float16: 10}[dtype]
    fields = 2 ** (15 - bits) - 1
    top = torch.arange(fields).repeat_interleave(256)[:, None]
    field = (top - torch.randint(0, 7, (len(top), 32))).clamp(min=0)
    field[:, :1] = top
    sign, mantissa = (torch.randint(0, high, field.shape) for high in (2, 2**bits))
    patterns = (field << bits) + mantissa - (sign << 15)
    rows = patterns.to(torch.int16).view(dtype).cuda()
    packed, scales = (tensor[0] for tensor in _outputs(1, tuple(rows.shape)))
    quantize(rows, packed, scales)
    want, want_scales, _ = downcast(rows, -1)
    differ = (packed != want).any(1) | (scales != want_scales).any(1)
    smallest = (scales == 0).any(1)
    return {
        "blocks": len(rows),
        "smallest_scale_blocks": int(smallest.sum()),
        "smallest_scale_blocks_differ": int((differ & smallest).sum()),
        "other_blocks_differ": int((differ & ~smallest).sum()),
    }


def _weights(experts: int, shape: tuple[int, int], dtype: Any) -> Any:
    import torch

    weights = torch.empty(experts, *shape, dtype=dtype, device="cuda")
    for expert in weights:
        expert.normal_(std=0.02)
    return weights


def _outputs(experts: int, shape: tuple[int, ...]) -> tuple[Any, Any]:
    import torch

    count, width = shape
    return (
        torch.zeros(experts, count, width // 2, dtype=torch.uint8, device="cuda"),
        torch.zeros(experts, count, width // 32, dtype=torch.uint8, device="cuda"),
    )


def _equal(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> bool:
    import torch

    return all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


def _graph_seconds(run: Callable[[int], None], copies: int, repeats: int) -> float:
    """Seconds of the GPU for a pass over the copies."""
    import torch

    def run_all() -> None:
        for copy in range(copies):
            run(copy)

    run_all()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_all()
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    return _median_seconds(graph.replay, repeats)


def _median_seconds(run: Callable[[], None], repeats: int) -> float:
    import torch

    times = []
    for _ in range(repeats):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        run()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / 1e3)
    return statistics.median(times)


def _case(
    how: str,
    shape: tuple[int, int],
    calls: int,
    tensors: tuple[Any, ...],
    seconds: list[float],
    equal: bool,
) -> dict[str, Any]:
    moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    rates = [moved / each / 1e9 for each in seconds]
    times = [each / calls * 1e6 for each in seconds]
    return {
        "how": how,
        "shape": list(shape),
        "calls": calls,
        "ours_gb_s": rates[0],
        "vllm_gb_s": rates[1],
        "ours_us": times[0],
        "vllm_us": times[1],
        "equal": equal,
    }


def _machine() -> dict[str, Any]:
    import torch
    import triton

    return {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def _print(report: dict[str, Any]) -> None:
    print("{device}, torch {torch}, triton {triton}, {dtype}".format(**report))
    print(
        "edges: {blocks} blocks; {smallest_scale_blocks_differ} of {smallest_scale_blocks} with "
        "the smallest scale differ, {other_blocks_differ} of the others".format(**report["edges"])
    )
    heads = ("GB/s", 9), ("vLLM", 9), ("ratio", 8), ("us a call", 11), ("vLLM", 9)
    print(f"{'shape':>20}" + "".join(f"{head:>{width}}" for head, width in heads) + "  bytes")
    for case in report["cases"]:
        shape = "x".join(map(str, case["shape"]))
        ratio = case["ours_gb_s"] / case["vllm_gb_s"]
        print(
            f"{case['how']:8}{shape:>12}{case['ours_gb_s']:9.0f}{case['vllm_gb_s']:9.0f}"
            f"{ratio:8.2f}{case['ours_us']:11.1f}{case['vllm_us']:9.1f}  "
            f"{'equal' if case['equal'] else 'DIFFER'}"
        )


if __name__ == "__main__":
    sys.exit(main())
