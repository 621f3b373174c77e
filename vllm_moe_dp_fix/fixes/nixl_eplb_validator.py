# SPDX-License-Identifier: Apache-2.0
"""The NIXL communicator of EPLB: all ranks agree before experts move, and fail together.

Setting up has two exchanges, as in vLLM. The first one says of every rank whether its own part
went well, and what it holds, as a digest; the second one whether it could connect to its peers, and
where its tensors lie. A rank that fails before the first exchange still takes part in it. So each
rank learns of each failure, and raises the same text.
"""

from __future__ import annotations

import functools
import inspect
import logging
import pickle
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from types import FunctionType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

from vllm_moe_dp_fix.patching import overridden
from vllm_moe_dp_fix.records import Fault, Fix, Patch, Repair
from vllm_moe_dp_fix.registry import EPLB_COMMUNICATOR

if TYPE_CHECKING:
    import torch

    from vllm_moe_dp_fix.nixl.layout import Labels, Layout
    from vllm_moe_dp_fix.nixl.report import Described

    Tensor: TypeAlias = torch.Tensor

logger = logging.getLogger("vllm.moe_dp_fix")

_CLASS = "NixlEplbCommunicator"
_SETUP = "_moe_dp_fix_setup"  # attributes that a communicator gets
_EXPERT = "_moe_dp_fix_expert"
_MOVES = "_moe_dp_fix_moves"


class _Hello(NamedTuple):
    """What a rank says first."""

    failure: str | None
    agent: bytes | None = None
    layout: bytes = b""
    labels: bytes = b""


class _Connected(NamedTuple):
    """What a rank says when it knows its peers."""

    failure: str | None
    device_id: int
    addresses: bytes


