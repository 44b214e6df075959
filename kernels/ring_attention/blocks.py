"""The state of a call in its group, and the two data flows between ranks. Blocks arrive one step before the kernels
that use them, and contributions are sent to their owner one step after the kernels that compute them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from . import configs
from .chains import Chains
from .peer_writes import PeerWrites
from .schedule import Problem, Step
from .transport import BLOCKS, SUMS, Block, Messages, Nothing, Pending, Transport

GIVEN = 0  # index of the room of contributions; the rooms of blocks follow
STAGES = 2  # buffers of contributions for others: one is sent while the next is computed


@dataclass(frozen=True)
class Ring:
    """The arguments on which all ranks agree, and the rank of this process."""

    problem: Problem
    rank: int
    rotate: str
    scale: float | None
    group: dist.ProcessGroup | None
    transfers: str  # "peer", "messages" or "none"

    def transport(
        self, device: torch.device, given: Sequence[Block], blocks: Sequence[Block], rooms: int | None = None
    ) -> Transport:
        """Returns the transport for contributions and blocks of at most these shapes, the same on all ranks. `rooms`:
        number of rooms for blocks; by default up to two, as one block arrives while the previous one is in use."""
        kinds: dict[str, Callable[..., Transport]] = {"peer": PeerWrites, "messages": Messages, "none": Nothing}
        rooms = min(2, self.problem.world - 1) if rooms is None else rooms
        return kinds[self.transfers](self.group, device, [given, *[blocks] * rooms])

    def chains(self, q: torch.Tensor, k: torch.Tensor) -> Chains:
        """Returns the chains for calls where keys move. With messages there is one, as one stream waits for them."""
        (batch, heads, queries, _), kv_heads = q.shape, k.shape[1]
        several = self.transfers == "peer" or (self.transfers == "none" and q.device.type == "cuda")
        count = configs.pick_chains(queries, batch * heads, batch if batch > 1 else kv_heads) if several else 1
        return Chains(count, batch, kv_heads, q.device)


def like(tensors: Sequence[torch.Tensor], rows: int) -> list[Block]:
    """Returns Blocks (shape and dtype) like these tensors with `rows` rows."""
    return [((*t.shape[:2], rows, *t.shape[3:]), t.dtype) for t in tensors]


class Fetched:
    """Fetches the partners' blocks step by step: while a step computes, the block of the next one arrives. `own`: this
    rank's tensors [B, H, S, ...]."""

    def __init__(
        self,
        transport: Transport,
        steps: Sequence[Step],
        own: Sequence[torch.Tensor],
        chains: Chains | None = None,
    ) -> None:
        self.transport, self.steps, self.own, self.chains = transport, steps, own, chains
        self.sendable = [transport.sendable(t) for t in own] if len(steps) > 1 else []
        self.pending: Pending | None = None

    def take(self, s: int) -> list[torch.Tensor]:
        """Returns the fetched rows of step s, of each tensor; at step 0 all rows of this rank's own."""
        if self.pending and self.chains:
            self.chains.wait(self.pending)
        elif self.pending:
            self.pending.wait()
        found = self._room(s, self.steps[s].rows) if s else list(self.own)
        if s + 1 < len(self.steps):
            if self.chains:
                self.chains.precede(self.transport)
            self._begin(s + 1)
        return found

    def _begin(self, s: int) -> None:
        step = self.steps[s]
        first, last = step.to_rows
        sent = [t[:, :, first:last] for t in self.sendable]
        places = self._room(s, step.to_rows, step.to)
        self.pending = self.transport.exchange(BLOCKS, sent, step.to, places, self._room(s, step.rows), step.partner)

    def _room(self, s: int, rows: tuple[int, int], rank: int | None = None) -> list[torch.Tensor]:
        index = GIVEN + 1 + s % min(2, len(self.steps) - 1)
        return self.transport.room(index, like(self.own, rows[1] - rows[0]), rank)


class Handed:
    """Sends contributions that this rank computes for its partners' blocks, and receives those for its own.

    shapes   (rows) -> shapes of a contribution for so many rows, fp32
    """

    def __init__(
        self,
        transport: Transport,
        steps: Sequence[Step],
        shapes: Callable[[int], Sequence[tuple[int, ...]]],
        device: torch.device,
    ) -> None:
        self.transport, self.steps, self.shapes = transport, steps, shapes
        most = max((step.rows[1] - step.rows[0] for step in steps[1:]), default=0)
        stages = min(STAGES, len(steps) - 1)
        self.stages = [
            [torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes(most)] for _ in range(stages)
        ]
        self.pending: Pending | None = None
        self.last = 0

    def staging(self, s: int) -> list[torch.Tensor]:
        """Returns the buffer for the contribution of step s; its contents are undefined."""
        shapes = self.shapes(_length(self.steps[s].rows))
        stage = self.stages[s % len(self.stages)]
        return [t.view(-1)[: torch.Size(shape).numel()].view(shape) for t, shape in zip(stage, shapes, strict=True)]

    def hand(self, s: int, given: Sequence[torch.Tensor]) -> None:
        """Starts sending the contribution of step s. The one received before must have been collected."""
        step = self.steps[s]
        places = self._room(_length(step.rows), step.partner)
        into = self._room(_length(step.to_rows))
        self.pending = self.transport.exchange(SUMS, given, step.partner, places, into, step.to)
        self.last = s

    def collect(self) -> tuple[tuple[int, int], list[torch.Tensor]] | None:
        """Returns the contribution received since the last call, if any: rows of this rank's block, and tensors."""
        if self.pending is None:
            return None
        self.pending.wait()
        self.pending = None
        rows = self.steps[self.last].to_rows
        return rows, self._room(_length(rows))

    def _room(self, rows: int, rank: int | None = None) -> list[torch.Tensor]:
        return self.transport.room(GIVEN, fp32(self.shapes(rows)), rank)


def fp32(shapes: Sequence[tuple[int, ...]]) -> list[Block]:
    return [(shape, torch.float32) for shape in shapes]


def _length(rows: tuple[int, int]) -> int:
    return rows[1] - rows[0]
