"""Ranks that write into each other's memory, as threads of one process; and the choice of the transport."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from . import exchange, fsdp, topk, transport
from .chunks import KINDS, Chunks
from .reference import exchange_reference
from .test_gradient_compression import DEVICE, same

OFFSET, GUARD, FILL = 64, 96, 0x55  # bytes before and after the requested symmetric memory, and their value


class Ranks:
    """Ranks that run one at a time, from barrier to barrier, with memory that all of them can access."""

    def __init__(self, world: int) -> None:
        self.world, self.turn, self.met = world, threading.Lock(), threading.Barrier(world, timeout=60)
        self.memory: dict[int, torch.Tensor] = {}

    def barrier(self, channel: int = 0) -> None:
        self.turn.release()
        try:
            self.met.wait()
        finally:
            self.turn.acquire()

    def group(self, rank: int) -> Any:
        return SimpleNamespace(rank=lambda: rank, size=lambda: self.world)

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full((OFFSET + size + GUARD,), FILL, dtype=dtype, device=device)[OFFSET:-GUARD]

    def rendezvous(self, memory: torch.Tensor, group: Any) -> SimpleNamespace:
        self.memory[group.rank()] = memory
        self.barrier()
        addresses = [self.memory[rank].data_ptr() - OFFSET for rank in range(self.world)]
        return SimpleNamespace(buffer_ptrs=addresses, barrier=self.barrier)

    def run(self, work: Callable[[Any], None]) -> None:
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            with self.turn:
                try:
                    work(self.group(rank))
                except BaseException as error:
                    errors.append(error)
                    self.met.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 3])
def test_peers_equal_the_reference_to_the_bit(world: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Successive calls use the same memory, which has exactly the requested size and begins at an offset in its
    allocation. Nothing outside it is written."""
    ranks, made = Ranks(world), {}
    symmetric = pytest.importorskip("torch.distributed._symmetric_memory")
    monkeypatch.setattr(symmetric, "empty", ranks.empty)
    monkeypatch.setattr(symmetric, "rendezvous", ranks.rendezvous)

    def peers(group: Any, device: torch.device, needed: int) -> transport.Peers:
        if group.rank() not in made:
            made[group.rank()] = transport.Peers(group, device, needed)
        return made[group.rank()]

    monkeypatch.setattr(exchange, "peers", peers)
    calls = []
    for numel, average in ((1500, True), (700, False), (1500, True)):
        tensors = [torch.randn(numel, device=DEVICE) for _ in range(world)]
        residuals = [torch.randn(numel, device=DEVICE).mul(0.01).bfloat16() for _ in range(world)]
        calls.append((tensors, residuals, average, exchange_reference(tensors, residuals, kind, average)))

    def work(group: Any) -> None:
        for tensors, residuals, average, _ in calls:
            exchange.all_reduce(tensors[group.rank()], residuals[group.rank()], group, kind, average, "peers")

    ranks.run(work)
    for tensors, residuals, _, (want, kept) in calls:
        assert all(same(tensor, want) for tensor in tensors)
        assert all(same(residual, own) for residual, own in zip(residuals, kept, strict=True))
    for memory in ranks.memory.values():
        assert memory.numel() == 2 * world * Chunks.whole_blocks(1500, world, kind).bytes
        whole = memory.as_strided((OFFSET + memory.numel() + GUARD,), (1,), 0)
        assert (whole[:OFFSET] == FILL).all() and (whole[-GUARD:] == FILL).all()


@pytest.mark.parametrize(
    ("asked", "reached", "taken"),
    [
        ("auto", True, "peers"),
        ("auto", False, "collectives"),
        ("peers", False, "peers"),
        ("collectives", True, "collectives"),
    ],
)
def test_which_transport_is_taken(asked: str, reached: bool, taken: str) -> None:
    group = Ranks(2).group(1)
    with (
        mock.patch.object(exchange, "reachable", return_value=reached),
        mock.patch.object(exchange, "peers") as peers,
        mock.patch.object(exchange, "Collectives") as collectives,
    ):
        exchange.all_reduce(torch.zeros(300, device=DEVICE), None, group, "int8", True, asked)
    assert (peers.called, collectives.called) == (taken == "peers", taken == "collectives")


def test_one_rank_sends_nothing() -> None:
    """Whatever the transport: a group of one rank has no peers."""
    group, x = Ranks(1).group(0), torch.randn(300, device=DEVICE)
    want, _ = exchange_reference([x], [None], "int8", True)
    exchange.all_reduce(x, None, group, "int8", True, "peers")
    assert torch.equal(x, want)
    assert not transport.reachable(group, torch.device("cuda"))


def test_what_is_gathered_is_in_the_order_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(everyone: torch.Tensor, own: torch.Tensor, group: Any) -> None:
        everyone.copy_(torch.cat([own, own + 10, own + 20]))

    monkeypatch.setattr(transport, "_all_gather", gather)
    own = torch.arange(4.0)
    found = transport.all_gather(own, Ranks(3).group(0))
    assert [part.tolist() for part in found] == [[0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23]]
    assert transport.all_gather(own, None) == [own] and transport.all_gather(own, Ranks(1).group(0)) == [own]