class _Setup:
    """The set-up of one communicator.

    Attributes:
        layout, labels: Of this rank, once its tensors have been looked at.
        failure: What went wrong here since the last exchange.
        has_met: The first exchange took place.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.layout: Layout | None = None
        self.labels: Labels | None = None
        self.failure: str | None = None
        self.has_met = False

    @functools.cached_property
    def tensors(self) -> dict[tuple[int, int], tuple[int, int]]:
        """(layer, tensor) -> place in the list of addresses, and bytes an expert."""
        assert self.layout is not None
        layouts = self.layout.tensors.items()
        return {key: (index, layout.nbytes) for index, (key, layout) in enumerate(layouts)}

    def meet(self, agent: bytes | None, failure: str | None) -> list[_Hello]:
        """The first exchange. Raises where a rank failed or holds something else."""
        from vllm_moe_dp_fix.nixl import exchange, report

        self.has_met = True
        hello = _Hello(failure)
        if failure is None and self.layout is not None and self.labels is not None:
            hello = _Hello(None, agent, self.layout.digest, self.labels.digest)
        hellos = exchange.gather(self.group, hello)
        failures = {rank: h.failure for rank, h in enumerate(hellos) if h.failure is not None}
        if failures:
            raise exchange.NixlEplbError(report.failures(failures, len(hellos)))
        kinds: dict[tuple[bytes, bytes], list[int]] = {}
        for rank, other in enumerate(hellos):
            kinds.setdefault((other.layout, other.labels), []).append(rank)
        if len(kinds) > 1:
            largest_first = sorted(kinds.values(), key=lambda ranks: (-len(ranks), ranks))
            groups = self._describe_all(largest_first[:_MAX_KINDS])
            if len({layout for layout, _ in kinds}) > 1:
                raise exchange.NixlEplbError(report.differences(groups, len(hellos)))
            if self.group.rank() == 0:
                logger.warning("%s", report.label_differences(groups))
        return hellos

    def _describe_all(self, kinds: list[list[int]]) -> list[Described]:
        """What the ranks of each kind hold, as the first of them says."""
        from vllm_moe_dp_fix.nixl import exchange
        from vllm_moe_dp_fix.nixl.report import Described

        mine = pickle.dumps((self.layout, self.labels))
        sizes = exchange.gather(self.group, len(mine))
        described = []
        for ranks in kinds:
            speaks = self.group.rank() == ranks[0]
            said = exchange.spread(self.group, mine if speaks else None, sizes[ranks[0]])
            described.append(Described(tuple(ranks), *pickle.loads(said)))
        return described


_MAX_KINDS = 16  # of layouts that are told apart in a report


# --- set-up ---------------------------------------------------------------------------------


def _wrap_init(original: FunctionType, module: ModuleType) -> FunctionType:
    from vllm_moe_dp_fix.nixl import layout

    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        call = signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        arguments = call.arguments
        setup = _Setup(arguments["cpu_group"])
        setattr(self, _SETUP, setup)
        is_deferred = arguments.get("defer_remote_setup", False)
        weights, buffer = _tensors(arguments)
        try:
            setup.labels = layout.find_labels(weights)
            setup.layout = layout.describe(weights, buffer, setup.labels)
            original(self, *args, **kwargs)
        except Exception as error:
            report = _report_in(error)
            if report is None and not setup.has_met and not is_deferred:
                report = _fail_together(setup, error)
            _give_up(self, error, report)

    return __init__  # type: ignore[return-value]


def _tensors(
    arguments: Mapping[str, Any],
) -> tuple[Sequence[Sequence[Tensor]], Sequence[Tensor] | None]:
    """Expert weights by layer, and the receive buffer; to 0.22.1 one layer and no buffer."""
    if "all_expert_weights" in arguments:
        return arguments["all_expert_weights"], arguments["expert_buffer"]
    return [arguments["expert_weights"]], None


def _fail_together(setup: _Setup, error: Exception) -> Exception | None:
    """Tells the peers that this rank failed before the first exchange; the common error."""
    from vllm_moe_dp_fix.nixl.exchange import NixlEplbError

    try:
        setup.meet(None, _in_words(error))
    except NixlEplbError as report:
        return report
    return None


def _in_words(error: BaseException) -> str:
    """An error and its causes: vLLM wraps them in one that says only in which step it was."""
    words = []
    cause: BaseException | None = error
    while cause is not None:
        words.append(f"{type(cause).__name__}: {cause}"[:400])
        cause = cause.__cause__
    return " <- ".join(words)


def _report_in(error: BaseException) -> Exception | None:
    """The common error, which vLLM wraps in another one."""
    from vllm_moe_dp_fix.nixl.exchange import NixlEplbError

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, NixlEplbError):
            return cause
        cause = cause.__cause__
    return None


def _give_up(communicator: Any, error: Exception, report: Exception | None) -> NoReturn:
    """Leaves nothing registered, and raises what all ranks say, or else what this one met."""
    _release(communicator)
    if report is None or report is error:
        raise error
    # Where the report caused the error, the error must not cause the report as well.
    raise report from report.__cause__ if _report_in(error) is report else error


def _release(communicator: Any) -> None:
    """Leaves nothing registered and no agent behind, whatever still holds the communicator."""
    wrapper = communicator.__dict__.pop("_nixl_wrapper", None)
    agents = communicator.__dict__.get("_remote_agents", {})
    registered = communicator.__dict__.get("_registered_descs", [])
    if (one := communicator.__dict__.get("_registered_desc")) is not None:
        registered = [one]
        communicator._registered_desc = None
    for name in agents.values():
        with suppress(Exception):
            wrapper.remove_remote_agent(name)
    for descriptors in registered:
        with suppress(Exception):
            wrapper.deregister_memory(descriptors)
    agents.clear()
    registered.clear()


def _wrap_remote_agents(original: FunctionType, module: ModuleType) -> FunctionType:
    @functools.wraps(original)
    def _init_remote_agents(self: Any) -> None:
        setup: _Setup = getattr(self, _SETUP)
        agent, failure = None, None
        try:
            agent = self._nixl_wrapper.get_agent_metadata()
        except Exception as error:
            failure = _in_words(error)
        hellos = setup.meet(agent, failure)
        for peer, hello in enumerate(hellos):
            if peer == self._rank or setup.failure is not None:
                continue
            try:
                self._remote_agents[peer] = self._nixl_wrapper.add_remote_agent(hello.agent)
            except Exception as error:
                setup.failure = f"connecting to rank {peer}: {_in_words(error)}"

    return _init_remote_agents  # type: ignore[return-value]


def _wrap_exchange_meta(original: FunctionType, module: ModuleType) -> FunctionType:
    from vllm_moe_dp_fix.nixl import exchange, report

    @functools.wraps(original)
    def _exchange_remote_send_meta(self: Any) -> None:
        setup: _Setup = getattr(self, _SETUP)
        tensors = _sent_tensors(self)
        addresses = array("q", [tensor.data_ptr() for tensor in tensors.values()]).tobytes()
        mine = _Connected(setup.failure, self._cuda_device_id, addresses)
        said: list[_Connected] = exchange.gather(setup.group, mine)
        failures = {rank: c.failure for rank, c in enumerate(said) if c.failure is not None}
        if failures:
            raise exchange.NixlEplbError(report.failures(failures, len(said)))
        for peer in self._remote_agents:
            bases = array("q")
            bases.frombytes(said[peer].addresses)
            self._remote_send_meta[peer] = _peer_meta(self, tensors, bases, said[peer].device_id)

    return _exchange_remote_send_meta  # type: ignore[return-value]


def _sent_tensors(communicator: Any) -> dict[Any, Tensor]:
    """What peers read: the expert weights, or to 0.22.1 a buffer that they are packed in."""
    if hasattr(communicator, "_all_expert_weights"):
        return {
            (layer, index): tensor
            for layer, in_layer in enumerate(communicator._all_expert_weights)
            for index, tensor in enumerate(in_layer)
        }
    return {"send buffer": communicator._send_buffer}


def _peer_meta(
    communicator: Any, tensors: dict[Any, Tensor], bases: array[int], device_id: int
) -> Any:
    """What vLLM keeps of a peer, in the form that the release reads."""
    if hasattr(communicator, "_all_expert_weights"):
        return _PeerTensors(getattr(communicator, _SETUP).tensors, bases, device_id)
    if hasattr(communicator, "_peer_partition_bytes"):  # to 0.20.2
        return (bases[0], communicator._peer_partition_bytes, device_id)
    return (bases[0], device_id)


class _PeerTensors(Mapping[tuple[int, int], tuple[int, int, int]]):
    """(layer, tensor) -> (address, bytes an expert, device), of a peer that holds what we hold."""

    def __init__(
        self, tensors: Mapping[tuple[int, int], tuple[int, int]], bases: array[int], device_id: int
    ) -> None:
        self._tensors, self._bases, self._device_id = tensors, bases, device_id

    def __getitem__(self, key: tuple[int, int]) -> tuple[int, int, int]:
        position, nbytes = self._tensors[key]
        return self._bases[position], nbytes, self._device_id

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _wrap_deferred(original: FunctionType, module: ModuleType) -> FunctionType:
    @functools.wraps(original)
    def _ensure_remote_state(self: Any) -> None:
        try:
            original(self)
        except Exception as error:
            _give_up(self, error, _report_in(error))

    return _ensure_remote_state  # type: ignore[return-value]


# --- transfers ------------------------------------------------------------------------------


def _wrap_add_recv(original: FunctionType, module: ModuleType) -> FunctionType:
    """Remembers which expert the transfers that begin now are of, and names it in errors."""
    from vllm_moe_dp_fix.nixl.exchange import NixlEplbError

    @functools.wraps(original)
    def add_recv(self: Any, tensors: Any, src_rank: int, *expert_id: Any, **named: Any) -> None:
        self.__dict__[_EXPERT] = next(iter((*expert_id, *named.values())), None)  # none in 0.20
        try:
            original(self, tensors, src_rank, *expert_id, **named)
        except AssertionError:
            raise
        except Exception as error:
            raise NixlEplbError(
                f"NIXL EPLB: {_what_moves(self, src_rank)} cannot be read: {_in_words(error)}"
            ) from error

    return add_recv  # type: ignore[return-value]


def _wrap_create_transfer(original: FunctionType, module: ModuleType) -> FunctionType:
    """Remembers of each transfer what it moves."""

    @functools.wraps(original)
    def create(self: Any, src: int, *args: Any) -> Any:
        created = original(self, src, *args)
        handle = created[2] if isinstance(created, tuple) else created
        self.__dict__.setdefault(_MOVES, {})[handle] = _what_moves(self, src)
        return created

    return create  # type: ignore[return-value]


def _what_moves(communicator: Any, src: int) -> str:
    state = communicator.__dict__
    layer = state.get("_layer_idx")
    experts = state.get("_recv_map", {}).get(src) or [state.get(_EXPERT)]
    known = ", ".join(str(expert) for expert in experts if expert is not None)
    return (
        f"rank {communicator._rank} from rank {src}"
        + (f", layer {layer}" if layer is not None else "")
        + (f", expert {known}" if known else "")
    )


def _wrap_wait(original: FunctionType, module: ModuleType) -> FunctionType:
    from vllm_moe_dp_fix.nixl.exchange import NixlEplbError

    @functools.wraps(original)
    def _wait_for_all_transfers(self: Any, handles: list[int]) -> None:
        moves = self.__dict__.get(_MOVES, {})
        wrapper = self._nixl_wrapper
        try:
            original(self, handles)
        except Exception as error:
            for handle in handles:
                try:
                    state = wrapper.check_xfer_state(handle)
                except Exception as cause:
                    state = f"{type(cause).__name__}: {cause}"
                if state not in ("DONE", "PROC"):
                    what = moves.get(handle, "an unknown transfer")
                    raise NixlEplbError(
                        f"NIXL EPLB: NIXL transfer failed with state={state}: {what}"
                    ) from error
            raise
        moves.clear()

    return _wait_for_all_transfers  # type: ignore[return-value]


def _wrap_execute(original: FunctionType, module: ModuleType) -> FunctionType:
    """No rank leaves, and packs anew, while a peer still reads from it."""
    from vllm_moe_dp_fix.nixl import exchange

    @functools.wraps(original)
    def execute(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original(self, *args, **kwargs)
        except Exception:
            # Before its first read a rank fails in front of vLLM's barrier, and no peer is here.
            if self.__dict__.pop(_MOVES, None):
                with suppress(exchange.NixlEplbError):
                    exchange.all_fine(self._cpu_group, False)
            raise
        if not exchange.all_fine(self._cpu_group, True):
            raise exchange.NixlEplbError(
                "NIXL EPLB: the transfer failed on another rank, whose own log says why"
            )

    return execute  # type: ignore[return-value]


# --- probes ---------------------------------------------------------------------------------


class _Wrapper:
    """Stands for NIXL's agent, so that a probe needs neither NIXL nor memory of a device."""

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
    from vllm_moe_dp_fix.nixl import exchange

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
        overridden(exchange, gather=lambda group, item: group.gather(item), spread=_no_details),
    ):
        if "all_expert_weights" in inspect.signature(getattr(module, _CLASS)).parameters:
            buffer = [tensor.clone() for tensor in weights[0]]
            return getattr(module, _CLASS)(group, weights, buffer)
        return getattr(module, _CLASS)(group, weights[0])


