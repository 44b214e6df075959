"""Ring attention on two to four gloo processes, compared with one process in fp64."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from harness.spec import Case, Peer

from ..attention import attention
from . import agreement, backward, bench, compute, configs, op, peer_writes, release, ring_attention, shard, unshard
from . import test_world as plain
from .backward import ring_backward
from .blocks import Ring
from .compute import attend
from .layout import LAYOUTS, even_lengths
from .peer_writes import Seat, peer_writes_reason
from .reference import ring_attention_reference
from .schedule import ROTATIONS, Call, Problem
from .test_world import SECONDS, Run, call, call_all, spread

WORLDS = (2, 3, 4)
# Processes on the CPU compute by `plain`, and also by the kernels if the interpreter is on.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _runs(world: int) -> Iterator[tuple[str, Run]]:
    """Returns runs by name: each layout and rotation, with and without a mask, equal and unequal lengths, square and
    rectangular."""
    for layout, rotate, causal in itertools.product(LAYOUTS, ROTATIONS, (False, True)):
        options = dict(layout=layout, rotate=rotate, causal=causal)
        even = [even_lengths(n, world, layout) for n in (23, 41, 5 * world)]
        ragged = (9, 0, 4, 1)[:world]
        others = (3, 7, 0, 6)[-world:]
        shapes = {
            "even": (even[2], even[2]),
            "wide": (even[0], even[1]),
            "tall": (even[1], even[0]),
            "ragged": (ragged, ragged),
        }
        if layout != "striped" or not causal:
            shapes["mixed"] = (ragged, others)
        for name, (queries, keys) in shapes.items():
            mask = "causal" if causal else "full"
            run = Run(queries, keys, dict(options, return_lse=name in ("wide", "ragged")), told=name != "even")
            yield f"{layout}-{rotate}-{mask}-{name}", run
    yield "auto-keys", Run((8,) * world, (8,) * world, dict(causal=True), told=False)
    yield "auto-queries", Run((2,) * world, (40,) * world, dict(scale=0.3))
    yield "half", Run((8,) * world, (8,) * world, dict(causal=True), dtype=torch.float16)
    yield "nothing", Run((0,) * world, (0,) * world, dict(causal=True))
    yield "no-keys", Run((3,) * world, (0,) * world, dict(return_lse=True))
    if world == 2 and INTERPRETED:
        for rotate in ROTATIONS:
            options = dict(causal=True, rotate=rotate)
            yield f"kernels-{rotate}", Run((7, 4), (7, 4), options, batch=1, dim=16, kernels=True)


RUNS = {world: dict(_runs(world)) for world in WORLDS}


def _everything(rank: int, world: int, runs: dict[str, Run]) -> dict[str, Any]:
    """Runs all calls on one rank. Starting processes takes longer than the calls, so one set of processes runs all."""
    found: dict[str, Any] = {"runs": call_all(rank, world, runs)}
    compute.attention_partial, compute.attention_partial_backward = plain.partial, plain.partial_backward
    backward.attention_delta = plain.delta
    if world == 2:
        found |= {"said": _bad_calls(rank), "shards": _checked_shards(world)}
    if world == 3:
        found |= {"group": _at_length(rank, world)}
    return found


@cache
def _ranks(world: int) -> list[dict[str, Any]]:
    """Returns the results of each rank of a world."""
    with tempfile.TemporaryDirectory() as folder:
        return spread(world, _everything, Path(folder), RUNS[world])


@pytest.mark.parametrize("world", [w if w < 4 else pytest.param(w, marks=pytest.mark.slow) for w in WORLDS])
def test_all_ranks_together_have_what_one_process_has(world: int) -> None:
    ranks = [found["runs"] for found in _ranks(world)]
    wrong = []
    for name, run in RUNS[world].items():
        found, expected = run.assembled([rank[name] for rank in ranks]), run.expected()
        for what, tensor in found.items():
            wide = dict(rtol=2e-2, atol=4e-3) if run.dtype == torch.float16 else dict(rtol=2e-5, atol=2e-5)
            if what != "lse" and tensor.dtype != run.dtype:
                wrong.append(f"{name}: {what} is {tensor.dtype}")
            if not torch.allclose(tensor.double(), expected[what], **wide):
                wrong.append(f"{name}: {what} is off by {(tensor - expected[what]).abs().max()}")
    assert not wrong, "\n".join(wrong)


def _bad_calls(rank: int) -> list[str]:
    """Returns the error messages of invalid calls: first of those that a rank detects alone, then of those where ranks
    differ."""
    x = torch.zeros(1, 2, 4, 8)
    alone: list[tuple[tuple, dict]] = [
        ((x.int(), x, x), {}),
        ((x, x.half(), x), {}),
        ((x, x, x[:, :, :2]), {}),
        ((x, x[:, :, :, :4], x), {}),
        ((torch.zeros(1, 2, 4, 257),) * 3, {}),
        ((x[..., :0],) * 3, {}),
        ((x, x[:, :1].repeat(1, 3, 1, 1), x[:, :1].repeat(1, 3, 1, 1)), {}),
        ((x, x, x), dict(layout="round")),
        ((x, x, x), dict(rotate="values")),
        ((x, x, x), dict(transport="carrier")),
        ((x, x, x), dict(scale=0.0)),
        ((x, x, x), dict(group="all")),
        ((x, x, x), dict(q_lengths=(4,))),
        ((x, x, x), dict(k_lengths=(3, 3))),
    ]
    mine = x[:, :, : 4 - rank]
    together: list[tuple[tuple, dict]] = [
        ((x, x, x), dict(causal=rank == 0)),
        ((mine, x, x), {}),
        ((x, mine, mine), {}),
        ((mine, x, x), dict(q_lengths=(4, 3), k_lengths=(4, 4), layout="striped", causal=True)),
        ((mine, mine, mine), dict(q_lengths=(4, 3), k_lengths=(4, 3), transport="peer")),
    ]
    wrong_cut = (x[:, :, : 3 + rank], x, x), dict(q_lengths=(3, 4), k_lengths=(4, 4), layout="striped", causal=True)
    said = []
    for arguments, options in (*alone, *together, wrong_cut):
        try:
            ring_attention(*arguments, **options)
            said.append("nothing")
        except (TypeError, ValueError, RuntimeError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


SAID = (
    "TypeError: ring_attention: q must be a tensor of float32, float16 or bfloat16, got torch.int32",
    "TypeError: ring_attention: k must be a tensor of q's dtype, got torch.float16",
    "ValueError: ring_attention: v must have k's shape",
    "ValueError: ring_attention: k must have the B and D of q",
    "ValueError: ring_attention: q must be [B, H, S, D] with 1 <= D <= 256, got shape (1, 2, 4, 257)",
    "ValueError: ring_attention: q must be [B, H, S, D] with 1 <= D <= 256, got shape (1, 2, 4, 0)",
    "ValueError: ring_attention: q must have a multiple of k's 3 heads, got 2",
    "ValueError: layout must be one of",
    "ValueError: ring_attention: rotate must be one of",
    "ValueError: ring_attention: transport must be one of",
    "ValueError: ring_attention: scale must be a positive number",
    "TypeError: ring_attention: group must be a ProcessGroup or None, got str",
    "ValueError: ring_attention: q_lengths must be 2 numbers of rows, got [4]",
    "ValueError: ring_attention: k must have the 3 rows that k_lengths gives rank",
    "ValueError: ring_attention: causal must be the same on all ranks, got rank 0 True, rank 1 False",
    "ValueError: ring_attention: q_lengths must be [4, 3], the rows of q on the ranks, got None",
    "ValueError: ring_attention: k_lengths must be [4, 3], the rows of k on the ranks, got None",
    "nothing",
    'RuntimeError: ring_attention: transport="peer" cannot run here: the group\'s backend is gloo, not nccl',
    "ValueError: ring_attention: layout='striped' does not support these arguments: causal stripes",
)


def test_bad_calls_are_named_on_every_rank() -> None:
    for said in (found["said"] for found in _ranks(2)):
        assert len(said) == len(SAID)
        assert [got for got, wanted in zip(said, SAID, strict=True) if not got.startswith(wanted)] == []


def _at_length(rank: int, world: int) -> dict[str, object]:
    """Checks other properties of a group: `unshard` after `shard`, a repeated call, a subgroup."""
    x = torch.arange(2.0 * 13).view(2, 13)
    found: dict[str, object] = {}
    for layout in LAYOUTS:
        found[layout] = torch.equal(unshard(shard(x, 1, layout=layout), 1, layout=layout), x)
    run = Run((4, 1, 3), (4, 1, 3), dict(causal=True))
    first, again = (call(run, rank, world) for _ in range(2))
    found["again"] = all(torch.equal(first[name], again[name]) for name in first)
    x4 = torch.randn(1, 2, 4, 8, requires_grad=True)
    out, lse = ring_attention(x4, x4, x4, return_lse=True)
    (out.sum() + lse.sum()).backward()  # incoming gradients of stride 0
    found["expanded"] = x4.grad is not None and bool(x4.grad.isfinite().all())
    for rotate in ROTATIONS:
        found[rotate] = _of_any_strides(rotate)
    pair = dist.new_group([0, 2])
    if rank != 1:
        q = torch.randn(1, 1, 4, 8, generator=torch.Generator().manual_seed(1))
        mine = shard(q, 2, group=pair)
        whole = unshard(ring_attention(mine, mine, mine, causal=True, group=pair), 2, group=pair)
        found["pair"] = torch.allclose(whole, ring_attention_reference(q, q, q, causal=True), atol=1e-5)
    else:
        try:
            ring_attention(x[None, None], x[None, None], x[None, None], group=pair)
        except (TypeError, ValueError) as error:
            found["outside"] = str(error)
    leaves = [torch.randn(1, 2, 4 + rank, 8, requires_grad=True) for _ in range(3)]
    lengths = [4 + other for other in range(world)]
    with mock.patch.object(dist, "batch_isend_irecv", side_effect=AssertionError("sent")):
        still = ring_attention(*leaves, causal=True, q_lengths=lengths, k_lengths=lengths, transport="none")
        gradients = torch.autograd.grad(still.sum(), leaves)
    found["still"] = [x.shape for x in (still, *gradients)] == [leaves[0].shape] * 4
    return found


def _of_any_strides(rotate: str) -> bool:
    """Whether inputs whose rows are not contiguous have the results of contiguous ones."""
    tensors = [torch.randn(2, 2, 4, 8) for _ in range(4)]
    found = []
    for given in (tensors, [x.mT.contiguous().mT for x in tensors]):
        leaves = [x.clone().requires_grad_() for x in given[:3]]
        out = ring_attention(*leaves, causal=True, rotate=rotate)
        found.append((out, *torch.autograd.grad(out, leaves, given[3])))
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*found, strict=True))


def test_groups_and_repeats() -> None:
    ranks = [found["group"] for found in _ranks(3)]
    assert all(found[name] for found in ranks for name in (*LAYOUTS, *ROTATIONS))
    assert all(found["again"] and found["still"] and found["expanded"] for found in ranks)
    assert ranks[0]["pair"] and ranks[2]["pair"] and "group must be" in str(ranks[1]["outside"])


CHECKED = ("auto", "all-gather", *(("all-to-all",) if INTERPRETED else ()))


def _checked_shards(world: int) -> dict[str, str | None]:
    bench.CHECKED_ROWS = 32
    found = {}
    for case in bench.CASES:
        if case.world_size != world or case.dims["dim"] > 64:
            continue
        small = dataclasses.replace(case, dtype=torch.float32, dims=dict(case.dims) | dict(dim=8, group=1))
        for name in CHECKED:
            peer = next((peer for peer in bench.SPEC.baselines if peer.name == name), None)
            if peer and peer.supports(small, "bwd"):
                continue
            fn = peer.load() if isinstance(peer, Peer) else ring_attention
            found[f"{case.name} {name}"] = bench.check_shard(fn, small, "bwd", "cpu")
    wrong = bench.check_shard(lambda q, k, v, **_: q, small, "fwd", "cpu")
    return found | {"wrong": None if wrong else "a wrong one passes"}


def test_the_check_of_several_ranks_takes_what_is_right_and_nothing_else() -> None:
    for found in (rank["shards"] for rank in _ranks(2)):
        assert {name.split()[-1] for name in found} == {*CHECKED, "wrong"}
        assert {name: reason for name, reason in found.items() if reason} == {}


@pytest.mark.parametrize("case", bench.CASES, ids=lambda case: case.name)
def test_shards_are_the_problem_cut_up_and_the_cost_is_theirs(case: Case) -> None:
    world, whole = case.world_size, bench.make_inputs(case, "meta", None)
    shards = [bench.make_shard(case, rank, "meta", None) for rank in range(world)]
    for name in "qkv":
        assert sum(part[name].shape[2] for part in shards) == whole[name].shape[2]
    for mode in bench.SPEC.modes_of(case):
        cost = bench.cost(case, mode)
        assert (cost.link_bytes > 0) == (world > 1)
        assert cost.link_bytes <= 4 * 4 * sum(whole[name].numel() for name in "qkv")


def test_one_rank_is_plain_attention() -> None:
    q, k, v = (torch.randn(1, 2, 5, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    ours, lse = ring_attention(q, k, v, causal=True, return_lse=True, layout="striped", q_lengths=[5])
    plain_out, plain_lse = attention(q, k, v, causal=True, return_lse=True)
    assert torch.equal(ours, plain_out) and torch.equal(lse, plain_lse)
    with pytest.raises(ValueError, match="q must have the 4 rows that q_lengths gives rank 0, got 5"):
        ring_attention(q, k, v, q_lengths=[4])


def test_a_gradient_that_there_is_none_of_is_not_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a gradient of lse, the backward receives None, not zeros that it would subtract."""
    given = []
    monkeypatch.setattr(op, "ring_forward", lambda ring, q, k, v: (q.clone(), q.sum(3)))
    monkeypatch.setattr(op, "ring_backward", lambda ring, dout, dlse, q, *_: given.append((dout, dlse)) or (q, q, q))
    q = torch.ones(1, 2, 5, 8, requires_grad=True)
    for use in (lambda out, lse: out.sum(), lambda out, lse: lse.sum()):
        use(*op._RingAttention.apply(q, q, q, None)).backward()
    (dout, dlse), (no_dout, of_lse) = given
    assert dlse is None and dout.eq(1).all()
    assert not no_dout.any() and no_dout.shape == q.shape and of_lse.eq(1).all()


