# SPDX-License-Identifier: Apache-2.0
"""MXFP4 expert weights: the right bytes on every rank, or an error before serving.

The methods that make and convert the parameters of an MXFP4 layer are wrapped: the sizes are cut
into whole blocks, the parameters get a loader that knows those sizes (``mxfp4.loading``), and the
layer is looked over before its weights are converted. vLLM's generic loader stays as it is.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm_moe_dp_fix.patching import overridden
from vllm_moe_dp_fix.records import Fault, Fix, Patch, Repair
from vllm_moe_dp_fix.registry import GPT_OSS, MXFP4

if TYPE_CHECKING:
    import torch

    Tensor: TypeAlias = torch.Tensor

_METHOD = "Mxfp4MoEMethod"
_GPT_OSS_METHOD = "GptOssMxfp4MoEMethod"  # from 0.20.0; before, there is one method for all
# Chooses the kernel of Mxfp4MoEMethod; from 0.21.0 the second one chooses gpt-oss's.
_SELECTIONS = ("select_deepseek_v4_mxfp4_moe_backend", "select_mxfp4_moe_backend")


# --- sizes, parameters, last look -----------------------------------------------------------


def _wrap_roundup(original: FunctionType, module: ModuleType) -> FunctionType:
    from vllm_moe_dp_fix.mxfp4.hooks import cut_into_blocks

    @functools.wraps(original)
    def maybe_roundup_sizes(
        self: Any,
        hidden_size: int,
        intermediate_size_per_partition: int,
        act_dtype: Any,
        moe_parallel_config: Any,
    ) -> tuple[int, int]:
        width = cut_into_blocks(
            self, hidden_size, intermediate_size_per_partition, moe_parallel_config
        )
        return original(self, hidden_size, width, act_dtype, moe_parallel_config)

    return maybe_roundup_sizes  # type: ignore[return-value]


def _wrap_create_weights(original: FunctionType, module: ModuleType) -> FunctionType:
    from vllm_moe_dp_fix.mxfp4.hooks import attach_loader
    from vllm_moe_dp_fix.mxfp4.quantize import quantize

    quantizer = None if _quantizes_online(module) else quantize

    @functools.wraps(original)
    def create_weights(self: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
        original(self, layer, *args, **kwargs)
        attach_loader(self, layer, quantizer)

    return create_weights  # type: ignore[return-value]


def _wrap_process_weights(original: FunctionType, module: ModuleType) -> FunctionType:
    from vllm_moe_dp_fix.mxfp4.loading import finish

    @functools.wraps(original)
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        finish(layer)
        original(self, layer)

    return process_weights_after_loading  # type: ignore[return-value]


def _quantizes_online(module: ModuleType) -> bool:
    """Whether this vLLM quantizes full-precision checkpoints to MXFP4 itself (from 0.28.0)."""
    return (Path(module.__file__ or "").parent / "online" / "mxfp4.py").exists()


def _patches(method: str, is_optional: bool) -> tuple[Patch, ...]:
    wraps = {
        "maybe_roundup_sizes": _wrap_roundup,
        "create_weights": _wrap_create_weights,
        "process_weights_after_loading": _wrap_process_weights,
    }
    return tuple(
        Patch((f"{method}.{name}",), wrap, is_optional=is_optional) for name, wrap in wraps.items()
    )


# --- which method, which kernel -------------------------------------------------------------


def _wrap_get_quant_method(original: FunctionType, module: ModuleType) -> FunctionType:
    from vllm_moe_dp_fix.mxfp4.methods import with_kernel
    from vllm_moe_dp_fix.mxfp4.sharding import is_gpt_oss

    @functools.wraps(original)
    def get_quant_method(self: Any, layer: Any, prefix: str) -> Any:
        config = getattr(layer, "moe_config", None)
        if config is None or self.get_name() != "mxfp4" or is_gpt_oss(config):
            return original(self, layer, prefix)
        return with_kernel(
            lambda: getattr(module, _METHOD)(config), lambda: original(self, layer, prefix)
        )

    return get_quant_method  # type: ignore[return-value]


def _wrap_select(original: FunctionType, module: ModuleType) -> FunctionType:
    from vllm_moe_dp_fix.mxfp4.kernels import explained
    from vllm_moe_dp_fix.mxfp4.marlin import marlin_for_others

    is_for_all = not hasattr(module, _GPT_OSS_METHOD)
    select = marlin_for_others(original) if is_for_all else original
    return explained(select)  # type: ignore[return-value]


# --- gpt-oss, one expert a tensor -----------------------------------------------------------


def _wrap_gpt_oss_loader(original: FunctionType, module: ModuleType) -> FunctionType:
    from vllm_moe_dp_fix.mxfp4.single_experts import load_single_experts

    signature = inspect.signature(original)

    @functools.wraps(original)
    def _load_weights_mxfp4(self: Any, *args: Any, **kwargs: Any) -> set[str]:
        call = signature.bind(self, *args, **kwargs)
        loaded: set[str] = set()
        call.arguments["weights"] = load_single_experts(
            call.arguments["weights"], dict(self.named_parameters()), loaded
        )
        return original(*call.args, **call.kwargs) | loaded

    return _load_weights_mxfp4  # type: ignore[return-value]


# --- probes ---------------------------------------------------------------------------------


class _Unset:
    """A configuration in which everything that is not said is off."""

    def __init__(self, **said: object) -> None:
        self.__dict__.update(said)

    def __getattr__(self, name: str) -> bool:
        return False


class _Refused(Exception):
    """vLLM's loader failed on a tensor that it should take, or judge."""


