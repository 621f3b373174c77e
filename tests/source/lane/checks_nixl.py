# SPDX-License-Identifier: Apache-2.0
"""EPLB over NIXL: real agents over UCX in DRAM, the real communicator of each release.

Set by hand is the kind of memory alone, which vLLM fixes to VRAM.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import re
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from checks_dispatch import same
from world import Dies, Rank

LAYERS, EXPERTS = 2, 2
WAIT_S = 12
Weights = list[list[torch.Tensor]]


def weights(
    rank: int,
    layers: int = LAYERS,
    experts: int = EXPERTS,
    dtype: torch.dtype = torch.uint8,
    width: int = 96,
) -> Weights:
    """What a rank holds: a packed weight, its scales and a bias in each layer, all different."""
    generator = torch.Generator().manual_seed(100 + rank)

    def tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        item = torch.empty(0, dtype=dtype).element_size()
        raw = torch.randint(256, (*shape[:-1], shape[-1] * item), generator=generator)
        return raw.to(torch.uint8).view(dtype)

    return [
        [
            tensor(dtype, experts, width),
            tensor(torch.uint8, experts, 6),
            tensor(torch.bfloat16, experts, 16),
        ]
        for _ in range(layers)
    ]


class Agents:
    """Real NIXL agents in DRAM; ``fails`` names the method that raises on this rank."""

    def __init__(self, fails: str = "") -> None:
        from nixl._api import nixl_agent

        self.alive = 0
        owner = self

        class Agent(nixl_agent):  # type: ignore[misc]
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                self.registered: list[Any] = []
                self.peers: list[Any] = []
                owner.alive += 1

            def __del__(self) -> None:
                owner.alive -= 1
                super().__del__()

            def get_xfer_descs(self, descs: Any, mem_type: Any = None, *rest: Any) -> Any:
                return super().get_xfer_descs(descs, mem_type and "DRAM", *rest)

            def register_memory(self, *args: Any, **kwargs: Any) -> Any:
                if fails == "register_memory":
                    raise RuntimeError("no memory left to register")
                return super().register_memory(*args, **kwargs)

            def add_remote_agent(self, *args: Any) -> Any:
                if fails == "add_remote_agent":
                    raise RuntimeError("the peer cannot be reached")
                return super().add_remote_agent(*args)

        self.agent = Agent


def communicator(
    rank: Rank, held: Weights, agents: Agents | None = None, deferred: bool = False
) -> Any:
    """The communicator of this rank, set up together with the others."""
    from vllm.distributed import get_dp_group

    module: Any = importlib.import_module("vllm.distributed.eplb.eplb_communicator")
    place = getattr(module, "nixl_utils", module)
    place.NixlWrapper = (agents or Agents()).agent
    made = module.NixlEplbCommunicator
    names = inspect.signature(made).parameters
    group = get_dp_group().cpu_group
    if "expert_weights" in names:
        stream = SimpleNamespace(synchronize=lambda: None, device_index=0)
        communicator = made(group, held[0])
        communicator._cuda_stream = stream
        return communicator
    buffer = [torch.zeros_like(tensor) for tensor in held[0]]
    options = {"defer_remote_setup": True} if "defer_remote_setup" in names and deferred else {}
    communicator = made(group, held, buffer, **options)
    communicator.buffer = buffer
    return communicator


def move(communicator: Any, rank: Rank, held: Weights, layer: int) -> list[torch.Tensor]:
    """Moves expert 1 of the next rank here, and ours to the rank before; what arrived."""
    import numpy

    world_size = rank.dp_size
    source, target = (rank.rank + 1) % world_size, (rank.rank - 1) % world_size
    experts = held[layer][0].shape[0]
    everywhere = numpy.arange(world_size * experts)
    wanted, given = source * experts + 1, rank.rank * experts + 1
    outgoing = [tensor[1] for tensor in held[layer]]
    if hasattr(communicator, "set_transfer_context"):
        communicator.set_transfer_context(everywhere, layer)
        incoming = [tensor[0] for tensor in communicator.buffer]
    else:
        incoming = [torch.zeros_like(tensor) for tensor in outgoing]
    if "expert_id" in inspect.signature(communicator.add_recv).parameters:
        communicator.add_send(outgoing, target, given)
        communicator.add_recv(incoming, source, wanted)
    else:  # 0.20
        for out, into in zip(outgoing, incoming, strict=True):
            communicator.add_send(out, target)
            communicator.add_recv(into, source)
    if "old_indices" in inspect.signature(communicator.execute).parameters:
        communicator.execute(old_indices=everywhere)
    else:
        communicator.execute()
    return incoming


def moves(rank: Rank) -> None:
    """Experts arrive byte for byte, layer by layer."""
    held = weights(rank.rank)
    made = communicator(rank, held)
    source = weights((rank.rank + 1) % rank.dp_size)
    layers = range(LAYERS if hasattr(made, "set_transfer_context") else 1)
    for _ in range(2):
        for layer in layers:
            for index, got in enumerate(move(made, rank, held, layer)):
                same(got, source[layer][index][1], f"layer {layer}, tensor {index}")
    _wait_for_all()


def _wait_for_all() -> None:
    """Others may still read from this rank, up to 0.22.1."""
    from vllm.distributed import get_dp_group

    torch.distributed.barrier(get_dp_group().cpu_group)


def moves_when_deferred(rank: Rank) -> None:
    """Elastic EP: construction waits for nobody, the first transfer sets the rest up."""
    held = weights(rank.rank)
    if rank.rank:
        time.sleep(0.5)
    made = communicator(rank, held, deferred=True)
    if made._remote_agents and hasattr(made, "_ensure_remote_state"):
        raise AssertionError("peers were met while the communicator was made")
    source = weights((rank.rank + 1) % rank.dp_size)
    for index, got in enumerate(move(made, rank, held, 0)):
        same(got, source[0][index][1], f"tensor {index}")
    _wait_for_all()


# --- errors on all ranks --------------------------------------------------------------------


def _must_end(error: BaseException) -> None:
    """An error that is among its own causes hangs who looks for the first of them."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None:
        if cause in seen:
            raise AssertionError(f"the causes go round: {seen}")
        seen.append(cause)
        cause = cause.__cause__


