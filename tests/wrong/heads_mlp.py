"""What is wrong with each broken heads_mlp, and the controls."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from harness.spec import Case

from . import Wrong, wrappers
from .plain_heads_mlp import check, heads_mlp

PLAIN, GELU = "11x8-2x7x3-fp32", "10x8-2x7x3-fp32"
CASES = (
    Case(PLAIN, dict(rows=11, dim=8, heads=2, hidden=7, dim_out=3), torch.float32, dict(activation="silu")),
    Case(GELU, dict(rows=10, dim=8, heads=2, hidden=7, dim_out=3), torch.float32, dict(activation="gelu")),
)
LONG_CASES: tuple[Case, ...] = ()
FUZZ = {"rows": (0, 12), "dim": (1, 9), "heads": (1, 3), "hidden": (1, 9), "dim_out": (1, 4)}
LIMITS: dict[str, float] = {}


def _fault(name: str, case: str, check: str, cause: str, on_gpu: tuple[str, str] | None = None) -> Wrong:
    return Wrong(name, partial(heads_mlp, fault=name), case, check, cause, on_gpu)


WRONG = (
    # In the forward.
    _fault("last column of x dropped", PLAIN, "accuracy", "error"),
    _fault("last block of the hidden dropped", PLAIN, "accuracy", "error"),
    _fault("sum rounded at each block of the hidden", PLAIN, "accuracy", "error"),
    _fault("sum carried from head to head", PLAIN, "accuracy", "error"),
    _fault("w2 of the first head", PLAIN, "accuracy", "error"),
    _fault("heads before rows", PLAIN, "accuracy", "error"),
    _fault("tail of the rows dropped", PLAIN, "accuracy", "error"),
    _fault("tanh form taken for exact", GELU, "accuracy", "error"),
    _fault("strides ignored", PLAIN, "strides", "error"),
    # In the backward.
    _fault("derivative left out", PLAIN, "accuracy", "error"),
    _fault("derivative at the hidden", PLAIN, "accuracy", "error"),
    _fault("gradient of x of the last head", PLAIN, "accuracy", "error"),
    _fault("last chunk of the rows alone", PLAIN, "accuracy", "error"),
    _fault("sum rounded at each chunk", PLAIN, "accuracy", "error"),
    _fault("first chunk left out of w2's gradient", PLAIN, "accuracy", "error"),
    _fault("w2's gradient before the activation", PLAIN, "accuracy", "error"),
    _fault("incoming gradient taken for one", PLAIN, "accuracy", "error"),
    _fault("chunks in the order of arrival", PLAIN, "repeat", "repeat"),
    # Around the kernel.
    Wrong("zeros", wrappers.constant(0.0)(heads_mlp), PLAIN, "accuracy", "error"),
    Wrong("nan", wrappers.constant(float("nan"))(heads_mlp), PLAIN, "accuracy", "nonfinite"),
    Wrong("cached by address", wrappers.cached(heads_mlp), PLAIN, "replay", "replay", on_gpu=("accuracy", "error")),
    Wrong("mutated input", wrappers.mutating(heads_mlp), PLAIN, "accuracy", "inputs"),
    Wrong("lazy output", wrappers.lazy(heads_mlp), PLAIN, "accuracy", "lazy"),
    _fault("no checks", PLAIN, "refusal", "accepted", on_gpu=("refusal", "message")),
    _fault("dtype of the fake result", PLAIN, "opcheck", "opcheck"),
    Wrong("looks at values", wrappers.looking_at_values(heads_mlp), PLAIN, "compile", "compile"),
)

# Each tried by the check that it names alone: what other checks see of an unjoined stream is a matter of luck.
ON_A_GPU = (
    Wrong("side stream", wrappers.on_a_side_stream(wait=True)(heads_mlp), PLAIN, "stream", "late"),
    Wrong("side stream that is not joined", wrappers.on_a_side_stream(wait=True)(heads_mlp), PLAIN, "graph", "graph"),
)


def one_by_one(x, w1, w2, activation="silu"):
    """Two linear layers for each head."""
    check(x, w1, w2, activation)
    act = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "relu": F.relu}[activation]
    heads = [F.linear(act(F.linear(x, first)), second) for first, second in zip(w1, w2, strict=True)]
    return torch.stack(heads, -2)


CONTROLS = {"plain": heads_mlp, "one by one": one_by_one}