def _probing(probe: Callable[[ModuleType], str | None]) -> Callable[[ModuleType], str | None]:
    @functools.wraps(probe)
    def judge(module: ModuleType) -> str | None:
        try:
            return probe(module)
        except _Refused as error:
            return str(error)

    return judge


def _layer_class(module: ModuleType) -> Any:
    """The layer that holds the expert parameters: RoutedExperts from 0.24.0."""
    return getattr(module, "RoutedExperts", None) or module.FusedMoE


class _TinyLayer:
    """vLLM's own layer class and MXFP4 method, with 8-bit parameters of one rank of ``tp_size``."""

    def __init__(
        self,
        module: ModuleType,
        intermediate: int,
        tp_size: int = 1,
        tp_rank: int = 0,
        hidden: int = 256,
        method: str = _METHOD,
        activation: str = "silu",
    ) -> None:
        import torch

        layer_class = _layer_class(module)
        self.parallel = _Unset(tp_size=tp_size, tp_rank=tp_rank)
        moe = _Unset(
            moe_parallel_config=self.parallel,
            tp_size=tp_size,
            tp_rank=tp_rank,
            num_experts=1,
            num_logical_experts=1,
            is_act_and_mul=True,
            w13_num_shards=2,
            activation=SimpleNamespace(value=activation),
            intermediate_size_per_partition_unpadded=intermediate // tp_size,
        )
        quant = object.__new__(getattr(module, method))
        quant.moe = moe
        quant.mxfp4_backend = module.Mxfp4MoeBackend.MARLIN
        quant.is_k3_situ_aiter = False  # read from 0.27.0
        layer = self.layer = object.__new__(layer_class)
        torch.nn.Module.__init__(layer)
        config = module.Mxfp4Config() if method == _METHOD else module.GptOssMxfp4Config()
        state = {
            "moe_config": moe,
            "moe_parallel_config": self.parallel,
            "quant_config": config,
            "quant_method": quant,
            "_expert_map": None,
            "expert_map_manager": _Unset(map_global_to_local=lambda expert: expert),
            "_fused_shared_expert_quantizer": None,
        }
        layer.__dict__.update(state)
        sizes = quant.maybe_roundup_sizes(
            hidden, intermediate // tp_size, torch.bfloat16, self.parallel
        )
        quant.create_weights(
            layer=layer,
            num_experts=1,
            hidden_size=sizes[0],
            intermediate_size_per_partition=sizes[1],
            params_dtype=torch.bfloat16,
            weight_loader=layer.weight_loader,
            global_num_experts=1,
        )

    def load(self, name: str, tensor: Tensor, shard_id: str | None) -> Tensor:
        """Loads a tensor into the parameter; what the one expert holds then."""
        parameter = getattr(self.layer, name)
        try:
            parameter.weight_loader(
                parameter, tensor, f"experts.{name}", shard_id=shard_id, expert_id=0
            )
        except (IndexError, RuntimeError) as error:
            raise _Refused(f"a tensor of one expert is refused: {error}") from error
        return parameter.data[0]


