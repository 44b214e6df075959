"""Checks that the ranks of a group call with the same arguments, once for each new kind of call."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .peer_writes import Seat, peer_writes_reason, seat
from .transport import members

_KEPT = 256  # kinds of calls of a group


@dataclass(frozen=True)
class Terms:
    """The arguments of one rank: its numbers of queries and keys, and the values that must be equal on all ranks, with
    their names for error messages."""

    queries: int
    keys: int
    shared: tuple[tuple[str, object], ...]


@dataclass(frozen=True)
class Agreement:
    """The lengths of all ranks, and why they cannot write each other's memory, or None."""

    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    peer_writes_reason: str | None


# For each group on its own, as calls of other groups, which not all of its ranks make, must not drop any of it: a rank
# would gather while others go on. Weak references: a group that outlives `destroy_process_group` has threads left when
# the process ends, which then aborts.
_AGREED: weakref.WeakKeyDictionary[dist.ProcessGroup, OrderedDict[tuple, Agreement]] = weakref.WeakKeyDictionary()


def agree(
    terms: Terms,
    group: dist.ProcessGroup | None,
    device: torch.device,
    q_lengths: Sequence[int] | None,
    k_lengths: Sequence[int] | None,
) -> Agreement:
    """Returns the Agreement of the ranks. The first call of its kind gathers the Terms of all; later ones send nothing.

    Raises ValueError, on every rank, with the name of the argument that differs.
    """
    kept = _AGREED.setdefault(members(group), OrderedDict())
    key = (device, terms, q_lengths, k_lengths)
    if (known := kept.get(key)) is not None:
        kept.move_to_end(key)
        return known
    found: list[tuple[Terms, Seat]] = [None] * dist.get_world_size(group)  # type: ignore[list-item]
    shared = (*terms.shared, ("q_lengths", q_lengths), ("k_lengths", k_lengths))
    mine = Terms(terms.queries, terms.keys, shared)
    dist.all_gather_object(found, (mine, seat(group, device)), group=group)
    made = _held_together([one for one, _ in found], q_lengths, k_lengths, [one for _, one in found])
    kept[key] = made
    if len(kept) > _KEPT:
        kept.popitem(last=False)
    return made


def _held_together(
    found: Sequence[Terms],
    q_lengths: Sequence[int] | None,
    k_lengths: Sequence[int] | None,
    seats: Sequence[Seat],
) -> Agreement:
    for values in zip(*(one.shared for one in found), strict=True):
        if any(value != values[0] for value in values):
            told = ", ".join(f"rank {rank} {value}" for rank, (_, value) in enumerate(values))
            raise ValueError(f"ring_attention: {values[0][0]} must be the same on all ranks, got {told}")
    queries = _lengths("q", [one.queries for one in found], q_lengths)
    keys = _lengths("k", [one.keys for one in found], k_lengths)
    return Agreement(queries, keys, peer_writes_reason(seats))


def _lengths(name: str, found: list[int], told: Sequence[int] | None) -> tuple[int, ...]:
    if told is None and len(set(found)) > 1:
        raise ValueError(f"ring_attention: {name}_lengths must be {found}, the rows of {name} on the ranks, got None")
    if told is not None and list(told) != found:
        raise ValueError(
            f"ring_attention: {name}_lengths must be {found}, the rows of {name} on the ranks, got {list(told)}"
        )
    return tuple(found)
