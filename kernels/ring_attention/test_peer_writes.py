"""Writes into peers' memory, with threads for ranks: an emulated driver copies and signals, and each rank's streams are
one queue. That the calls end shows that no signal is waited for before what it depends on has been queued."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from . import backward, blocks, chains, compute, configs, driver, peer_writes, transport
from . import test_world as plain
from .backward import ring_backward
from .forward import ring_forward
from .layout import LAYOUTS, even_lengths, positions
from .schedule import ROTATIONS, Problem
from .test_world import Run

SECONDS = 30


class _Stream:
    cuda_stream = 0

    def wait_stream(self, other: _Stream) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def record_event(self) -> object:
        return object()


class _Signals:
    def __init__(self, posted: dict, rank: int) -> None:
        self.posted, self.rank = posted, rank

    def say(self, kind: int, to: int) -> None:
        self.posted[kind, self.rank, to].release()

    def expected(self, kind: int, source: int) -> tuple[int, int]:
        return kind, source

    def wait(self, signal: tuple[int, int]) -> None:
        assert self.posted[(*signal, self.rank)].acquire(timeout=SECONDS), "nothing was said"


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


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers' memory in one process. The rank of a thread is its name."""
    posted: dict = defaultdict(lambda: threading.Semaphore(0))
    memory: dict[int, torch.Tensor] = defaultdict(lambda: torch.full((1 << 20,), 255, dtype=torch.uint8))

    def arena(group: object, device: torch.device, size: int) -> SimpleNamespace:
        assert size <= 1 << 20
        rank = int(threading.current_thread().name)
        rooms = [memory[i] for i in range(4)]
        handle = SimpleNamespace(rank=rank)
        return SimpleNamespace(handle=handle, rooms=rooms, signals=_Signals(posted, rank), stream=_Stream())

    cuda = SimpleNamespace(
        current_stream=lambda *_: _Stream(),
        stream=lambda _: contextlib.nullcontext(),
        device=lambda _: contextlib.nullcontext(),
        Event=object,
    )
    for i in itertools.product(range(2), range(4), range(4)):
        posted[i]
    for i in range(4):
        memory[i]
    fake = SimpleNamespace(cuda=cuda)
    monkeypatch.setattr(peer_writes, "torch", fake)
    monkeypatch.setattr(transport, "torch", fake)
    monkeypatch.setattr(chains, "torch", fake)
    monkeypatch.setattr(chains, "_other", lambda device: _Stream())
    monkeypatch.setattr(peer_writes, "_arena", arena)
    monkeypatch.setattr(peer_writes, "members", lambda group: group)
    monkeypatch.setattr(driver, "_call", _emulated)
    monkeypatch.setattr(compute, "attention_partial", plain.partial)
    monkeypatch.setattr(compute, "attention_partial_backward", plain.partial_backward)
    monkeypatch.setattr(backward, "attention_delta", plain.delta)
    monkeypatch.setattr(backward, "_empty", lambda x: torch.full(x.shape, torch.nan))
    staging = blocks.Handed.staging
    monkeypatch.setattr(blocks.Handed, "staging", lambda me, s: [t.fill_(torch.nan) for t in staging(me, s)])


def _rank(run: Run, rank: int, world: int, found: list) -> None:
    """Two calls, forward and backward, as one rank; in the layout of a model's projections at the second."""
    options = run.options
    problem = Problem(run.layout, options["causal"], run.q_lengths, run.k_lengths)
    ring = blocks.Ring(problem, rank, options["rotate"], None, None, "peer")
    lengths = run.q_lengths, run.k_lengths, run.k_lengths, run.q_lengths, run.q_lengths
    mine = [
        x.index_select(2, positions(n[rank], rank, world, run.layout, n))
        for x, n in zip(run.whole(), lengths, strict=True)
    ]
    for again in range(2):
        q, k, v, dout, dlse = mine
        if again:
            q, k, v, dout = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, dout))
        out, lse = ring_forward(ring, q, k, v)
        found[rank] = out, *ring_backward(ring, dout, dlse, q, k, v, out, lse), lse


def _all(run: Run, world: int) -> list:
    """(out, dq, dk, dv, lse) of each rank."""
    found: list = [None] * world
    ranks = [
        threading.Thread(target=_rank, args=(run, rank, world, found), name=str(rank), daemon=True)
        for rank in range(world)
    ]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(SECONDS)
    assert None not in found, run
    return found


