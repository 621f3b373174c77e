# SPDX-License-Identifier: Apache-2.0
"""One text for all ranks: who differs in what, and why that may be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from vllm_moe_dp_fix.nixl.layout import Key, Labels, Layout, TensorLayout

MAX_LINES = 20
_SHOWN = 6  # rank ranges, keys
_FIELDS = {
    "nbytes": "bytes an expert",
    "dtype": "dtype",
    "shape": "shape of an expert",
    "stride": "bytes between experts",
    "order": "memory order",
}


class Described(NamedTuple):
    """What some ranks, that all hold the same, hold."""

    ranks: tuple[int, ...]
    layout: Layout
    labels: Labels


class _Difference(NamedTuple):
    what: str
    values: tuple[tuple[str, tuple[int, ...]], ...]  # value -> ranks, most ranks first


def failures(causes: Mapping[int, str], world_size: int) -> str:
    """The text where ranks failed on their own.

    Args:
        causes: Rank -> what went wrong there.
    """
    by_cause: dict[str, list[int]] = {}
    for rank in sorted(causes):
        by_cause.setdefault(causes[rank], []).append(rank)
    lines = [f"  {_ranks(ranks)}: {cause}" for cause, ranks in by_cause.items()]
    return "\n".join(
        [
            f"NIXL EPLB init failed on {len(causes)} of {world_size} ranks; all of them stop",
            *_bounded(lines),
        ]
    )


def differences(groups: Sequence[Described], world_size: int) -> str:
    """The text where the ranks do not hold the same.

    Starts with words that vLLM has used before, so that a search for them finds this. Of a great
    many kinds of ranks, ``groups`` are the largest.
    """
    found: dict[_Difference, list[Key]] = {}
    for key, difference in _differences(groups):
        found.setdefault(difference, [])
        if key is not None:
            found[difference].append(key)
    described = {rank for group in groups for rank in group.ranks}
    odd = {rank for d in found for _, ranks in d.values[1:] for rank in ranks}
    odd |= set(range(world_size)) - described
    lines = [
        f"  {difference.what}: "
        + ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in difference.values)
        + (f": {_tensors(keys, groups)}" if keys else "")
        for difference, keys in found.items()
    ]
    causes = _causes(groups, {difference.what for difference in found})
    return "\n".join(
        [
            f"{_head(found)}: {_ranks(sorted(odd))} of {world_size} hold other expert weights "
            "than the rest; nothing was transferred",
            *_bounded(lines),
            f"  Likely cause: {'; '.join(causes)}.",
        ]
    )


def label_differences(groups: Sequence[Described]) -> str:
    """What the ranks call differently, in one line: no harm to a transfer."""
    versions = _by_value(groups, [group.labels.version for group in groups])
    methods = _by_value(groups, [_methods(group) for group in groups])
    parts = [
        f"{what} {_values(values)}"
        for what, values in (("vLLM", versions), ("quantization", methods))
        if len(values) > 1
    ]
    return "NIXL EPLB: the ranks' experts agree, but not " + ("; ".join(parts) or "their names")


def _head(found: Mapping[_Difference, list[Key]]) -> str:
    for difference, keys in found.items():
        if difference.what == _FIELDS["nbytes"]:
            return f"NIXL EPLB nbytes_per_expert mismatch for {min(keys)}"
    if any(difference.what == "tensor" for difference in found):
        return "NIXL EPLB metadata key mismatch"
    first = min((key for keys in found.values() for key in keys), default=None)
    return "NIXL EPLB metadata mismatch" + (f" for {first}" if first else "")


def _differences(
    groups: Sequence[Described],
) -> Iterable[tuple[Key | None, _Difference]]:
    for what in ("experts", "device"):
        values = _by_value(groups, [str(getattr(group.layout, what)) for group in groups])
        if len(values) > 1:
            yield None, _Difference({"experts": "local experts"}.get(what, what), values)
    for key in sorted({key for group in groups for key in group.layout.tensors}):
        held = [group.layout.tensors.get(key) for group in groups]
        if None in held:
            values = _by_value(groups, ["there" if one else "missing" for one in held])
            yield key, _Difference("tensor", values)
            continue
        for field in TensorLayout._fields:
            values = _by_value(groups, [str(getattr(one, field)) for one in held])
            if len(values) > 1:
                yield key, _Difference(_FIELDS[field], values)
                if field == "nbytes":
                    break  # shape and stride say it again


def _by_value(
    groups: Sequence[Described], values: Sequence[str]
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The groups' values -> ranks; that of most ranks first, of the lowest rank in a tie."""
    ranks: dict[str, list[int]] = {}
    for group, value in zip(groups, values, strict=True):
        ranks.setdefault(value, []).extend(group.ranks)
    sets = ((value, tuple(sorted(members))) for value, members in ranks.items())
    return tuple(sorted(sets, key=lambda pair: (-len(pair[1]), pair[1][0])))


def _causes(groups: Sequence[Described], what: set[str]) -> list[str]:
    causes = []
    versions = _by_value(groups, [group.labels.version for group in groups])
    if len(versions) > 1:
        causes.append(f"another vLLM version ({_values(versions)})")
    methods = _by_value(groups, [_methods(group) for group in groups])
    if len(methods) > 1:
        causes.append(
            f"another quantization method or kernel back end, which may pad ({_values(methods)})"
        )
    if "tensor" in what:
        causes.append("a layer or parameter that only some ranks have (model, pipeline stage)")
    if "local experts" in what:
        causes.append("another number of local experts (redundant experts, group sizes)")
    if not causes and _FIELDS["dtype"] in what:
        causes.append("another dtype (--dtype, --quantization, or the checkpoint)")
    if not causes:
        causes.append(
            "another kernel back end or padding (--moe-backend, device, environment variables)"
        )
    return causes


def _methods(group: Described) -> str:
    return ", ".join(sorted(set(group.labels.methods.values())))


def _values(values: Iterable[tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{value or None} on {_ranks(ranks)}" for value, ranks in values)


def _bounded(lines: list[str]) -> list[str]:
    room = MAX_LINES - 3
    if len(lines) <= room:
        return lines
    return [*lines[: room - 1], f"  and {len(lines) - room + 1} more of the kind"]


def _tensors(keys: Sequence[Key], groups: Sequence[Described]) -> str:
    """The tensors by their place in a layer, with the name of the first of each."""
    layers: dict[int, list[int]] = {}
    for layer, tensor in sorted(keys):
        layers.setdefault(tensor, []).append(layer)
    shown = []
    for tensor, ids in list(layers.items())[:_SHOWN]:
        name = _name((ids[0], tensor), groups)
        shown.append(f"{name} (layer {spell(ids)}, tensor {tensor})".strip())
    more = f" and {len(layers) - _SHOWN} more" if len(layers) > _SHOWN else ""
    return ", ".join(shown) + more


def _name(key: Key, groups: Sequence[Described]) -> str:
    return next((name for g in groups if (name := g.labels.names.get(key))), "")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {spell(ranks)}" if len(ranks) == 1 else f"ranks {spell(ranks)}"


def spell(ranks: Sequence[int]) -> str:
    """Numbers in short: 0-2, 5."""
    if not ranks:
        return "unknown"
    parts: list[str] = []
    start = end = ranks[0]
    for rank in [*ranks[1:], None]:
        if rank is not None and rank == end + 1:
            end = rank
            continue
        parts.append(str(start) if start == end else f"{start}-{end}")
        if rank is not None:
            start = end = rank
    more = f" and {len(parts) - _SHOWN} more ranges" if len(parts) > _SHOWN else ""
    return ", ".join(parts[:_SHOWN]) + more
