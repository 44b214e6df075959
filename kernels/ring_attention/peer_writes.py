"""Writes into the memory of peers by copy engines, through PyTorch's symmetric memory.

A transfer takes two signals. The receiving rank signals "ready" to the sender once its stream has passed all work that
reads the receive buffer (the "room"). The sender then writes, and signals "arrived". The streams that read the room
wait for that signal. So no barrier is needed.

Blocks and sums each have a copy stream and counters of their own, so no wait for a block includes a wait for a sum. In
the backward the next block is fetched, and the next step begins, while sums are still being sent.

There is no deadlock, even if all streams of a rank share one hardware queue, which runs everything in enqueue order.
All ranks enqueue the same transfers in the same order. For each transfer, the signal "ready" is enqueued before the
wait for it, and that before the wait for "arrived". Suppose that all unfinished ranks wait. Take the earliest transfer
that is waited for, and of its two signals "ready" first. The rank that has not sent this signal waits for something
enqueued before it: for an earlier transfer, or for "ready" of the same one. Both contradict the choice. Several
hardware queues only remove some of the waits.
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
    """The transport by copy engines: copies from the sent tensors directly into the memory of peers, on the copy
    streams of the group. It uses no multicast. It uses SMs only for tensors that a strided copy cannot express
    (`driver.pieces`), which are made contiguous first.

    rooms   the largest blocks of each room, over all ranks; in the same order on all
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, rooms: Sequence[Sequence[Block]]) -> None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # A replay would wait for the values of the capture, which the counters have passed: for nothing.
            raise RuntimeError('ring_attention: transport="peer" cannot be captured in a CUDA graph')
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
        # Counted now: if an error ends the call before it waits, the counts of later transfers are still right.
        arrival = signals.expected(ARRIVED, source) if receives else None
        return _Transfer(signals, self.device, arrival, left)

    def follow(self, stream: torch.cuda.Stream) -> None:
        for own in self.streams:
            own.wait_stream(stream)

    def close(self) -> None:
        # Later work on this stream may overwrite sent tensors, and later transfers may overwrite rooms.
        current = torch.cuda.current_stream(self.device)
        for own in self.streams:
            current.wait_stream(own)
        for own in self.streams:
            own.wait_stream(current)


@dataclass
class _Transfer:
    """A transfer in flight. After the event `left` the sent tensors may be overwritten. The wait for an arrival is
    enqueued on the waiting stream, and as late as possible. On a copy stream it would come after later transfers.
    Enqueued before the kernels that overlap the transfer, it would block them if streams share a hardware queue."""

    signals: StreamSignals
    device: torch.device
    arrival: tuple[int, int] | None
    left: torch.cuda.Event | None

    def wait(self) -> None:
        current = torch.cuda.current_stream(self.device)
        if self.arrival is not None:
            with torch.cuda.stream(current):  # a default stream's handle means that of the current device
                self.signals.wait(self.arrival, current)
        if self.left is not None:
            current.wait_event(self.left)


class StreamSignals:
    """Counters that streams write and wait for without a kernel (cuStreamWriteValue32, cuStreamWaitValue32): one for
    each signal and each pair of ranks. A rank's counters, [signal, source rank], are in its arena, from byte `first`
    on. One stream writes all signals, so counters only increase, and any number of streams can wait for one."""

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
        """Counts the next signal of this kind from `source`. Returns the counter's address, and its value then."""
        self.awaited[signal, source] += 1
        return self.addresses[self.rank] + 4 * (signal * self.world + source), self.awaited[signal, source]

    def wait(self, counted: tuple[int, int], stream: torch.cuda.Stream) -> None:
        """Enqueues a wait on the stream, whose device must be current."""
        driver.wait_value(stream, *counted)


class _Arena:
    """Memory of one rank that its group can write, and the copy streams of the group, one for each kind of transfer."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, size: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        counters = 2 * 4 * group.size()  # bytes of the counters of one kind: two signals of 32 bits
        numbers = aligned(len(KINDS) * counters)
        whole = numbers + size
        self.memory = symmetric.empty(whole, dtype=torch.uint8, device=device)
        self.memory[:numbers].zero_()
        self.handle = symmetric.rendezvous(self.memory, group.group_name)
        # The memory may have an offset in its pool's segment, which `get_buffer`, unlike `get_remote_tensor`, ignores.
        self.parts = [
            self.memory if rank == self.handle.rank else self.handle.get_remote_tensor(rank, (whole,), torch.uint8)
            for rank in range(self.handle.world_size)
        ]
        self.rooms = [part[numbers:] for part in self.parts]
        self.handle.barrier()  # all counters are 0 then
        self.streams = [torch.cuda.Stream(device, priority=-1) for _ in KINDS]
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream(device))
        self.signals = [StreamSignals(self, kind * counters) for kind in KINDS]
        self.size, self.group, self.device = size, group, device  # keeps the group alive, so that its id stays unique

    def finish(self) -> None:
        """Waits for this rank's work. Each call has already waited for the writes of peers."""
        torch.cuda.synchronize(self.device)


_ARENAS: dict[tuple[int, torch.device], _Arena] = {}


def _arena(group: dist.ProcessGroup, device: torch.device, size: int) -> _Arena:
    """Returns the group's arena, a new one if it is too small. Allocation is a collective call; all ranks of a group
    request the same sizes in the same order, so all of them allocate together. Arenas of other groups are kept, as not
    all ranks are in those groups: `release` frees them."""
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
    """Frees the memory that transfers keep between calls. All ranks of a group must call it at the same point."""
    for arena in _ARENAS.values():
        arena.finish()
    _ARENAS.clear()
    Nothing.kept.clear()


@dataclass(frozen=True)
class Seat:
    """Where a rank computes: host, backend for its device, GPU index in its process, and UUIDs: of its GPU, of all that
    its process sees, and of those whose memory its GPU can access."""

    host: str
    backend: str
    index: int
    gpu: str
    seen: frozenset[str]
    reached: frozenset[str]


def peer_writes_reason(seats: Sequence[Seat]) -> str | None:
    """Returns why peers cannot write each other's memory, or None. It depends on the seats alone, so that all ranks
    have the same answer: processes may see different GPUs."""
    hosts, backends = {one.host for one in seats}, {one.backend for one in seats}
    if backends != {"nccl"}:
        return f"the group's backend is {', '.join(sorted(backends))}, not nccl"
    if len(hosts) > 1:
        return "the ranks are on several hosts"
    gpus = {one.gpu for one in seats}
    if len(gpus) < len(seats) or len({one.index for one in seats}) < len(seats):
        return "several ranks use one GPU, or each process sees only its own (CUDA_VISIBLE_DEVICES)"
    if not all(gpus <= one.seen for one in seats):
        return "a process does not see the GPUs of all ranks"
    if not all(gpus <= one.reached | {one.gpu} for one in seats):
        return "a GPU cannot access another's memory (no P2P)"
    return None


def seat(group: dist.ProcessGroup | None, device: torch.device) -> Seat:
    """Returns the Seat of this rank. RuntimeError if the group has no backend for the device."""
    backend = members(group)._get_backend(device).name()
    index, all_ = device.index or 0, range(torch.cuda.device_count() if device.type == "cuda" else 0)
    names = [str(torch.cuda.get_device_properties(i).uuid) for i in all_]
    reached = frozenset(names[i] for i in all_ if i != index and torch.cuda.can_device_access_peer(index, i))
    return Seat(socket.gethostname(), backend, index, names[index] if names else "", frozenset(names), reached)
