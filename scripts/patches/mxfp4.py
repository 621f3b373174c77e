# SPDX-License-Identifier: Apache-2.0
"""Patches for MXFP4 experts."""

from __future__ import annotations

from scripts.patches.build import IN_VLLM, PLUGIN, Change, Tree, faults_in
from scripts.patches.edit import Source
from scripts.patches.tests_from import regression_test, regression_tests
from vllm_moe_dp_fix.fixes.mxfp4_weight_loader import FIX as RECORDS
from vllm_moe_dp_fix.registry import GPT_OSS, MXFP4

FIX = RECORDS.id
RECORD = f"vllm_moe_dp_fix.fixes.{FIX}"
PACKAGE = "vllm.model_executor.layers.quantization.utils.mxfp4_experts"
METHODS, MODEL = (name.replace(".", "/") + ".py" for name in (MXFP4, GPT_OSS))
ORACLE = "vllm/model_executor/layers/fused_moe/oracle/mxfp4.py"
TESTS = "tests/kernels/moe"

LOADER, SELECTION, SINGLE_EXPERTS = (
    tuple(fault.id for fault in repair.faults) for repair in RECORDS.repairs
)
UPSTREAM = [
    tuple(dict.fromkeys(link for fault in repair.faults for link in fault.upstream))
    for repair in RECORDS.repairs
]
LOADER_TESTS = {
    "F3a": "an_expert_comes_alone",
    "F3c": "ranks_hold_equal_shares",
    "F3d": "ranks_hold_whole_blocks",
    "F3e": "scales_by_value_are_encoded",
    "F3f": "full_precision_is_quantized",
    "F3h": "another_scheme_is_refused",
    "F3i": "scales_are_not_rounded",
}
# Of the record, where a release quantizes full-precision checkpoints itself; none of these does.
GUARD = "    if _quantizes_online(module):\n        return None\n"

NAMES = {
    "vllm_moe_dp_fix.mxfp4": PACKAGE,
    "_moe_dp_fix_": "_",
    "import triton\nimport triton.language as tl\n": "from vllm.triton_utils import tl, triton\n",
    **IN_VLLM,
}

METHOD = '''
def _make_moe_method(self, moe: FusedMoEConfig) -> FusedMoEMethodBase:
    """Only gpt-oss has gate and up in alternating rows."""
    if self.get_name() != "mxfp4" or is_gpt_oss(moe):
        return GptOssMxfp4MoEMethod(moe)
    return with_kernel(
        lambda: Mxfp4MoEMethod(moe), lambda: GptOssMxfp4MoEMethod(moe)
    )
'''
NO_METHOD_YET = """\
    # TODO (zyongye) This is only temporaty fallback.
    # We should have `Mxfp4MoEMethod` after this migration is complete.
"""
SELECT = """
# Quark, which emulates where there is no kernel, has the one without explanations.
select_mxfp4_moe_backend = explained(
    marlin_for_others(mxfp4_oracle.select_mxfp4_moe_backend)
)
"""


def _vendor(tree: Tree, *names: str) -> None:
    for name in names:
        tree.vendor(f"{PACKAGE}.{name}", PLUGIN / "mxfp4" / f"{name}.py", NAMES)


def _loader(tree: Tree) -> None:
    faults = faults_in(LOADER, tree.release)
    quantizes = "F3f" in faults
    _vendor(tree, "__init__", "sharding", "loading", "hooks")
    if quantizes:
        _vendor(tree, "quantize", "triton_kernel")

    def edit(source: Source) -> None:
        quantizer = "quantize" if quantizes else "quantizer=None"
        for method in ("Mxfp4MoEMethod", "GptOssMxfp4MoEMethod"):
            if not source.has(method):
                continue
            source.insert(
                f"{method}.maybe_roundup_sizes",
                0,
                """
                intermediate_size_per_partition = cut_into_blocks(
                    self, hidden_size, intermediate_size_per_partition, moe_parallel_config
                )
                """,
            )
            source.append(f"{method}.create_weights", f"attach_loader(self, layer, {quantizer})")
            source.insert(f"{method}.process_weights_after_loading", 0, "finish(layer)")
        source.add_import(f"{PACKAGE}.hooks", "attach_loader, cut_into_blocks")
        source.add_import(f"{PACKAGE}.loading", "finish")
        if quantizes:
            source.add_import(f"{PACKAGE}.quantize", "quantize")

    tree.edit(METHODS, edit)
    text = regression_tests(
        "What the MXFP4 experts of a rank hold, and which tensors are refused.",
        RECORD,
        {f"_probe_{fault.lower()}": LOADER_TESTS[fault] for fault in faults},
        MXFP4,
    )
    tree.add(f"{TESTS}/test_mxfp4_expert_shards.py", _without_guard(text))


def _selection(tree: Tree) -> None:
    _vendor(tree, "kernels")
    methods = Source(tree.read(METHODS) or "")
    if not methods.has("GptOssMxfp4MoEMethod"):  # to 0.19.1
        _vendor(tree, "marlin")
        tree.edit(METHODS, _explain_here)
    else:
        tree.edit(ORACLE, _explain)
        if not methods.has("Mxfp4Config._make_moe_method"):  # to 0.26.0
            _vendor(tree, "methods")
            tree.edit(METHODS, _choose_method)
    text = regression_test(
        "Which method and kernel MXFP4 experts get, and what is said if there is none.",
        (RECORD, "_probe_f3b"),
        MXFP4,
        "experts_get_a_kernel_for_their_activation",
    )
    tree.add(f"{TESTS}/test_mxfp4_selection.py", _without_guard(text))


