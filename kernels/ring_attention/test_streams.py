"""Streams of several GPUs, emulated on the CPU. Calls of the host enqueue work. It runs afterwards, in any order that
streams, events and signals between ranks permit, or in the order of simulated times. So a missing wait shows as a wrong
result or a wrong time, and a cycle of waits as a deadlock. The tests that use the emulation are in test_peer_writes.py.

Ranks are called one at a time, in one thread. PyTorch's computations within `Gpus.rank` are deferred to the current
stream: views and allocations are made at once, and a tensor holds NaN until the work that fills it has run.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(eq=False)
class Work:
    """Work in a stream. It runs once the work before it in its queue and in `after` is done, and `ready` holds."""

    stream: Stream
    name: str
    run: Callable[[], object] = lambda: None
    after: tuple[Work, ...] = ()
    ready: Callable[[], bool] = lambda: True
    seconds: float = 0.0
    done: bool = False
    begin: float = 0.0
    end: float = 0.0

    def can_run(self) -> bool:
        return all(one.done for one in self.after) and self.ready()


@dataclass(eq=False)
class Stream:
    """The used part of the interface of torch.cuda.Stream. `cuda_stream` is not a handle."""

    gpus: Gpus
    rank: int
    name: str
    last: tuple[Work, ...] = ()
    cuda_stream: int = 0

    def give(self, name: str, run: Callable[[], object] = lambda: None, **given) -> Work:
        work = Work(self, name, run, **given)
        self.last = (work,)
        self.gpus.given[self.rank].append(work)
        return work

    def wait_stream(self, other: Stream) -> None:
        self.give("wait", after=other.last)

    def record_event(self) -> tuple[Work, ...]:
        return self.last

    def wait_event(self, event: tuple[Work, ...]) -> None:
        self.give("wait", after=event)


Queue = Callable[[Stream], object]  # maps a stream to a hardware queue of its rank


class Gpus:
    """`world` emulated ranks, each with a stream "main". `seconds(stream, name, tensors)`, the time of a copy or a
    kernel, is 0 unless it is set."""

    def __init__(self, world: int) -> None:
        self.world, self.now = world, 0.0
        self.given: list[list[Work]] = [[] for _ in range(world)]
        self.current: list[Stream] = []
        self.seconds: Callable[[Stream, str, tuple], float] = lambda stream, name, tensors: 0.0

    @contextlib.contextmanager
    def rank(self, rank: int) -> Iterator[None]:
        with self.on(Stream(self, rank, "main")), _Deferred(self):
            yield

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self.current.append(stream)
        try:
            yield
        finally:
            self.current.pop()

    def kernel(self, function: Callable) -> Callable:
        """Returns a function that enqueues the call and returns nothing."""

        def call(*arguments, **options) -> None:
            stream, name = self.current[-1], function.__name__
            seconds = self.seconds(stream, name, arguments)
            stream.give(name, lambda: function(*arguments, **options), seconds=seconds)

        return call

    def copy(self, source: torch.Tensor, into: torch.Tensor, stream: Stream) -> None:
        stream.give("copy", lambda: into.copy_(source), seconds=self.seconds(stream, "copy", (source,)))

    def write_value(self, stream: Stream, address: int, value: int) -> None:
        def write() -> None:
            counter = ctypes.c_uint32.from_address(address)
            assert counter.value == value - 1, "a counter that does not grow by 1"
            counter.value = value

        stream.give("write", write)

    def wait_value(self, stream: Stream, address: int, value: int) -> None:
        counter = ctypes.c_uint32.from_address(address)
        stream.give("value", ready=lambda: counter.value >= value)

    def run(self, queue: Queue, drawn: random.Random) -> None:
        """Runs all work, one item at a time, chosen at random from the ready items at the head of a queue. Streams of a
        rank with equal `queue` share one. AssertionError on deadlock."""
        queues = self._queues(queue)
        while queues:
            able = [works for works in queues if works[0].can_run()]
            assert able, "deadlock: " + ", ".join(f"{q[0].stream.rank} {q[0].stream.name} {q[0].name}" for q in queues)
            work = drawn.choice(able).pop(0)
            work.run()
            work.done = True
            queues = [works for works in queues if works]

    def time(self, queue: Queue) -> dict[int, list[Work]]:
        """Runs each item of work as early as possible, for its seconds; queues are concurrent. Returns the work of each
        rank."""
        found = dict(enumerate(self.given))
        queues, running = self._queues(queue), []
        while queues or running:
            busy = {id(works) for works, _ in running}
            for works in queues:
                if id(works) not in busy and works[0].can_run():
                    works[0].begin, works[0].end = self.now, self.now + works[0].seconds
                    running.append((works, works[0]))
            assert running, "deadlock"
            running.sort(key=lambda one: one[1].end)
            works, first = running.pop(0)
            self.now = first.end
            first.run()
            first.done = True
            works.pop(0)
            queues = [left for left in queues if left]
        return found

    def _queues(self, queue: Queue) -> list[list[Work]]:
        found: dict[object, list[Work]] = {}
        for rank, works in enumerate(self.given):
            for work in works:
                found.setdefault((rank, queue(work.stream)), []).append(work)
        self.given = [[] for _ in self.given]
        return list(found.values())


@dataclass
class _Deferred(TorchDispatchMode):
    """A dispatch mode that enqueues PyTorch's computations."""

    gpus: Gpus

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options = options or {}
        stream, name = self.gpus.current[-1], str(function)
        if function._schema.is_mutable:
            stream.give(name, lambda: function(*arguments, **options))
            return options["out"] if "out" in options else arguments[0]
        found = function(*arguments, **options)
        if function.is_view or "empty" in name:
            return found
        assert isinstance(found, torch.Tensor), name
        found.fill_(torch.nan)
        stream.give(name, lambda: found.copy_(function(*arguments, **options)))
        return found


