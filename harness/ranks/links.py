"""Bandwidth of the links between the GPUs of a host: messages through NCCL, and copy-engine reads of a peer's memory.

The ranks form a ring, and each exchanges with its neighbours. *one way*: every second rank sends and the next one
receives; *both ways*: every rank does both at once. Rates are bytes per second that the slowest rank receives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import distributed

from ..execute import first_line
from ..measure import stats
from .launch import Rank
from .timing import gathered

SIZES = (2**20, 2**24, 2**26, 2**28, 2**30)
LARGE = (2**28,)  # large enough for a ceiling
REPEATS, CALLS = 7, 4

Transfer = Callable[[], object]


def measure(me: Rank, sizes: Sequence[int] = LARGE) -> dict[str, Any]:
    """The links' part of `ceilings.measured`: `link`, the best rate both ways, and `links`, every rate by engine,
    direction and size. A collective call."""
    found: dict[str, Any] = {}
    for engine, prepare in (("nccl", _messages), ("peer reads", _peer_reads)):
        me.beat.step(f"links: {engine}")
        try:
            transfers = prepare(me, max(sizes))
        except Unreachable as reason:
            found[engine] = {"reason": str(reason)}
            continue
        found[engine] = {
            direction: {str(size): _rate(me, transfer, size, direction, engine) for size in sizes}
            for direction, transfer in transfers.items()
        }
    rates = [rate for of in found.values() for rate in of.get("both ways", {}).values()]
    return {"link": max(rates), "links": found}


class Unreachable(Exception):
    """An engine cannot be used here; the message says why."""


def _messages(me: Rank, most: int) -> dict[str, Callable[[int], Transfer | None]]:
    """Transfers by NCCL's send and receive."""
    mine, other = (torch.randint(256, (most,), dtype=torch.uint8, device=me.device) for _ in range(2))

    def operations(size: int, sends: bool, receives: bool) -> Transfer | None:
        found = []
        if sends:
            found.append(distributed.P2POp(distributed.isend, mine[:size], (me.rank + 1) % me.size))
        if receives:
            found.append(distributed.P2POp(distributed.irecv, other[:size], (me.rank - 1) % me.size))

        def exchange() -> None:
            for work in distributed.batch_isend_irecv(found):
                work.wait()

        return exchange if found else None

    sends, receives = _one_way(me)
    return {
        "one way": lambda size: operations(size, sends, receives),
        "both ways": lambda size: operations(size, True, True),
    }


def _peer_reads(me: Rank, most: int) -> dict[str, Callable[[int], Transfer | None]]:
    """Copies from the memory of the previous rank, which torch's symmetric memory maps into this process."""
    near = (me.rank - 1) % me.size
    if not all(gathered(torch.cuda.can_device_access_peer(me.rank, near), me)):
        raise Unreachable("peer access between the GPUs is not available")
    trouble, mapped = None, None
    try:
        mapped = _Mapped(me.device, near, most)
    except (ImportError, RuntimeError) as error:
        trouble = f"no symmetric memory: {first_line(error)}"
    if found := [reason for reason in gathered(trouble, me) if reason]:
        raise Unreachable(found[0])
    assert mapped is not None
    _, receives = _one_way(me)
    read: Callable[[int], Transfer] = partial(partial, mapped.read)
    return {"one way": lambda size: read(size) if receives else None, "both ways": read}


class _Mapped:
    """Memory that the next rank reads, and the mapping of the previous rank's, which this one reads."""

    def __init__(self, device: torch.device, near: int, size: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        assert distributed.group.WORLD is not None
        self.own = symmetric.empty(size, dtype=torch.uint8, device=device)
        self.own.random_()
        self.handle = symmetric.rendezvous(self.own, distributed.group.WORLD.group_name)
        self.theirs = self.handle.get_buffer(near, (size,), torch.uint8)
        self.copy = torch.empty_like(self.own)

    def read(self, size: int) -> object:
        return self.copy[:size].copy_(self.theirs[:size])


def _one_way(me: Rank) -> tuple[bool, bool]:
    """Whether a rank sends, and whether it receives: with an odd world size the last rank does neither."""
    sends = me.rank % 2 == 0 and me.rank + 1 < me.size
    return sends, me.rank % 2 == 1


def _rate(me: Rank, transfer: Callable[[int], Transfer | None], size: int, direction: str, engine: str) -> float:
    """Bytes per second of the slowest rank: medians of a few back-to-back transfers that all ranks begin together."""
    me.beat.step(f"links: {engine}, {direction}, {size} bytes")
    run, token, samples = transfer(size), torch.zeros(1, device=me.device), []
    for _ in range(REPEATS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        distributed.all_reduce(token)
        start.record()
        for call in [run] * CALLS if run is not None else ():
            call()
        stop.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(stop) / (1e3 * CALLS))
    slowest = max(gathered(stats.quantile(sorted(samples), 0.5), me))
    return size / slowest
