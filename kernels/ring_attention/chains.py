"""The streams that a rank's calls run on.

The last wave of a call leaves SMs without work, and the next call for the same queries waits for its end. Queries do
not depend on each other: so they are cut in two, and the calls for either run on a stream of their own. Those of one
start on SMs that are free while the last tiles of the other end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch

from .schedule import Call, split
from .transport import Pending, Transport


class Chains:
    """The current stream for queries before `row` and another one for the rest, or only the first, if it is 0. `join`
    ends it."""

    def __init__(self, row: int, device: torch.device) -> None:
        self.row = row
        self.others: tuple[torch.cuda.Stream, ...] = ()
        if row:
            self.current, self.others = torch.cuda.current_stream(device), (_other(device),)
            self.others[0].wait_stream(self.current)

    def wait(self, pending: Pending) -> None:
        pending.wait()
        for stream in self.others:
            with torch.cuda.stream(stream):
                pending.wait()

    def precede(self, transport: Transport) -> None:
        """Transfers that come next run after the calls so far."""
        for stream in self.others:
            transport.follow(stream)

    def run(self, calls: Sequence[Call], work: Callable[[Call], None]) -> None:
        first, second = split(calls, self.row) if self.row else (calls, ())
        for call in first:
            work(call)
        if second:
            with torch.cuda.stream(self.others[0]):
                for call in second:
                    work(call)

    def join(self) -> None:
        for stream in self.others:
            self.current.wait_stream(stream)


@cache
def _other(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