def _explain(source: Source) -> None:
    """The function that chooses the kernel of ``Mxfp4MoEMethod``."""
    names = ("select_deepseek_v4_mxfp4_moe_backend", "select_mxfp4_moe_backend")
    source.decorate(next(name for name in names if source.has(name)), "explained")
    source.add_import(f"{PACKAGE}.kernels", "explained")


def _explain_here(source: Source) -> None:
    source.replace("    select_mxfp4_moe_backend,\n", "")
    source.replace(
        "\nlogger = init_logger(__name__)\n", f"\nlogger = init_logger(__name__)\n{SELECT}"
    )
    source.add_import("vllm.model_executor.layers.fused_moe.oracle", "mxfp4 as mxfp4_oracle")
    source.add_import(f"{PACKAGE}.kernels", "explained")
    source.add_import(f"{PACKAGE}.marlin", "marlin_for_others")


def _choose_method(source: Source) -> None:
    source.replace(NO_METHOD_YET, "")
    source.replace(
        "return GptOssMxfp4MoEMethod(layer.moe_config)",
        "return self._make_moe_method(layer.moe_config)",
    )
    source.add_after("Mxfp4Config.get_quant_method", METHOD)
    source.add_import(f"{PACKAGE}.methods", "with_kernel")
    source.add_import(f"{PACKAGE}.sharding", "is_gpt_oss")


def _single_experts(tree: Tree) -> None:
    _vendor(tree, "single_experts")

    def edit(source: Source) -> None:
        source.insert(
            "GptOssModel._load_weights_mxfp4",
            2,
            "weights = load_single_experts(weights, params_dict, loaded_params)",
        )
        source.add_import(f"{PACKAGE}.single_experts", "load_single_experts")

    tree.edit(MODEL, edit)
    tree.add(
        f"{TESTS}/test_mxfp4_gpt_oss_single_experts.py",
        regression_test(
            "Checkpoints of gpt-oss that hold a tensor an expert.",
            (RECORD, "_probe_f3g"),
            GPT_OSS,
            "an_expert_comes_alone",
        ),
    )


def _without_guard(text: str) -> str:
    """A test, without the question whether the release needs it."""
    if GUARD not in text:
        return text
    text = text.replace(GUARD, "").replace("from pathlib import Path\n", "")
    guard = Source(text).find("_quantizes_online")
    lines = text.splitlines(keepends=True)
    return "".join([*lines[: guard.lineno - 1], *lines[guard.end_lineno :]])


CHANGES = (
    Change(
        fix=FIX,
        faults=LOADER,
        title="[Bugfix][Quantization] Load MXFP4 experts in whole blocks and check them",
        message="""
The generic loader of expert layers knows neither the sizes of an MXFP4
layer without padding nor its blocks of 32 values with one scale, and it
checks little. Wrong numbers are served, or loading ends in an IndexError.

The intermediate size is cut into whole blocks. The parameters of the layer
get a loader that knows the true sizes: a tensor has the one shape that fits,
or an error names parameter, expert, shard and rank, and what was expected.
Before the weights are converted, tensors that are missing and scales that
are not a number are an error, too.

The faults that this release has:
""",
        notes=(
            ("F3a", "Tensors of one expert end in IndexError: tuple index out of range."),
            (
                "F3c",
                "Ranks begin at multiples of the padded size, so that the last ones\n"
                "  hold little or nothing.",
            ),
            (
                "F3d",
                "Where a rank does not begin on a block, columns of w2 get the scale of\n"
                "  another block, silently.",
            ),
            ("F3e", "Floating-point scales are cast by value: 0.25 becomes byte 0, not 125."),
            (
                "F3f",
                "Full-precision checkpoints with --quantization mxfp4 are cast, or an\n"
                "  error. They are quantized as they load.",
            ),
            ("F3h", "Tensors of another shape or quantization are taken silently."),
            (
                "F3i",
                "Scales that are negative or no powers of two are rounded silently.\n"
                "  E8M0 does not have them: an error.",
            ),
        ),
        upstream=UPSTREAM[0],
        make=_loader,
    ),
    Change(
        fix=FIX,
        faults=SELECTION,
        title="[Bugfix][Quantization] Choose MXFP4 kernels by activation, or say why not",
        message="""
Where no kernel fits, the error says neither what was asked nor what there
is. To 0.26, all experts get the method, or the weight conversion, that is
made for gpt-oss, with gate and up in alternating rows.

Experts with another activation get the method that is made for them, and
the error names activation, device, back ends and ways out.
""",
        upstream=UPSTREAM[1],
        make=_selection,
    ),
    Change(
        fix=FIX,
        faults=SINGLE_EXPERTS,
        title="[Bugfix][Model] Load gpt-oss checkpoints with one tensor an expert",
        message="""
The loader of gpt-oss expects one tensor for all experts of a layer; with a
tensor an expert it ends in KeyError. These go to the loader of their
parameter, which knows where they belong.
""",
        upstream=UPSTREAM[2],
        make=_single_experts,
    ),
)