@pytest.mark.parametrize("world", (2, 3, 4))
@pytest.mark.parametrize("rotate", ROTATIONS)
def test_ranks_that_write_into_each_other_have_what_one_process_has(emulated, world, rotate) -> None:
    wrong = []
    for layout, causal in itertools.product(LAYOUTS, (False, True)):
        even, ragged = even_lengths(11 * world, world, layout), (9, 0, 4, 1)[:world]
        for queries, keys in ((even, even), (ragged, ragged)):
            run = Run(queries, keys, dict(layout=layout, rotate=rotate, causal=causal, return_lse=True))
            found = _all(run, world)
            names = ("out", "dq", "dk", "dv", "lse")
            whole = run.assembled([dict(zip(names, one, strict=True)) for one in found])
            for name, right in run.expected().items():
                if not torch.allclose(whole[name].double(), right, rtol=2e-5, atol=2e-5):
                    wrong.append(f"{layout} causal={causal} {queries}: {name}")
    assert not wrong, "\n".join(wrong)


def test_what_copy_engines_take_as_one_copy() -> None:
    x = torch.zeros(2, 3, 8, 4)
    assert driver.pieces(x) == (1, 768, 768)
    assert driver.pieces(x[:, :, 2:5]) == (6, 48, 128)
    assert driver.pieces(x[:, :1, 2:5]) == (2, 48, 384)
    assert driver.pieces(x[:, :2]) is None and driver.pieces(x[:1, :2]) == (1, 256, 256)
    assert driver.pieces(x.transpose(1, 2)) is None and driver.pieces(x[..., :2]) is None
    assert driver.pieces(x[:, :1].expand(2, 3, 8, 4)) is None
    assert driver.pieces(x[..., 0].contiguous()[:, :, 1:]) == (6, 28, 32)


def test_rows_are_copied_into_rows_of_another_pitch(emulated) -> None:
    x, into = torch.randn(2, 3, 8, 4), torch.zeros(2, 3, 11, 4)
    driver.copy(x[:, :, 2:7], into[:, :, 1:6], _Stream())
    driver.copy(x[:, :, 2:4].contiguous(), into[:, :, 8:10], _Stream())
    assert torch.equal(into[:, :, 1:6], x[:, :, 2:7]) and torch.equal(into[:, :, 8:10], x[:, :, 2:4])
    assert not into[:, :, 0].any() and not into[:, :, 6:8].any() and not into[:, :, 10].any()


@pytest.mark.parametrize(("batch", "heads"), ((2, (2, 1)), (1, (6, 3))))
@pytest.mark.parametrize(
    ("world", "layout", "causal"), ((2, "zigzag", True), (3, "striped", True), (3, "zigzag", False))
)
def test_heads_in_two_chains_have_what_one_has(emulated, monkeypatch, world, layout, causal, batch, heads) -> None:
    lengths = even_lengths(22 * world, world, layout)
    options = dict(layout=layout, rotate="keys", causal=causal, return_lse=True)
    run = Run(lengths, lengths, options, batch=batch, heads=heads)
    one = _all(run, world)
    monkeypatch.setattr(configs, "pick_chains", lambda *_: 2)
    for whole, cut in zip(one, _all(run, world), strict=True):
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(whole, cut, strict=True))


def test_small_problems_have_one_chain() -> None:
    assert configs.pick_chains(8192, 32, 32) == 2
    assert configs.pick_chains(8192, 32, 1) == configs.pick_chains(128, 32, 32) == 1


@pytest.mark.parametrize("most", [driver.MAX_PITCH, 0])
def test_copies_of_pieces(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one copy of two dimensions, and piece by piece where the pitch is too large for it."""
    monkeypatch.setattr(driver, "_call", _emulated)
    monkeypatch.setattr(driver, "MAX_PITCH", most)
    whole, rooms = torch.randn(2, 3, 8, 4), [torch.zeros(2, 3, 5, 4), torch.zeros(2, 3, 9, 4)[:, :, 2:7]]
    for source in (whole[:, :, 1:6], whole[:, :, :5].contiguous()):
        for into in rooms:
            driver.copy(source, into.zero_(), _Stream())
            assert torch.equal(source, into)
