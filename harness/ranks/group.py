"""One case in one mode on one rank: the collective checks and timings, and the rows.

Every rank makes the same calls in the same order. If one rank fails, all of them learn of it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from .. import execute, rows
from ..measure import stats
from ..measure.timing import AA
from ..roofline import Ceilings, floor_seconds, over_roofline
from ..spec import Case, KernelSpec, Peer, Sharding
from ..timed_data import timed_data
from .timing import COLD, LONG_CALL, Call, Clock, Contender, Samples, differences, gathered

LOCAL, ALONE = "#local", "#alone"  # suffixes of an implementation's name: without transfers; on one GPU
NO_LOCAL = 2.0  # seconds of a call above which it is not timed without transfers: that takes minutes, to say little
#: Floors in seconds above which a call has one sample and no warm-up: for the one-GPU call, during which the others
#: wait, and for the call of all ranks.
ONCE_ALONE, ONCE = 2.5, 20.0
SEED = 20261123

Rows = list[dict[str, Any]]
Restore = Callable[[], object]


class Failed(Exception):
    """An implementation that is not timed, on any rank: its status and the reason."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class Group:
    """One case in one mode."""

    def __init__(
        self, spec: KernelSpec, case: Case, mode: str, names: Sequence[str], clock: Clock, limits: Ceilings | None
    ) -> None:
        assert spec.sharding is not None
        self.spec, self.case, self.mode, self.names, self.clock, self.limits = spec, case, mode, names, clock, limits
        self.me, self.on_gpu = clock.rank, clock.on_gpu
        self.sharding: Sharding = spec.sharding
        self.label = f"{spec.name} {case.name} {mode}"
        self.done: dict[str, dict[str, Any]] = {}
        self.warnings: dict[str, list[str]] = {}
        self.outside: dict[str, list[int]] = {}  # bytes by rank that are not from PyTorch's allocator
        self.paired = False  # whether there is an A/A pair: of the first of ours that can be timed
        self.unmeasured: dict[str, str] = {}  # why there is no T1, or no time without transfers

    def rows(self) -> Rows:
        """Checks, times and describes every implementation."""
        if contenders := self.prepared():
            samples = self.clock.measure(contenders, self.label)
            for name in self.names:
                if name not in self.done:
                    self.done[name] = self._described(name, samples)
        contenders.clear()
        self.free()
        return [self.done[name] for name in self.names]

    def prepared(self) -> list[Contender]:
        """The contenders that can be timed, checked and called once: every implementation, then its references for
        comparison (without transfers; on one GPU). The rows of all others are in `done`."""
        capability = torch.cuda.get_device_capability(self.me.device) if self.on_gpu else (99, 0)
        if self.case.min_capability > capability:
            reason = "needs compute capability {}.{}".format(*self.case.min_capability)
            self.done = {row["implementation"]: row for row in self.closed("skipped", reason)}
            return []
        self._step("inputs")
        torch._dynamo.reset()  # graphs of other cases would make shapes dynamic, or exceed the recompile limit
        generator = torch.Generator(self.me.device).manual_seed(SEED + self.me.rank)
        shard = self.sharding.make_shard(self.case, self.me.rank, self.me.device, generator)
        restore = self._restoring(shard)
        contenders = []
        for name in self.names:
            try:
                fn = self.ready(name)
                contenders += self._contenders(name, fn, shard, restore)
            except Failed as failed:
                self.done[name] = self._row(name, failed.status, failed.reason)
        return [*contenders, *self._alone()] if contenders else []

    def free(self) -> None:
        """Releases the memory of the prepared contenders, once nothing refers to it."""
        self._step("releasing memory")
        self.sharding.release()
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def closed(self, status: str, reason: str) -> Rows:
        """Rows for all implementations, none of which was run."""
        return [self._row(name, status, reason) for name in self.names]

    def ready(self, name: str) -> execute.Op:
        """The implementation, checked by all ranks together. Raises Failed on all ranks or on none."""

        def load() -> execute.Op:
            if not self.on_gpu and (reason := execute.uninterpretable(self.case)):
                raise execute.Unavailable(reason)
            baseline = next((b for b in self.spec.baselines if b.name == name), None)
            if baseline is not None and not isinstance(baseline, Peer):
                raise execute.Unavailable("runs the reference, which is for one process")
            ours = name in self.spec.implementations
            if ours and (reason := self.spec.skip_reason(name, self.case, self.mode)):
                raise execute.Unavailable(reason)
            return execute.load(self.spec, name, self.case, self.mode)

        fn = self._together(load, f"{name}: load")
        check = self.sharding.check_shard
        if rows.kind(self.spec, name) == "yardstick":
            return fn
        if check is None:
            self.warnings[name] = ["not checked: the SPEC has no check_shard"]
            return fn
        wrong = self._together(lambda: check(fn, self.case, self.mode, self.me.device), f"{name}: check")
        found = [f"rank {rank}: {reason}" for rank, reason in enumerate(gathered(wrong, self.me)) if reason]
        if found and name in self.spec.implementations:
            raise Failed("wrong", "; ".join(found))
        self.warnings[name] = [f"wrong by its own check: {'; '.join(found)}"] if found else []
        return fn

    def _contenders(self, name: str, fn: execute.Op, shard: execute.Inputs, restore: Restore) -> list[Contender]:
        """The implementation bound to its inputs, called once; and its variant without transfers, if there is one."""
        used, local = self._used(), self.sharding.local.get(name)
        if local and self._long(NO_LOCAL):
            self.unmeasured[name + LOCAL] = "not measured: a call takes seconds, of which transfers are a small part"
        if self._long(ONCE):
            self.warnings.setdefault(name, []).append("a single sample: its first call, without a warm-up")
            self.outside[name] = []
            run = self._together(lambda: self._bind(fn, shard), f"{name}: inputs")
            return [Contender(name, run, once=True, restore=restore)]
        found = [self._together(lambda: self._called(name, fn, shard, restore), f"{name}: first call")]
        self.outside[name] = gathered(max(0, self._used() - used), self.me)
        if name in self.spec.implementations and not self.paired and not self._long():
            self.paired = True
            found.append(self._together(lambda: self._called(name + AA, fn, shard, restore), f"{name}: again"))
        if local and not self._long(NO_LOCAL):
            try:
                what = f"{name}: first call without transfers"
                found.append(self._together(lambda: self._called(name + LOCAL, local, shard, restore), what))
            except Failed as failed:
                self.unmeasured[name + LOCAL] = failed.reason
        return found

    def _alone(self) -> list[Contender]:
        """Our one-GPU implementation on the first rank; on the others a contender that does nothing."""
        if not self.sharding.alone:
            self.unmeasured[ALONE] = "there is no one-GPU implementation"
            return []
        if reason := self.sharding.alone_reason(self.case, self.mode):
            self.unmeasured[ALONE] = reason
            return []
        (fn,) = self.sharding.alone.values()
        once = self._long(ONCE_ALONE / self.me.size)

        def called() -> Contender:
            if not self.me.first:
                return Contender(ALONE, None, Call(), once)
            generator = torch.Generator(self.me.device).manual_seed(SEED)
            inputs = self.spec.make_inputs(self.case, self.me.device, generator)
            restore = self._restoring(inputs)
            if once:
                return Contender(ALONE, self._bind(fn, inputs), once=True, restore=restore)
            return self._called(ALONE, fn, inputs, restore)

        try:
            return [self._together(called, "one GPU: first call")]
        except Failed as failed:
            self.unmeasured[ALONE] = failed.reason
            return []

    def _bind(self, fn: execute.Op, inputs: execute.Inputs) -> execute.Run:
        run = execute.bind(self.spec, fn, inputs, self.mode)
        self.clock.synchronize()
        return run

    def _restoring(self, inputs: execute.Inputs) -> Restore:
        """What resets the inputs that a call updates in place: all contenders share them."""
        return partial(timed_data(self.case, self.mode, [inputs], [None], torch.Generator(self.me.device)).restore, 0)

    def _called(self, name: str, fn: execute.Op, inputs: execute.Inputs, restore: Restore) -> Contender:
        run = self._bind(fn, inputs)
        return Contender(name, run, self.clock.call(run, restore), restore=restore)

    def _together(self, act: Callable[[], Any], what: str) -> Any:
        """Calls act() on every rank. If it fails on one, all raise Failed: a rank that continued would wait forever."""
        self._step(what)
        result, trouble = None, None
        try:
            result = act()
        except execute.Unavailable as error:
            trouble = "skipped", str(error)
        except torch.AcceleratorError:
            raise  # the context is lost
        except Exception as error:  # a peer may raise anything; its row reports it
            status = "oom" if execute.out_of_memory(error) else "error"
            if status == "oom":
                torch.cuda.empty_cache()
            trouble = status, f"{type(error).__name__}: {execute.first_line(error)}"
        said = f"{what}: {trouble[1] if trouble else 'done'}, waiting for the other ranks"
        self.me.beat.step(f"{self.label}: {said}", failed=trouble is not None)
        found = [(rank, *t) for rank, t in enumerate(gathered(trouble, self.me)) if t]
        if not found:
            return result
        rank, status, reason = found[0]
        where = "" if len(found) == self.me.size else f"rank {rank}: "
        raise Failed(status, where + reason)

    def _described(self, name: str, samples: Samples) -> dict[str, Any]:
        """The row of an implementation that was timed."""
        columns, mine = samples.columns(), samples.slowest[name]
        throttled = samples.clocks.get("rounds", {}).get(samples.column, {}).get("throttled", ())
        ratios = {
            other: stats.ratio_of_columns(theirs, columns[name], throttled)
            for other, theirs in columns.items()
            if other != name and "#" not in other.removesuffix(AA)
        }
        over = self._over(name, columns[name]["median_us"])
        several = {
            "backend": "nccl" if self.on_gpu else "gloo",
            "rank_median_us": samples.medians_of_ranks(name),
            "outside_bytes": self.outside[name] or None if self.on_gpu else None,
            "axis": list(self.sharding.axis(self.case)) if self.sharding.axis else None,
            **self._efficiency(mine, samples, columns),
            **self._exposed(name, mine, samples, columns),
            "plain": self._plain(name),
            "model": self._model(name, columns),
        }
        return self._row(name, "over-roofline" if over else "ok", over) | {
            "timer": "events" if self.on_gpu else "wall",
            "headline": samples.column,
            "columns": {samples.column: columns[name]},
            "sustained": None,
            "noise": ratios.pop(name + AA, None),
            "ratios": {other: ratio for other, ratio in ratios.items() if not other.endswith(AA)},
            "peak_memory_bytes": max(samples.peaks[name]) if self.on_gpu else None,
            "error": None,
            "clocks": samples.clocks,
            "warnings": self.warnings.get(name, []),
            "several": several,
        }

    def _efficiency(self, mine: Sequence[float], samples: Samples, columns: Mapping[str, Any]) -> dict[str, Any]:
        """The efficiency T1 / (N · TN), paired by round unless there is only one sample of T1; and T1 itself, or why
        there is none."""
        alone = samples.slowest.get(ALONE)
        if alone is None:
            return {"efficiency": None, "alone": None, "alone_reason": self.unmeasured[ALONE]}
        ratio = stats.ratio(alone * len(mine) if len(alone) == 1 else alone, mine, samples.looks)
        efficiency = {
            "median": ratio["median"] / self.me.size,
            "ci95": [bound / self.me.size for bound in ratio["ci95"]],
        }
        (name,) = self.sharding.alone
        return {"efficiency": efficiency, "alone": {"implementation": name, **columns[ALONE]}}

    def _exposed(
        self, name: str, mine: Sequence[float], samples: Samples, columns: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The exposed transfer time: the difference to the variant without transfers, paired by round."""
        local = samples.slowest.get(name + LOCAL)
        if local is None:
            reason = self.unmeasured.get(name + LOCAL, "it has no version without transfers")
            return {"exposed_us": None, "exposed_reason": reason}
        return {
            "exposed_us": differences(mine, local, samples.looks),
            "local_median_us": columns[name + LOCAL]["median_us"],
        }

    def _plain(self, name: str) -> dict[str, Any] | None:
        """The baseline without compression to compare ours with, and the bytes that a GPU sends there."""
        plain = self.sharding.plain(self.case) if name in self.spec.implementations else None
        return plain and {"implementation": plain[0], "link_bytes": plain[1]}

    def _model(self, name: str, columns: Mapping[str, Any]) -> dict[str, float] | None:
        """The prediction of the SPEC's model for one of ours, from the measured T1 and link rate."""
        link = self.limits.link if self.limits else None
        if self.spec.model is None or name not in self.spec.implementations or ALONE not in columns or not link:
            return None
        alone = columns[ALONE]["median_us"] * 1e-6
        rate = self.spec.cost(self.case, self.mode).total_flops * self.me.size / alone
        seconds, exposed, efficiency = self.spec.model(self.case, self.mode, self.me.size, None, rate, link)
        return {"us": seconds * 1e6, "exposed_us": exposed * 1e6, "efficiency": efficiency}

    def _long(self, seconds: float = LONG_CALL) -> bool:
        """Whether a call's floor is longer than `seconds`."""
        least = floor_seconds(self.spec.cost(self.case, self.mode), self.limits).seconds if self.limits else 0.0
        return least > seconds

    def _used(self) -> int:
        """Bytes of the device in use beyond those that PyTorch's allocator holds: NCCL, symmetric memory, code."""
        if not self.on_gpu:
            return 0
        free, total = torch.cuda.mem_get_info(self.me.device)
        return total - free - torch.cuda.memory_reserved()

    def _over(self, name: str, microseconds: float) -> str | None:
        if self.limits is None:
            return None
        yardsticks = {b.name: b for b in self.spec.baselines if rows.kind(self.spec, b.name) == "yardstick"}
        cost = getattr(yardsticks.get(name), "cost", self.spec.cost)(self.case, self.mode)
        return over_roofline(microseconds * 1e-6, cost, self.limits, column=COLD)

    def _row(self, name: str, status: str, reason: str | None) -> dict[str, Any]:
        return rows.described(self.spec, self.case, self.mode, name, status, reason)

    def _step(self, what: str) -> None:
        self.me.beat.step(f"{self.label}: {what}")