def _word_of_all(rank: Rank, call: Callable[[], Any]) -> str:
    """The error that the call ends with on every rank, the same on all; in bounded time."""
    said: list[str] = []
    raised: list[Exception] = []

    def attempt() -> None:
        try:
            call()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
            raised.append(error)
        else:
            said.append("")

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    _calls.append(None)
    _meet(rank, f"call {len(_calls)}")
    if not said:
        raise AssertionError(f"left waiting for {WAIT_S} s by a rank that failed")
    if not said[0]:
        raise AssertionError("taken without a word")
    if "NIXL EPLB" not in said[0] or re.search("init failed: [a-z ]+$", said[0]):
        raise AssertionError(f"this rank alone says: {said[0]}")
    _must_end(raised[0])
    from vllm.distributed import get_dp_group

    everywhere: list[Any] = [None] * rank.dp_size
    torch.distributed.all_gather_object(everywhere, said[0], group=get_dp_group().cpu_group)
    if set(everywhere) != {said[0]}:
        raise AssertionError(f"another error on each rank: {everywhere}")
    return said[0]


_calls: list[None] = []


def _meet(rank: Rank, name: str) -> None:
    """Waits for the others, who may wait in vain; the end of a process would end their wait."""
    store = torch.distributed.distributed_c10d._get_default_store()
    store.add(name, 1)
    until = time.monotonic() + 2 * WAIT_S
    while store.add(name, 0) < rank.dp_size and time.monotonic() < until:
        time.sleep(0.05)


def _must_say(text: str, *words: object) -> None:
    missing = [str(word) for word in words if str(word) not in text]
    if missing:
        raise AssertionError(f"the error does not name {missing}: {text}")
    if len(text.splitlines()) > 20:
        raise AssertionError(f"{len(text.splitlines())} lines: {text}")


def _planted(rank: Rank, odd: int, **other: Any) -> str:
    """What all ranks say where rank ``odd`` holds other weights; then that equal ones work."""
    held = weights(rank.rank, **(other if rank.rank == odd else {}))
    agents = Agents()
    text = _word_of_all(rank, lambda: communicator(rank, held, agents))
    _leaves_nothing(agents)
    moves(rank)
    return text


def _leaves_nothing(agents: Agents) -> None:
    gc.collect()
    if agents.alive:
        raise AssertionError(f"{agents.alive} agents are left behind")


def other_bytes(rank: Rank) -> None:
    for odd in (rank.dp_size - 1, 0):
        text = _planted(rank, odd, width=128)
        _must_say(text, "NIXL EPLB nbytes_per_expert mismatch for (0, 0)", 96, 128, "Likely cause")


def other_dtype(rank: Rank) -> None:
    for odd in (rank.dp_size - 1, 0):
        text = _planted(rank, odd, dtype=torch.int8)
        _must_say(text, "NIXL EPLB metadata mismatch for (0, 0)", "torch.int8", "torch.uint8")
        _must_say(text, f"rank {odd}", "dtype: ", "tensor 0")


