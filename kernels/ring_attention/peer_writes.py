"""Writes into peers' memory by copy engines, through torch's symmetric memory.

A transfer takes two signals. The rank where it arrives says "ready" to the one that sends, once its stream has come
past all that reads the room; the sender then writes, and says "arrived", for which the receiver waits. Every signal is
waited for once, so that nothing else is to be agreed on: neither a barrier nor the order in which rooms are used. All
ranks queue the same transfers in the same order, and of each what they say before what they wait for. So they do not
wait for each other in a circle, not even where the streams of a rank share one hardware queue.
"""

from __future__ import annotations

import socket
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from . import driver
from .rows import copied
from .transport import Block, Nothing, Pending, aligned, members, placed, room_bytes

_ARENAS_KEPT = 4
READY, ARRIVED = 0, 1


class PeerWrites:
    """Copies into the peers' memory by the copy engines, straight from what is sent, on a stream of its own. No
    multicast is used, and no SM but for what has no pieces (`driver.pieces`), of which a contiguous copy is made.

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
                signals.wait(READY, to)
                if signals.takes_sms:  # which the kernels that come next would all have
                    current.wait_stream(self.side)
                for mine, theirs in zip(sent, places, strict=True):
                    if mine.numel():
                        driver.copy(mine, theirs, self.side)
                signals.say(ARRIVED, to)
        return _Transfer(signals, self.side, self.device, source if receives else None)

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

    signals: StreamSignals | KernelSignals
    side: torch.cuda.Stream
    device: torch.device
    source: int | None
    done: torch.cuda.Event | None = None

    def wait(self) -> None:
        if self.done is None:
            if self.source is not None:
                with torch.cuda.stream(self.side):
                    self.signals.wait(ARRIVED, self.source)
            self.done = self.side.record_event()
        torch.cuda.current_stream(self.device).wait_event(self.done)


class StreamSignals:
    """Signals that streams write and wait for without a kernel: a number for each kind and each pair of ranks, which
    counts up. A rank's numbers, [kind, from which rank], lie at the beginning of its arena."""

    takes_sms = False

    def __init__(self, arena: _Arena) -> None:
        self.rank, self.world = arena.handle.rank, arena.handle.world_size
        self.addresses = [part.data_ptr() for part in arena.parts]
        self.said: dict[tuple[int, int], int] = defaultdict(int)
        self.awaited: dict[tuple[int, int], int] = defaultdict(int)

    def say(self, kind: int, to: int) -> None:
        self.said[kind, to] += 1
        where = self.addresses[to] + 4 * (kind * self.world + self.rank)
        driver.write_value(torch.cuda.current_stream(), where, self.said[kind, to])

    def wait(self, kind: int, source: int) -> None:
        self.awaited[kind, source] += 1
        where = self.addresses[self.rank] + 4 * (kind * self.world + source)
        driver.wait_value(torch.cuda.current_stream(), where, self.awaited[kind, source])


class KernelSignals:
    """The same by torch's kernels of one warp, which wait for an SM."""

    takes_sms = True

    def __init__(self, arena: _Arena) -> None:
        self.handle = arena.handle

    def say(self, kind: int, to: int) -> None:
        self.handle.put_signal(to, kind)

    def wait(self, kind: int, source: int) -> None:
        self.handle.wait_signal(source, kind)


SIGNALS: type[StreamSignals] | type[KernelSignals] = StreamSignals


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
        self.signals = SIGNALS(self)
        self.size, self.group, self.device = size, group, device  # the group is kept, so that no other has its id

    def finish(self) -> None:
        """Waits until nothing of this rank's reads or writes it. What peers write here is waited for by the calls that
        they write for."""
        torch.cuda.synchronize(self.device)


_ARENAS: OrderedDict[tuple[int, torch.device], _Arena] = OrderedDict()


def _arena(group: dist.ProcessGroup, device: torch.device, size: int) -> _Arena:
    """The group's arena, a new one where that is too small. All ranks ask for the same sizes in the same order, so all
    take the same way here: to make one is a collective call."""
    key = id(group), device
    found = _ARENAS.pop(key, None)
    if found is None or found.size < size:
        if found is not None:
            found.finish()
            del found
        found = _Arena(group, device, size)
    _ARENAS[key] = found
    while len(_ARENAS) > _ARENAS_KEPT:
        _, oldest = _ARENAS.popitem(last=False)
        oldest.finish()
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
        return "ranks share a GPU"
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
