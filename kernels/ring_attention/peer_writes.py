"""Writes into peers' memory by copy engines, through torch's symmetric memory.

A transfer takes two signals. The rank where it arrives says "ready" to the one that sends, once its stream has come
past all that reads the room; the sender then writes, and says "arrived", for which the streams that read the room wait
themselves. So no barrier is needed.

Blocks and sums have a copy stream and counters each. What waits for a block waits for no sum: in the backward the next
block is fetched, and the next step begins, while sums still leave.

No cycle of waits forms, not even where all streams of a rank share one hardware queue, in which everything runs in the
order of its enqueueing. All ranks enqueue the same transfers in the same order; of each, "ready" comes before the wait
for it, and that before the wait for "arrived". Suppose that all ranks that are not done wait, and take the earliest
transfer that is waited for, for "ready" first. The rank that has not said so waits for something enqueued before: for
an earlier transfer, or for "ready" of the same one. Both contradict the choice. Several hardware queues only leave out
some of the waits.
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
from .transport import KINDS, Block, Nothing, Pending, aligned, members, placed, room_bytes

READY, ARRIVED = 0, 1


class PeerWrites:
    """Copies into the peers' memory by the copy engines, straight from what is sent, on the group's copy streams. No
    multicast is used, and no SM but for what no strided copy can express (`driver.pieces`), which is copied first.

    rooms   the largest blocks of each room, over all ranks; in the same order on all
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, rooms: Sequence[Sequence[Block]]) -> None:
        self.firsts, size = [], 0
        for blocks in rooms:
            self.firsts.append(size)
            size += room_bytes(blocks)
        self.arena = _arena(members(group), device, size)
        self.streams, self.device = self.arena.streams, device

    def sendable(self, x: torch.Tensor) -> torch.Tensor:
        return copied(x) if driver.pieces(x) is None else x

    def room(self, index: int, blocks: Sequence[Block], rank: int | None = None) -> list[torch.Tensor]:
        rank = self.arena.handle.rank if rank is None else rank
        return placed(self.arena.rooms[rank], blocks, self.firsts[index])

    def exchange(
        self,
        kind: int,
        sent: Sequence[torch.Tensor],
        to: int,
        places: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor],
        source: int,
    ) -> Pending:
        signals, stream = self.arena.signals[kind], self.streams[kind]
        receives, sends = any(t.numel() for t in into), any(t.numel() for t in sent)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            if receives:
                signals.say(READY, source, stream)
            if sends:
                signals.wait(signals.expected(READY, to), stream)
                for mine, theirs in zip(sent, places, strict=True):
                    if mine.numel():
                        driver.copy(mine, theirs, stream)
                signals.say(ARRIVED, to, stream)
        left = stream.record_event() if sends else None
        # Expected now: a call that ends by an error before it waits leaves the counts of later ones right.
        arrival = signals.expected(ARRIVED, source) if receives else None
        return _Transfer(signals, self.device, arrival, left)

    def follow(self, stream: torch.cuda.Stream) -> None:
        for own in self.streams:
            own.wait_stream(stream)

    def close(self) -> None:
        # What was sent may be overwritten by what comes behind the call; and rooms are read until here.
        current = torch.cuda.current_stream(self.device)
        for own in self.streams:
            current.wait_stream(own)
        for own in self.streams:
            own.wait_stream(current)


@dataclass
class _Transfer:
    """What was sent may be overwritten behind `left`. The wait for an arrival is queued on the stream that waits, and
    only then: on a copy stream it would stand behind later transfers, and before the kernels that the transfer is
    overlapped with it would hold these up where streams share a hardware queue."""

    signals: StreamSignals
    device: torch.device
    arrival: tuple[int, int] | None
    left: torch.cuda.Event | None

    def wait(self) -> None:
        current = torch.cuda.current_stream(self.device)
        if self.arrival is not None:
            with torch.cuda.stream(current):  # the default stream is that of the current device
                self.signals.wait(self.arrival, current)
        if self.left is not None:
            current.wait_event(self.left)


class StreamSignals:
    """Counters that streams write and wait for without a kernel (cuStreamWriteValue32, cuStreamWaitValue32): one for
    each signal and each pair of ranks. A rank's counters, [signal, from which rank], lie in its arena, from byte
    `first` on. One stream says all signals, so that counters only grow and any number of streams can wait for one."""

    def __init__(self, arena: _Arena, first: int) -> None:
        self.rank, self.world = arena.handle.rank, arena.handle.world_size
        self.addresses = [part.data_ptr() + first for part in arena.parts]
        self.said: dict[tuple[int, int], int] = defaultdict(int)
        self.awaited: dict[tuple[int, int], int] = defaultdict(int)

    def say(self, signal: int, to: int, stream: torch.cuda.Stream) -> None:
        self.said[signal, to] += 1
        where = self.addresses[to] + 4 * (signal * self.world + self.rank)
        driver.write_value(stream, where, self.said[signal, to])

    def expected(self, signal: int, source: int) -> tuple[int, int]:
        """The next signal of that sort from there: the counter's address, and its value by then."""
        self.awaited[signal, source] += 1
        return self.addresses[self.rank] + 4 * (signal * self.world + source), self.awaited[signal, source]

    def wait(self, counted: tuple[int, int], stream: torch.cuda.Stream) -> None:
        """The stream's device is current."""
        driver.wait_value(stream, *counted)


class _Arena:
    """Memory of one rank that its group can write, and the streams on which the transfers of the group run, one for
    each kind."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, size: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        counters = 2 * 4 * group.size()  # of a kind
        numbers = aligned(len(KINDS) * counters)
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
        self.streams = [torch.cuda.Stream(device, priority=-1) for _ in KINDS]
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream(device))
        self.signals = [StreamSignals(self, kind * counters) for kind in KINDS]
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