def test_the_example_runs_under_torchrun(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    example = root / "examples" / "ring_attention.py"
    if not example.is_file():
        pytest.skip("a copy of this folder has no examples")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(example)]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert "2 ranks, (1, 8, 24, 64) on each" in done.stdout
    assert float(done.stdout.split()[-1]) < 1e-4


def test_what_keeps_peers_from_reading_each_other() -> None:
    both = frozenset(("a", "b"))
    one, other = Seat("host", "nccl", 0, "a", both, both - {"a"}), Seat("host", "nccl", 1, "b", both, both - {"b"})
    shared = "several ranks use one GPU, or each process sees only its own (CUDA_VISIBLE_DEVICES)"
    for seats, reason in (
        ((one, other), None),
        ((dataclasses.replace(one, backend="gloo"),) * 2, "the group's backend is gloo, not nccl"),
        ((one, dataclasses.replace(other, host="other")), "the ranks are on several hosts"),
        ((one, one), shared),
        ((one, dataclasses.replace(other, index=0)), shared),
        ((one, dataclasses.replace(other, gpu="a")), shared),
        # What one process sees differs from what the others do, and all ranks must have the same answer.
        ((one, dataclasses.replace(other, seen=frozenset("b"))), "a process does not see the GPUs of all ranks"),
        ((one, dataclasses.replace(other, reached=frozenset())), "a GPU cannot access another's memory (no P2P)"),
    ):
        assert peer_writes_reason(seats) == peer_writes_reason(seats[::-1]) == reason


