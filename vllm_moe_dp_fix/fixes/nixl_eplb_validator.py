# SPDX-License-Identifier: Apache-2.0
"""The NIXL communicator of EPLB: all ranks agree before experts move, and fail together.

What is done is in ``vllm_moe_dp_fix.nixl``; here it takes its place around vLLM's functions.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from types import FunctionType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm_moe_dp_fix.patching import overridden
from vllm_moe_dp_fix.records import Fault, Fix, Patch, Repair
from vllm_moe_dp_fix.registry import EPLB_COMMUNICATOR

if TYPE_CHECKING:
    import torch

    Tensor: TypeAlias = torch.Tensor

_CLASS = "NixlEplbCommunicator"


# --- set-up ---------------------------------------------------------------------------------


def _wrap_init(original: FunctionType, module: ModuleType) -> FunctionType:
    from vllm_moe_dp_fix.nixl import setup

    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        call = signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        arguments = call.arguments
        weights, buffer = _tensors(arguments)
        is_deferred = arguments.get("defer_remote_setup", False)
        with setup.setting_up(self, arguments["cpu_group"], weights, buffer, is_deferred):
            original(self, *args, **kwargs)

    return __init__  # type: ignore[return-value]


def _tensors(
    arguments: Mapping[str, Any],
) -> tuple[Sequence[Sequence[Tensor]], Sequence[Tensor] | None]:
    """Expert weights by layer, and the receive buffer; to 0.22.1 one layer and no buffer."""
    if "all_expert_weights" in arguments:
        return arguments["all_expert_weights"], arguments["expert_buffer"]
    return [arguments["expert_weights"]], None


def _wrap_remote_agents(original: FunctionType, module: ModuleType) -> FunctionType:
    from vllm_moe_dp_fix.nixl import setup

    @functools.wraps(original)
    def _init_remote_agents(self: Any) -> None:
        setup.meet_peers(self)

    return _init_remote_agents  # type: ignore[return-value]


def _wrap_exchange_meta(original: FunctionType, module: ModuleType) -> FunctionType:
    from vllm_moe_dp_fix.nixl import addresses, setup

    @functools.wraps(original)
    def _exchange_remote_send_meta(self: Any) -> None:
        """What vLLM keeps of a peer, in the form that the release reads."""
        if hasattr(self, "_all_expert_weights"):
            tensors = [tensor for in_layer in self._all_expert_weights for tensor in in_layer]
            peers = setup.exchange_addresses(self, tensors)
            found = addresses.by_tensor(setup.layout_of(self), peers)
            self._remote_send_meta.update(found)
            return
        # To 0.22.1 peers read a buffer that experts are packed in.
        peers = setup.exchange_addresses(self, [self._send_buffer])
        for peer, ((base,), device_id) in peers.items():
            if hasattr(self, "_peer_partition_bytes"):  # to 0.20.2
                self._remote_send_meta[peer] = (base, self._peer_partition_bytes, device_id)
            else:
                self._remote_send_meta[peer] = (base, device_id)

    return _exchange_remote_send_meta  # type: ignore[return-value]


def _wrap_deferred(original: FunctionType, module: ModuleType) -> FunctionType:
    from vllm_moe_dp_fix.nixl import setup

    @functools.wraps(original)
    def _ensure_remote_state(self: Any) -> None:
        with setup.exchanging_later(self):
            original(self)

    return _ensure_remote_state  # type: ignore[return-value]


# --- transfers ------------------------------------------------------------------------------


def _wrap_add_recv(original: FunctionType, module: ModuleType) -> FunctionType:
    from vllm_moe_dp_fix.nixl import transfers

    @functools.wraps(original)
    def add_recv(self: Any, tensors: Any, src_rank: int, *expert_id: Any, **named: Any) -> None:
        expert = next(iter((*expert_id, *named.values())), None)  # none in 0.20
        with transfers.reading(self, src_rank, expert):
            original(self, tensors, src_rank, *expert_id, **named)

    return add_recv  # type: ignore[return-value]


def _wrap_create_transfer(original: FunctionType, module: ModuleType) -> FunctionType:
    from vllm_moe_dp_fix.nixl import transfers

    @functools.wraps(original)
    def create(self: Any, src: int, *args: Any) -> Any:
        created = original(self, src, *args)
        handle = created[2] if isinstance(created, tuple) else created
        transfers.remember(self, handle, src)
        return created

    return create  # type: ignore[return-value]


def _wrap_wait(original: FunctionType, module: ModuleType) -> FunctionType:
    from vllm_moe_dp_fix.nixl import transfers

    @functools.wraps(original)
    def _wait_for_all_transfers(self: Any, handles: list[int]) -> None:
        with transfers.waiting_for(self, handles):
            original(self, handles)

    return _wait_for_all_transfers  # type: ignore[return-value]


def _wrap_execute(original: FunctionType, module: ModuleType) -> FunctionType:
    from vllm_moe_dp_fix.nixl import transfers

    @functools.wraps(original)
    def execute(self: Any, *args: Any, **kwargs: Any) -> None:
        with transfers.leaving_together(self):
            original(self, *args, **kwargs)

    return execute  # type: ignore[return-value]


# --- probes ---------------------------------------------------------------------------------

# Where the collectives of a repaired communicator are.
_EXCHANGES = {"vllm_moe_dp_fix.nixl.exchange", "vllm.distributed.eplb.nixl.exchange"}


class _Wrapper:
    """Stands for NIXL's agent, so that neither NIXL nor a device is needed."""

    def __init__(self, *_: object) -> None:
        pass

    def get_reg_descs(self, tensors: Any) -> list[object]:
        return list(tensors)

    def register_memory(self, _: object) -> None:
        pass

    def get_agent_metadata(self) -> bytes:
        return b"agent"

    def add_remote_agent(self, _: object) -> str:
        return "peer"

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class _FailingWrapper(_Wrapper):
    def register_memory(self, _: object) -> None:
        raise OSError("no memory can be registered")


