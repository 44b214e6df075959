"""The streams that a rank's calls run on.

The last wave of a call leaves SMs idle, and the next call for the same heads must wait for its end. Heads are
independent, so they are split into two chains, and the calls of each chain run on a stream of their own. Calls of one
chain start on idle SMs while the last tiles of the other finish.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from .transport import Pending, Transport

Cut = Callable[[torch.Tensor], torch.Tensor]


class Chains:
    """The current stream and, with `count` 2, another one. Each processes a part of the tensors [B, H, ...] of a call:
    some batches, or some of the `kv_heads` KV heads with their query heads. `join` ends it."""

    def __init__(self, count: int, batch: int, kv_heads: int, device: torch.device) -> None:
        self.others: tuple[torch.cuda.Stream, ...] = ()
        self.axis, self.whole = (0, batch) if batch > 1 else (1, kv_heads)
        if count > 1:
            self.current, self.others = torch.cuda.current_stream(device), (_other(device),)
            self.fork()

    def run(self, work: Callable[[Cut], None]) -> None:
        """Calls `work` for each part, with a function that slices a tensor to that part."""
        if not self.others:
            work(lambda x: x)
            return
        half = self.whole // 2
        work(lambda x: x.narrow(self.axis, 0, x.shape[self.axis] * half // self.whole))
        with torch.cuda.stream(self.others[0]):
            work(self._rest)

    def _rest(self, x: torch.Tensor) -> torch.Tensor:
        first = x.shape[self.axis] * (self.whole // 2) // self.whole
        return x.narrow(self.axis, first, x.shape[self.axis] - first)

    def wait(self, pending: Pending) -> None:
        pending.wait()
        for stream in self.others:
            with torch.cuda.stream(stream):
                pending.wait()

    def precede(self, transport: Transport) -> None:
        """Makes later transfers wait for the work so far on the other stream; they wait for the current one anyway."""
        for stream in self.others:
            transport.follow(stream)

    def fork(self) -> None:
        for stream in self.others:
            stream.wait_stream(self.current)

    def join(self) -> None:
        for stream in self.others:
            self.current.wait_stream(stream)


@cache
def _other(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
