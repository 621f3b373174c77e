# SPDX-License-Identifier: Apache-2.0
"""MXFP4 experts: what the ranks hold must be what the checkpoint says, or loading must fail.

Each check raises where that is not so; it knows nothing of the plugin.
"""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import experts
import hypothesis
import mxfp4_oracle as oracle
import numpy as np
import torch
import torch.distributed as dist
from experts import Group, held, load, load_gpt_oss
from hypothesis import strategies
from mxfp4_oracle import Checkpoint, Layout, Matrix, Tensor
from packaging.version import Version
from world import Rank

TP_SIZES = (1, 2, 4, 8)
APART = Layout()
MERGED = Layout(is_merged=True)
STACKED = Layout(is_stacked=True, is_merged=True)
GPT_OSS = Layout(is_merged=True, is_interleaved=True, is_blocked=True)
GPT_OSS_STACKED = Layout(is_stacked=True, is_merged=True, is_interleaved=True, is_blocked=True)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def _is_since(release: str) -> bool:
    import vllm

    return Version(vllm.__version__) >= Version(release)


def _own_layout(**storage: torch.dtype) -> Layout:
    """What this release can load without the plugin: to 0.19.1, all experts in one tensor."""
    is_stacked = not _is_since("0.20.0")
    return Layout(is_stacked=is_stacked, is_merged=is_stacked, **storage)


def _backends() -> list[str]:
    """Back ends that pad the intermediate size to 128, 64, 256 and, from 0.29.0, not at all."""
    known = importlib.import_module(experts.METHODS).Mxfp4MoeBackend.__members__
    names = ("MARLIN", "TRITON", "FLASHINFER_TRTLLM_MXFP4_BF16", "B12X_MXFP4_BF16")
    return [name for name in names if name in known]


# --- what all ranks hold ---------------------------------------------------------------------


def same(got: Checkpoint, want: Checkpoint) -> None:
    """Value for value, and bit for bit."""
    got_values, want_values = got.values(), want.values()
    if got_values.keys() != want_values.keys():
        raise AssertionError(f"holds {[*got_values]}, not {[*want_values]}")
    for name, values in want_values.items():
        if got_values[name].shape != values.shape:
            raise AssertionError(f"{name} is {got_values[name].shape} in all, not {values.shape}")
        if (wrong := (got_values[name] != values).mean()) > 0:
            raise AssertionError(f"{name}: {wrong:.1%} of the values differ")
    for mine, matrix in zip(got.matrices, want.matrices, strict=True):
        if not (mine.packed.equal(matrix.packed) and mine.scales.equal(matrix.scales)):
            raise AssertionError("the values are the same, and the bytes differ")


def same_sum(shares: list[Checkpoint], want: Checkpoint, activation: str = "silu") -> None:
    """The ranks' outputs add up to those of the unsharded layer."""
    rows = _rows(want.hidden)
    summed = sum(oracle.outputs(share.values(), rows, activation) for share in shares)
    _close(summed, oracle.outputs(want.values(), rows, activation))


def _rows(hidden: int) -> oracle.Array:
    return np.random.default_rng(0).standard_normal((5, hidden))


def _close(got: Any, want: oracle.Array) -> None:
    error = np.abs(got - want).max() / np.abs(want).max()
    if not error < 1e-12:
        raise AssertionError(f"outputs differ by {error:.1e} of the largest")


def _sharded(
    checkpoint: Checkpoint, layout: Layout, tp_size: int, backend: str, **options: Any
) -> list[Any]:
    """The loaded layers of all ranks."""
    tensors = checkpoint.tensors(layout)
    layers = []
    for rank in range(tp_size):
        layer = experts.build(
            checkpoint.intermediate,
            Group(tp_size, rank),
            checkpoint.hidden,
            checkpoint.experts,
            backend,
            has_bias=checkpoint.has_bias,
            **options,
        )
        load(layer, tensors)
        layers.append(layer)
    return layers


def _exact_shares(
    checkpoint: Checkpoint, layout: Layout, tp_size: int, backend: str = "MARLIN"
) -> list[Checkpoint]:
    layers = _sharded(checkpoint, layout, tp_size, backend)
    shares = [held(layer, checkpoint.hidden) for layer in layers]
    same(Checkpoint.joined(shares), checkpoint)
    return shares


@contextlib.contextmanager
def _conversion(layer: Any) -> Iterator[mock.Mock]:
    """Stands for the conversion of the weights to a kernel's format."""
    with mock.patch.object(type(layer.quant_method), "_setup_kernel") as setup:
        yield setup


def process(layer: Any) -> None:
    with _conversion(layer) as setup:
        layer.quant_method.process_weights_after_loading(layer)
    if setup.call_count != 1:
        raise AssertionError("the weights are not converted")


# --- sharding -------------------------------------------------------------------------------


def per_expert(rank: Rank) -> None:
    for backend in _backends():
        for intermediate in (704, 768, 1408, 1536, 2880):
            _exact_shares(Checkpoint.random(intermediate, experts=2), APART, 1, backend)
    _exact_shares(Checkpoint.random(14336, experts=2), APART, 1)
    _exact_shares(Checkpoint.random(704, hidden=256), APART, 1)


