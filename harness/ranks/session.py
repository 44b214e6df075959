"""The bench as one rank runs it: all ranks make the same calls in the same order, the first one writes the record.

A *group* is a case in a mode (`group.py`). Each implementation is checked by all ranks together, then all are timed in
the same rounds, together with our one-GPU implementation and the variants without transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from .. import environment, nvtx, record, roofline, rows
from ..commands import calibrate
from ..measure.timing import QUICK, Budget
from ..reporting.progress import Progress
from ..spec import Case, KernelSpec
from . import links
from .group import Failed, Group
from .launch import Rank
from .timing import Clock, gathered


@dataclass(frozen=True)
class Orders:
    """The work of the ranks, pickled: one kernel's groups, by the names of their case and mode, and the options."""

    load: Callable[[], KernelSpec]
    run_id: str
    path: Path
    groups: tuple[tuple[str, str], ...]
    implementations: tuple[str, ...]
    asked: Mapping[str, Any] = field(default_factory=dict)
    died: frozenset[tuple[str, str]] = frozenset()
    quick: bool = False
    budget: Budget | None = None


def bench(me: Rank, orders: Orders) -> int:
    """Benches all groups of one kernel into its record. Returns how many rows of our own failed."""
    spec = orders.load()
    session = Session(me, orders, spec)
    with record.Writer(orders.path) if me.first else nullcontext() as writer:

        def write(kind: str, /, **entry: Any) -> None:
            if writer is not None:
                writer.write({"type": kind, "run": orders.run_id, "kernel": spec.name, **entry})

        with Progress(spec.name, len(orders.groups), quiet=not me.first) as progress:
            write("run", unit=spec.unit, options=orders.asked, **session.described())
            return sum(session.group(spec.case(case), mode, write, progress) for case, mode in orders.groups)


class Session:
    """State that the groups of one invocation share."""

    def __init__(self, me: Rank, orders: Orders, spec: KernelSpec, calibrated: bool = True) -> None:
        self.me, self.orders, self.spec = me, orders, spec
        self.on_gpu = me.device.type == "cuda"
        self.measured: dict[str, Any] = {}
        self.ceilings: roofline.Ceilings | None = None
        self.limits: roofline.Ceilings | None = None
        if self.on_gpu and calibrated:
            self._calibrate()
        self.clock = Clock(me, orders.budget or (QUICK if orders.quick else Budget()))

    def _calibrate(self) -> None:
        me = self.me
        me.beat.step("measuring the peak rates of this GPU")
        here = calibrate.measure(me.device)
        of_all = gathered(here, me)
        # A collective operation cannot be faster than the slowest of the cards.
        slowest = {name: min(m[name] for m in of_all) for name in roofline.BANDWIDTHS}
        flops = {pipe: min(m["flops"][pipe] for m in of_all) for pipe in here["flops"]}
        self.measured = {**of_all[0], **slowest, "flops": flops, **links.measure(me)}
        name, key = torch.cuda.get_device_name(me.device), environment.gpu(me.device)["key"]
        promised = roofline.get(key, name).ceilings if key else None
        self.promised = promised.to_record() if promised else None
        self.ceilings = calibrate.ceilings(self.measured).with_links_of(promised)
        fastest = {pipe: max(m["flops"][pipe] for m in of_all) for pipe in flops}
        bandwidth = max(calibrate.ceilings(m).bandwidth for m in of_all)
        self.limits = replace(self.ceilings, bandwidth=bandwidth, flops=fastest)

    def described(self) -> dict[str, Any]:
        """The run line of the record."""
        world = {"world_size": self.me.size}
        ceilings = {"measured": self.measured, "datasheet": self.promised} if self.on_gpu else {}
        return {"environment": environment.capture(self.me.device), "ceilings": ceilings, **world}

    def of(self, case: Case, mode: str) -> Group:
        """The Group of a case in a mode."""
        return Group(self.spec, case, mode, self.orders.implementations, self.clock, self.limits)

    def group(self, case: Case, mode: str, write: Callable[..., None], progress: Progress) -> int:
        """Benches one group into the record. Returns how many rows of our own failed."""
        dead = (case.name, mode) in self.orders.died
        if not dead:
            write("start", case=case.name, mode=mode)
        group = self.of(case, mode)
        found = group.closed("crashed", "a rank died or hung here; not tried again") if dead else group.rows()
        for row in found:
            write("row", **row)
        if self.me.first:
            progress.group(case.name, mode, found, self.ceilings)
        return sum(r["kind"] == "ours" and r["status"] not in ("ok", "skipped", "oom") for r in found)


def check(me: Rank, orders: Orders) -> list[tuple[str, str, str, str, str | None]]:
    """Checks correctness as `Group` does, without timing: (case, mode, implementation, status, reason)."""
    spec = orders.load()
    session = Session(me, orders, spec)
    found = []
    for case, mode in orders.groups:
        group = session.of(spec.case(case), mode)
        for name in orders.implementations:
            if rows.kind(spec, name) == "yardstick":
                continue
            status, reason = "ok", None
            try:
                group.ready(name)
            except Failed as failed:
                status, reason = failed.status, failed.reason
            said = reason or "; ".join(group.warnings.get(name, []))
            found.append((case, mode, name, status, said or None))
    return found


def mark(me: Rank, orders: Orders, traces: Path | None) -> list[tuple[str, str, str]]:
    """Runs everything that the bench times once, in an NVTX range of its name, for profilers. Times nothing.

    With `traces` PyTorch's profiler writes `<kernel>-<case>-<mode>-rank<r>.json.gz` there, for Perfetto. Returns the
    range, status and reason of every implementation.
    """
    spec, found = orders.load(), []
    session = Session(me, orders, spec, calibrated=False)
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if session.on_gpu else [])]
    for case, mode in orders.groups:
        group = session.of(spec.case(case), mode)
        contenders = group.prepared()
        for contender in contenders:
            session.clock.warm_up(contender, f"{group.label} {contender.name}: warm-up")
        with profile(activities=kinds) if traces and contenders else nullcontext() as profiler:
            for contender in contenders:
                name = nvtx.range_name(spec.name, mode, case, contender.name)
                contender.restore()
                session.clock.meet()
                with nvtx.range(name), record_function(name):
                    if contender.run is not None:
                        contender.run()
                    session.clock.synchronize()
        if profiler is not None:
            assert traces is not None
            traces.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(traces / f"{spec.name}-{case}-{mode}-rank{me.rank}.json.gz"))
        for name in orders.implementations:
            row = group.done.get(name, {"status": "ok", "reason": None})
            found.append((nvtx.range_name(spec.name, mode, case, name), row["status"], row["reason"] or ""))
        contenders.clear()
        group.free()
    return found
