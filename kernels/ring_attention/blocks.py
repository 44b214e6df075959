"""A call's view of its group, and the two streams of data between ranks: blocks that are fetched one step ahead of the
kernels, and contributions that are handed to their owner one step behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .peer_reads import PeerReads, slot_bytes
from .schedule import Problem, Step
from .transport import SLOTS, LocalCopies, Messages, Pending, Piece, Transport


@dataclass(frozen=True)
class Ring:
    """What all ranks have agreed on, and this one's place."""

    problem: Problem
    rank: int
    rotate: str
    scale: float | None
    group: dist.ProcessGroup | None
    transfers: str  # "peer", "messages" or "local"

    def transport(
        self, lengths: Sequence[int], block: Sequence[torch.Tensor], given: Sequence[Sequence[int]] = ()
    ) -> Transport:
        """For blocks like this one, of so many rows, and contributions of up to these shapes; the same on all ranks."""
        device = block[0].device
        if self.transfers != "peer":
            return {"messages": Messages, "local": LocalCopies}[self.transfers](self.group, device)
        rows = [(t.shape[1:], t.dtype) for t in block]
        return PeerReads(self.group, device, lengths, rows, slot_bytes(given))


class Fetched:
    """The partners' blocks, step after step, in two receive buffers: while a step computes, the next one's block
    arrives. `own` are this rank's tensors, rows first."""

    def __init__(self, transport: Transport, steps: Sequence[Step], own: Sequence[torch.Tensor]) -> None:
        self.transport, self.steps, self.own = transport, steps, own
        most = max((step.rows[1] - step.rows[0] for step in steps[1:]), default=0)
        self.buffers = [[t.new_empty(most, *t.shape[1:]) for t in own] for _ in range(min(2, len(steps) - 1))]
        self.pending: Pending | None = None
        transport.publish(own)

    def take(self, s: int) -> list[torch.Tensor]:
        """The rows of step s that are fetched, of each tensor, rows first; at step 0 all of this rank's own."""
        if self.pending:
            self.pending.wait()
        found = self._views(s) if s else list(self.own)
        if s + 1 < len(self.steps):
            self._begin(s + 1)
        return found

    def _begin(self, s: int) -> None:
        step = self.steps[s]
        pieces = [(Piece(i, *step.rows), view) for i, view in enumerate(self._views(s)) if view.numel()]
        sends = [Piece(i, *step.to_rows) for i in range(len(self.own)) if step.to_rows[0] < step.to_rows[1]]
        self.pending = self.transport.fetch(step.partner, pieces, step.to, sends)

    def _views(self, s: int) -> list[torch.Tensor]:
        first, last = self.steps[s].rows
        return [buffer[: last - first] for buffer in self.buffers[s % len(self.buffers)]]


class Handed:
    """Contributions that this rank computes for the block of its partner, and those that it is handed for its own.

    shapes   (rows) -> shapes of a contribution for so many rows, fp32
    """

    def __init__(self, transport: Transport, steps: Sequence[Step], shapes, device: torch.device) -> None:
        self.transport, self.steps, self.shapes = transport, steps, shapes
        most = max((step.to_rows[1] - step.to_rows[0] for step in steps[1:]), default=0)
        self.received = [torch.empty(*shape, dtype=torch.float32, device=device) for shape in shapes(most)]
        self.pending: Pending | None = None
        self.last = 0

    def staging(self, s: int) -> list[torch.Tensor]:
        """Where the contribution of step s goes; its contents are undefined."""
        first, last = self.steps[s].rows
        return self.transport.staging(s % SLOTS, self.shapes(last - first))

    def hand(self, s: int, given: Sequence[torch.Tensor]) -> None:
        """Begins to hand that of step s over. What was received before must have been collected."""
        step = self.steps[s]
        into = self._received(s)
        self.pending, self.last = self.transport.give(s % SLOTS, step.partner, given, step.to, into), s

    def collect(self) -> tuple[tuple[int, int], list[torch.Tensor]] | None:
        """What has been handed to this rank since the last time: the rows of its block that it is for, and tensors."""
        if self.pending is None:
            return None
        self.pending.wait()
        self.pending = None
        return self.steps[self.last].to_rows, self._received(self.last)

    def _received(self, s: int) -> list[torch.Tensor]:
        rows = self.steps[s].to_rows
        flat = [t.view(-1) for t in self.received]
        shapes = self.shapes(rows[1] - rows[0])
        return [t[: torch.Size(shape).numel()].view(*shape) for t, shape in zip(flat, shapes, strict=True)]
