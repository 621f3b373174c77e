# SPDX-License-Identifier: Apache-2.0
"""Loads MXFP4 experts: checks each tensor, places it, and looks over the layer at the end.

``attach`` gives the parameters of a layer ``weight_loader``. That one knows the layer's sizes
without padding, so a tensor either has the one shape that fits or is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

import torch

from vllm_moe_dp_fix.mxfp4.sharding import BLOCK, NAN_SCALE, ExpertLayout, ExpertShard

if TYPE_CHECKING:
    Tensor: TypeAlias = torch.Tensor
    # Rows, and where their packed values and their scales go.
    Quantizer: TypeAlias = Callable[[Tensor, Tensor, Tensor], None]

logger = logging.getLogger("vllm.moe_dp_fix")

_STATE = "_moe_dp_fix_mxfp4"
_PACKED = (torch.uint8, torch.int8, torch.float4_e2m1fn_x2)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class _Parameter(NamedTuple):
    """What a parameter holds; see ``ExpertLayout`` for ``per_element``."""

    projection: str
    kind: str
    per_element: int


_PARAMETERS = {
    "w13_weight": _Parameter("w13", "weight", 2),
    "w13_weight_scale": _Parameter("w13", "scale", BLOCK),
    "w13_bias": _Parameter("w13", "bias", 0),
    "w2_weight": _Parameter("w2", "weight", 2),
    "w2_weight_scale": _Parameter("w2", "scale", BLOCK),
    "w2_bias": _Parameter("w2", "bias", 0),
}
_PARTS = {"w1": 0, "w3": 1}  # of w13, by shard id
_WHOLE = {"w13": (None, "w13", "gpt_oss_w13"), "w2": (None, "w2", "gpt_oss_w2")}


@dataclass
class _State:
    """What the loader knows of a layer.

    Attributes:
        layer_name: For error messages.
        quantizer: Quantizes full-precision weights as they load; None where they are refused.
        is_interleaved: Gate and up lie in alternating rows, as gpt-oss's activation wants them.
        written: Parameter name -> what of it was written, as ``2 * local expert + part``.
        was_finished: The layer was processed once; what loads from now on is an update.
    """

    layer_name: str
    shard: ExpertShard
    quantizer: Quantizer | None
    is_interleaved: bool
    written: dict[str, set[int]] = field(default_factory=dict)
    was_finished: bool = False


def attach(
    layer: Any, shard: ExpertShard, quantizer: Quantizer | None, is_interleaved: bool
) -> None:
    """Makes ``weight_loader`` the loader of the layer's MXFP4 parameters.

    It is bound to the layer as vLLM's own is, so that vLLM's reloading can part the two.
    """
    name = getattr(layer, "layer_name", "") or type(layer).__name__
    setattr(layer, _STATE, _State(name, shard, quantizer, is_interleaved))
    # What load_weights() calls, to 0.24.0.
    layer.weight_loader = MethodType(weight_loader, layer)
    for parameter in _parameters(layer).values():
        parameter.weight_loader = MethodType(weight_loader, layer)


def weight_loader(
    self: Any,
    param: torch.nn.Parameter,
    loaded_weight: Tensor,
    weight_name: str,
    shard_id: str | None,
    expert_id: int | None,
    return_success: bool = False,
) -> bool | None:
    """Places a tensor of the checkpoint; takes the place of vLLM's method of this name.

    Args:
        param: ``w13_*`` or ``w2_*`` of this layer, ``[local experts, rows, columns]`` with padding.
        loaded_weight: One expert ``[rows, columns]``, or several ``[experts, rows, columns]``.
            Weights: packed E2M1, also as ``[rows, blocks, 16]``; or full precision where this
            release quantizes as it loads. Scales: E8M0 bytes, or powers of two. Unsharded, or
            with ``shard_id`` None (gpt-oss) also this rank's share.
        weight_name: For error messages.
        shard_id: ``w1`` (gate), ``w3`` (up), ``w2`` (down); None and the like for all of w13.
        expert_id: Global physical expert, or None where the tensor holds all.
        return_success: Whether to say if some of it belongs on this rank.

    Raises:
        ValueError: Names parameter, expert, shard, both shapes and dtypes, and what to do.
    """
    state: _State = getattr(self, _STATE)
    loading = _Loading(self, state, param, loaded_weight, weight_name, shard_id, expert_id)
    success = loading.run()
    return success if return_success else None


class _Loading:
    """One tensor on its way into a parameter."""

    def __init__(
        self,
        layer: Any,
        state: _State,
        param: torch.nn.Parameter,
        loaded: Tensor,
        weight_name: str,
        shard_id: str | None,
        expert_id: int | None,
    ) -> None:
        self.layer, self.state, self.param, self.loaded = layer, state, param, loaded
        self.weight_name, self.shard_id, self.expert_id = weight_name, shard_id, expert_id
        named = (name for name, own in _parameters(layer).items() if own is param)
        self.name = next(named, weight_name.rpartition(".")[2])
        if self.name not in _PARAMETERS:
            self.refuse(f"is for none of {', '.join(_PARAMETERS)}")
        self.projection, self.kind, self.per_element = _PARAMETERS[self.name]
        self.layout = _layout(layer, state)
        if self.kind == "weight" and loaded.dtype in _FLOATS:
            self.per_element = 1
        self.parts = self._parts()

    def run(self) -> bool:
        if self.per_element == 1 and self.state.quantizer is None:
            return self._load_shared_expert()
        self.loaded = self._flat_blocks(self.loaded)
        dims = 1 if self.kind == "bias" else 2
        if self.loaded.ndim == dims and self.expert_id is not None:
            local = self._local(self.expert_id)
            if local == -1:
                return False
            self._load_expert(self.loaded, local)
            return True
        if self.loaded.ndim != dims + 1:
            self.refuse(f"is neither one expert ({dims} dimensions) nor all of them ({dims + 1})")
        pairs = self._experts(self.loaded.shape[0])
        for source, local in pairs:
            self._load_expert(self.loaded[source], local)
        return bool(pairs)

    def _load_shared_expert(self) -> bool:
        """A full-precision shared expert among MXFP4 ones, which vLLM quantizes (from 0.32.0)."""
        quantizer = getattr(self.layer, "_fused_shared_expert_quantizer", None)
        is_shared = (self.expert_id or 0) >= self.layer.moe_config.num_logical_experts
        if quantizer is None or not is_shared:
            self.refuse(
                "is not packed and would be cast by value. This release quantizes only checkpoints "
                "that do not call themselves MXFP4: is this the right one, or quantization_config "
                "left over in its config.json?"
            )
        weight, scale = quantizer(self.loaded.to(self.param.device))
        placed = False
        for name, tensor in ((self.name, weight), (f"{self.name}_scale", scale)):
            param = self.layer._parameters[name]
            part = _Loading(
                *(self.layer, self.state, param, tensor),
                *(self.weight_name, self.shard_id, self.expert_id),
            )
            placed = part.run()
        return placed

    def _local(self, expert_id: int) -> int:
        return int(self.layer._map_global_expert_id_to_local_expert_id(expert_id))

    def _experts(self, given: int) -> list[tuple[int, int]]:
        """Which of the given experts go to which local ones."""
        config, here = self.layer.moe_config, self.param.shape[0]
        physical = config.num_experts
        logical = getattr(config, "num_logical_experts", None) or physical
        if given in (logical, physical):
            # Physical experts beyond the logical ones are EPLB's copies, dealt out in turn.
            pairs = [(expert % given, self._local(expert)) for expert in range(physical)]
            return [pair for pair in pairs if pair[1] != -1]
        if given != here:
            self.refuse(f"holds {given} experts; the layer has {logical}, this rank {here}")
        return [(expert, expert) for expert in range(here)]

    def _parts(self) -> tuple[int, ...]:
        """The parts of w13 that the tensor holds; (0,) for w2."""
        if self.shard_id in _WHOLE[self.projection]:
            return self.layout.parts if self.projection == "w13" else (0,)
        if self.projection == "w2" or self.shard_id not in _PARTS:
            self.refuse(f"comes as shard {self.shard_id!r}, no part of {self.projection}")
        return (_PARTS[self.shard_id],)

    def _flat_blocks(self, loaded: Tensor) -> Tensor:
        """``[..., blocks, 16]``, as gpt-oss stores packed weights, as ``[..., columns]``."""
        half = BLOCK // 2
        if self.kind == "weight" and loaded.ndim >= 3 and loaded.shape[-1] == half:
            columns = loaded.shape[-2] * half
            for shape in (self.layout.shape, self.layout.share):
                if shape(self.projection, len(self.parts), 2)[-1] == columns:
                    return loaded.flatten(-2)
        return loaded

    def _load_expert(self, expert: Tensor, local: int) -> None:
        shape = tuple(expert.shape)
        parts, per_element = len(self.parts), self.per_element
        is_share = shape != self.layout.shape(self.projection, parts, per_element)
        if is_share and not (
            self.shard_id is None
            and shape == self.layout.share(self.projection, parts, per_element)
        ):
            self._refuse_shape()
        self._claim(self.name, local)
        if per_element == 1:
            self._claim(f"{self.name}_scale", local)
        as_is = parts == 2 and self.layout.is_interleaved
        pieces: Iterable[tuple[int | None, int | None]] = (
            [(None, None)] if as_is else enumerate(self.parts)
        )
        for index, part in pieces:
            rows = self.layout.source(self.projection, expert, index, per_element, is_share)
            if per_element == 1:
                self._quantize(rows, local, part)
            else:
                self._copy(rows, self._target(self.name, local, part))

    def _target(self, name: str, local: int, part: int | None) -> Tensor:
        data = self.layer._parameters[name].data[local]
        projection, _, per_element = _PARAMETERS[name]
        return self.layout.target(projection, data, part, per_element)

    def _copy(self, rows: Tensor, target: Tensor) -> None:
        self._check_room(tuple(rows.shape), target)
        if self.kind != "bias":
            rows = self._as_bytes(rows)
        elif rows.dtype not in _FLOATS:
            self.refuse("is no floating-point bias")
        elif self.projection == "w2" and self.layout.shard.tp_rank:
            target.zero_()  # the ranks' outputs are added up, and this bias with them
            return
        target.copy_(rows)

    def _as_bytes(self, rows: Tensor) -> Tensor:
        if self.kind == "weight":
            if rows.dtype in _PACKED:
                return rows.view(torch.uint8)
            self.refuse("is no packed E2M1 and would be cast by value")
        if rows.dtype in (torch.uint8, torch.float8_e8m0fnu):
            return rows.view(torch.uint8)
        if rows.dtype not in (*_FLOATS, torch.float64):
            self.refuse("is no E8M0 scale and would be cast by value")
        encoded, is_exact = encode_e8m0(rows)
        if not is_exact:
            self.refuse("holds scales that are negative or no powers of two: E8M0 would alter them")
        return encoded

    def _quantize(self, rows: Tensor, local: int, part: int | None) -> None:
        if rows.shape[-1] % BLOCK:
            self.refuse(
                f"has rows of {rows.shape[-1]} values, which are no whole blocks of {BLOCK}"
            )
        packed = self._target(self.name, local, part)
        scales = self._target(f"{self.name}_scale", local, part)
        self._check_room((rows.shape[0], rows.shape[1] // 2), packed)
        self._check_room((rows.shape[0], rows.shape[1] // BLOCK), scales)
        if packed.is_meta:
            packed.copy_(torch.empty_like(packed))
            scales.copy_(torch.empty_like(scales))
        else:
            assert self.state.quantizer is not None
            self.state.quantizer(rows.to(packed.device), packed, scales)

    def _claim(self, name: str, local: int) -> None:
        if self.param.is_meta:  # a reload counts elements first
            return
        written = self.state.written.setdefault(name, set())
        for part in self.parts:
            key = 2 * local + part
            if key in written and not self.state.was_finished:
                self.refuse("was loaded before: the checkpoint holds it twice")
            written.add(key)

    def _check_room(self, shape: tuple[int, ...], target: Tensor) -> None:
        if shape != target.shape:
            self.refuse(
                f"needs room for {shape} on this rank and finds {tuple(target.shape)}; choose "
                "another back end (--moe-backend), another TP or DP size, or "
                "--enable-expert-parallel"
            )

    def _refuse_shape(self) -> NoReturn:
        shard = self.layout.shard
        holds = {0: "a value a row", 1: "full precision", 2: "two values a byte"}
        what = holds.get(self.per_element, f"a scale for {BLOCK} values")
        dtype = "bfloat16 and the like" if self.per_element == 1 else self.param.dtype
        self.refuse(
            f"does not fit: expected {self.layout.shape(*self._expected)} of dtype {dtype}, "
            f"{what}, for hidden size {shard.hidden} and intermediate size "
            f"{shard.intermediate}; is the checkpoint another model's, or quantized with another "
            "scheme?"
        )

    @property
    def _expected(self) -> tuple[str, int, int]:
        return self.projection, len(self.parts), self.per_element

    def refuse(self, why: str) -> NoReturn:
        shard = self.state.shard
        expert = "all experts" if self.expert_id is None else f"expert {self.expert_id}"
        raise ValueError(
            f"{self.state.layer_name}: MXFP4 parameter {self.name} of shape "
            f"{tuple(self.param.shape)} (padding included) and {self.param.dtype}, {expert}, shard "
            f"{self.shard_id}, rank {shard.tp_rank} of {shard.tp_size}: the checkpoint's tensor "
            f"{self.weight_name} of shape {tuple(self.loaded.shape)} and {self.loaded.dtype} {why}"
        )


def encode_e8m0(scales: Tensor) -> tuple[Tensor, bool]:
    """E8M0 bytes of floating-point scales, and whether all of them are exact.

    0 becomes 2**-127: E8M0 has no zero, and quantizers give it to blocks that hold nothing else.
    """
    bits = scales.to(torch.float32).contiguous().view(torch.int32)
    is_power = ((bits & 0x807FFFFF) == 0) & (bits != 0x7F800000)
    is_smallest = bits == 0x00400000  # 2**-127, a subnormal of float32
    return (bits >> 23).to(torch.uint8), bool((is_power | is_smallest).all())


def finish(layer: Any) -> None:
    """Looks over a layer whose tensors have all been loaded, before its weights are converted.

    A layer that was not loaded through ``weight_loader`` (dummy weights, sharded state) is left
    alone. Experts of which nothing came are taken for pruned: they are zero, and a warning names
    them.

    Raises:
        ValueError: Names the parameters and local experts of which something is missing, or whose
            scales are all zero while their weights are not, or not a number.
    """
    state: _State | None = getattr(layer, _STATE, None)
    if state is None:
        return
    is_reload, state.was_finished = state.was_finished, True
    if not state.written:
        return
    written, state.written = state.written, {}
    layout = _layout(layer, state)
    parameters = {name: parameter.data for name, parameter in _parameters(layer).items()}
    loaded = {key // 2 for keys in written.values() for key in keys}
    pruned = sorted(set(range(len(parameters["w2_weight"]))) - loaded)
    problems = []
    for name, data in parameters.items():
        projection, kind, per_element = _PARAMETERS[name]
        found = written.get(name, set())
        if is_reload:  # into memory that is not zero as at first
            data[pruned] = 0
            layout.clear_padding(projection, data, per_element)
            if not found:
                data.zero_()
        if kind == "bias" and not found:
            continue
        parts = layout.parts if projection == "w13" else (0,)
        missing = {e for e in loaded for part in parts if 2 * e + part not in found}
        if missing:
            problems.append(f"{name} is missing for {_some(missing)}")
    problems = problems or _odd_scales(layout, parameters, loaded)
    if problems:
        shard = layout.shard
        raise ValueError(
            f"{state.layer_name}: MXFP4 experts are not complete after loading, rank "
            f"{shard.tp_rank} of {shard.tp_size}: {'; '.join(problems)} (local numbers). Is a "
            "tensor or file of the checkpoint missing or damaged?"
        )
    if pruned:
        logger.warning(
            "%s: the checkpoint has nothing for %s; taken for pruned",
            state.layer_name,
            _some(pruned),
        )


def _odd_scales(layout: ExpertLayout, parameters: dict[str, Tensor], loaded: set[int]) -> list[str]:
    """What is odd about the planes of scales; waits for the device once."""
    if not layout.shard.width:
        return []
    planes = [
        (
            projection,
            part,
            layout.target(projection, parameters[f"{projection}_weight_scale"], part, BLOCK),
        )
        for projection, parts in (("w13", layout.parts), ("w2", (0,)))
        for part in parts
    ]
    largest = torch.stack([plane.amax(dim=(1, 2)) for _, _, plane in planes]).tolist()
    problems = []
    for (projection, part, _), by_expert in zip(planes, largest, strict=True):
        name = f"{projection}_weight_scale"
        nan = [expert for expert, value in enumerate(by_expert) if value == NAN_SCALE]
        if nan:
            problems.append(f"{name} is not a number for {_some(nan)}")
        weights = layout.target(projection, parameters[f"{projection}_weight"], part, 2)
        zero = [
            expert
            for expert, value in enumerate(by_expert)
            if value == 0 and expert in loaded and bool((weights[expert] & 0x77).any())
        ]
        if zero:
            problems.append(f"{name} is all zero, and the weight is not, for {_some(zero)}")
    return problems


def _parameters(layer: Any) -> dict[str, torch.nn.Parameter]:
    own = layer._parameters
    return {name: own[name] for name in _PARAMETERS if own.get(name) is not None}


def _layout(layer: Any, state: _State) -> ExpertLayout:
    config, shard = layer.moe_config, state.shard
    width = getattr(config, "intermediate_size_per_partition_unpadded", None)
    if width is not None and width != shard.width:
        # A model that pads its experts itself says their true width after they are made.
        shard = ExpertShard(shard.hidden, width * shard.tp_size, shard.tp_size, shard.tp_rank)
    return ExpertLayout(shard, config.is_act_and_mul, state.is_interleaved)


def _some(experts: Iterable[int]) -> str:
    numbers = sorted(experts)
    shown = ", ".join(map(str, numbers[:8]))
    return f"experts {shown}" + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
