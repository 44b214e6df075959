"""Suites: named selections of cases, with the baselines of their summary. `python -m harness bench --suite NAME`.

A suite is data. Those here select cases of several kernels; a kernel's or workload's bench.py may declare more in
`SUITES`, a tuple of them. Cases that only a suite needs are in `KernelSpec.suite_cases`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from . import options, registry


@dataclass(frozen=True)
class Part:
    """Cases of one kernel.

    baselines        timed together with ours; the first is the one that the speed-up refers to
    modes            empty: all of SPEC's
    implementations  of ours; empty: SPEC's first
    unit             name of SPEC's items in this suite; empty: SPEC's own
    """

    kernel: str
    cases: tuple[str, ...]
    baselines: tuple[str, ...]
    modes: tuple[str, ...] = ()
    implementations: tuple[str, ...] = ()
    unit: str = ""


@dataclass(frozen=True)
class Suite:
    """Parts, with a `title` for the summary."""

    name: str
    title: str
    parts: tuple[Part, ...]


def _names(pattern: str, *values: object) -> tuple[str, ...]:
    return tuple(pattern.format(value) for value in values)


TRAIN_SCALE = Suite(
    "trainscale",
    "the ops of one training step of a large language model",
    (
        Part(
            "rmsnorm",
            # Batch 4 and 32, sequence 2048 and 4096.
            tuple(f"{rows}x{dim}-bf16" for rows in (8192, 16384, 65536, 131072) for dim in (4096, 8192)),
            ("torch", "compile"),
        ),
        Part(
            "gelu",
            tuple(f"{rows}x4096-bf16-{form}" for rows in (4096, 16384) for form in ("exact", "tanh")),
            ("eager", "compile"),
        ),
        Part("swiglu", ("2048x11008-bf16-silu",), ("torch", "compile")),
        Part("rope", _names("{}x32-32x128-bf16", "8x8192", "4x2048"), ("copy", "torch", "compile"), modes=("fwd",)),
        Part("cross_entropy", _names("{}x32000-bf16", 4096, 16384), ("torch", "compile")),
        Part(
            "attention",
            _names("b4-h32-q{0}-k{0}-d128-causal-bf16", 2048, 4096),
            ("torch", "sdpa-flash", "cudnn", "compile"),
        ),
        Part(
            "fp8",
            tuple(f"{rows}x4096-bf16-{by}" for rows in (4096, 16384) for by in ("row", "1x128", "128x128")),
            ("torch", "compile", "copy"),
        ),
    ),
)

ATTENTION_SMALL = Suite(
    "attention-small",
    "attention over few tokens, against PyTorch's scaled_dot_product_attention with its defaults",
    (
        Part(
            "attention",
            tuple(
                f"{shape}-d64-{dtype}"
                for dtype in ("fp16", "bf16")
                for shape in (*(f"b1-h1-q{n}-k{n}" for n in (32, 64, 128, 256, 512)), "b2-h4-q128-k128")
            ),
            ("torch", "compile"),
            unit="tokens",  # each is a query
        ),
    ),
)

SUITES = (TRAIN_SCALE, ATTENTION_SMALL)


def find(name: str) -> Suite:
    """The suite of that name, from here or from a bench.py. ValueError lists the known ones."""
    for suite in SUITES:
        if suite.name == name:
            return suite
    known = every()
    if name not in known:
        raise ValueError(f"unknown suite {name!r}; known: {', '.join(sorted(known))}")
    return known[name]


def every() -> dict[str, Suite]:
    """All suites by name. Imports every bench.py. ValueError if two have the same name."""
    found = list(SUITES)
    for kernel in registry.names():
        found += getattr(registry.module(kernel), "SUITES", ())
    known = {suite.name: suite for suite in found}
    if len(known) != len(found):
        raise ValueError(f"names of suites must be unique, got {sorted(suite.name for suite in found)}")
    return known


def select(suite: Suite, arguments: argparse.Namespace) -> list[options.Selection]:
    """The suite's cases that --kernel, --case, --mode and --impl do not exclude. ValueError for a kernel or case
    that is not in the suite, for a part that names something its SPEC does not have, and if no case is left."""
    options.known(arguments.kernel, {part.kernel for part in suite.parts}, f"kernel of suite {suite.name}")
    options.known(arguments.case, {name for part in suite.parts for name in part.cases}, f"case of suite {suite.name}")
    selections = []
    for part in suite.parts:
        if arguments.kernel and part.kernel not in arguments.kernel:
            continue
        spec = registry.load(part.kernel)
        named = options.implementations(spec)
        wanted = (*(part.implementations or tuple(spec.implementations)[:1]), *part.baselines)
        if unknown := sorted({*wanted} - {*named}):
            raise ValueError(f"suite {suite.name}: {part.kernel} has no implementation {', '.join(unknown)}")
        cases = tuple(spec.case(name) for name in part.cases if not arguments.case or name in arguments.case)
        modes = tuple(m for m in part.modes or spec.modes if not arguments.mode or m in arguments.mode)
        implementations = tuple(n for n in wanted if not arguments.impl or n in arguments.impl)
        if cases and modes and implementations:
            selections.append(options.Selection(spec, cases, modes, implementations))
    if not selections:
        raise ValueError(f"suite {suite.name}: --kernel, --case, --mode and --impl select none of its cases")
    return selections