def test_calls_of_other_groups_leave_what_ranks_agreed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one rank would gather again, and those that are in fewer groups would not."""

    class Group:
        def _get_backend(self, device: torch.device) -> Any:
            return SimpleNamespace(name=lambda: "gloo")

    def gathered(found: list, mine: object, group: Group) -> None:
        found[0] = mine
        asked.append(group)

    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    monkeypatch.setattr(dist, "all_gather_object", gathered)
    monkeypatch.setattr(agreement, "_KEPT", 3)
    asked: list[Group] = []
    first: Any = Group()
    second: Any = Group()
    device = torch.device("cpu")
    for group, rows in ((first, 1), *((second, rows) for rows in range(5)), (first, 1), (second, 4), (second, 0)):
        agreement.agree(agreement.Terms(rows, rows, ()), group, device, None, None)
    assert asked == [first, *[second] * 5, second]  # 4 is still known, 0 no longer


def _gpu_calls(rank: int, world: int, runs: dict[str, Run]) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for name, run in runs.items():
        found[name] = call(run, rank, world, f"cuda:{rank}")
        if "peer" in name:  # a second call reuses buffers
            again = call(run, rank, world, f"cuda:{rank}")
            assert all(torch.equal(again[what], found[name][what]) for what in ("out", "dk", "dv")), name
    release()
    return found


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_all_gpus_by_both_transports_against_one_process(tmp_path: Path) -> None:
    runs, world = {}, torch.cuda.device_count()

    def ragged(*lengths: int) -> tuple[int, ...]:
        return tuple(itertools.islice(itertools.cycle(lengths), world))

    for transport, rotate, dim in itertools.product(("peer", "messages"), ROTATIONS, (64, 128)):
        options = dict(causal=True, rotate=rotate, transport=transport, return_lse=True)
        shapes = dict(heads=(4, 2), dim=dim, dtype=torch.bfloat16)
        runs[f"{transport}-{rotate}-{dim}"] = Run((700,) * world, (700,) * world, options, **shapes)
        uneven = ragged(300, 171, 0), ragged(0, 515, 33)
        runs[f"{transport}-{rotate}-{dim}-ragged"] = Run(*uneven, options | dict(causal=False), **shapes)
        runs[f"{transport}-{rotate}-{dim}-wide"] = Run(ragged(160, 161), ragged(1100, 900), options, **shapes)
    ranks = spread(world, _gpu_calls, tmp_path, runs, backend="nccl")
    for name, run in runs.items():
        found, expected = run.assembled([rank[name] for rank in ranks]), run.expected()
        eager = run.eager()
        for what, tensor in found.items():
            error, allowed = ((x[what].double() - expected[what]).square().mean().sqrt() for x in (found, eager))
            floor = 4 * 2**-8 * expected[what].square().mean().sqrt()
            assert tensor.isfinite().all() and error <= 2 * allowed + floor, (name, what, float(error), float(allowed))


def _memory(rank: int, world: int) -> dict[str, tuple[int, int]]:
    """Returns (bytes that a call takes, most that it may take) for forward and backward, and for memory that is
    kept."""
    device, rows, heads, dim = torch.device("cuda", rank), 8192, 8, 128
    q, k, v, dout = (torch.randn(1, heads, rows, dim, device=device, dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    block, line = q.numel() * q.element_size(), 4 * heads * rows

    def peak(work) -> tuple[int, object]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        results = work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - base, results

    def forward():
        return ring_attention(*leaves, causal=True)

    for _ in range(2):
        torch.autograd.grad(forward(), leaves, dout)
    taken, out = peak(forward)
    most = block + line + 2 * block  # out and lse, and out in fp32
    taken_back, _ = peak(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True))
    # dq, dk, dv, in the dtype and in fp32; dk and dv that are sent; the kernels' fp32 dQ of a call in each chain.
    most_back = 3 * block + 3 * 2 * block + 2 * 2 * block + 2 * 2 * block + 8 * line
    kept = sum(arena.size for arena in peer_writes._ARENAS.values())
    release()
    slack = 4 << 20
    # A block of K and V, and one of dK and dV in fp32.
    return {"fwd": (taken, most + slack), "bwd": (taken_back, most_back + slack), "kept": (kept, 2 * block + 4 * block)}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_memory_beside_inputs_and_results_is_bounded(tmp_path: Path) -> None:
    for found in spread(2, _memory, tmp_path, backend="nccl"):
        assert {what: sizes for what, sizes in found.items() if sizes[0] > sizes[1]} == {}


def test_the_backward_of_sliding_windows() -> None:
    """Of `unfold`: rows overlap. torch.empty_like makes the rows' dimension the innermost one; kernels write rows."""
    q, k, v = (torch.randn(1, 2, rows + 15, device=DEVICE).unfold(2, 16, 1) for rows in (5, 21, 21))
    assert torch.empty_like(q).stride(3) != 1
    leaves = [t.contiguous().requires_grad_() for t in (q, k, v)]
    out, lse = attention(*leaves, return_lse=True)
    dout = torch.randn_like(out)
    ring = Ring(Problem("contiguous", False, (5,), (21,)), 0, "keys", None, None, "none")
    found = ring_backward(ring, dout, None, q, k, v, out.detach(), lse.detach())
    for mine, other in zip(found, torch.autograd.grad(out, leaves, dout), strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-5, atol=2e-5)


def test_keys_in_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call, and several calls on a few keys each. The first queries see keys of the first call only."""
    q, k, v = (torch.randn(1, 2, rows, 16) for rows in (21, 26, 26))
    calls = [Call((0, 21), (0, 26), 5, 0, causal, True) for causal in (False, True)]
    calls += [Call((3, 9), (4, 4), final=True), Call((0, 21), (2, 26), 0, 3, True, True)]
    for one_call in calls:
        found = []
        for segment in (26, 7):
            monkeypatch.setattr(configs, "pick_segment", lambda dim, size, segment=segment: segment)
            out, lse, result = torch.zeros_like(q), torch.full(q.shape[:3], -torch.inf), torch.full_like(q, 9)
            attend(one_call, q, k, v, out, lse, None, result)
            found.append((lse, result))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
