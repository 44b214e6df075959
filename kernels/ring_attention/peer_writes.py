"""Writes into peers' memory by copy engines, through torch's symmetric memory.

A transfer takes two signals. The rank where it arrives says "ready" to the one that sends, once its stream has come
past all that reads the room; the sender then writes, and says "arrived", for which the receiver waits. Each signal has
one wait, so that no barrier is needed. All ranks enqueue the same transfers in the same order; of each, "ready" comes
before every wait, and the wait for "arrived" last. So no cycle forms, not even where the streams of a rank share one
hardware queue.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from . import driver
from .rows import copied
from .transport import Block, Nothing, Pending, aligned, members, placed, room_bytes

READY, ARRIVED = 0, 1


class PeerWrites:
    """Copies into the peers' memory by the copy engines, straight from what is sent, on the group's copy stream. No
    multicast is used, and no SM but for what no strided copy can express (`driver.pieces`), which is copied first.

    rooms   the largest blocks of each room, over all ranks; in the same order on all
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, rooms: Sequence[Sequence[Block]]) -> None:
        self.firsts, size = [], 0
        for blocks in rooms:
            self.firsts.append(size)
            size += room_bytes(blocks)
        self.arena = _arena(members(group), device, size)
        self.side, self.device = self.arena.stream, device

    def sendable(self, x: torch.Tensor) -> torch.Tensor:
        return copied(x) if driver.pieces(x) is None else x

    def room(self, index: int, blocks: Sequence[Block], rank: int | None = None) -> list[torch.Tensor]:
        rank = self.arena.handle.rank if rank is None else rank
        return placed(self.arena.rooms[rank], blocks, self.firsts[index])

    def exchange(
        self,
        sent: Sequence[torch.Tensor],
        to: int,
        places: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor],
        source: int,
    ) -> Pending:
        signals = self.arena.signals
        receives, sends = any(t.numel() for t in into), any(t.numel() for t in sent)
        current = torch.cuda.current_stream(self.device)
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side):
            if receives:
                signals.say(READY, source)
            if sends:
                signals.wait(signals.expected(READY, to))
                for mine, theirs in zip(sent, places, strict=True):
                    if mine.numel():
                        driver.copy(mine, theirs, self.side)
                signals.say(ARRIVED, to)
        # Expected now: a call that ends by an error before it waits leaves the counts of later ones right.
        arrival = signals.expected(ARRIVED, source) if receives else None
        return _Transfer(signals, self.side, self.device, arrival)

    def follow(self, stream: torch.cuda.Stream) -> None:
        self.side.wait_stream(stream)

    def close(self) -> None:
        # What was sent may be overwritten by what comes behind the call; and rooms are read until here.
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.side)
        self.side.wait_stream(current)


@dataclass
class _Transfer:
    """The wait for an arrival is queued only when somebody waits: behind the kernels that the transfer is overlapped
    with, which it would hold up where the streams share a hardware queue."""

    signals: StreamSignals
    side: torch.cuda.Stream
    device: torch.device
    arrival: tuple[int, int] | None
    done: torch.cuda.Event | None = None

    def wait(self) -> None:
        if self.done is None:
            if self.arrival is not None:
                with torch.cuda.stream(self.side):
                    self.signals.wait(self.arrival)
            self.done = self.side.record_event()
        torch.cuda.current_stream(self.device).wait_event(self.done)


class StreamSignals:
    """Counters that streams write and wait for without a kernel (cuStreamWriteValue32, cuStreamWaitValue32): one for
    each kind and each pair of ranks. A rank's counters, [kind, from which rank], lie at the beginning of its arena."""

    def __init__(self, arena: _Arena) -> None:
        self.rank, self.world = arena.handle.rank, arena.handle.world_size
        self.addresses = [part.data_ptr() for part in arena.parts]
        self.said: dict[tuple[int, int], int] = defaultdict(int)
        self.awaited: dict[tuple[int, int], int] = defaultdict(int)

    def say(self, kind: int, to: int) -> None:
        self.said[kind, to] += 1
        where = self.addresses[to] + 4 * (kind * self.world + self.rank)
        driver.write_value(torch.cuda.current_stream(), where, self.said[kind, to])

    def expected(self, kind: int, source: int) -> tuple[int, int]:
        """The next signal of that kind from there: the counter's address, and its value by then."""
        self.awaited[kind, source] += 1
        return self.addresses[self.rank] + 4 * (kind * self.world + source), self.awaited[kind, source]

    def wait(self, signal: tuple[int, int]) -> None:
        driver.wait_value(torch.cuda.current_stream(), *signal)


class _Arena:
    """Memory of one rank that its group can write, and the stream on which all transfers of the group run."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, size: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        numbers = aligned(2 * 4 * group.size())
        whole = numbers + size
        self.memory = symmetric.empty(whole, dtype=torch.uint8, device=device)
        self.memory[:numbers].zero_()
        self.handle = symmetric.rendezvous(self.memory, group.group_name)
        # The memory may lie anywhere in a pool's segment, which `get_remote_tensor` knows and `get_buffer` does not.
        self.parts = [
            self.memory if rank == self.handle.rank else self.handle.get_remote_tensor(rank, (whole,), torch.uint8)
            for rank in range(self.handle.world_size)
        ]
        self.rooms = [part[numbers:] for part in self.parts]
        self.handle.barrier()  # all numbers are 0
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        self.signals = StreamSignals(self)
        self.size, self.group, self.device = size, group, device  # the group is kept, so that no other has its id

    def finish(self) -> None:
        """Waits for this rank's work. What peers write here was waited for by the calls that they write for."""
        torch.cuda.synchronize(self.device)


_ARENAS: dict[tuple[int, torch.device], _Arena] = {}


def _arena(group: dist.ProcessGroup, device: torch.device, size: int) -> _Arena:
    """The group's arena, a new one where that is too small. All ranks of a group ask for the same sizes in the same
    order, so all take the same way here: to make one is a collective call. None is dropped for that of another group,
    which not all of them are in: `release` frees them."""
    key = id(group), device
    found = _ARENAS.pop(key, None)
    if found is None or found.size < size:
        if found is not None:
            found.finish()
            del found
        found = _Arena(group, device, size)
    _ARENAS[key] = found
    return found


def release() -> None:
    """Frees the memory that transfers keep between calls. Every rank of a group must do so at the same place."""
    for arena in _ARENAS.values():
        arena.finish()
    _ARENAS.clear()
    Nothing.kept.clear()


def peer_writes_reason(devices: Sequence[tuple[str, str, int]]) -> str | None:
    """Why peers cannot write each other's memory, or None. `devices` has host, backend and GPU index of each rank."""
    hosts, backends = {host for host, _, _ in devices}, {backend for _, backend, _ in devices}
    if backends != {"nccl"}:
        return f"the group's backend is {', '.join(sorted(backends))}, not nccl"
    if len(hosts) > 1:
        return "the ranks are on several hosts"
    indices = [index for _, _, index in devices]
    if len(set(indices)) < len(indices):
        return "ranks share a GPU, or each process sees only its own"
    if max(indices) >= torch.cuda.device_count():
        return "this process does not see the GPUs of all ranks"
    if not all(torch.cuda.can_device_access_peer(a, b) for a in indices for b in indices if a != b):
        return "a GPU cannot reach another's memory"
    return None


def where(group: dist.ProcessGroup | None, device: torch.device) -> tuple[str, str, int]:
    """Host, backend for that device and GPU index of this rank: what `peer_writes_reason` takes. RuntimeError where the
    group has no backend for the device."""
    backend = members(group)._get_backend(device).name()
    return socket.gethostname(), backend, device.index or 0
