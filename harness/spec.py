"""The one declaration of a kernel. Tests, bench, build, profile and report all read it and nothing else.

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
WHOLE = ("step", "train")  # in which all that there is to check happens in one call
WITHOUT_AUTOGRAD = ("fwd", *WHOLE)


@dataclass(frozen=True)
class Case:
    """One problem: sizes, dtype and the keyword arguments that are not tensors.

    `name` is used verbatim as pytest id, NVTX range, report row and file key, so it is unique within a kernel and made
    of letters, digits, '.', '_' and '-'. `bench=False` cases are only for correctness.

    `mutates` names the inputs that the op updates in place. It must return them among its outputs, while the reference
    computes their new values as new tensors. Such a case is run without autograd alone.

    `modes` are those of SPEC's in which it is run; all of them where it is empty.

    `world_size` is the number of GPUs that it takes, which are of one host. Its records lie in a folder of their own.
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
    """When a result is right (`harness.correctness.accuracy` has the rule in full).

    With e = |result − oracle| and e_eager = |eager in the same dtype − oracle|, both max and RMS must satisfy
    e <= ratio · e_eager + floor · scale, where scale is the largest finite |oracle| (max) or its RMS. `floor` is in
    units of the dtype's epsilon; it covers the case of an eager result that is accurate by chance.
    """

    ratio: float = 2.0
    floor: float = 4.0


@dataclass(frozen=True)
class Baseline:
    """Something to be compared with. Use EAGER, COMPILED and COMPILED_MAX, which are made from `reference`, or `Peer`.
    `supports` gives the reason why a case cannot be run, or None; `dataclasses.replace(EAGER, supports=...)` has one.
    """

    name: str
    supports: Callable[[Case, str], str | None] = field(kw_only=True, default=lambda case, mode: None)


@dataclass(frozen=True)
class Peer(Baseline):
    """Another library's implementation with the signature of the public op.

    `load` imports the library and returns the callable, so that an absent one costs nothing until it is asked for;
    its ImportError becomes a skipped row. `configurations` are smaller ones, by name and best first: the first that
    runs takes the place of a `load` that does not compile or run, and the row says which it was.
    """

    load: Callable[[], Op] = field(kw_only=True)
    configurations: Mapping[str, Callable[[], Op]] = field(kw_only=True, default_factory=dict)


@dataclass(frozen=True)
class Yardstick(Peer):
    """Something else that is timed in the same rounds, such as a plain copy of the input: it is not checked, is no peer
    and takes no part in the verdict. Its rate is that of its own `cost`; the report shows ours as a share of it. One
    that is `ours` calls further public functions of the folder, and `sanitize` runs it on the small cases."""

    cost: Callable[[Case, str], Cost] = field(kw_only=True)
    ours: bool = field(default=False, kw_only=True)


EAGER = Baseline("eager")
COMPILED = Baseline("compile")
#: torch.compile at its best: its mode max-autotune-no-cudagraphs, whose options these are. The harness has a column of
#: its own for CUDA graphs.
COMPILED_MAX = Baseline("compile-max")
MAX_AUTOTUNE: dict[str, Any] = {"max_autotune": True, "coordinate_descent_tuning": True}
WITHOUT_DESCENT: dict[str, Any] = {"max_autotune": True}  # what is tried where those do not compile
FROM_REFERENCE = frozenset(baseline.name for baseline in (EAGER, COMPILED, COMPILED_MAX))


@dataclass(frozen=True)
class Tunable:
    """A `pick_*` function of a kernel's module and the configurations that `tune` tries in its place: over `cases`, by
    default SPEC's that are benched, in `implementation`, by default SPEC's first."""

    module: ModuleType
    function: str
    mode: str
    candidates: Callable[[Case], Iterable[Any]]
    cases: tuple[Case, ...] = ()
    implementation: str = ""


@dataclass(frozen=True)
class Rows:
    """Rows that an op computes independently: they lie along dimension inputs[name] of those inputs, and along
    dimension `outputs` of every output. `count` of them are compared with the reference (`harness.sampling`)."""

    count: int
    inputs: Mapping[str, int]
    outputs: int