def one_queue(stream: Stream) -> object:
    return None


def own_queue(stream: Stream) -> object:
    return stream


def cuda(gpus: Gpus) -> SimpleNamespace:
    """A replacement of torch.cuda."""
    return SimpleNamespace(current_stream=lambda *_: gpus.current[-1], stream=gpus.on)


def _two_streams(waits: bool) -> tuple[Gpus, torch.Tensor]:
    gpus = Gpus(1)
    with gpus.rank(0):
        side, x = Stream(gpus, 0, "side"), torch.empty(4)
        with gpus.on(side):
            x.fill_(1.0)
        if waits:
            gpus.current[-1].wait_stream(side)
        y = x + 1
    return gpus, y


def test_a_missing_wait_shows_in_some_order() -> None:
    for waits in (True, False):
        results = set()
        for seed in range(20):
            gpus, y = _two_streams(waits)
            gpus.run(own_queue, random.Random(seed))
            results.add(bool((y == 2).all()))
        assert results == ({True} if waits else {True, False})


def test_a_cycle_of_waits_is_a_deadlock() -> None:
    gpus, counters = Gpus(2), torch.zeros(2, dtype=torch.int32)
    for rank in range(2):
        stream = Stream(gpus, rank, "main")
        gpus.wait_value(stream, counters.data_ptr() + 4 * rank, 1)
        gpus.write_value(stream, counters.data_ptr() + 4 * (1 - rank), 1)
    with pytest.raises(AssertionError, match="deadlock: 0 main value, 1 main value"):
        gpus.run(own_queue, random.Random(0))


def test_queues_are_timed_beside_each_other() -> None:
    gpus = Gpus(1)
    first, second = Stream(gpus, 0, "a"), Stream(gpus, 0, "b")
    first.give("x", seconds=2.0)
    second.give("y", seconds=3.0)
    first.wait_stream(second)
    last = first.give("z", seconds=1.0)
    gpus.time(own_queue)
    assert (last.begin, last.end, gpus.now) == (3.0, 4.0, 4.0)