def test_top_k_is_the_mean_over_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [torch.tensor([3.0, 0, -5, 1, 0]), torch.tensor([0.0, 2, 7, 1, 0])]
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(topk, "all_gather", lambda own, group: sent.append(own) or [own])
    for x in ranks:
        topk.top_k(x.clone(), None, None, 0.4, 5)
    monkeypatch.setattr(topk, "all_gather", lambda own, group: sent)
    x = ranks[0].clone()
    topk.top_k(x, None, Ranks(2).group(0), 0.4, 5)
    assert x.tolist() == [1.5, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("reached", "hosts", "forbidden", "device", "answer"),
    [
        (({0, 1}, {0, 1}), "aa", "", "cuda:0", True),
        (({0, 1, 2}, {0, 1}), "aa", "0", "cuda:0", True),
        (({0, 1}, {1}), "aa", "", "cuda:0", False),  # as another rank says
        (({0}, {0, 1}), "aa", "", "cuda:0", False),
        (({0, 1}, {0, 1}), "ab", "", "cuda:0", False),
        (({0, 1}, {0, 1}), "aa", "1", "cuda:0", False),
        (({0, 1}, {0, 1}), "aa", "", "cuda", True),  # a device without an index is the current one
    ],
)
def test_what_can_be_reached(
    reached: tuple[set[int], ...], hosts: str, forbidden: str, device: str, answer: bool, monkeypatch
) -> None:
    """Rank 0 has GPU 0, and rank 1 GPU 1."""

    def gathered(everyone: list, mine: Any, group: Any) -> None:
        host, without, own, within_reach = mine
        assert (host, without, own) == ("a", forbidden == "1", "gpu 0") and within_reach == names(reached[0])
        everyone[:] = [mine, (hosts[1], False, "gpu 1", names(reached[1]))]

    def names(indices: set[int]) -> set[str]:
        return {f"gpu {i}" for i in indices}

    monkeypatch.setattr(transport, "_REACHABLE", {})
    monkeypatch.setattr(transport.socket, "gethostname", lambda: "a")
    monkeypatch.setenv("NCCL_P2P_DISABLE", forbidden)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(transport, "_identity", lambda index: f"gpu {index}")
    monkeypatch.setattr(transport, "_linked", lambda index, other: other in reached[index])
    monkeypatch.setattr(transport.dist, "all_gather_object", gathered)
    group: Any = SimpleNamespace(size=lambda: 2, group_name="0")
    for _ in range(2):
        assert transport.reachable(group, torch.device(device)) == answer
        monkeypatch.setattr(transport.dist, "all_gather_object", None)  # asked once


@pytest.mark.parametrize("numel", [2047, 2048])
def test_by_default_fsdp_compresses_modules_of_2048_elements(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(fsdp, "full_reduce_scatter", lambda *given, **named: calls.append("in full"))
    monkeypatch.setattr(fsdp, "reduce_scatter", lambda *given: calls.append("compressed"))
    monkeypatch.setattr("torch.distributed.fsdp.FSDPModule", SimpleNamespace)
    made: list[fsdp.CompressedReduceScatter] = []
    module = SimpleNamespace(set_custom_reduce_scatter=made.append)
    fsdp.compress_fsdp(SimpleNamespace(named_modules=lambda: [("", module)]))  # type: ignore[arg-type]
    for scatter in (*made, fsdp.CompressedReduceScatter()):
        scatter(torch.empty(1), torch.empty(numel), Ranks(2).group(0), torch.distributed.ReduceOp.SUM)
    assert calls == ["compressed" if numel == 2048 else "in full"] * 2


def test_room_of_peers_is_a_power_of_two_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is cached by group, device, size and stream. A call that fits the present memory allocates none."""
    stream, device = SimpleNamespace(cuda_stream=1), torch.device("cuda", 0)
    first: Any
    group: Any = SimpleNamespace(group_name="first")
    another: Any = SimpleNamespace(group_name="first")  # a new group may have the name of one that was destroyed
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(transport, "_PEERS", {})
    made = mock.Mock(side_effect=lambda group, device, capacity: SimpleNamespace(group=group, capacity=capacity))
    monkeypatch.setattr(transport, "Peers", made)
    first = transport.peers(group, device, 1)
    assert first.capacity == transport.LEAST_CAPACITY
    assert transport.peers(group, device, 1 << 20) is first
    larger: list[Any] = [transport.peers(group, device, n) for n in ((1 << 20) + 1, 1 << 21, (1 << 21) + 1)]
    assert [found.capacity for found in larger] == [1 << 21, 1 << 21, 1 << 22]
    assert transport.peers(group, device, 5) is first and made.call_count == 3
    stream.cuda_stream = 2
    assert transport.peers(group, device, 5) is not first
    stream.cuda_stream = 1
    assert transport.peers(another, device, 5) is not first
