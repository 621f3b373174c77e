# SPDX-License-Identifier: Apache-2.0
"""Patches for the dispatch of quantized activations."""

from __future__ import annotations

from packaging.version import Version

from scripts.patches.build import Change, Tree, faults_in
from scripts.patches.edit import Source
from scripts.patches.extract import extract
from scripts.patches.tests_from import regression_test
from vllm_moe_dp_fix.fixes.moe_dp_dispatch import F1A, F1C
from vllm_moe_dp_fix.registry import NAIVE_DP_EP

FIX = "moe_dp_dispatch"
RECORD = f"vllm_moe_dp_fix.fixes.{FIX}"
FILE = NAIVE_DP_EP.replace(".", "/") + ".py"
SET_UP = "_quantize_and_setup_dispatch"
UNWRAP = "_unwrap_scale_and_prepare_for_moe"
CLASS = "MoEPrepareAndFinalizeNaiveDPEP"

QUANTIZE_GATHERED = '''
def _with_one_scale(
    a1q: torch.Tensor, quant_config: FusedMoEQuantConfig
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Quantizes the rows of all ranks; with a static scale they already are."""
    if quant_config.a1_scale is not None:
        return a1q, quant_config.a1_scale
    return moe_kernel_quantize_input(
        a1q,
        None,
        quant_dtype=quant_config.quant_dtype,
        per_act_token_quant=quant_config.per_act_token_quant,
        block_shape=quant_config.block_shape,
    )
'''

STATIC_TEST = """

def test_static_scale_reaches_the_experts() -> None:
    assert _probe_one_scale(naive_dp_ep, torch.tensor(0.125)) is None
"""
OLD_FLAG = """quant_config.is_nvfp4_scale_swizzled and not getattr(
        quant_config, "mx_alignment", 0
    )"""
SWIZZLE = """
    is_swizzled = {flag}
    if quant_config.quant_dtype == "mxfp8" and is_swizzled:
        rows, blocks = a1q_scale.shape
        if a1q_scale.is_cuda and torch.version.hip is None:
            a1q_scale = nvfp4_block_scale_interleave(a1q_scale)
        else:
            a1q_scale = swizzle_mxfp8_scale(a1q_scale, rows, blocks * 32)
"""


def _one_scale(tree: Tree) -> None:
    def edit(source: Source) -> None:
        source.insert(
            SET_UP,
            0,
            """
            # One scale belongs to the rows of all ranks, which are quantized after
            # dispatch.
            if _has_one_scale(quant_config) and quant_config.a1_scale is None:
                defer_input_quant = True
            """,
        )
        source.replace(
            "    skip_gather_scales = a1q_scale is None or a1q_scale.ndim == 0\n",
            "    skip_gather_scales = (\n"
            "        a1q_scale is None\n"
            "        or a1q_scale.ndim == 0\n"
            "        or _has_one_scale(quant_config)\n"
            "    )\n",
        )
        (has_one_scale,) = extract(RECORD, "has_one_scale").definitions
        has_one_scale = has_one_scale.replace(
            "has_one_scale(quant_config: Any)", "_has_one_scale(quant_config: FusedMoEQuantConfig)"
        )
        source.add_after(UNWRAP, f"{has_one_scale}\n\n{QUANTIZE_GATHERED}")
        for kind in ("Modular", "Monolithic"):
            source.insert(
                f"{CLASS}{kind}.prepare",
                -1,
                """
                if not defer_input_quant and _has_one_scale(quant_config):
                    a1q, a1q_scale = _with_one_scale(a1q, quant_config)

                """,
            )

    tree.edit(FILE, edit)
    tree.add(
        "tests/kernels/moe/test_naive_dp_ep_one_scale.py",
        regression_test(
            "Activations with one scale, through the data-parallel dispatch.",
            (RECORD, "_probe_f1a"),
            NAIVE_DP_EP,
            "rows_of_all_ranks_share_one_scale",
            STATIC_TEST if faults_in(("F1b",), tree.release) else "",
        ),
    )


def _mxfp8(tree: Tree) -> None:
    if Version(tree.release) < Version("0.21.0"):
        # The flag speaks of NVFP4 there. The one back end with row-major MXFP8 scales is TRTLLM,
        # which asks for an alignment.
        flag = OLD_FLAG
    else:
        flag = "quant_config.is_scale_swizzled"

    def edit(source: Source) -> None:
        source.insert(UNWRAP, -1, SWIZZLE.format(flag=flag))
        source.add_import(
            "vllm.model_executor.layers.quantization.utils.mxfp8_utils", "swizzle_mxfp8_scale"
        )

    tree.edit(FILE, edit)
    tree.add(
        "tests/kernels/moe/test_naive_dp_ep_mxfp8_scale.py",
        regression_test(
            "MXFP8 scales, through the data-parallel dispatch.",
            (RECORD, "_probe_f1c"),
            NAIVE_DP_EP,
            "scales_are_swizzled_after_dispatch",
        ),
    )


CHANGES = (
    Change(
        fix=FIX,
        faults=("F1a", "F1b"),
        title="[Bugfix][MoE] Do not gather a single activation scale over DP ranks",
        message="""
A per-tensor activation scale has no row a token, but the data-parallel
dispatch gathers it as if it had one. With unequal token counts the
all-gather fails (AssertionError: 1 != 36). With equal ones every rank's
rows get the scale of rank 0, silently.

The rows of all ranks are quantized together, after dispatch, which gives
the bits of a single rank. Static scales are the same on all ranks: rows are
quantized before, and the scale is not gathered.
""",
        upstream=F1A.upstream,
        make=_one_scale,
    ),
    Change(
        fix=FIX,
        faults=("F1c",),
        title="[Bugfix][MoE] Swizzle MXFP8 activation scales after dispatch",
        message="""
Scales travel row-major through the data-parallel dispatch. NVFP4 scales get
the layout that the kernels want afterwards, MXFP8 scales did not: NaN or
garbage.
""",
        upstream=F1C.upstream,
        make=_mxfp8,
    ),
)
