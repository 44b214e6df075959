"""What is wrong with each broken swiglu, and the controls."""

from __future__ import annotations

from functools import partial

import torch

from harness.spec import Case
from kernels.swiglu.reference import swiglu_reference

from . import Wrong, cheats, wrappers
from .plain_swiglu import check, swiglu

PAIR, PACKED, GELU, HALF = "7x37-fp32-silu", "7x37-fp32-silu-packed", "7x37-fp32-gelu", "7x33-fp16-silu-packed"
CASES = (
    Case(PAIR, dict(rows=7, dim=37), torch.float32, dict(activation="silu")),
    Case(PACKED, dict(rows=7, dim=37), torch.float32, dict(activation="silu", layout="packed")),
    Case(GELU, dict(rows=7, dim=37), torch.float32, dict(activation="gelu")),
    Case(HALF, dict(rows=7, dim=33), torch.float16, dict(activation="silu", layout="packed")),
)
LONG_CASES: tuple[Case, ...] = ()
FUZZ = {"rows": (0, 7), "dim": (1, 40)}
LIMITS: dict[str, float] = {}


def _fault(name: str, case: str, check: str, cause: str, on_gpu: tuple[str, str] | None = None) -> Wrong:
    return Wrong(name, partial(swiglu, fault=name), case, check, cause, on_gpu)


def reference(gate, up=None, *, activation="silu"):
    """The reference itself, behind the checks of a public function."""
    check(gate, up, activation)
    return swiglu_reference(gate, up, activation=activation)


WRONG = (
    # In the formula.
    _fault("silu for gelu", GELU, "accuracy", "error"),
    _fault("sigmoid for silu", PAIR, "accuracy", "error"),
    _fault("up dropped", PAIR, "accuracy", "error"),
    _fault("gate and up swapped", PAIR, "accuracy", "error"),
    _fault("exponential that overflows", PAIR, "values", "nonfinite"),
    Wrong("small values flushed", cheats.small_values_flushed(reference), HALF, "accuracy", "error"),
    # In the derivatives.
    _fault("slope of the sigmoid alone", PAIR, "accuracy", "error"),
    _fault("dgate without up", PAIR, "accuracy", "error"),
    _fault("dup without the activation", PAIR, "accuracy", "error"),
    _fault("dgate and dup swapped", PACKED, "accuracy", "error"),
    _fault("no gradient of up alone", PAIR, "partial", "error"),
    # In what is read and written.
    _fault("halves taken for neighbours", PACKED, "accuracy", "error"),
    _fault("row stride of one half", PACKED, "accuracy", "error"),
    _fault("second half of the gradient not written", PACKED, "accuracy", "nonfinite"),
    _fault("odd last column not written", HALF, "accuracy", "nonfinite"),
    _fault("writes past the end", PACKED, "accuracy", "bounds"),
    _fault("up read with the strides of gate", PAIR, "strides", "nonfinite"),
    _fault("gradient read with the strides of gate", PAIR, "strides", "nonfinite"),
    # Around the kernel.
    Wrong("gradient over the input", wrappers.mutating(swiglu), PACKED, "accuracy", "inputs"),
    Wrong("cached by address", wrappers.cached(swiglu), PAIR, "replay", "replay", on_gpu=("accuracy", "error")),
    Wrong("fp32 out of fp16", wrappers.single_precision(swiglu), HALF, "accuracy", "dtype"),
    _fault("no checks", PAIR, "refusal", "accepted", on_gpu=("refusal", "launched")),
    Wrong("nameless refusal", wrappers.nameless(swiglu), PAIR, "refusal", "message"),
    _fault("shape of the fake result", PACKED, "opcheck", "opcheck"),
)
ON_A_GPU: tuple[Wrong, ...] = ()


def doubled(gate, up=None, *, activation="silu"):
    """In fp64, rounded once."""
    check(gate, up, activation)
    wide = swiglu_reference(gate.double(), None if up is None else up.double(), activation=activation)
    return wide.to(gate.dtype)


def repacked(gate, up=None, *, activation="silu"):
    """A pair as one tensor, a packed tensor as a pair."""
    check(gate, up, activation)
    if up is None:
        return swiglu(*(half.contiguous() for half in gate.chunk(2, dim=-1)), activation=activation)
    return swiglu(torch.cat((gate, up), dim=-1), activation=activation)


CONTROLS = {"plain": swiglu, "reference": reference, "doubled": doubled, "repacked": repacked}
