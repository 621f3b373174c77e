# SPDX-License-Identifier: Apache-2.0
"""Setting up the NIXL communicator of EPLB: all ranks agree, or all fail with the same text.

There are two exchanges. The first one says of every rank whether its own part went well, and what
it holds, as a digest; the second one whether it could connect to its peers, and where its tensors
lie. A rank that fails before the first exchange still takes part in it.
"""

from __future__ import annotations

import logging
import pickle
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from vllm_moe_dp_fix.nixl import exchange, layout, report
from vllm_moe_dp_fix.nixl.exchange import NixlEplbError
from vllm_moe_dp_fix.nixl.report import Described

if TYPE_CHECKING:
    import torch

    from vllm_moe_dp_fix.nixl.layout import Labels, Layout

logger = logging.getLogger("vllm.moe_dp_fix")

_SETUP = "_moe_dp_fix_setup"  # attribute that a communicator gets
_MAX_KINDS = 16  # of layouts that are told apart in a report


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


class Setup:
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

    def meet(self, agent: bytes | None, failure: str | None) -> list[_Hello]:
        """The first exchange. Raises where a rank failed or holds something else."""
        self.has_met = True
        hello = _Hello(failure)
        if failure is None and self.layout is not None and self.labels is not None:
            hello = _Hello(None, agent, self.layout.digest, self.labels.digest)
        hellos = exchange.gather(self.group, hello)
        failures = {rank: h.failure for rank, h in enumerate(hellos) if h.failure is not None}
        if failures:
            raise NixlEplbError(report.failures(failures, len(hellos)))
        kinds: dict[tuple[bytes, bytes], list[int]] = {}
        for rank, other in enumerate(hellos):
            kinds.setdefault((other.layout, other.labels), []).append(rank)
        if len(kinds) > 1:
            largest_first = sorted(kinds.values(), key=lambda ranks: (-len(ranks), ranks))
            groups = self._describe_all(largest_first[:_MAX_KINDS])
            if len({layout for layout, _ in kinds}) > 1:
                raise NixlEplbError(report.differences(groups, len(hellos)))
            if self.group.rank() == 0:
                logger.warning("%s", report.label_differences(groups))
        return hellos

    def _describe_all(self, kinds: list[list[int]]) -> list[Described]:
        """What the ranks of each kind hold, as the first of them says."""
        mine = pickle.dumps((self.layout, self.labels))
        sizes = exchange.gather(self.group, len(mine))
        described = []
        for ranks in kinds:
            speaks = self.group.rank() == ranks[0]
            said = exchange.spread(self.group, mine if speaks else None, sizes[ranks[0]])
            described.append(Described(tuple(ranks), *pickle.loads(said)))
        return described


def layout_of(communicator: Any) -> Layout:
    """What this rank holds, and its peers as well."""
    layout = _setup_of(communicator).layout
    assert layout is not None
    return layout


def _setup_of(communicator: Any) -> Setup:
    setup: Setup = getattr(communicator, _SETUP)
    return setup


@contextmanager
def setting_up(
    communicator: Any,
    group: Any,
    weights: Sequence[Sequence[torch.Tensor]],
    buffer: Sequence[torch.Tensor] | None = None,
    is_deferred: bool = False,
) -> Iterator[None]:
    """All that makes a communicator, the exchanges included: an error here is one of all ranks.

    Args:
        weights: Expert weights by layer.
        buffer: What they are received in; None where that is not their twin.
        is_deferred: The exchanges take place later, so that nobody waits for this rank now.
    """
    setup = Setup(group)
    setattr(communicator, _SETUP, setup)
    try:
        setup.labels = layout.find_labels(weights)
        setup.layout = layout.describe(weights, buffer, setup.labels)
        yield
    except Exception as error:
        common = _report_in(error)
        if common is None and not setup.has_met and not is_deferred:
            common = _fail_together(setup, error)
        _give_up(communicator, error, common)


@contextmanager
def exchanging_later(communicator: Any) -> Iterator[None]:
    """The exchanges of a communicator that was made without them."""
    try:
        yield
    except Exception as error:
        _give_up(communicator, error, _report_in(error))


def meet_peers(communicator: Any) -> None:
    """The first exchange, and connecting to the peers."""
    setup = _setup_of(communicator)
    agent, failure = None, None
    try:
        agent = communicator._nixl_wrapper.get_agent_metadata()
    except Exception as error:
        failure = in_words(error)
    hellos = setup.meet(agent, failure)
    for peer, hello in enumerate(hellos):
        if peer == communicator._rank or setup.failure is not None:
            continue
        try:
            name = communicator._nixl_wrapper.add_remote_agent(hello.agent)
            communicator._remote_agents[peer] = name
        except Exception as error:
            setup.failure = f"connecting to rank {peer}: {in_words(error)}"


def exchange_addresses(
    communicator: Any, tensors: Sequence[torch.Tensor]
) -> dict[int, tuple[array[int], int]]:
    """The second exchange: where the tensors that peers read lie.

    Returns:
        Peer -> the addresses of its tensors, in the order of ours, and its device.
    """
    setup = _setup_of(communicator)
    addresses = array("q", [tensor.data_ptr() for tensor in tensors]).tobytes()
    mine = _Connected(setup.failure, communicator._cuda_device_id, addresses)
    said: list[_Connected] = exchange.gather(setup.group, mine)
    failures = {rank: c.failure for rank, c in enumerate(said) if c.failure is not None}
    if failures:
        raise NixlEplbError(report.failures(failures, len(said)))
    peers = {}
    for peer in communicator._remote_agents:
        bases = array("q")
        bases.frombytes(said[peer].addresses)
        peers[peer] = (bases, said[peer].device_id)
    return peers


def in_words(error: BaseException) -> str:
    """An error and its causes: the outermost one says only in which step it was."""
    return " <- ".join(f"{type(one).__name__}: {one}"[:400] for one in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, its cause, and so on."""
    while error is not None:
        yield error
        error = error.__cause__


def _fail_together(setup: Setup, error: Exception) -> Exception | None:
    """Tells the peers that this rank failed before the first exchange; the common error."""
    try:
        setup.meet(None, in_words(error))
    except NixlEplbError as common:
        return common
    return None


def _report_in(error: BaseException) -> Exception | None:
    """The common error, which the step of the set-up wraps in another one."""
    return next((one for one in _chain(error) if isinstance(one, NixlEplbError)), None)


def _give_up(communicator: Any, error: Exception, common: Exception | None) -> NoReturn:
    """Leaves nothing registered, and raises what all ranks say, or else what this one met."""
    _release(communicator)
    if common is None or common is error:
        raise error
    # Where the report caused the error, the error must not cause the report as well.
    raise common from common.__cause__ if _report_in(error) is common else error


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
