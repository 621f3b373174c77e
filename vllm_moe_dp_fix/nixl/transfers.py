# SPDX-License-Identifier: Apache-2.0
"""Transfers of the NIXL communicator of EPLB: errors name what moves, and no rank leaves early."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from vllm_moe_dp_fix.nixl import exchange
from vllm_moe_dp_fix.nixl.exchange import NixlEplbError
from vllm_moe_dp_fix.nixl.setup import in_words

_EXPERT = "_moe_dp_fix_expert"  # attributes that a communicator gets
_MOVES = "_moe_dp_fix_moves"


@contextmanager
def reading(communicator: Any, src: int, expert: int | None) -> Iterator[None]:
    """Remembers which expert the transfers that begin now are of, and names it in errors."""
    communicator.__dict__[_EXPERT] = expert
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:
        raise NixlEplbError(
            f"NIXL EPLB: {_what_moves(communicator, src)} cannot be read: {in_words(error)}"
        ) from error


def remember(communicator: Any, handle: Any, src: int) -> None:
    """Remembers of a transfer what it moves."""
    communicator.__dict__.setdefault(_MOVES, {})[handle] = _what_moves(communicator, src)


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


@contextmanager
def waiting_for(communicator: Any, handles: Sequence[Any]) -> Iterator[None]:
    """Names in errors what did not arrive."""
    moves = communicator.__dict__.get(_MOVES, {})
    wrapper = communicator._nixl_wrapper
    try:
        yield
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


@contextmanager
def leaving_together(communicator: Any) -> Iterator[None]:
    """No rank leaves, and packs anew, while a peer still reads from it."""
    try:
        yield
    except Exception:
        # Before its first read a rank fails in front of the barrier, and no peer is here.
        if communicator.__dict__.pop(_MOVES, None):
            with suppress(NixlEplbError):
                exchange.all_fine(communicator._cpu_group, False)
        raise
    if not exchange.all_fine(communicator._cpu_group, True):
        raise NixlEplbError(
            "NIXL EPLB: the transfer failed on another rank, whose own log says why"
        )