class _Overlay:
    """A module with some names of its own."""

    def __init__(self, module: Any, **names: object) -> None:
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _no_details(group: _Group, data: bytes | None, size: int) -> bytes:
    """The probes' peer sends no details: this rank's own stand for them."""
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
    import numpy
    import torch

    from vllm_moe_dp_fix.nixl import exchange

    events: list[str] = []

    class Reading(_Wrapper):
        def check_xfer_state(self, _: object) -> str:
            events.append("read")
            return "DONE"

    def barrier(*_: object, **__: object) -> Any:
        events.append("barrier")
        return SimpleNamespace(wait=lambda **_: None)

    weights = torch.zeros(2, 8, dtype=torch.uint8)
    communicator = _set_up(module, _Group(0), [[weights]], Reading)
    cuda = SimpleNamespace(
        stream=lambda _: nullcontext(),
        current_stream=lambda: SimpleNamespace(synchronize=lambda: None),
    )
    distributed = SimpleNamespace(monitored_barrier=barrier, all_reduce=barrier)
    here = _Overlay(module.torch, cuda=cuda, distributed=distributed)
    everywhere = numpy.arange(4)
    with overridden(module, torch=here), overridden(exchange, all_fine=barrier):
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
    if events[-1:] == ["barrier"] and "read" in events:
        return None
    return "a rank goes on while its peers still read from it"


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
