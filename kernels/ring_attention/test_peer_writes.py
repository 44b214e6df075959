"""Writes into the memory of peers, on emulated GPUs (test_streams.py): results for any order that streams and signals
permit, with a hardware queue for each stream or a shared one, and which work overlaps transfers."""

from __future__ import annotations

import ctypes
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from . import backward, blocks, chains, compute, configs, driver, peer_writes
from . import test_world as plain
from .backward import ring_backward
from .forward import ring_forward
from .layout import LAYOUTS, even_lengths, positions
from .schedule import ROTATIONS, Problem
from .test_streams import Gpus, Queue, Stream, Work, cuda, one_queue, own_queue
from .test_world import Run
from .transport import KINDS, aligned

ROOMS = 1 << 20  # bytes


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Runs PyTorch on one thread, as tensors are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _emulated(name: str, *arguments: object) -> None:
    if name == "cuMemcpyAsync":
        into, source, width, _ = (x.value for x in arguments)
        ctypes.memmove(into, source, width)
        return
    assert name == "cuMemcpy2DAsync_v2"
    told = arguments[0]._obj
    assert told.src_pitch >= told.width and told.dst_pitch >= told.width and told.src_type == driver.UNIFIED
    for i in range(told.height):
        ctypes.memmove(told.dst_device + i * told.dst_pitch, told.src_device + i * told.src_pitch, told.width)


class _Group(Gpus):
    """Emulated ranks with memory that all can write. Each has an arena of the group, which its calls share."""

    def __init__(self, world: int, patch: pytest.MonkeyPatch) -> None:
        super().__init__(world)
        counters = 2 * 4 * world
        numbers = aligned(len(KINDS) * counters)
        self.parts = [torch.full((numbers + ROOMS,), 255, dtype=torch.uint8) for _ in range(world)]
        for part in self.parts:
            part[:numbers] = 0
        self.arenas = []
        for rank in range(world):
            handle = SimpleNamespace(rank=rank, world_size=world)
            arena = SimpleNamespace(handle=handle, parts=self.parts, rooms=[part[numbers:] for part in self.parts])
            arena.streams = [Stream(self, rank, name) for name in ("blocks", "sums")]
            arena.signals = [peer_writes.StreamSignals(arena, kind * counters) for kind in KINDS]
            self.arenas.append(arena)
        fake = SimpleNamespace(cuda=cuda(self))
        patch.setattr(peer_writes, "torch", fake)
        patch.setattr(chains, "torch", fake)
        others = [Stream(self, rank, "other") for rank in range(world)]
        patch.setattr(chains, "_other", lambda device: others[self.current[-1].rank])
        patch.setattr(peer_writes, "_arena", self._arena)
        patch.setattr(peer_writes, "members", lambda group: group)
        for name in ("copy", "write_value", "wait_value"):
            patch.setattr(driver, name, getattr(self, name))
        patch.setattr(compute, "attention_partial", self.kernel(plain.partial))
        patch.setattr(compute, "attention_partial_backward", self.kernel(plain.partial_backward))
        patch.setattr(backward, "attention_delta", plain.delta)
        patch.setattr(backward, "_empty", lambda x: torch.full(x.shape, torch.nan))

    def _arena(self, group: object, device: torch.device, size: int) -> SimpleNamespace:
        assert size <= ROOMS
        return self.arenas[self.current[-1].rank]

    def call(self, run: Run) -> list[tuple[torch.Tensor, ...]]:
        """Enqueues on each rank two calls, forward and backward; the second has the memory order of a model's
        projections. Returns (out, dq, dk, dv, lse) of the second for each rank, to be read when everything has run."""
        found = []
        for rank in range(self.world):
            problem = Problem(run.layout, run.options["causal"], run.q_lengths, run.k_lengths)
            ring = blocks.Ring(problem, rank, run.options["rotate"], None, None, "peer")
            lengths = run.q_lengths, run.k_lengths, run.k_lengths, run.q_lengths, run.q_lengths
            mine = [
                x.index_select(2, positions(n[rank], rank, self.world, run.layout, n))
                for x, n in zip(run.whole(), lengths, strict=True)
            ]
            calls = [mine, [x.transpose(1, 2).contiguous().transpose(1, 2) for x in mine]]
            with self.rank(rank):
                for q, k, v, dout, dlse in calls:
                    out, lse = ring_forward(ring, q, k, v)
                    results = out, *ring_backward(ring, dout, dlse, q, k, v, out, lse), lse
            found.append(results)
        return found


def _results(
    run: Run, world: int, patch: pytest.MonkeyPatch, queue: Queue = one_queue, seed: int = 0
) -> list[tuple[torch.Tensor, ...]]:
    with patch.context() as inner:
        group = _Group(world, inner)
        found = group.call(run)
        group.run(queue, random.Random(seed))
    return found