@dataclass(frozen=True)
class StandIn:
    """How a case is checked whose results in fp64, and whose copies, do not fit beside what is timed
    (`harness.correctness.stand_in`): all of the checks on a smaller case, and a part of the results on what is timed.

    case       of the same kind and smaller, such as fewer layers of the same widths
    inputs     (the inputs that are timed) -> arguments of `reference`. What the op updates in place is copied
    reference  as SPEC's, for the part of the results alone
    results    (the results, the inputs) -> that part
    scalar     the relative error that is allowed of a result of one number: that of eager, which is the measure of the
               others, may be 0 by chance
    """

    case: Case
    inputs: Callable[[Inputs], Inputs]
    reference: Op
    results: Callable[[tuple[torch.Tensor, ...], Inputs], tuple[torch.Tensor, ...]]
    scalar: float


@dataclass(frozen=True)
class Sharding:
    """How a kernel runs on several GPUs. The harness starts the processes, one a GPU ("ranks"), and makes the default
    process group of `case.world_size` ranks before it calls any of this (`harness.ranks`).

    make_shard   (case, rank, device, generator) -> keyword arguments of the op on that rank, as `make_inputs`. The
                 generator is seeded by the rank.
    check_shard  (fn, case, mode, device) -> why an implementation is wrong, or None. Called by all ranks together, with
                 the implementation as it is. It makes a small problem of the case's kind and holds it against the
                 oracle. Without it rows say that nothing was checked.
    alone        our one-GPU implementation, name -> callable(**make_inputs(case, ...)), at most one. Rank 0 runs it on
                 the whole problem in the same rounds: T1 of the efficiency T1 / (N · TN).
    alone_reason (case, mode) -> why it is not timed there, or None
    local        implementation -> the same without its transfers, or with local copies in their place: its results are
                 wrong, and what the transfers take beyond it is not hidden
    plain        (case) -> of an exchange that is compressed: the baseline that sends everything as it is, and the bytes
                 that a GPU sends there; else None. The report then says at which speeds of a link it pays
    axis         (case) -> the series and the length by which a chart of the efficiency has it
    environment  (case) -> environment variables that its ranks start with
    release      called on each rank after each case and mode: gives back what is kept between calls
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
    """Everything the harness knows of a kernel.

    name             folder = public function = op
    implementations  what this folder offers, best first: name -> callable(**inputs) -> tensor or tuple of tensors
    reference        same signature, plain PyTorch, computing in at least fp32 and in fp64 when given fp64
    make_inputs      (case, device, generator) -> keyword arguments of the op, tensors and scalars. Fresh random data at
                     each call. The generator is None when shapes alone matter (ahead-of-time build).
    cost             (case, mode) -> Cost; no tensors. Its bytes are those of the call's tensors (inputs, outputs,
                     incoming gradients, gradients) and `extra_bytes`, which a test holds it to
    extra_bytes      (case, mode) -> bytes by name: of what the forward saves for the backward beyond inputs; negative
                     of what a call need not touch of its tensors. Of a case of several GPUs: of one of them
    cases            at least one with bench=True
    pytorch          names of the baselines that are what a PyTorch user would write (F.rms_norm, SDPA, fused AdamW).
                     The report's "over PyTorch" is over the fastest; "eager" where the reference is just that
    grads            names of the inputs that have a gradient
    modes            what is timed: "fwd" (no autograd), "bwd" (the backward alone), "fwd+bwd", or "step": one update of
                     an optimizer, or "train": one step of a model's training, with its own forward, backward and
                     optimizer. The last two are run like "fwd", under torch.no_grad: what "train" differentiates it
                     does under a torch.enable_grad of its own.
    min_capability   implementation -> the compute capability that it needs, where that is more than the case's own
    alias_reason     (implementation, case, mode) -> why it is the same as another implementation there, so that it is
                     neither checked nor timed again; else None
    unit, items      the case's own throughput: "rows", (case) -> how many
    unsupported_reason  (implementation, case, mode) -> why it cannot take the case (beyond min_capability) or None
    determinism      mode -> "run-to-run" (bit-wise equal repeats, tested), "on request" (the same under
                     torch.use_deterministic_algorithms(True)) or "none"
    fuzz             dimension -> (low, high), from which Hypothesis draws sizes
    finite_only      (case) -> whether its inputs must be finite, because what the op masks it may or may not read
    sampled          (case) -> Rows where the problem is too large for the reference, else None
    stand_in         (case) -> StandIn where neither the whole nor some of its rows can be held against the reference,
                     else None. Such a case is checked by `bench` alone
    own_strides      (case) -> the outputs, by index, that have neither eager's strides nor those of a contiguous
                     tensor, but such as the op documents and the kernel's own tests check
    product_error    (inputs) -> the relative error of each term of a matrix product, where it is more than the inputs'
                     dtypes say: operands are rounded on the way, or tensor cores keep fewer bits
    limits           input -> the largest magnitude up to which the op is right, where that is not all of its dtype
    spills           JIT kernel -> bytes of register spill that are accepted, with the reason in the kernel's README
    early_arrivals   kernel of CUDA C++ -> arrivals at another CTA's mbarrier that may come before reads of shared
                     memory are done, since what they give back is not what is read; the reason is in the README
    false_alarms     (tool of compute-sanitizer, JIT kernel or device function) -> why its finding there is not an
                     error
    tunables         what `tune` searches
    host_cases       problems so small that a call takes its host time; every peer takes them
    suite_cases      further cases that only a suite or --case names: neither in the tests nor in a bench of everything
    host_ops         implementation or peer -> what is called on host cases in its place, e.g. the step of an optimizer
    compile_targets  compute capabilities that `build` compiles for
    needs            the kernels whose public functions a composed one calls; it has no kernel of its own
    captured         whether a user has a call in a CUDA graph, as a step of training: then that column is there and is
                     the headline, but of calls of seconds
    stages           (implementation, case, mode, device) -> seconds of each stage of a call, each measured by itself,
                     or None. The bench records them beside the times, the report has a table of them
    stage_ranges     (range of a stage's name) -> a context in which a call has what it launches inside such ranges,
                     forward and backward: `profile` says then which kernels each stage has
    ablation         implementation or baseline -> what runs there, for the report's table of what each part brings: the
                     first of `implementations`, those that differ from it in one part, and peers
    model            (case, mode, GPUs, length or None for the case's own, FLOP/s of a GPU, bytes/s of a link) -> a
                     model's (seconds, seconds of them that a transfer is waited for, efficiency); or None
    sharding         how cases of several GPUs are run; None where there are none
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
            raise ValueError(f"{self.name}: min_capability names {sorted(unknown)}, which are no implementations")
        if unknown := set(self.pytorch) - {baseline.name for baseline in self.baselines}:
            raise ValueError(f"{self.name}: pytorch names {sorted(unknown)}, which are no baselines")
        others = [case.name for case in (*self.host_cases, *self.suite_cases)]
        if len(set(names + others)) != len(names) + len(others):
            raise ValueError(
                f"{self.name}: names of host cases and of suites' must be unique too, got {sorted(others)}"
            )
        if unknown := set(self.ablation) - {*self.implementations, *(b.name for b in self.baselines)}:
            raise ValueError(f"{self.name}: ablation names {sorted(unknown)}, which are nothing that is timed")
        if alone := [case.name for case in self.cases if case.world_size < 1]:
            raise ValueError(f"{self.name}: a case takes one GPU at least, got {alone}")
        self._check_sharding()
        if idle := [case.name for case in self.cases if not self.modes_of(case)]:
            raise ValueError(
                f"{self.name}: no mode for the cases {idle}; those that mutate inputs need one without autograd"
            )

    def _check_sharding(self) -> None:
        if self.sharding is None:
            return
        if len(self.sharding.alone) > 1:
            raise ValueError(f"{self.name}: one implementation alone gives T1, got {sorted(self.sharding.alone)}")
        if unknown := set(self.sharding.local) - set(self.implementations):
            raise ValueError(f"{self.name}: `local` names {sorted(unknown)}, which are no implementations")

    def skip_reason(self, implementation: str, case: Case, mode: str) -> str | None:
        """Why one of our implementations is neither checked nor timed on a case, or None."""
        return self.unsupported_reason(implementation, case, mode) or self.alias_reason(implementation, case, mode)

    def searched_in(self, tunable: Tunable) -> str:
        """The implementation in which a tunable is searched."""
        return tunable.implementation or next(iter(self.implementations))

    def modes_of(self, case: Case) -> tuple[str, ...]:
        """The modes in which a case is run."""
        wanted = [mode for mode in self.modes if mode in (case.modes or self.modes)]
        return tuple(mode for mode in wanted if mode in WITHOUT_AUTOGRAD or not case.mutates)

    def case(self, name: str) -> Case:
        """The case of that name; ValueError lists the known ones."""
        for case in (*self.cases, *self.suite_cases):
            if case.name == name:
                return case
        raise ValueError(f"{self.name} has no case {name!r}; known: {', '.join(c.name for c in self.cases)}")