class _Group:
    """Two ranks of which this process is one; what the other one says is known beforehand."""

    def __init__(self, rank: int, peer: list[Any] | None = None) -> None:
        self._rank, self._peer = rank, peer
        self.said: list[Any] = []
        self.mine = b""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return self._rank

    def gather(self, item: Any) -> list[Any]:
        """This rank's item and the peer's, who says the same unless told otherwise."""
        step = len(self.said)
        self.said.append(item)
        other = item if self._peer is None else self._peer[step]
        return [item, other] if self._rank == 0 else [other, item]


def _set_up(
    module: ModuleType,
    group: _Group,
    weights: Sequence[Sequence[Tensor]],
    wrapper: type[_Wrapper] = _Wrapper,
) -> Any:
    """Sets a real communicator up, over a group and an agent that are none."""

    def all_gather_object(output: list[Any], item: Any, group: _Group) -> None:
        output[:] = group.gather(item)

    distributed = SimpleNamespace(all_gather_object=all_gather_object)
    names: dict[str, Any] = {
        "torch": _Overlay(module.torch, distributed=distributed),
        "get_pp_group": lambda: SimpleNamespace(world_size=1, rank_in_group=0),
    }
    if hasattr(module, "nixl_utils"):
        names["nixl_utils"] = SimpleNamespace(NixlWrapper=wrapper, nixl_agent_config=None)
    else:  # 0.20
        names |= {"NixlWrapper": wrapper, "nixl_agent_config": None}
    with (
        overridden(module, **names),
        _exchanging(gather=lambda group, item: group.gather(item), spread=_no_details),
    ):
        if "all_expert_weights" in inspect.signature(getattr(module, _CLASS)).parameters:
            buffer = [tensor.clone() for tensor in weights[0]]
            return getattr(module, _CLASS)(group, weights, buffer)
        return getattr(module, _CLASS)(group, weights[0])


@contextmanager
def _exchanging(**functions: Callable[..., Any]) -> Iterator[None]:
    """Puts functions in place of the collectives of a communicator that has been repaired."""
    with ExitStack() as stack:
        for name in _EXCHANGES & sys.modules.keys():
            stack.enter_context(overridden(sys.modules[name], **functions))
        yield


class _Overlay:
    """A module with some names of its own."""

    def __init__(self, module: Any, **names: object) -> None:
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _no_details(group: _Group, data: bytes | None, size: int) -> bytes:
    """The peer sends no details: this rank's own stand for them."""
    group.mine = data or group.mine
    return group.mine


def _two_kinds(module: ModuleType, one: Tensor, other: Tensor) -> str | None:
    """What rank 0 says to a peer that holds ``other``, as an error; None where there is none."""
    peer = _Group(1)
    _set_up(module, peer, [[other]])
    try:
        _set_up(module, _Group(0, peer.said), [[one]])
    except (RuntimeError, AssertionError) as error:
        return str(error)
    return None


def _probe_f4a(module: ModuleType) -> str | None:
    import torch

    one = torch.zeros(2, 8, dtype=torch.uint8)
    if _two_kinds(module, one, one.view(torch.int8)) is None:
        return "another dtype of the same size passes"
    return None