@pytest.mark.parametrize("world", (2, 3, 4))
@pytest.mark.parametrize("rotate", ROTATIONS)
def test_ranks_that_write_into_each_other_have_what_one_process_has(monkeypatch, world, rotate) -> None:
    """All streams of a rank share one hardware queue. If this terminates, no signal is waited for before the work on
    which it depends has been enqueued."""
    wrong = []
    for layout, causal in itertools.product(LAYOUTS, (False, True)):
        even, ragged = even_lengths(11 * world, world, layout), (9, 0, 4, 1)[:world]
        for queries, keys in ((even, even), (ragged, ragged)):
            run = Run(queries, keys, dict(layout=layout, rotate=rotate, causal=causal, return_lse=True))
            wrong += _wrong(run, _results(run, world, monkeypatch))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("chains_", (1, 2))
@pytest.mark.parametrize("rotate", ROTATIONS)
@pytest.mark.parametrize("world", (2, 3, 4, 8))
def test_any_order_that_streams_and_signals_allow_has_the_same_results(monkeypatch, world, rotate, chains_) -> None:
    """Each stream has a hardware queue of its own; then one of two, chosen at random for each stream."""
    monkeypatch.setattr(configs, "pick_chains", lambda *_: chains_)
    lengths = even_lengths(6 * world, world, "zigzag")
    run = Run(lengths, lengths, dict(layout="zigzag", rotate=rotate, causal=True, return_lse=True), heads=(4, 2))
    for seed in range(4):
        draws = random.Random(seed)
        queues: dict[Stream, int] = defaultdict(lambda draws=draws: draws.randrange(2))
        queue = own_queue if seed < 2 else queues.__getitem__
        wrong = _wrong(run, _results(run, world, monkeypatch, queue, seed))
        assert not wrong, (seed, wrong)


def _wrong(run: Run, found: list[tuple[torch.Tensor, ...]]) -> list[str]:
    whole = run.assembled([dict(zip(("out", "dq", "dk", "dv", "lse"), one, strict=True)) for one in found])
    return [
        f"{run.options} {run.q_lengths}: {name}"
        for name, right in run.expected().items()
        if not torch.allclose(whole[name].double(), right, rtol=2e-5, atol=2e-5)
    ]


ROWS = 256  # rows of a rank, so that its own block has two halves


def _timed(
    world: int, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int, str], float], queue: Queue = own_queue
) -> list[list[Work]]:
    """Returns the GEMMs of a backward on each rank, without a mask. Those of a step take `seconds(rank, "product")`,
    and its transfers `seconds(rank, "blocks")` and `seconds(rank, "sums")`."""
    with monkeypatch.context() as patch:
        group = _Group(world, patch)

        def of_step(stream: Stream, name: str, tensors: tuple[torch.Tensor, ...]) -> float:
            if name == "copy":
                return seconds(stream.rank, stream.name) / 2  # of keys and of values
            return seconds(stream.rank, "product") * tensors[1].shape[2] / ROWS if name == "partial_backward" else 0.0

        group.seconds = of_step
        problem = Problem("zigzag", False, *[(ROWS,) * world] * 2)
        for rank in range(world):
            ring = blocks.Ring(problem, rank, "keys", None, None, "peer")
            with group.rank(rank):
                q, k, v, dout = (torch.zeros(1, heads, ROWS, 2) for heads in (2, 1, 1, 2))
                ring_backward(ring, dout, None, q, k, v, torch.zeros_like(q), torch.zeros(1, 2, ROWS))
        return [[one for one in works if one.name == "partial_backward"] for works in group.time(queue).values()]


def _one_for_copies(stream: Stream) -> object:
    return "copies" if stream.name in ("blocks", "sums") else stream


@pytest.mark.parametrize("world", (2, 3, 4, 8))
@pytest.mark.parametrize("queue", (own_queue, _one_for_copies))
def test_what_a_step_has_time_for_is_overlapped_with_it(monkeypatch, world, queue) -> None:
    """Also if the copy streams share a hardware queue, and if one rank is slow: no rank takes longer than the slowest
    one."""
    times = {"product": 1.0, "blocks": 0.45, "sums": 0.45}
    for of_rank in ([1.0] * world, [1.0, 1.3, *[1.0] * (world - 2)]):
        found = _timed(world, monkeypatch, lambda rank, name, each=of_rank: times[name] * each[rank], queue)
        assert max(products[-1].end for products in found) == pytest.approx(world * max(of_rank))


def test_no_step_waits_for_sums_that_leave(monkeypatch) -> None:
    """The sums of the first step take as long as many steps; the GEMMs of the second step start before they arrive."""
    found = _timed(4, monkeypatch, lambda rank, name: {"product": 1.0, "blocks": 0.4, "sums": 9.0}[name])
    for first, one, two, three, last in found:
        assert (first.begin, one.begin, two.begin) == (0.0, 0.5, 1.5)
        assert (three.begin, last.begin) == (10.5, 19.5)  # sums are added in the order of the steps