def _block_numbers(rows: int, blocks: int, per_element: int) -> Tensor:
    """A row's elements, each the number (from 1) of the block of 32 values that it belongs to."""
    import torch

    numbers = torch.arange(1, blocks + 1, dtype=torch.uint8)
    return numbers.repeat_interleave(32 // per_element).repeat(rows, 1)


@_probing
def _probe_f3a(module: ModuleType) -> str | None:
    weight, scale = _block_numbers(128, 8, 2), _block_numbers(128, 8, 32)
    weights = _TinyLayer(module, 128).load("w13_weight", weight, "w3")
    scales = _TinyLayer(module, 128).load("w13_weight_scale", scale, "w1")
    is_right = weights[128:].equal(weight) and scales[:128].equal(scale)
    return None if is_right else "a tensor of one expert lands in the wrong place"


@_probing
def _probe_f3c(module: ModuleType) -> str | None:
    """256 columns over four ranks are 64 on each, though Marlin pads them to 128."""
    got = _TinyLayer(module, 256, 4, 1).load("w2_weight", _block_numbers(256, 8, 2), "w2")
    held = got[0, :32].tolist()
    if held != [3] * 16 + [4] * 16:
        return f"rank 1 of 4 begins on block {held[0]} of 8 (from 1), not 3"
    return None


@_probing
def _probe_f3d(module: ModuleType) -> str | None:
    """192 columns over four ranks are 1.5 blocks on each."""
    for rank in range(4):
        tiny = _TinyLayer(module, 192, 4, rank)
        weights = tiny.load("w2_weight", _block_numbers(256, 6, 2), "w2")[0]
        scales = tiny.load("w2_weight_scale", _block_numbers(256, 6, 32), "w2")[0]
        for column, block in enumerate(weights.tolist()):
            if block and scales[column // 16] != block:
                return f"on rank {rank} of 4, w2 columns of block {block} get another block's scale"
    return None


@_probing
def _probe_f3e(module: ModuleType) -> str | None:
    import torch

    scales = torch.full((128, 8), 0.25)
    byte = _TinyLayer(module, 128).load("w13_weight_scale", scales, "w1")[0, 0].item()
    return None if byte == 125 else f"the scale 0.25 becomes byte {byte}, not 125"


@_probing
def _probe_f3f(module: ModuleType) -> str | None:
    import torch

    if _quantizes_online(module):
        return None
    tiny = _TinyLayer(module, 128)
    weights = tiny.load("w13_weight", torch.full((128, 256), 1.5, dtype=torch.bfloat16), "w1")
    got = (weights[0, 0].item(), tiny.layer.w13_weight_scale.data[0, 0, 0].item())
    return None if got == (0x77, 125) else f"the weight 1.5 becomes byte and scale {got}"


def _probe_f3g(module: ModuleType) -> str | None:
    import torch

    taken: list[tuple[int, ...]] = []

    def weight_loader(parameter: object, weight: Tensor, **_: object) -> bool:
        taken.append(tuple(weight.shape))
        return True

    stacked = {"layers.0.mlp.experts.w13_weight", "layers.0.mlp.experts.routed_experts.w13_weight"}
    model = object.__new__(module.GptOssModel)
    model.__dict__.update(
        named_parameters=lambda: [
            (n, SimpleNamespace(weight_loader=weight_loader)) for n in stacked
        ],
        parallel_config=_Unset(),
        config=_Unset(num_local_experts=1, intermediate_size=32),
    )
    of_one = iter([("layers.0.mlp.experts.0.w13_weight", torch.zeros(64, 16, dtype=torch.uint8))])
    group = SimpleNamespace(world_size=1, rank_in_group=0)
    rest: tuple[Any, ...] = (of_one, [])
    if "head_start" in inspect.signature(module.GptOssModel._load_weights_mxfp4).parameters:
        rest = (0, 0, *rest)
    with overridden(
        module,
        get_tensor_model_parallel_world_size=lambda: 1,
        get_dp_group=lambda: group,
        get_pcp_group=lambda: group,
        is_pp_missing_parameter=lambda *_: False,
    ):
        try:
            model._load_weights_mxfp4(1, 0, *rest)
        except (KeyError, IndexError, RuntimeError) as error:
            return f"a tensor of one expert is refused: {error!r}"
    return None if taken == [(64, 16)] else f"a tensor of one expert is taken as {taken}"


@_probing
def _probe_f3h(module: ModuleType) -> str | None:
    import torch

    scales = torch.full((1, 2), 127, dtype=torch.uint8)  # of 128 x 128 blocks, as FP8 has them
    try:
        _TinyLayer(module, 128).load("w13_weight_scale", scales, "w1")
    except ValueError as error:
        return None if "(1, 2)" in str(error) else f"an error without the shape: {error}"
    return "scales of another scheme are taken"


@_probing
def _probe_f3i(module: ModuleType) -> str | None:
    import torch

    for value in (0.3, -0.25):
        scales = torch.full((128, 8), value)
        try:
            byte = _TinyLayer(module, 128).load("w13_weight_scale", scales, "w1")[0, 0].item()
        except ValueError:
            continue
        return f"the scale {value} is taken, as byte {byte}"
    return None


def _probe_f3b(module: ModuleType) -> str | None:
    from vllm.model_executor.layers.fused_moe.oracle import mxfp4 as oracle

    config = _Unset(
        activation=SimpleNamespace(value="silu"), moe_parallel_config=_Unset(), moe_backend="auto"
    )
    if hasattr(module, _GPT_OSS_METHOD):
        layer = object.__new__(_layer_class(module))
        layer.__dict__["moe_config"] = config
        names = {name: lambda moe, name=name: name for name in (_METHOD, _GPT_OSS_METHOD)}
        with overridden(module, **names):
            got = module.Mxfp4Config().get_quant_method(layer, "experts")
        if got != _METHOD:
            return f"experts with SiLU get {got}"
    if _quantizes_online(module):
        return None
    with _kernels_that(oracle, fit=True):
        backend, _ = _selection(module)(config)
    if not hasattr(module, _GPT_OSS_METHOD) and backend != module.Mxfp4MoeBackend.MARLIN:
        return f"experts with SiLU get {backend.value}, whose weights are converted as gpt-oss's"
    try:
        with _kernels_that(oracle, fit=False):
            _selection(module)(config)
    except (NotImplementedError, ValueError) as error:
        return None if "silu" in str(error) else f"where no kernel fits, the error says: {error}"
    return "where no kernel fits, there is no error"


def _selection(module: ModuleType) -> Callable[[Any], Any]:
    return next(select for name in _SELECTIONS if (select := getattr(module, name, None)))


def _kernels_that(oracle: ModuleType, fit: bool) -> AbstractContextManager[None]:
    """Kernels that all fit, or none, whatever the device."""

    class Kernel:
        @staticmethod
        def is_supported_config(*_: object) -> tuple[bool, str | None]:
            return fit, None

    return overridden(
        oracle, backend_to_kernel_cls=lambda _: [Kernel], has_triton_kernels=lambda: False
    )


# --- record ---------------------------------------------------------------------------------

_NOT_REPORTED = "when vLLM cuts w2 and its scales into whole blocks, and checks shapes and dtypes"

F3A = Fault(
    id="F3a",
    summary="Per-expert 2-D weights: IndexError, tuple index out of range",
    upstream=(),
    removable="with vLLM 0.19, fixed in 0.20.0",
    probe=_probe_f3a,
)
F3B = Fault(
    id="F3b",
    summary="Every model gets the method and weight conversion of gpt-oss (to 0.26.0); where no "
    "kernel fits, no word about what was asked and what there is",
    upstream=(),
    removable="with vLLM 0.27",
    probe=_probe_f3b,
)
F3C = Fault(
    id="F3c",
    summary="Shards begin at multiples of the padded size: the last ranks hold little or nothing",
    upstream=(),
    removable="with vLLM 0.22",
    probe=_probe_f3c,
)
F3D = Fault(
    id="F3d",
    summary="w2 columns get another block's scale where a rank does not begin on a block: "
    "wrong numbers, silently",
    upstream=(),
    removable=_NOT_REPORTED,
    probe=_probe_f3d,
)
F3E = Fault(
    id="F3e",
    summary="Floating-point scales are cast by value: 0.25 becomes byte 0 instead of 125",
    upstream=(),
    removable="with vLLM 0.27, fixed in 0.28.0",
    probe=_probe_f3e,
)
F3F = Fault(
    id="F3f",
    summary="Full-precision checkpoints with --quantization mxfp4: an error, or a silent cast",
    upstream=(),
    removable="with vLLM 0.27; 0.28.0 quantizes them itself",
    probe=_probe_f3f,
)
F3G = Fault(
    id="F3g",
    summary="gpt-oss with a tensor an expert: KeyError, or IndexError in the layer's loader",
    upstream=(),
    removable="with vLLM 0.28, fixed in 0.29.0",
    probe=_probe_f3g,
)
F3H = Fault(
    id="F3h",
    summary="Tensors of another scheme or shape are taken silently",
    upstream=(),
    removable=_NOT_REPORTED,
    probe=_probe_f3h,
)
F3I = Fault(
    id="F3i",
    summary="Scales that are negative or no powers of two are rounded silently",
    upstream=(),
    removable="when vLLM refuses them",
    probe=_probe_f3i,
)

FIX = Fix(
    id="mxfp4_weight_loader",
    summary="MXFP4 expert weights: sharding, layouts, checks, quantization as they load",
    repairs=(
        Repair(
            module=MXFP4,
            faults=(F3A, F3C, F3D, F3E, F3F, F3H, F3I),
            patches=(*_patches(_METHOD, False), *_patches(_GPT_OSS_METHOD, True)),
        ),
        Repair(
            module=MXFP4,
            faults=(F3B,),
            patches=(
                Patch(("Mxfp4Config.get_quant_method",), _wrap_get_quant_method),
                Patch(_SELECTIONS, _wrap_select),
            ),
        ),
        Repair(
            module=GPT_OSS,
            faults=(F3G,),
            patches=(Patch(("GptOssModel._load_weights_mxfp4",), _wrap_gpt_oss_loader),),
        ),
    ),
)
