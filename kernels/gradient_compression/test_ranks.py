"""gradient_compression over several processes: gloo without a GPU, NCCL on two.

Starting processes takes seconds, so one group of them runs every check of `CHECKS` and records the outcomes, which the
tests read.
"""

from __future__ import annotations

import copy
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from . import CompressedReduceScatter, CompressState, compress_fsdp, compress_hook, gradient_compression, release
from .chunks import KINDS
from .reference import exchange_reference, gradient_compression_reference, roundtrip
from .state import OTHER_KINDS

TIMEOUT = timedelta(seconds=120)
TRANSPORTS = {"cpu": ("collectives",), "cuda": ("collectives", "peers")}


def random(rank: int, seed: int, numel: int, device: str) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * seed + rank)).to(device)


def everyone(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of all ranks."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return parts


def agree(tensor: torch.Tensor) -> bool:
    """Whether all ranks have the same bits, where any NaN equals any other."""
    first, *others = (part.nan_to_num(nan=12345.0) for part in everyone(tensor))
    return all(torch.equal(first, other) for other in others)


def equals_the_reference(rank: int, world: int, device: str) -> None:
    for transport in TRANSPORTS[device]:
        for kind in KINDS:
            for numel in (0, 1, 256, 257, 256 * world * 2 + 5):
                for dtype, feedback, average in ((torch.float32, True, True), (torch.bfloat16, False, False)):
                    x = random(rank, numel, numel, device).to(dtype)
                    residual = random(rank, numel + 1, numel, device).mul(0.01).bfloat16() if feedback else None
                    want = gradient_compression_reference(x, residual, kind=kind, average=average)
                    gradient_compression(x, residual, kind=kind, average=average, transport=transport)
                    want, kept = want if isinstance(want, tuple) else (want, None)
                    where = f"{transport} {kind} {numel} {dtype}"
                    assert torch.equal(x, want), where
                    assert residual is None or torch.equal(residual, kept), where
                    assert agree(x), where


def each_kind_is_the_reference(rank: int, world: int, device: str) -> None:
    """A small subset of `equals_the_reference`."""
    for kind in KINDS:
        x, residual = random(rank, 4, 1500, device), random(rank, 5, 1500, device).mul(0.01).bfloat16()
        want, kept = gradient_compression_reference(x, residual, kind=kind)
        gradient_compression(x, residual, kind=kind, transport="collectives")
        assert torch.equal(x, want) and torch.equal(residual, kept), kind


def repeats_to_the_bit(rank: int, world: int, device: str) -> None:
    for transport in TRANSPORTS[device]:
        results = []
        for _ in range(3):
            x, residual = random(rank, 1, 3000, device), torch.zeros(3000, device=device)
            gradient_compression(x, residual, transport=transport)
            results.append(torch.cat((x, residual)))
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def what_is_not_finite_reaches_everyone(rank: int, world: int, device: str) -> None:
    x, residual = random(rank, 2, 700, device), torch.zeros(700, device=device)
    if rank == 0:
        x[5] = torch.nan
    if rank == world - 1:
        x[600] = torch.inf
    gradient_compression(x, residual)
    assert x.isnan().nonzero().flatten().tolist() == [5, 600]
    assert residual.isfinite().all() and agree(x)


def error_feedback_converges(rank: int, world: int, device: str) -> None:
    """The sums over steps of the outputs and of the true mean differ by the residuals' mean, which does not grow."""
    numel, steps = 1000, 12
    for kind in KINDS:
        residual = torch.zeros(numel, dtype=torch.bfloat16, device=device)
        total, truth = torch.zeros(numel, device=device), torch.zeros(numel, device=device)
        for step in range(steps):
            x = random(rank, 10 + step % 3, numel, device)
            truth += torch.stack(everyone(x)).mean(0)
            total += gradient_compression(x, residual, kind=kind)
        left = torch.stack(everyone(residual.float())).mean(0)
        # The residual is rounded to 8 bits, at most twice per step.
        slack = 2 * steps * 2**-8 * torch.stack(everyone(residual.float())).abs().max() * max(2, world)
        assert (total + left - truth).abs().max() <= slack, kind
        assert (total - truth).abs().max() < 3 * (4.5 / 7), kind


def scatter_is_the_reference(rank: int, world: int, device: str) -> None:
    """FSDP's reduce-scatter: each rank's chunk is quantised once, in separate blocks; small tensors are not."""
    average, total_of = dist.ReduceOp.AVG, dist.ReduceOp.SUM
    for kind, op, numel in (("int8", average, 300), ("int4", total_of, 256), ("fp8", average, 5)):
        scatter = CompressedReduceScatter(kind, error_feedback=True, min_numel=6 * world)
        for step in range(2):
            given = random(rank, 20 + step, numel * world, device)
            kept = torch.zeros_like(given) if scatter.residual is None else scatter.residual.float()
            total = torch.zeros(numel, device=device)
            lost = torch.zeros_like(given)
            for other, x in enumerate(everyone(given + kept)):
                small = x.numel() < 6 * world
                parts = [part if small else roundtrip(part, kind) for part in x.split(numel)]
                total = total + parts[rank]
                lost = x - torch.cat(parts) if other == rank else lost
            want = total * (1 / world) if op == average else total
            out, x = torch.empty_like(total), given.clone()
            scatter(out, x, dist.group.WORLD, op)
            assert torch.equal(x, given), kind
            if small:
                torch.testing.assert_close(out, want)
                assert scatter.residual is None
            else:
                assert torch.equal(out, want), kind
                assert torch.equal(scatter.residual, lost.bfloat16()), kind
    with pytest.raises(ValueError, match="op must be SUM or AVG"):
        scatter(out, x, dist.group.WORLD, dist.ReduceOp.MAX)
    empty = torch.empty(0, device=device)
    CompressedReduceScatter(min_numel=0)(empty, empty, dist.group.WORLD, total_of)


def one_rank_is_the_reference_of_all(rank: int, world: int, device: str) -> None:
    """The oracle over processes equals the oracle over lists of tensors."""
    x = random(rank, 3, 900, device)
    want, _ = exchange_reference(everyone(x), [None] * world, "int8", True)
    assert torch.equal(gradient_compression(x, kind="int8"), want)


def model_of(device: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = (nn.Linear(16, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 1))
    return nn.Sequential(*layers).to(device)


def batch(rank: int, step: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    x = random(rank, 1000 + step, 32 * 16, device).view(32, 16)
    return x, torch.tanh(x[:, :3].sum(1, keepdim=True)) + x[:, 3:4] * x[:, 4:5]


def train(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range, device: str) -> list[float]:
    losses = []
    for step in steps:
        x, y = batch(rank, step, device)
        loss = (ddp(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(mean := loss.detach().clone())
        losses.append(float(mean) / dist.get_world_size())
    return losses


def ddp_of(model: nn.Module, state: CompressState | None, cap: float = 25) -> nn.Module:
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=cap)
    if state is not None:
        ddp.register_comm_hook(state, compress_hook)
    return ddp


def ddp_trains_like_uncompressed(rank: int, world: int, device: str) -> None:
    final = {}
    for kind in (None, *KINDS, *OTHER_KINDS):
        model = model_of(device)
        state = None if kind is None else CompressState(kind=kind, min_numel=200, ratio=0.1, rank=4)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        # Two buckets, which DDP rebuilds after the first step.
        losses = train(ddp_of(model, state, cap=0.005), optimizer, rank, range(14), device)
        final[kind] = sum(losses[-3:]) / 3
        assert losses[0] > final[kind], kind
        assert state is None or state.step == 14
        for parameter in model.parameters():
            assert agree(parameter.detach()), kind
    for loss in final.values():
        assert abs(loss - final[None]) < 0.15 * final[None], final


def small_tensors_are_exempt(rank: int, world: int, device: str) -> None:
    """Their gradients equal those of uncompressed training to fp32 rounding; those of weights do not."""
    gradients = []
    for state in (None, CompressState(bits=4, min_numel=200)):
        model = model_of(device)
        ddp = ddp_of(model, state)
        x, y = batch(rank, 0, device)
        (ddp(x) - y).square().mean().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    plain, compressed = gradients
    for name, gradient in plain.items():
        same = torch.allclose(gradient, compressed[name], rtol=1e-4, atol=1e-6)
        assert same == (gradient.dim() == 1 or gradient.numel() < 200), name


def a_checkpoint_continues(rank: int, world: int, device: str) -> None:
    for kind in ("int4", "topk", "powersgd"):
        options = dict(kind=kind, min_numel=200, ratio=0.05, rank=2)
        model, state = model_of(device), CompressState(**options)
        ddp = ddp_of(model, state, cap=0.005)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        train(ddp, optimizer, rank, range(3), device)
        saved, kept = copy.deepcopy(model.state_dict()), copy.deepcopy(state.state_dict())
        train(ddp, optimizer, rank, range(3, 5), device)
        again, resumed = model_of(device, seed=1), CompressState(**options)
        again.load_state_dict(saved)
        resumed.load_state_dict(kept)
        for part in ("residuals", "factors"):
            back = resumed.state_dict()[part]
            assert list(back) == list(kept[part]) and all(torch.equal(back[n], t) for n, t in kept[part].items())
        optimizer = torch.optim.SGD(again.parameters(), lr=0.05)
        train(ddp_of(again, resumed, cap=0.005), optimizer, rank, range(3, 5), device)
        assert resumed.step == 5
        sizes = [{n: t.numel() for n, t in s.state_dict()["residuals"].items()} for s in (state, resumed)]
        assert sizes[0] == sizes[1], "parameters have the same numbers"
        for a, b in zip(model.parameters(), again.parameters(), strict=True):
            # The first step of a process has the initial buckets, so other blocks: results are only close.
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)
        with pytest.raises(ValueError, match="state_dict must be of kind"):
            CompressState(kind="fp8").load_state_dict(kept)


def warmup_steps_are_uncompressed(rank: int, world: int, device: str) -> None:
    weights = []
    for state in (None, CompressState(bits=4, min_numel=0, warmup_steps=2)):
        model = model_of(device)
        ddp = ddp_of(model, state)
        train(ddp, torch.optim.SGD(model.parameters(), lr=0.05), rank, range(2), device)
        weights.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def fsdp_trains_like_uncompressed(rank: int, world: int, device: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    final = {}
    for kind, feedback in ((None, False), ("int8", False), ("int4", True)):
        model = model_of(device)
        mesh = init_device_mesh(device, (world,))
        for layer in (model[0], model[3]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if kind is not None:
            made = compress_fsdp(model, kind, error_feedback=feedback, min_numel=300)
            assert sorted(made) == ["", "0", "3"]
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        final[kind] = train(model, optimizer, rank, range(8), device)[-1]
        if feedback and world > 1:  # with one rank FSDP scatters nothing
            assert made["3"].residual is not None and made[""].residual is None
    for loss in final.values():
        assert abs(loss - final[None]) < 0.1 * final[None], final


CHECKS: tuple[Callable[[int, int, str], None], ...] = (
    equals_the_reference,
    repeats_to_the_bit,
    what_is_not_finite_reaches_everyone,
    error_feedback_converges,
    one_rank_is_the_reference_of_all,
    ddp_trains_like_uncompressed,
    small_tensors_are_exempt,
    a_checkpoint_continues,
    warmup_steps_are_uncompressed,
    fsdp_trains_like_uncompressed,
    scatter_is_the_reference,
)


#: run with two processes in every run of the tests: the exchange with each kind, and DDP's hook
QUICK = (
    repeats_to_the_bit,
    one_rank_is_the_reference_of_all,
    each_kind_is_the_reference,
    small_tensors_are_exempt,
    scatter_is_the_reference,
)


def work(rank: int, world: int, device: str, folder: str, checks: tuple[str, ...]) -> None:
    """One process."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    store = f"file://{folder}/store"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world, timeout=TIMEOUT)
    outcomes = {}
    for check in (globals()[name] for name in checks):
        try:
            check(rank, world, device)
            outcomes[check.__name__] = ""
        except Exception:
            outcomes[check.__name__] = traceback.format_exc()
        torch.save(outcomes, f"{folder}/{rank}.pt")
        # After a failure the other ranks are still in a collective, where they would wait for the timeout.
        if outcomes[check.__name__]:
            os._exit(1)
    release()
    dist.destroy_process_group()


def run(
    world: int, device: str, folder: Path, checks: tuple[Callable[[int, int, str], None], ...] = CHECKS
) -> list[dict[str, str]]:
    """The outcomes of the checks on each rank. A process that fails terminates the others."""
    context = mp.get_context("spawn")
    names = tuple(check.__name__ for check in checks)
    processes = [context.Process(target=work, args=(r, world, device, str(folder), names)) for r in range(world)]
    for process in processes:
        process.start()
    while any(p.is_alive() for p in processes) and not any(p.exitcode for p in processes):
        for process in processes:
            process.join(0.1)
    for process in processes:
        process.join(2)
        if process.is_alive():
            process.terminate()
            process.join()
    files = [folder / f"{rank}.pt" for rank in range(world)]
    return [torch.load(file) if file.exists() else {} for file in files]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], list[dict[str, str]]]:
    found: dict[tuple[int, str], list[dict[str, str]]] = {}

    def of(world: int, device: str) -> list[dict[str, str]]:
        if (world, device) not in found:
            found[world, device] = run(world, device, tmp_path_factory.mktemp("ranks"))
        return found[world, device]

    return of


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
@pytest.mark.parametrize("world", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
def test_on_gloo(world: int, check: str, outcomes) -> None:
    if torch.cuda.is_available():
        pytest.skip("without a GPU, in Triton's interpreter")
    judge(outcomes(world, "cpu"), check)


def test_two_processes_in_short(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("without a GPU, in Triton's interpreter")
    ranks = run(2, "cpu", tmp_path, QUICK)
    for check in QUICK:
        judge(ranks, check.__name__)


@pytest.mark.gpu
@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_on_two_gpus(check: str, outcomes) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    judge(outcomes(2, "cuda"), check)


def judge(ranks: list[dict[str, str]], check: str) -> None:
    failed = [text for outcomes in ranks for text in outcomes.values() if text]
    mine = [outcomes.get(check) for outcomes in ranks]
    if None in mine and not any(mine):
        pytest.fail("\n".join(["not reached, because of:", *failed]))
    assert not any(mine), "\n".join(text for text in mine if text)