def _probe_f4b(module: ModuleType) -> str | None:
    import torch

    group = _Group(0)
    with suppress(RuntimeError):
        _set_up(module, group, [[torch.zeros(2, 8, dtype=torch.uint8)]], _FailingWrapper)
    return None if group.said else "a rank that cannot register its memory leaves its peers waiting"


def _probe_f4c(module: ModuleType) -> str | None:
    import torch

    one, other = (torch.zeros(2, size, dtype=torch.uint8) for size in (8, 16))
    return None if _two_kinds(module, one, other) else "another number of bytes an expert passes"


def _probe_f4d(module: ModuleType) -> str | None:
    events: list[str] = []

    class Reading(_Wrapper):
        def check_xfer_state(self, _: object) -> str:
            events.append("read")
            return "DONE"

    def barrier(*_: object, **__: object) -> Any:
        events.append("barrier")
        return SimpleNamespace(wait=lambda **_: None)

    _move(module, Reading, barrier)
    if events[-1:] == ["barrier"] and "read" in events:
        return None
    return "a rank goes on while its peers still read from it"


def _move(module: ModuleType, wrapper: type[_Wrapper], barrier: Callable[..., Any]) -> None:
    """Reads an expert of rank 1, over a group and an agent that are none."""
    import numpy
    import torch

    weights = torch.zeros(2, 8, dtype=torch.uint8)
    communicator = _set_up(module, _Group(0), [[weights]], wrapper)
    cuda = SimpleNamespace(
        stream=lambda _: nullcontext(),
        current_stream=lambda: SimpleNamespace(synchronize=lambda: None),
    )
    distributed = SimpleNamespace(monitored_barrier=barrier, all_reduce=barrier)
    here = _Overlay(module.torch, cuda=cuda, distributed=distributed)
    everywhere = numpy.arange(4)
    with overridden(module, torch=here), _exchanging(all_fine=barrier):
        if hasattr(communicator, "set_transfer_context"):  # from 0.23.0
            communicator.set_transfer_context(everywhere, 0)
            communicator.add_recv([weights[0]], 1, 2)
            communicator.execute()
        elif "old_indices" in inspect.signature(communicator.execute).parameters:
            communicator.add_recv([weights[0]], 1, 2)
            communicator.execute(old_indices=everywhere)
        else:  # 0.20
            communicator.add_recv(weights[0], 1)
            communicator.execute()


# --- record ---------------------------------------------------------------------------------

F4A = Fault(
    id="F4a",
    summary="Only byte counts are compared, peer by peer: another dtype of the same size passes, "
    "and the error does not say what differs on which rank",
    upstream=(),
    removable="when vLLM compares dtype and layout over all ranks at once",
    probe=_probe_f4a,
)
F4B = Fault(
    id="F4b",
    summary="A rank that fails alone while NIXL is set up leaves its peers waiting for 30 minutes",
    upstream=(),
    removable="when vLLM's ranks exchange their status first",
    probe=_probe_f4b,
)
F4C = Fault(
    id="F4c",
    summary="The ranks' expert weights are not compared at all: experts are corrupted silently",
    upstream=(),
    removable="with vLLM 0.22; 0.23.0 compares byte counts",
    probe=_probe_f4c,
)
F4D = Fault(
    id="F4d",
    summary="A rank goes on, and overwrites its send buffer, while peers still read from it",
    upstream=(),
    removable="with vLLM 0.22, fixed in 0.23.0",
    probe=_probe_f4d,
)

FIX = Fix(
    id="nixl_eplb_validator",
    summary="EPLB over NIXL: one report on all ranks, and nobody left waiting",
    repairs=(
        Repair(
            module=EPLB_COMMUNICATOR,
            faults=(F4A, F4B, F4C),
            patches=(
                Patch((f"{_CLASS}.__init__",), _wrap_init),
                Patch((f"{_CLASS}._init_remote_agents",), _wrap_remote_agents),
                Patch((f"{_CLASS}._exchange_remote_send_meta",), _wrap_exchange_meta),
                Patch((f"{_CLASS}._ensure_remote_state",), _wrap_deferred, is_optional=True),
                Patch((f"{_CLASS}.add_recv",), _wrap_add_recv),
                Patch(
                    (f"{_CLASS}._create_peer_xfer", f"{_CLASS}._get_or_create_xfer"),
                    _wrap_create_transfer,
                ),
                Patch((f"{_CLASS}._wait_for_all_transfers",), _wrap_wait),
            ),
            on_cpu=False,
        ),
        Repair(
            module=EPLB_COMMUNICATOR,
            faults=(F4D,),
            patches=(Patch((f"{_CLASS}.execute",), _wrap_execute),),
            on_cpu=False,
        ),
    ),
)