def other_layers(rank: Rank) -> None:
    text = _planted(rank, rank.dp_size - 1, layers=LAYERS + 1)
    _must_say(text, "NIXL EPLB metadata key mismatch", "missing", f"layer {LAYERS}, tensor 0")


def real_layers(rank: Rank) -> None:
    """Tensors of vLLM's own layers are called by their parameters' names."""
    import experts

    intermediate = 128 if rank.rank == 0 else 256
    layers = [experts.build(intermediate, experts.Group(), experts=4) for _ in range(LAYERS)]
    held = [list(layer.get_expert_weights()) for layer in layers]
    text = _word_of_all(rank, lambda: communicator(rank, held))
    _must_say(text, "nbytes_per_expert", "experts.", "w13_weight", "w2_weight_scale", "rank 0")


def several_at_once(rank: Rank) -> None:
    """Another dtype on the first rank, another expert count on the last one."""
    others: dict[int, dict[str, Any]] = {
        0: {"dtype": torch.int8},
        rank.dp_size - 1: {"experts": EXPERTS + 1},
    }
    held = weights(rank.rank, **others.get(rank.rank, {}))
    text = _word_of_all(rank, lambda: communicator(rank, held))
    _must_say(text, "torch.int8", "local experts", "rank 0", f"rank {rank.dp_size - 1}")
    moves(rank)


def fails_alone(rank: Rank) -> None:
    """A rank that cannot register, cannot connect, or holds what cannot be transferred."""
    for method in ("register_memory", "add_remote_agent"):
        for odd in (rank.dp_size - 1, 0):
            agents = Agents(method if rank.rank == odd else "")
            held = weights(rank.rank)
            text = _word_of_all(rank, lambda: communicator(rank, held, agents))  # noqa: B023
            cause = "no memory left" if method == "register_memory" else "cannot be reached"
            _must_say(text, "NIXL EPLB init failed on 1 of", f"rank {odd}: ", cause)
            _leaves_nothing(agents)
            moves(rank)
    held = weights(rank.rank)
    if rank.rank == 0:
        held[0][0] = held[0][0].t().contiguous().t()  # experts lie across each other
    text = _word_of_all(rank, lambda: communicator(rank, held))
    _must_say(text, "rank 0: ", "layer 0 tensor 0", "one after the other")
    moves(rank)


def dies(rank: Rank) -> None:
    """A rank ends in the middle of setting up; the others say so."""
    if rank.rank == rank.dp_size - 1:
        raise Dies
    text = ""
    try:
        communicator(rank, weights(rank.rank))
    except RuntimeError as error:
        text = str(error)
    if "a rank died or did not come" not in text:
        raise AssertionError(f"the others say: {text}")


def transfer_fails(rank: Rank) -> None:
    """A transfer that ends in an error names peer, layer, expert and state."""
    held = weights(rank.rank)
    made = communicator(rank, held)
    source = (rank.rank + 1) % rank.dp_size
    made._nixl_wrapper.check_xfer_state = lambda _: "ERR"
    try:
        move(made, rank, held, 0)
    except RuntimeError as error:
        words: Sequence[object] = ("state=ERR", f"from rank {source}")
        if hasattr(made, "set_transfer_context"):
            words = (*words, "layer 0", f"expert {source * EXPERTS + 1}")
        _must_say(str(error), *words)
    else:
        raise AssertionError("taken without a word")
    finally:
        _wait_for_all()


def other_version(rank: Rank) -> None:
    """Transfers do not depend on vLLM's version: experts move all the same."""
    import vllm

    version = "0.0.1" if rank.rank == 0 else vllm.__version__
    with mock.patch.object(vllm, "__version__", version):
        moves(rank)


def one_rank(rank: Rank) -> None:
    """A group of one has nobody to wait for."""
    communicator(rank, weights(0))


def waits_for_readers(rank: Rank) -> None:
    """A rank leaves a transfer only when its peers have read from it."""
    held = weights(rank.rank)
    made = communicator(rank, held)
    _wait_for_all()
    slow = rank.rank == rank.dp_size - 1
    wrapper, ready = made._nixl_wrapper, time.monotonic() + 1.5
    check = wrapper.check_xfer_state
    if slow:  # its reads take long
        wrapper.check_xfer_state = lambda handle: (
            "PROC" if time.monotonic() < ready else check(handle)
        )
    began = time.monotonic()
    move(made, rank, held, 0)
    took = time.monotonic() - began
    _wait_for_all()
    if took < 0.5:
        raise AssertionError("this rank goes on while its peers still read from it")