def expert_map(rank: Rank) -> None:
    """With expert parallelism a rank takes its own experts whole, and says which those are."""
    checkpoint = Checkpoint.random(704, experts=8)
    tensors = checkpoint.tensors(APART)
    parallel = rank.config.parallel_config
    groups: dict[str, Any] = {"use_grouped_topk": True, "num_expert_group": 2, "topk_group": 1}
    for ep_size in (2, 4):
        for ep_rank in range(ep_size):
            for placement, mine in (
                ("linear", range(ep_rank * 8 // ep_size, (ep_rank + 1) * 8 // ep_size)),
                ("round_robin", range(ep_rank, 8, ep_size)),
            ):
                group = Group(ep_size=ep_size, ep_rank=ep_rank)
                with mock.patch.object(parallel, "expert_placement_strategy", placement):
                    layer = experts.build(704, group, **groups)
                said = load(layer, tensors)
                if said != [tensor.expert_id in mine for tensor in tensors]:
                    raise AssertionError(f"wrong experts are said to be loaded: {said}")
                same(held(layer, checkpoint.hidden), checkpoint.some(mine))


def redundant_experts(rank: Rank) -> None:
    """EPLB's copies: 8 logical experts are 10 physical ones, the last two again 0 and 1."""
    checkpoint = Checkpoint.random(704, experts=8)
    physical = checkpoint.some([*range(8), 0, 1])
    for ep_rank in (0, 1):
        layer = experts.build(704, Group(ep_size=2, ep_rank=ep_rank), redundant=2)
        load(layer, physical.tensors(APART))
        same(held(layer, 64), physical.some(range(5 * ep_rank, 5 * ep_rank + 5)))


def whole_blocks(rank: Rank) -> None:
    """Equal shares of whole blocks; each rank has its share and no other."""
    for backend in _backends():
        for intermediate, tp_sizes in (
            (704, (2,)),
            (768, (2, 4, 8)),
            (1408, (2, 4)),
            (1536, (2, 4, 8)),
            (2880, (2,)),
        ):
            for tp_size in tp_sizes:
                checkpoint = Checkpoint.random(intermediate, experts=2)
                shares = _exact_shares(checkpoint, APART, tp_size, backend)
                if {share.intermediate for share in shares} != {intermediate // tp_size}:
                    raise AssertionError("shares are not equal")
    _exact_shares(Checkpoint.random(14336, experts=2), APART, 8)


def unequal_shares(rank: Rank) -> None:
    """Where the blocks cannot be shared out evenly: no gap, no overlap, and the true widths."""
    for backend in _backends():
        for intermediate, tp_sizes in ((704, (4, 8)), (1408, (8,)), (2880, (4, 8))):
            for tp_size in tp_sizes:
                count = 8 if intermediate == 704 else 2
                checkpoint = Checkpoint.random(intermediate, experts=count)
                same_sum(_exact_shares(checkpoint, APART, tp_size, backend), checkpoint)


def balanced(rank: Rank) -> None:
    """704 columns over four ranks: at most six blocks of 32 on each, and none without work."""
    layers = _sharded(Checkpoint.random(704), APART, 4, "MARLIN")
    counts = [int(layer.w2_weight.data.any(dim=(0, 1)).sum()) * 2 for layer in layers]
    rows = [int(layer.w13_weight.data.any(dim=(0, 2)).sum()) // 2 for layer in layers]
    if rows != counts or sum(rows) != 704 or max(rows) > 192 or min(rows) < 128:
        raise AssertionError(f"lopsided: the ranks hold {rows} rows and {counts} columns")


def data_parallel(rank: Rank) -> None:
    """Real ranks: without expert parallelism, data parallelism folds into the experts' TP."""
    for intermediate in (704, 96, 768):
        checkpoint = Checkpoint.random(intermediate, has_bias=not _is_since("0.20.0"))
        if _is_since("0.20.0"):
            layer = experts.build(intermediate, None, experts=checkpoint.experts)
            load(layer, checkpoint.tensors(APART))
        else:
            layer = experts.build_gpt_oss(intermediate, None, experts=checkpoint.experts)
            load_gpt_oss(layer, checkpoint, GPT_OSS_STACKED, None)
        if layer.moe_config.moe_parallel_config.tp_size != rank.world_size:
            raise AssertionError("data parallelism does not fold into the experts' TP")
        activation = layer.moe_config.activation.value
        rows = _rows(checkpoint.hidden)
        share = held(layer, checkpoint.hidden, is_whole=True)
        summed = torch.from_numpy(oracle.outputs(share.values(), rows, activation))
        dist.all_reduce(summed)
        _close(summed.numpy(), oracle.outputs(checkpoint.values(), rows, activation))


def through_layer(rank: Rank) -> None:
    """The layer's own ``load_weights``, which the Transformers back end uses."""
    checkpoint = Checkpoint.random(704)
    options: dict[str, Any] = {}
    names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    if not _is_since("0.25.0"):
        options["expert_mapping"] = [
            (f"experts.{'w2' if shard == 'w2' else 'w13'}_", f"experts.{e}.{name}.", e, shard)
            for e in range(checkpoint.experts)
            for shard, name in names.items()
        ]
    weights = [
        (f"{expert}.{names[str(shard)]}.{param.partition('_')[2]}", data)
        for param, data, shard, expert in checkpoint.tensors(APART)
    ]
    for tp_size in (1, 4):
        shares = []
        for tp_rank in range(tp_size):
            layer = experts.build(704, Group(tp_size, tp_rank), experts=4, **options)
            if len(list(layer.load_weights(weights))) != len(weights):
                raise AssertionError("not every tensor is said to be loaded")
            shares.append(held(layer, checkpoint.hidden))
        same(Checkpoint.joined(shares), checkpoint)


def padded_by_model(rank: Rank) -> None:
    """A model that pads its experts itself gives their true width once they are made."""
    checkpoint = Checkpoint.random(768)
    shares = []
    for tp_rank in range(4):
        layer = experts.build(1024, Group(4, tp_rank), experts=4)
        layer.moe_config.intermediate_size_per_partition_unpadded = 768 // 4
        load(layer, checkpoint.tensors(APART))
        process(layer)
        shares.append(held(layer, checkpoint.hidden))
    same(Checkpoint.joined(shares), checkpoint)


# --- layouts and storage --------------------------------------------------------------------


def layouts(rank: Rank) -> None:
    """Gate and up merged, experts stacked, weights in blocks."""
    for has_bias in (False, True):
        checkpoint = Checkpoint.random(704, experts=2, has_bias=has_bias)
        for tp_size in TP_SIZES:
            for is_stacked in (False, True):
                for layout in (
                    Layout(is_stacked, is_merged=True),
                    Layout(is_stacked, is_merged=False),
                    Layout(is_stacked, is_merged=True, is_blocked=True),
                ):
                    _exact_shares(checkpoint, layout, tp_size)
    checkpoint = Checkpoint.random(704, experts=8)
    for layout in (MERGED, STACKED):
        for ep_rank in range(4):
            layer = experts.build(704, Group(ep_size=4, ep_rank=ep_rank))
            load(layer, checkpoint.tensors(layout))
            same(held(layer, 64), checkpoint.some((2 * ep_rank, 2 * ep_rank + 1)))
    if _is_since("0.24.0"):  # a stack holds logical experts, and EPLB's copies are the first ones
        layer = experts.build(704, Group(ep_size=2, ep_rank=1), redundant=2)
        load(layer, checkpoint.tensors(STACKED))
        same(held(layer, 64), checkpoint.some((5, 6, 7, 0, 1)))


def biases(rank: Rank) -> None:
    """One bias an expert: rows of w13 are shared out, w2's counts once over all ranks."""
    for tp_size in TP_SIZES:
        _exact_shares(Checkpoint.random(768, has_bias=True), APART, tp_size)


def float4_views(rank: Rank) -> None:
    for tp_size in (1, 4):
        layout = Layout(weights=torch.float4_e2m1fn_x2, scales=torch.float8_e8m0fnu)
        _exact_shares(Checkpoint.random(704), layout, tp_size)


def scales_by_value(rank: Rank) -> None:
    """Scales that are not stored as bytes."""
    for scales in (torch.float8_e8m0fnu, *FLOATS):
        _exact_shares(Checkpoint.random(704), _own_layout(scales=scales), 1)


def gpt_oss_stacked(rank: Rank) -> None:
    """The checkpoints of gpt-oss through the model's loader, which cuts them itself."""
    checkpoint = Checkpoint.random(2880, has_bias=True)
    for tp_size in TP_SIZES:
        shares = _gpt_oss_shares(checkpoint, GPT_OSS_STACKED, tp_size, "MARLIN", is_whole=True)
        same_sum(shares, checkpoint, "swigluoai")
    _gpt_oss_expert_parallel(GPT_OSS_STACKED)


def gpt_oss_per_expert(rank: Rank) -> None:
    checkpoint = Checkpoint.random(2880, has_bias=True)
    for tp_size in TP_SIZES:
        shares = _gpt_oss_shares(checkpoint, GPT_OSS, tp_size, "MARLIN", is_whole=True)
        same_sum(shares, checkpoint, "swigluoai")
    _gpt_oss_expert_parallel(GPT_OSS)


def gpt_oss_widths(rank: Rank) -> None:
    """Each rank's share of gpt-oss is as wide as its configuration says."""
    checkpoint = Checkpoint.random(2880, experts=2, has_bias=True)
    for layout in (GPT_OSS_STACKED, GPT_OSS):
        for tp_size in (2, 4, 8):
            for backend in ("MARLIN", "TRITON"):
                shares = _gpt_oss_shares(checkpoint, layout, tp_size, backend)
                same(Checkpoint.joined(shares), checkpoint)


def _gpt_oss_shares(
    checkpoint: Checkpoint, layout: Layout, tp_size: int, backend: str, is_whole: bool = False
) -> list[Checkpoint]:
    shares = []
    for tp_rank in range(tp_size):
        group = Group(tp_size, tp_rank)
        layer = experts.build_gpt_oss(
            checkpoint.intermediate, group, experts=checkpoint.experts, backend=backend
        )
        load_gpt_oss(layer, checkpoint, layout, group)
        shares.append(held(layer, checkpoint.hidden, is_whole))
    return shares


def _gpt_oss_expert_parallel(layout: Layout) -> None:
    checkpoint = Checkpoint.random(704, has_bias=True)
    for ep_rank in (0, 1):
        group = Group(ep_size=2, ep_rank=ep_rank)
        layer = experts.build_gpt_oss(704, group, experts=4)
        load_gpt_oss(layer, checkpoint, layout, group)
        mine = (2 * ep_rank, 2 * ep_rank + 1)
        same(held(layer, checkpoint.hidden), checkpoint.some(mine))


def any_layer(rank: Rank) -> None:
    """Sizes, sharding, layout and storage at random."""
    draw = strategies
    # Its notes of earlier runs are not wanted, least of all in the repository.
    hypothesis.configuration.set_hypothesis_home_dir(tempfile.gettempdir())

    @hypothesis.settings(
        max_examples=30,
        derandomize=True,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(
        hidden=draw.integers(1, 9),
        blocks=draw.integers(1, 40),
        tp_size=draw.sampled_from(TP_SIZES),
        backend=draw.sampled_from(_backends()),
        has_bias=draw.booleans(),
        is_gpt_oss=draw.booleans(),
        layout=draw.builds(
            Layout,
            is_stacked=draw.booleans(),
            is_merged=draw.booleans(),
            is_blocked=draw.booleans(),
            is_strided=draw.booleans(),
            weights=draw.sampled_from([torch.uint8, torch.int8, torch.float4_e2m1fn_x2]),
            scales=draw.sampled_from([torch.uint8, torch.float8_e8m0fnu, *FLOATS]),
        ),
    )
    def holds(
        hidden: int,
        blocks: int,
        tp_size: int,
        backend: str,
        has_bias: bool,
        is_gpt_oss: bool,
        layout: Layout,
    ) -> None:
        checkpoint = Checkpoint.random(32 * blocks, 32 * hidden, 2, has_bias)
        activation = "silu"
        if is_gpt_oss:
            activation = "swigluoai"
            layout = Layout(**vars(layout) | {"is_interleaved": layout.is_merged})
        layers = _sharded(checkpoint, layout, tp_size, backend, activation=activation)
        shares = [held(layer, checkpoint.hidden) for layer in layers]
        same(Checkpoint.joined(shares), checkpoint)
        same_sum(shares, checkpoint, activation)
        for layer in layers:
            process(layer)

    holds()


# --- quantization as it loads ---------------------------------------------------------------


def _weights(intermediate: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Of four experts, in very different sizes."""
    generator = torch.Generator().manual_seed(7)
    wide, narrow = (4, intermediate, 64), (4, 64, intermediate)
    found = {}
    for shard_id, shape in (("w1", wide), ("w3", wide), ("w2", narrow)):
        sizes = torch.randint(-8, 9, (*shape[:2], 1), generator=generator)
        found[shard_id] = (torch.randn(shape, generator=generator) * 2.0**sizes).to(dtype)
    return found


def _apart(weights: dict[str, torch.Tensor]) -> list[Tensor]:
    return [
        Tensor("w2_weight" if shard_id == "w2" else "w13_weight", one, shard_id, expert)
        for shard_id, data in weights.items()
        for expert, one in enumerate(data)
    ]


def full_precision(rank: Rank) -> None:
    """``--quantization mxfp4`` on a checkpoint that is not quantized."""
    if _is_since("0.28.0"):
        _full_precision_by_vllm()
        return
    for dtype in FLOATS:
        weights = _weights(704, dtype)
        want = Checkpoint(*(Matrix.of(data) for data in weights.values()))
        both = torch.cat([weights["w1"], weights["w3"]], dim=1)
        merged = [
            Tensor("w13_weight", both, None, None),
            Tensor("w2_weight", weights["w2"], None, None),
        ]
        for tp_size in TP_SIZES:
            same(Checkpoint.joined(_quantized(_apart(weights), tp_size)), want)
        same(Checkpoint.joined(_quantized(merged, 4)), want)
    weights["w2"][1, 0, 0] = float("nan")
    wrong = _processing_fails("a NaN", _apart(weights), "w2_weight_scale", "experts 1")
    if wrong:
        raise AssertionError(*wrong)


def _quantized(tensors: list[Tensor], tp_size: int) -> list[Checkpoint]:
    shares = []
    for tp_rank in range(tp_size):
        layer = experts.build(704, Group(tp_size, tp_rank), experts=4)
        load(layer, tensors)
        kept = {parameter.dtype for parameter in layer.parameters()}
        if kept != {torch.uint8}:
            raise AssertionError(f"parameters of {kept} are kept")
        process(layer)
        shares.append(held(layer, 64))
    return shares


def shared_expert(rank: Rank) -> None:
    """One that is not quantized among those that are, which vLLM quantizes from 0.32.0 on."""
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    routed = Checkpoint.random(704, experts=3)
    weights = {name: data[:1] for name, data in _weights(704, torch.bfloat16).items()}
    shares = []
    for tp_rank in (0, 1):
        with (
            mock.patch.object(ExpertMapManager, "_init_aiter_shared_experts_topK_buffer"),
            mock.patch.object(
                RoutedExperts, "_get_fused_shared_expert_quantizer", return_value=oracle.quantize
            ),
        ):
            layer = experts.build(
                704, Group(2, tp_rank), experts=3, n_shared_experts=1, fuse_shared_experts=True
            )
        load(layer, routed.tensors(APART))
        load(layer, [tensor._replace(expert_id=3) for tensor in _apart(weights)])
        process(layer)
        shares.append(held(layer, 64))
    found = Checkpoint.joined(shares)
    same(found.some(range(3)), routed)
    same(found.some([3]), Checkpoint(*(Matrix.of(data) for data in weights.values())))


def _full_precision_by_vllm() -> None:
    """From 0.28.0, under another configuration; the oracle stands for its Triton kernel."""
    from vllm.model_executor.layers.quantization import mxfp4
    from vllm.model_executor.layers.quantization.online import mxfp4 as online
    from vllm.model_executor.model_loader import utils as loading
    from vllm.model_executor.model_loader.reload import layerwise

    class Online(mxfp4.Mxfp4Config):  # type: ignore[misc]
        """Gives what ``OnlineQuantizationConfig`` gives, which is not importable here."""

        @classmethod
        def get_name(cls) -> str:
            return "online"

        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            if _is_since("0.30.0"):
                return online.Mxfp4OnlineMoEMethod(moe=layer.moe_config)
            return online.Mxfp4OnlineMoEMethod(layer=layer)

    names = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale")
    weights = _weights(768, torch.bfloat16)
    for tp_size in TP_SIZES:
        shares = []
        for tp_rank in range(tp_size):
            layer = experts.build(768, Group(tp_size, tp_rank), experts=4, quant_config=Online())
            with (
                mock.patch.object(online, "mxfp4_quantize", oracle.quantize),
                # It measures, and imports the configuration.
                mock.patch.object(loading, "online_quantization_timing_context", create=True),
                _conversion(layer) as setup,
            ):
                load(layer, _apart(weights))
                layerwise.finalize_layerwise_processing(torch.nn.ModuleList([layer]), None)
            for name, data in zip(names, setup.call_args.args[1:5], strict=True):
                layer._parameters[name] = torch.nn.Parameter(data, requires_grad=False)
            shares.append(held(layer, 64))
        want = Checkpoint(*(Matrix.of(data) for data in weights.values()))
        same(Checkpoint.joined(shares), want)


# --- which method, which kernel -------------------------------------------------------------


def method(rank: Rank) -> None:
    """Experts get the method that is made for their activation."""
    methods = importlib.import_module(experts.METHODS)
    for activation in ("silu", "gelu"):
        found = type(experts.build(704, activation=activation).quant_method).__name__
        if found != "Mxfp4MoEMethod":
            raise AssertionError(f"experts with {activation} get {found}")
    found = type(experts.build_gpt_oss(704, Group()).quant_method).__name__
    want = "GptOssMxfp4MoEMethod" if hasattr(methods, "GptOssMxfp4MoEMethod") else "Mxfp4MoEMethod"
    if found != want:
        raise AssertionError(f"experts of gpt-oss get {found}")


@contextlib.contextmanager
def _own_selection(rank: Rank) -> Iterator[None]:
    """Back ends are selected as in serving, without settings of the model."""
    model = SimpleNamespace(quantization_config=None, dtype=torch.bfloat16)
    with (
        mock.patch.object(experts, "selected", return_value=contextlib.nullcontext()),
        mock.patch.object(rank.config, "model_config", model),
    ):
        yield


def kernel(rank: Rank) -> None:
    """Where all kernels fit, experts with SiLU get none that wants its weights as gpt-oss's."""
    from vllm.model_executor.layers.fused_moe.oracle import mxfp4

    methods = importlib.import_module(experts.METHODS)
    every = SimpleNamespace(is_supported_config=lambda *_: (True, None))
    with (
        _own_selection(rank),
        mock.patch.object(mxfp4, "backend_to_kernel_cls", return_value=[every]),
        mock.patch.object(mxfp4, "has_triton_kernels", return_value=False, create=True),
    ):
        chosen = experts.build(704).quant_method
    backend = chosen.mxfp4_backend.value
    if type(chosen).__name__ != "Mxfp4MoEMethod":
        raise AssertionError(f"experts with SiLU get {backend} of {type(chosen).__name__}")
    if not hasattr(methods, "GptOssMxfp4MoEMethod") and backend != "MARLIN":
        raise AssertionError(f"experts with SiLU get {backend}, made for gpt-oss alone")


def no_kernel(rank: Rank) -> None:
    """No back end fits this machine: an error before the first tensor is read."""
    import vllm

    words = ["--quantization mxfp4", vllm.__version__, "'relu2'", "MARLIN", "Serve without"]
    if _is_since("0.28.0"):
        words = ["No MXFP4 MoE backend supports"]
    try:
        with _own_selection(rank):
            experts.build(704, activation="relu2")
    except (ValueError, NotImplementedError) as error:
        if missing := [word for word in words if word not in str(error)]:
            raise AssertionError(f"the error does not name {missing}: {error}") from error
    else:
        raise AssertionError("experts without a kernel")


def cpu_kernel(rank: Rank) -> None:
    """Experts with SiLU keep the kernel for CPUs, which to 0.26.0 gpt-oss's method alone has.

    It is chosen here, not run: from 0.28.0 only a CPU with AMX gets it.
    """
    with_amx = mock.patch("torch.cpu._is_amx_tile_supported", return_value=True)
    try:
        with _own_selection(rank), with_amx:
            backend = experts.build(704).quant_method.mxfp4_backend.name
    except (ValueError, NotImplementedError) as error:
        backend = str(error)
    if (backend == "CPU") is (_is_since("0.27.0") and not _is_since("0.30.0")):
        raise AssertionError(f"the back end is {backend}")


def lora(rank: Rank) -> None:
    """Adapters are cut into equal parts, so that experts must be, or it is an error."""
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

    made = FusedMoEConfig.__init__

    def with_lora(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs | {"is_lora_enabled": True})

    with mock.patch.object(FusedMoEConfig, "__init__", with_lora):
        experts.build(704, Group(2, 1))
        wrong = _not_refused("LoRA", lambda: experts.build(704, Group(4, 1)), ("LoRA", 704))
    if wrong:
        raise AssertionError(*wrong)


# --- what must not be taken -----------------------------------------------------------------


class Bad(NamedTuple):
    """A tensor that does not belong, and words that the error must say besides."""

    what: str
    tensor: Tensor
    words: tuple[object, ...] = ()


def _must_refuse(make: Callable[[], Any], cases: Iterable[Bad]) -> None:
    """Each is a ValueError that names parameter, expert, shard, both shapes and both types."""
    wrong = []
    for what, tensor, more in cases:
        layer = make()
        parameter = layer._parameters[tensor.param]
        expert = "all experts" if tensor.expert_id is None else f"expert {tensor.expert_id}"
        words = (
            *(tensor.param, expert, tensor.shard_id, *more),
            *(tuple(parameter.shape), parameter.dtype, tuple(tensor.data.shape), tensor.data.dtype),
        )
        wrong += _not_refused(what, lambda: load(layer, [tensor]), words)  # noqa: B023
    if wrong:
        raise AssertionError("; ".join(wrong))


def _not_refused(what: str, call: Callable[[], object], words: Iterable[object]) -> list[str]:
    try:
        call()
    except ValueError as error:
        missing = [str(word) for word in words if str(word) not in str(error)]
        return [f"{what}: the error does not name {missing}: {error}"] if missing else []
    except Exception as error:
        return [f"{what}: no ValueError but {error!r}"]
    return [f"{what}: taken without a word"]


def _one(param: str, data: torch.Tensor, shard_id: str | None, expert_id: int | None = 3) -> Tensor:
    return Tensor(param, data, shard_id, expert_id)


def _tiny(tp_size: int = 1, **options: Any) -> Callable[[], Any]:
    return lambda: experts.build(704, Group(tp_size), **options)


def other_schemes(rank: Rank) -> None:
    """Scale planes of another quantization."""
    blocks = torch.full((6, 1), 0.5)  # of 128 x 128, as FP8 has them
    groups = torch.full((704, 4), 127, dtype=torch.uint8)  # of 16, as NVFP4 has them
    fp8 = torch.ones(704, 2).to(torch.float8_e4m3fn)
    cases = [
        Bad("a stack", _one("w13_weight_scale", torch.ones(8, 12, 1), None, None), ((1408, 2),)),
        Bad("FP8 blocks", _one("w13_weight_scale", blocks, "w1"), ((704, 2),)),
        Bad("FP8 blocks of w2", _one("w2_weight_scale", blocks.t(), "w2"), ((64, 22),)),
        Bad("FP8 blocks in bytes", _one("w13_weight_scale", blocks.byte(), "w3"), ((704, 2),)),
        Bad("E4M3 scales", _one("w13_weight_scale", fp8, "w1")),
        Bad("groups of 16", _one("w13_weight_scale", groups, "w1"), ((704, 2),)),
        Bad("a scale a channel", _one("w13_weight_scale", torch.ones(704), "w1")),
        Bad("a scale a tensor", _one("w2_weight_scale", torch.tensor(0.5), "w2")),
        Bad("integers", _one("w13_weight_scale", groups[:, :2].int(), "w1")),
    ]
    for tp_size in (1, 4):
        _must_refuse(_tiny(tp_size), cases)


def other_types(rank: Rank) -> None:
    """Weights that are no E2M1 pairs; in all of these the padding of a back end has room."""
    cases = [
        Bad("a stack", _one("w13_weight", torch.ones(8, 1408, 64).byte(), None, None)),
        Bad("GPTQ", _one("w13_weight", torch.ones(704, 8, dtype=torch.int32), "w1"), ((704, 32),)),
        Bad("integers", _one("w13_weight", torch.ones(704, 32, dtype=torch.int32), "w1")),
        Bad("FP8", _one("w13_weight", torch.ones(704, 32).to(torch.float8_e4m3fn), "w1")),
        Bad("booleans", _one("w2_weight", torch.ones(64, 352, dtype=torch.bool), "w2")),
        Bad("unpacked", _one("w13_weight", torch.ones(704, 64).byte(), "w3"), ((704, 32),)),
        Bad("w2, unpacked", _one("w2_weight", torch.ones(64, 704).byte(), "w2"), ((64, 352),)),
    ]
    for options in ({}, {"backend": "TRITON"}, {"tp_size": 4}):
        _must_refuse(_tiny(**options), cases)


def full_precision_of_mxfp4(rank: Rank) -> None:
    """From 0.28.0 another configuration quantizes; this one has no use for such weights."""
    cases = [
        Bad(str(dtype), _one(param, torch.ones(shape, dtype=dtype), shard))
        for dtype in FLOATS
        for param, shard, shape in (
            ("w13_weight", "w1", (704, 64)),
            ("w2_weight", "w2", (64, 704)),
        )
    ]
    _must_refuse(_tiny(), cases)


def other_places(rank: Rank) -> None:
    """Packed weights of a wrong size, for a wrong part, or not of as many experts."""

    def pairs(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.uint8)

    cases = [
        Bad("half a row", _one("w13_weight", torch.ones(704, 32).bfloat16(), "w1")),
        Bad("rows missing", _one("w13_weight", pairs(672, 32), "w1"), ((704, 32),)),
        Bad("rows too many", _one("w13_weight", pairs(736, 32), "w3"), ((704, 32),)),
        Bad("columns missing", _one("w2_weight", pairs(64, 351), "w2"), ((64, 352),)),
        Bad("transposed", _one("w13_weight", pairs(32, 704), "w1"), ((704, 32),)),
        Bad("one half", _one("w13_weight", pairs(704, 32), None), ((1408, 32),)),
        Bad("both halves", _one("w13_weight", pairs(1408, 32), "w1"), ((704, 32),)),
        Bad("no shard", _one("w13_weight", pairs(704, 32), "w4")),
        Bad("w2 for w13", _one("w13_weight", pairs(704, 32), "w2")),
        Bad("w1 for w2", _one("w2_weight", pairs(64, 352), "w1")),
        Bad("seven experts", _one("w2_weight", pairs(7, 64, 352), None, None)),
        Bad("bias too short", _one("w13_bias", torch.ones(700), "w1"), ((704,),)),
        Bad("bias of bytes", _one("w2_bias", pairs(64), "w2")),
    ]
    for tp_size in (1, 4):
        _must_refuse(_tiny(tp_size, has_bias=True), cases)


def twice(rank: Rank) -> None:
    """A tensor that comes twice, also as a part of another."""
    checkpoint = Checkpoint.random(704, experts=8)
    apart = checkpoint.tensors(_own_layout())
    wrong = []
    for tensor in apart[:: len(apart) // 4]:
        layer = _tiny()()
        load(layer, apart)
        words = (tensor.param, "twice", tuple(tensor.data.shape), tensor.data.dtype)
        wrong += _not_refused(tensor.param, lambda: load(layer, [tensor]), words)  # noqa: B023
    layer = _tiny()()
    load(layer, apart)
    merged = checkpoint.tensors(MERGED if apart[0].expert_id is None else STACKED)
    wrong += _not_refused("in another layout", lambda: load(layer, merged), ("twice",))
    if wrong:
        raise AssertionError("; ".join(wrong))


def odd_scales(rank: Rank) -> None:
    """Scales by value that E8M0 does not have."""
    shard, expert = (None, None) if _own_layout().is_stacked else ("w1", 3)
    cases = []
    for value in (0.3, -0.25, 3.0, float("nan"), float("inf"), -float("inf"), 1.5 * 2.0**-127):
        data = torch.full((704, 2), 0.5)
        data[100, 1] = value
        if expert is None:
            data = torch.cat([data, data]).expand(8, -1, -1)
        for dtype in (torch.float32, torch.bfloat16):
            cases.append(Bad(f"{value}", _one("w13_weight_scale", data.to(dtype), shard, expert)))
    _must_refuse(_tiny(), cases)


def no_rounding(rank: Rank) -> None:
    """Scales that are no powers of two do not become their neighbours, nor positive."""
    checkpoint = Checkpoint.random(704)
    for value, neighbours in ((0.3, (125, 126)), (-0.25, (125,)), (3.0, (128, 129))):
        layer = experts.build(704, experts=4)
        tensors = [
            tensor._replace(data=torch.full(tensor.data.shape, value))
            for tensor in checkpoint.tensors(_own_layout())
            if tensor.param == "w13_weight_scale"
        ]
        with contextlib.suppress(ValueError):
            load(layer, tensors)
        found = set(layer.w13_weight_scale.data.unique().tolist())
        if found & set(neighbours):
            raise AssertionError(f"the scale {value} is rounded, to byte {found & set(neighbours)}")


# --- after loading --------------------------------------------------------------------------


def _processing_fails(what: str, tensors: list[Tensor], *words: str, **options: Any) -> list[str]:
    layer = experts.build(704, experts=4, **options)
    load(layer, tensors)
    with _conversion(layer) as setup:
        call = layer.quant_method.process_weights_after_loading
        wrong = _not_refused(what, lambda: call(layer), words)
    if setup.called:
        wrong.append(f"{what}: the weights are converted nevertheless")
    return wrong


def incomplete(rank: Rank) -> None:
    """What a checkpoint lacks is an error before the weights are converted."""
    tensors = Checkpoint.random(704, has_bias=True).tensors(_own_layout())
    parts = {t[::2]: t for t in tensors if t.expert_id in (None, 2)}
    wrong = []
    for (param, shard_id), missing in parts.items():
        if param == "w2_bias" or (missing.expert_id is None and param == "w13_bias"):
            continue  # a layer may have no biases at all
        left = [tensor for tensor in tensors if tensor is not missing]
        words = (
            param,
            "missing",
            "experts 0, 1, 2, 3" if missing.expert_id is None else "experts 2",
        )
        wrong += _processing_fails(f"no {param} {shard_id}", left, *words, has_bias=True)
    if wrong:
        raise AssertionError("; ".join(wrong))


def damaged(rank: Rank) -> None:
    """Scale planes of expert 2 that are all zero, or in a row not a number."""

    def damage(data: torch.Tensor, value: int) -> torch.Tensor:
        data = data.clone()
        plane = data[2] if data.ndim == 3 else data
        (plane[5] if value else plane).fill_(value)
        return data

    tensors = Checkpoint.random(704).tensors(_own_layout())
    wrong = []
    for param in ("w13_weight_scale", "w2_weight_scale"):
        for value, words in ((0, "all zero"), (255, "not a number")):
            edited = [
                tensor._replace(data=damage(tensor.data, value))
                if tensor.param == param and tensor.expert_id in (None, 2)
                else tensor
                for tensor in tensors
            ]
            what = f"{param} of {value}"
            wrong += _processing_fails(what, edited, param, words, "experts 2")
    if wrong:
        raise AssertionError("; ".join(wrong))


def pruned(rank: Rank) -> None:
    """Experts of which the checkpoint has nothing are zero, and serving goes on."""
    checkpoint = Checkpoint.random(704)
    layer = experts.build(704, experts=4)
    load(layer, [t for t in checkpoint.tensors(APART) if t.expert_id in (0, 2)])
    process(layer)
    found = held(layer, checkpoint.hidden)
    same(found.some((0, 2)), checkpoint.some((0, 2)))
    for matrix in found.matrices:
        if matrix.packed[[1, 3]].any():
            raise AssertionError("experts that are not there have weights")


def without_biases(rank: Rank) -> None:
    """A layer that could have biases, and a checkpoint that has none."""
    checkpoint = Checkpoint.random(704)
    layer = experts.build(704, experts=4, has_bias=True)
    load(layer, checkpoint.tensors(_own_layout()))
    process(layer)
    if layer.w13_bias.any() or layer.w2_bias.any():
        raise AssertionError("biases that are not there")


def never_loaded(rank: Rank) -> None:
    """Dummy weights are written to the parameters by somebody else."""
    layer = experts.build(704)
    for parameter in layer.parameters():
        parameter.data.random_(0, 255)
    before = [parameter.data.clone() for parameter in layer.parameters()]
    process(layer)
    if not all(map(torch.equal, before, layer.parameters())):
        raise AssertionError("they are written to again")


def reloaded(rank: Rank) -> None:
    """New weights into a layer that serves."""
    _reload(Checkpoint.random(704).tensors(APART))


def reloaded_dummy(rank: Rank) -> None:
    """The first weights into a layer that serves with dummy ones."""
    _reload([])


def _reload(first: list[Tensor]) -> None:
    """With vLLM's layerwise reload, into memory that holds anything."""
    from vllm.model_executor.model_loader.reload import layerwise

    second = Checkpoint.random(704, seed=1)
    shares = []
    for tp_rank in range(4):
        layer = experts.build(704, Group(4, tp_rank), experts=4)
        model = torch.nn.ModuleList([layer])
        layerwise.record_metadata_for_reloading(model)
        load(layer, first)
        process(layer)
        before = {name: parameter.data_ptr() for name, parameter in layer.named_parameters()}
        layerwise.initialize_layerwise_reload(model)
        with _conversion(layer) as setup, _no_zeros():
            load(layer, second.tensors(APART))
            layerwise.finalize_layerwise_reload(model, None)
        if setup.call_count != 1:
            raise AssertionError(f"converted {setup.call_count} times on reload")
        if before != {name: parameter.data_ptr() for name, parameter in layer.named_parameters()}:
            raise AssertionError("the parameters are other ones after the reload")
        shares.append(held(layer, 64))
    same(Checkpoint.joined(shares), second)


@contextlib.contextmanager
def _no_zeros() -> Iterator[None]:
    """New memory is not zero by chance: with this setting, torch fills it with ones."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