def test_what_copy_engines_take_as_one_copy() -> None:
    x = torch.zeros(2, 3, 8, 4)
    assert driver.pieces(x) == (1, 768, 768)
    assert driver.pieces(x[:, :, 2:5]) == (6, 48, 128)
    assert driver.pieces(x[:, :1, 2:5]) == (2, 48, 384)
    assert driver.pieces(x[:, :2]) is None and driver.pieces(x[:1, :2]) == (1, 256, 256)
    assert driver.pieces(x.transpose(1, 2)) is None and driver.pieces(x[..., :2]) is None
    assert driver.pieces(x[:, :1].expand(2, 3, 8, 4)) is None
    assert driver.pieces(x[..., 0].contiguous()[:, :, 1:]) == (6, 28, 32)


@pytest.mark.parametrize(("batch", "heads"), ((2, (2, 1)), (1, (6, 3))))
@pytest.mark.parametrize(
    ("world", "layout", "causal"), ((2, "zigzag", True), (3, "striped", True), (3, "zigzag", False))
)
def test_heads_in_two_chains_have_what_one_has(monkeypatch, world, layout, causal, batch, heads) -> None:
    lengths = even_lengths(22 * world, world, layout)
    options = dict(layout=layout, rotate="keys", causal=causal, return_lse=True)
    run = Run(lengths, lengths, options, batch=batch, heads=heads)
    one = _results(run, world, monkeypatch)
    monkeypatch.setattr(configs, "pick_chains", lambda *_: 2)
    for whole, cut in zip(one, _results(run, world, monkeypatch), strict=True):
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(whole, cut, strict=True))


def test_small_problems_have_one_chain() -> None:
    assert configs.pick_chains(8192, 32, 32) == 2
    assert configs.pick_chains(8192, 32, 1) == configs.pick_chains(128, 32, 32) == 1


@pytest.mark.parametrize("most", [driver.MAX_PITCH, 0])
def test_copies_of_pieces(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies into rows of another pitch: by one 2D copy, or piece by piece if the pitch is too large for that."""
    monkeypatch.setattr(driver, "_call", _emulated)
    monkeypatch.setattr(driver, "MAX_PITCH", most)
    stream = SimpleNamespace(cuda_stream=0)
    whole, rooms = torch.randn(2, 3, 8, 4), [torch.zeros(2, 3, 5, 4), torch.zeros(2, 3, 9, 4)[:, :, 2:7]]
    for source in (whole[:, :, 1:6], whole[:, :, :5].contiguous()):
        for into in rooms:
            driver.copy(source, into.zero_(), stream)
            assert torch.equal(source, into)
    into = torch.zeros(2, 3, 11, 4)
    driver.copy(whole[:, :, 2:7], into[:, :, 1:6], stream)
    assert torch.equal(into[:, :, 1:6], whole[:, :, 2:7]) and not into[:, :, 0].any() and not into[:, :, 6:].any()


def test_a_graph_of_signals_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"):
        peer_writes.PeerWrites(None, torch.device("cuda", 0), [])


def test_an_arena_has_rooms_behind_counters_and_a_stream_for_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group has one arena. It is reallocated only if it is too small, and after its work is done."""
    symmetric = pytest.importorskip("torch.distributed._symmetric_memory")
    log: list[object] = []
    peers = torch.empty(2, 1 << 16, dtype=torch.uint8)
    handle = SimpleNamespace(
        rank=1,
        world_size=3,
        barrier=lambda: log.append("barrier"),
        get_remote_tensor=lambda rank, shape, dtype: peers[rank // 2][: shape[0]].view(dtype),
    )

    def stream(device: torch.device, priority: int) -> SimpleNamespace:
        return SimpleNamespace(wait_stream=lambda other: log.append(("waits", other)))

    monkeypatch.setattr(symmetric, "empty", lambda size, **options: torch.full((size,), 255, **options))
    monkeypatch.setattr(symmetric, "rendezvous", lambda memory, name: log.append(name) or handle)
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("synchronized"))
    monkeypatch.setattr(peer_writes, "_ARENAS", {})
    group: Any = SimpleNamespace(size=lambda: 3, group_name="three")
    device = torch.device("cpu")
    arena = peer_writes._arena(group, device, 1000)
    assert log == ["three", "barrier", ("waits", "current"), ("waits", "current")]
    assert len(arena.streams) == len(KINDS) and arena.streams[0] is not arena.streams[1]
    parts = [peers[0], arena.memory, peers[1]]
    assert [part.data_ptr() for part in arena.parts] == [part.data_ptr() for part in parts]
    first = arena.rooms[1].data_ptr() - arena.memory.data_ptr()
    assert not arena.memory[:first].any() and all(room.numel() >= 1000 for room in arena.rooms)
    counters = [
        arena.signals[kind].expected(signal, source)[0] - arena.memory.data_ptr()
        for kind, signal, source in itertools.product(KINDS, (peer_writes.READY, peer_writes.ARRIVED), range(3))
    ]
    assert len(set(counters)) == 12 and min(counters) >= 0 and max(counters) + 4 <= first
    assert peer_writes._arena(group, device, 400) is arena and len(log) == 4
    assert peer_writes._arena(group, device, 2000) is not arena and log[4] == "synchronized"
    peer_writes.release()
    assert not peer_writes._ARENAS and log[-1] == "synchronized"
