"""The declaration of a kernel. Tests, bench, build, profile and report read it and nothing else.

A kernel's `bench.py` defines `SPEC = KernelSpec(...)`. Every field below is data or a pure function, so everything
but the timing itself can be tested on a machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from .roofline import Cost as Cost

Inputs = dict[str, Any]
Op = Callable[..., "torch.Tensor | tuple[torch.Tensor, ...]"]

MODES = ("fwd", "bwd", "fwd+bwd", "step", "train")
WHOLE = ("step", "train")  # modes in which one call covers everything that is checked
WITHOUT_AUTOGRAD = ("fwd", *WHOLE)


@dataclass(frozen=True)
class Case:
    """One problem: sizes, dtype and the keyword arguments that are not tensors.

    `name` is used verbatim as pytest id, NVTX range, report row and file key, so it is unique within a kernel and made
    of letters, digits, '.', '_' and '-'. `bench=False` cases are only for correctness.

    `mutates` names the inputs that the op updates in place. It must return them among its outputs, while the reference
    computes their new values as new tensors. Such a case runs only in modes without autograd.

    `modes` are the modes of SPEC in which the case runs; empty means all of them.

    `world_size` is the number of GPUs that the case uses, all on one host. Its records are in a folder of their own.
    """

    name: str
    dims: Mapping[str, int]
    dtype: torch.dtype
    params: Mapping[str, Any] = field(default_factory=dict)
    bench: bool = False
    min_capability: tuple[int, int] = (0, 0)
    mutates: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    world_size: int = 1


@dataclass(frozen=True)
class Tolerance:
    """When a result is accepted as correct (`harness.correctness.accuracy` has the full rule).

    With e = |result − oracle| and e_eager = |eager in the same dtype − oracle|, both max and RMS must satisfy
    e <= ratio · e_eager + floor · scale, where scale is the largest finite |oracle| (max) or its RMS. `floor` is in
    units of the dtype's epsilon; it covers the case of an eager result that is accurate by chance.
    """

    ratio: float = 2.0
    floor: float = 4.0


@dataclass(frozen=True)
class Baseline:
    """An implementation to compare with. Use `Peer`, or EAGER, COMPILED and COMPILED_MAX, which run `reference`.
    `supports` returns why a case cannot run, or None; set it with `dataclasses.replace(EAGER, supports=...)`.
    """

    name: str
    supports: Callable[[Case, str], str | None] = field(kw_only=True, default=lambda case, mode: None)


@dataclass(frozen=True)
class Peer(Baseline):
    """Another library's implementation with the signature of the public op.

    `load` imports the library and returns the callable, so a missing library costs nothing until it is requested; its
    ImportError becomes a skipped row. `configurations` are smaller fallback configurations by name, best first. If
    `load` does not compile or run, the first of them that runs is used instead, and the row names it.
    """

    load: Callable[[], Op] = field(kw_only=True)
    configurations: Mapping[str, Callable[[], Op]] = field(kw_only=True, default_factory=dict)


@dataclass(frozen=True)
class Yardstick(Peer):
    """A further operation timed in the same rounds, such as a plain copy of the input. It is not checked, is not a peer
    and does not affect the verdict. Its rate comes from its own `cost`; the report shows ours as a percentage of it. If
    `ours` is set, it calls further public functions of the folder, and `sanitize` runs it on the small cases."""

    cost: Callable[[Case, str], Cost] = field(kw_only=True)
    ours: bool = field(default=False, kw_only=True)


EAGER = Baseline("eager")
COMPILED = Baseline("compile")
#: torch.compile with the options of its mode max-autotune-no-cudagraphs (MAX_AUTOTUNE). CUDA graphs have a column of
#: their own in the harness.
COMPILED_MAX = Baseline("compile-max")
MAX_AUTOTUNE: dict[str, Any] = {"max_autotune": True, "coordinate_descent_tuning": True}
WITHOUT_DESCENT: dict[str, Any] = {"max_autotune": True}  # used where MAX_AUTOTUNE does not compile
FROM_REFERENCE = frozenset(baseline.name for baseline in (EAGER, COMPILED, COMPILED_MAX))


@dataclass(frozen=True)
class Tunable:
    """A `pick_*` function of a kernel's module and the configurations that `tune` tries in its place. It is tuned over
    `cases` (default: SPEC's cases with bench=True) in `implementation` (default: SPEC's first)."""

    module: ModuleType
    function: str
    mode: str
    candidates: Callable[[Case], Iterable[Any]]
    cases: tuple[Case, ...] = ()
    implementation: str = ""


@dataclass(frozen=True)
class Rows:
    """Rows that an op computes independently. They lie along dimension inputs[name] of each of those inputs and along
    dimension `outputs` of every output. `count` of them are compared with the reference (`harness.sampling`)."""

    count: int
    inputs: Mapping[str, int]
    outputs: int


@dataclass(frozen=True)
class StandIn:
    """How to check a case whose fp64 results and copies do not fit in memory next to the timed tensors
    (`harness.correctness.stand_in`): all checks run on a smaller case, and a subset of the timed results is checked.

    case       a smaller case of the same kind, e.g. with fewer layers of the same widths
    inputs     (timed inputs) -> arguments of `reference`. Tensors that the op updates in place are copied
    reference  like SPEC's, but computes only the subset of the results
    results    (all results, inputs) -> the subset
    scalar     relative tolerance of a result with one element. Eager's error, which is the yardstick of the other
               results, may be 0 by chance there
    """

    case: Case
    inputs: Callable[[Inputs], Inputs]
    reference: Op
    results: Callable[[tuple[torch.Tensor, ...], Inputs], tuple[torch.Tensor, ...]]
    scalar: float


@dataclass(frozen=True)
class Sharding:
    """How a kernel runs on several GPUs. The harness starts one process per GPU (a rank) and initialises the default
    process group with `case.world_size` ranks before it calls anything below (`harness.ranks`).

    make_shard   (case, rank, device, generator) -> keyword arguments of the op on that rank, like `make_inputs`. The
                 generator is seeded by the rank.
    check_shard  (fn, case, mode, device) -> why an implementation is wrong, or None. It is a collective call: all ranks
                 make it, with the unwrapped implementation. It makes a small problem of the case's kind and compares
                 with the oracle. Without it the rows say that nothing was checked.
    alone        our one-GPU implementation, name -> callable(**make_inputs(case, ...)), at most one. Rank 0 runs it on
                 the whole problem in the same rounds: T1 of the efficiency T1 / (N · TN).
    alone_reason (case, mode) -> why `alone` is not timed there, or None
    local        implementation -> the same without transfers, or with local copies instead. Its results are wrong; the
                 difference in time is the transfer time that is not overlapped
    plain        (case) -> for a compressed exchange, the baseline that sends uncompressed data and the bytes that a GPU
                 sends there; else None. The report then gives the link speeds at which compression pays off
    axis         (case) -> the series and the length under which an efficiency chart plots the case
    environment  (case) -> environment variables that its ranks start with
    release      called on each rank after each case and mode, to free what is cached between calls
    """

    make_shard: Callable[[Case, int, torch.device | str, torch.Generator], Inputs]
    check_shard: Callable[[Op, Case, str, torch.device], str | None] | None = None
    alone: Mapping[str, Op] = field(default_factory=dict)
    alone_reason: Callable[[Case, str], str | None] = lambda case, mode: None
    local: Mapping[str, Op] = field(default_factory=dict)
    plain: Callable[[Case], tuple[str, int] | None] = lambda case: None
    axis: Callable[[Case], tuple[str, int]] | None = None
    environment: Callable[[Case], Mapping[str, str]] = lambda case: {}
    release: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class KernelSpec:
    """Everything that the harness knows about a kernel.

    name             folder = public function = op
    implementations  what this folder offers, best first: name -> callable(**inputs) -> tensor or tuple of tensors
    reference        same signature, plain PyTorch, computes in at least fp32, and in fp64 when given fp64
    make_inputs      (case, device, generator) -> keyword arguments of the op, tensors and scalars. Fresh random data at
                     each call. The generator is None when only shapes matter (ahead-of-time build).
    cost             (case, mode) -> Cost; no tensors. A test checks that its bytes equal those of the call's tensors
                     (inputs, outputs, incoming gradients, gradients) plus `extra_bytes`
    extra_bytes      (case, mode) -> bytes by name that the forward saves for the backward beyond inputs; negative for
                     bytes of its tensors that a call need not access. In a case of several GPUs, per GPU
    cases            at least one with bench=True
    pytorch          names of the baselines that a PyTorch user would write (F.rms_norm, SDPA, fused AdamW). The
                     report's "over PyTorch" refers to the fastest; "eager" where the reference itself is what one
                     would write
    grads            names of the inputs that have a gradient
    modes            what is timed: "fwd" (no autograd), "bwd" (the backward alone), "fwd+bwd", or "step": one update of
                     an optimizer, or "train": one step of a model's training, with its own forward, backward and
                     optimizer. The last two run like "fwd", under torch.no_grad; "train" uses its own
                     torch.enable_grad for what it differentiates.
    min_capability   implementation -> the compute capability that it needs, where that is more than the case's own
    alias_reason     (implementation, case, mode) -> why it is identical to another implementation there, so that it is
                     neither checked nor timed again; else None
    unit, items      the unit of the case's throughput, e.g. "rows", and (case) -> the number of them
    unsupported_reason  (implementation, case, mode) -> why it cannot run the case (beyond min_capability), or None
    determinism      mode -> "run-to-run" (bit-wise equal repeats, tested), "on request" (the same under
                     torch.use_deterministic_algorithms(True)) or "none"
    fuzz             dimension -> (low, high), the range from which Hypothesis draws sizes
    finite_only      (case) -> whether its inputs must be finite, because the op may or may not read masked elements
    sampled          (case) -> Rows where the problem is too large for the reference, else None
    stand_in         (case) -> StandIn where neither the whole result nor sampled rows can be compared with the
                     reference, else None. Only `bench` checks such a case
    own_strides      (case) -> indices of the outputs whose strides are neither eager's nor those of a contiguous
                     tensor; the op documents them and the kernel's own tests check them
    product_error    (inputs) -> the relative error of each product inside a GEMM, where it exceeds what the inputs'
                     dtypes imply: operands are rounded on the way, or tensor cores keep fewer bits
    limits           input -> the largest magnitude for which the op is correct, where that is not its dtype's maximum
    spills           JIT kernel -> bytes of register spill that are accepted, with the reason in the kernel's README
    early_arrivals   CUDA C++ kernel -> arrivals at another CTA's mbarrier that may precede the completion of
                     shared-memory reads, since those reads are not of the buffer released; the README has the reason
    false_alarms     (tool of compute-sanitizer, JIT kernel or device function) -> why its finding there is not an
                     error
    tunables         what `tune` searches
    host_cases       problems so small that host time dominates; every peer must support them
    suite_cases      further cases that run only if a suite or --case names them: neither in tests nor in a full bench
    host_ops         implementation or peer -> what is called instead of it on host cases, e.g. an optimizer's step
    compile_targets  compute capabilities that `build` compiles for
    needs            the kernels whose public functions a composed kernel calls; it has no kernel of its own
    captured         whether users capture the call in a CUDA graph, e.g. a training step: then the graph column exists
                     and is the headline, except for calls of seconds
    stages           (implementation, case, mode, device) -> seconds of each stage of a call, each timed separately, or
                     None. The bench records them with the times; the report has a table of them
    stage_ranges     (function: stage name -> range) -> a context manager inside which a call encloses its launches in
                     such ranges, forward and backward, so that `profile` can list the kernels of each stage
    ablation         implementation or baseline -> what runs there, for the report's ablation table: the first of
                     `implementations`, those that differ from it in one part, and peers
    model            (case, mode, GPUs, length or None for the case's own, FLOP/s of a GPU, bytes/s of a link) -> the
                     performance model's (seconds, seconds of exposed transfers among them, efficiency); or None
    sharding         how cases on several GPUs run; None where there are none
    """

    name: str
    implementations: Mapping[str, Op]
    reference: Op
    make_inputs: Callable[[Case, torch.device | str, torch.Generator | None], Inputs]
    cost: Callable[[Case, str], Cost]
    cases: tuple[Case, ...]
    grads: tuple[str, ...]
    unit: str
    items: Callable[[Case], int]
    fuzz: Mapping[str, tuple[int, int]]
    baselines: tuple[Baseline, ...] = (EAGER, COMPILED, COMPILED_MAX)
    pytorch: tuple[str, ...] = ()
    modes: tuple[str, ...] = ("fwd", "bwd")
    determinism: Mapping[str, str] = field(default_factory=lambda: {"fwd": "run-to-run", "bwd": "run-to-run"})
    tolerance: Tolerance = Tolerance()
    product_error: Callable[[Inputs], float] = lambda inputs: 0.0
    finite_only: Callable[[Case], bool] = lambda case: False
    extra_bytes: Callable[[Case, str], Mapping[str, int]] = lambda case, mode: {}
    sampled: Callable[[Case], Rows | None] = lambda case: None
    stand_in: Callable[[Case], StandIn | None] = lambda case: None
    own_strides: Callable[[Case], tuple[int, ...]] = lambda case: ()
    limits: Mapping[str, float] = field(default_factory=dict)
    spills: Mapping[str, int] = field(default_factory=dict)
    early_arrivals: Mapping[str, int] = field(default_factory=dict)
    false_alarms: Mapping[tuple[str, str], str] = field(default_factory=dict)
    tunables: tuple[Tunable, ...] = ()
    compile_targets: tuple[tuple[int, int], ...] = ((8, 0), (9, 0))
    min_capability: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    alias_reason: Callable[[str, Case, str], str | None] = lambda implementation, case, mode: None
    unsupported_reason: Callable[[str, Case, str], str | None] = lambda implementation, case, mode: None
    host_cases: tuple[Case, ...] = ()
    suite_cases: tuple[Case, ...] = ()
    host_ops: Mapping[str, Op] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    captured: bool = False
    stages: Callable[[str, Case, str, torch.device], Mapping[str, float] | None] = lambda *asked: None
    stage_ranges: Callable[[Callable[[str], AbstractContextManager[object]]], AbstractContextManager[object]] = (
        lambda range_of: nullcontext()
    )
    ablation: Mapping[str, str] = field(default_factory=dict)
    model: Callable[[Case, str, int, int | None, float, float], tuple[float, float, float]] | None = None
    sharding: Sharding | None = None

    def __post_init__(self) -> None:
        names = [case.name for case in self.cases]
        if len(set(names)) != len(names):
            raise ValueError(f"{self.name}: case names must be unique, got {sorted(names)}")
        if not any(case.bench for case in self.cases):
            raise ValueError(f"{self.name}: at least one case must have bench=True")
        if unknown := set(self.modes) - set(MODES):
            raise ValueError(f"{self.name}: unknown modes {sorted(unknown)}, known are {MODES}")
        if unknown := set(self.min_capability) - set(self.implementations):
            raise ValueError(f"{self.name}: min_capability names {sorted(unknown)}, which are not implementations")
        if unknown := set(self.pytorch) - {baseline.name for baseline in self.baselines}:
            raise ValueError(f"{self.name}: pytorch names {sorted(unknown)}, which are not baselines")
        others = [case.name for case in (*self.host_cases, *self.suite_cases)]
        if len(set(names + others)) != len(names) + len(others):
            raise ValueError(
                f"{self.name}: names of host cases and of suites' must be unique too, got {sorted(others)}"
            )
        if unknown := set(self.ablation) - {*self.implementations, *(b.name for b in self.baselines)}:
            raise ValueError(f"{self.name}: ablation names {sorted(unknown)}, which are not timed")
        if alone := [case.name for case in self.cases if case.world_size < 1]:
            raise ValueError(f"{self.name}: a case needs at least one GPU, got {alone}")
        self._check_sharding()
        if idle := [case.name for case in self.cases if not self.modes_of(case)]:
            raise ValueError(
                f"{self.name}: no mode for the cases {idle}; those that mutate inputs need one without autograd"
            )

    def _check_sharding(self) -> None:
        if self.sharding is None:
            return
        if len(self.sharding.alone) > 1:
            raise ValueError(f"{self.name}: only one implementation may give T1, got {sorted(self.sharding.alone)}")
        if unknown := set(self.sharding.local) - set(self.implementations):
            raise ValueError(f"{self.name}: `local` names {sorted(unknown)}, which are not implementations")

    def skip_reason(self, implementation: str, case: Case, mode: str) -> str | None:
        """Why one of our implementations is neither checked nor timed on a case, or None."""
        return self.unsupported_reason(implementation, case, mode) or self.alias_reason(implementation, case, mode)

    def searched_in(self, tunable: Tunable) -> str:
        """The implementation in which a tunable is tuned."""
        return tunable.implementation or next(iter(self.implementations))

    def modes_of(self, case: Case) -> tuple[str, ...]:
        """The modes in which a case runs."""
        wanted = [mode for mode in self.modes if mode in (case.modes or self.modes)]
        return tuple(mode for mode in wanted if mode in WITHOUT_AUTOGRAD or not case.mutates)

    def case(self, name: str) -> Case:
        """The case of that name; ValueError lists the known ones."""
        for case in (*self.cases, *self.suite_cases):
            if case.name == name:
                return case
        raise ValueError(f"{self.name} has no case {name!r}; known: {', '.join(c.name for c in self.cases)}")
