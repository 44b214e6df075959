"""A kernel of several ranks as small as can be, whose second rank can be made to misbehave. Its SPEC is what ranks are
tested with: gloo, two processes, no GPU."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from torch import distributed

from harness.spec import EAGER, Case, Cost, KernelSpec, Peer, Sharding

CALLS = {"fault": 0}
LATE = 6  # the call of the second rank at which its fault shows: past the check and the warm-up
SLOW_SECONDS = 0.02


def fake_ring(x: torch.Tensor, *, fault: str = "", local: bool = False) -> torch.Tensor:
    """The mean of all ranks' x; each rank hands its own on to the next until all have been everywhere."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    _misbehave(fault, rank)
    total, held = x.clone(), x.contiguous()
    for _ in range(size - 1):
        arrived = torch.empty_like(held)
        if local:
            arrived.copy_(held)
        else:
            works = distributed.batch_isend_irecv(
                [
                    distributed.P2POp(distributed.isend, held, (rank + 1) % size),
                    distributed.P2POp(distributed.irecv, arrived, (rank - 1) % size),
                ]
            )
            for work in works:
                work.wait()
        total, held = total + arrived, arrived
    return total / size


def _misbehave(fault: str, rank: int) -> None:
    if fault == "error":
        raise ValueError("not today")
    if not fault or rank != 1:
        return
    CALLS["fault"] += 1
    if fault == "slow":
        time.sleep(SLOW_SECONDS)
    elif CALLS["fault"] == LATE and fault == "hang":
        time.sleep(3600)
    elif CALLS["fault"] == LATE and fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)


def _local(x: torch.Tensor, *, fault: str = "") -> torch.Tensor:
    return fake_ring(x, fault=fault, local=True)


def _wrong(x: torch.Tensor, *, fault: str = "") -> torch.Tensor:
    return fake_ring(x) + 1


def _peer() -> Any:
    def reduced(x: torch.Tensor, *, fault: str = "") -> torch.Tensor:
        total = x.clone()
        distributed.all_reduce(total)
        return total / distributed.get_world_size()

    return reduced


def _absent() -> Any:
    raise ImportError("no such library")


def _alone(xs: torch.Tensor) -> torch.Tensor:
    return xs.mean(0)


def _make_inputs(case: Case, device: torch.device | str, generator: torch.Generator | None) -> dict[str, Any]:
    return {"xs": torch.randn(case.world_size, case.dims["length"], generator=generator, device=device)}


def _make_shard(case: Case, rank: int, device: torch.device | str, generator: torch.Generator) -> dict[str, Any]:
    x = torch.randn(case.dims["length"], generator=generator, device=device)
    return {"x": x, "fault": case.params.get("fault", "")}


def _check_shard(fn: Any, case: Case, mode: str, device: torch.device) -> str | None:
    generator = torch.Generator(device).manual_seed(7)
    whole = _make_inputs(case, device, generator)["xs"]
    mine = fn(whole[distributed.get_rank()], fault=case.params.get("fault", ""))
    furthest = float((mine - whole.mean(0)).abs().max())
    return f"off by {furthest:.2g}" if furthest > 1e-4 else None


def _case(name: str, length: int, **params: Any) -> Case:
    return Case(name, dict(length=length), torch.float32, params, bench=True, world_size=2)


SPEC = KernelSpec(
    name="fake_ring",
    implementations={"ring": fake_ring, "off": _wrong},
    reference=lambda xs: xs.mean(0),
    make_inputs=_make_inputs,
    cost=lambda case, mode: Cost(2 * case.dims["length"], 8 * case.dims["length"], link_bytes=4 * case.dims["length"]),
    cases=(
        Case("alone", dict(length=8), torch.float32),
        _case("short", 1000),
        _case("long", 4000),
        *(_case(fault, 100, fault=fault) for fault in ("slow", "error", "hang", "die")),
    ),
    grads=(),
    unit="values",
    items=lambda case: case.dims["length"],
    fuzz={},
    baselines=(EAGER, Peer("all_reduce", load=_peer), Peer("absent", load=_absent)),
    modes=("fwd",),
    determinism={"fwd": "run-to-run"},
    sharding=Sharding(
        make_shard=_make_shard,
        check_shard=_check_shard,
        alone={"mean": _alone},
        alone_reason=lambda case, mode: "too long for one GPU" if case.name == "long" else None,
        local={"ring": _local},
        axis=lambda case: ("fp32", case.dims["length"]),
    ),
)


def spec() -> KernelSpec:
    """What a rank calls to have the SPEC: functions are pickled by their names."""
    return SPEC


def _halved(x: torch.Tensor) -> torch.Tensor:
    """In place. It fails on data that an earlier call has updated."""
    if not bool((x == 1).all()):
        raise ValueError("x was not restored")
    return x.div_(2)


def _off(x: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("never")


def in_place() -> KernelSpec:
    """A SPEC of an in-place op for two ranks, with a baseline that shares its data."""
    return KernelSpec(
        name="fake_in_place",
        implementations={"absent": _off, "half": _halved},
        reference=lambda x: x / 2,
        make_inputs=lambda case, device, generator: {"x": torch.ones(8, device=device)},
        cost=lambda case, mode: Cost(8, 64),
        cases=(Case("eight", dict(length=8), torch.float32, bench=True, mutates=("x",), world_size=2),),
        grads=(),
        unit="values",
        items=lambda case: 8,
        fuzz={},
        baselines=(Peer("other", load=lambda: _halved),),
        modes=("fwd",),
        sharding=Sharding(
            make_shard=lambda case, rank, device, generator: {"x": torch.ones(8, device=device)},
            alone={"half": _halved},
        ),
    )


def _static(graph: Any, arguments: Any) -> Any:
    """A compiler of static shapes alone."""
    if not all(isinstance(argument, torch.Tensor) for argument in arguments):
        raise ValueError("a size is an argument of the graph")
    return graph.forward


def compiled() -> KernelSpec:
    """A SPEC of an op that compiles itself."""
    twice = torch.compile(lambda x: x * 2, backend=_static)
    return KernelSpec(
        name="fake_compiled",
        implementations={"twice": twice},
        reference=lambda x: x * 2,
        make_inputs=lambda case, device, generator: {"x": torch.ones(case.dims["length"], device=device)},
        cost=lambda case, mode: Cost(8, 64),
        cases=tuple(
            Case(f"of-{length}", dict(length=length), torch.float32, bench=True, world_size=2) for length in (8, 12)
        ),
        grads=(),
        unit="values",
        items=lambda case: 8,
        fuzz={},
        modes=("fwd",),
        sharding=Sharding(
            make_shard=lambda case, rank, device, generator: {"x": torch.ones(case.dims["length"], device=device)}
        ),
    )
