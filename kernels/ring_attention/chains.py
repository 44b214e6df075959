"""The streams that a rank's calls run on.

The last wave of a call leaves SMs without work, and the next call for the same heads waits for its end. Heads do not
depend on each other: so they are cut in two, and the calls for either run on a stream of their own. Those of one start
on SMs that are free while the last tiles of the other end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from .transport import Pending, Transport

Cut = Callable[[torch.Tensor], torch.Tensor]


class Chains:
    """The current stream and, with `count` 2, another one, each for a part of the tensors [B, H, ...] of a call: some
    batches, or heads of K and V, of which there are `kv_heads`, with the queries' that share them. `join` ends it."""

    def __init__(self, count: int, batch: int, kv_heads: int, device: torch.device) -> None:
        self.others: tuple[torch.cuda.Stream, ...] = ()
        self.axis, self.whole = (0, batch) if batch > 1 else (1, kv_heads)
        if count > 1:
            self.current, self.others = torch.cuda.current_stream(device), (_other(device),)
            self.fork()

    def run(self, work: Callable[[Cut], None]) -> None:
        """Does the work for each part, which it is given as a function that cuts a tensor."""
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
        """Later transfers run after the calls so far of the other stream; the current one is waited for anyway."""
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
