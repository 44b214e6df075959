"""What is wrong with each broken fused_mlp, and the controls."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from harness.spec import Case

from . import Wrong, wrappers
from .plain_fused_mlp import check, fused_mlp

PLAIN, GATED, BIASED = "11x7x10x5-fp32", "10x7x9x5-gated-fp32", "9x7x10x5-biased-fp32"
DIMS = dict(dim=7, dim_out=5)
CASES = (
    Case(PLAIN, dict(rows=11, hidden=10, **DIMS), torch.float32, dict(activation="gelu")),
    Case(GATED, dict(rows=10, hidden=9, **DIMS), torch.float32, dict(activation="silu", gated=True)),
    Case(BIASED, dict(rows=9, hidden=10, **DIMS), torch.float32, dict(activation="gelu_tanh", biased=True)),
)
LONG_CASES: tuple[Case, ...] = ()
FUZZ = {"rows": (0, 9), "dim": (1, 9), "hidden": (1, 9), "dim_out": (1, 9)}
LIMITS: dict[str, float] = {}


def _fault(name: str, case: str, check: str, cause: str, on_gpu: tuple[str, str] | None = None) -> Wrong:
    return Wrong(name, partial(fused_mlp, fault=name), case, check, cause, on_gpu)


WRONG = (
    # In the forward.
    _fault("last column of x dropped", PLAIN, "accuracy", "error"),
    _fault("last block of the hidden dropped", PLAIN, "accuracy", "error"),
    _fault("tail of the rows dropped", PLAIN, "accuracy", "error"),
    _fault("tanh form taken for exact", PLAIN, "accuracy", "error"),
    _fault("hidden rounded to 8 bits", PLAIN, "accuracy", "error"),
    _fault("sum rounded at each block of the hidden", PLAIN, "accuracy", "error"),
    _fault("gate and value exchanged", GATED, "accuracy", "error"),
    _fault("b1 dropped", BIASED, "accuracy", "error"),
    _fault("b2 added for each part", BIASED, "accuracy", "error"),
    _fault("strides ignored", PLAIN, "strides", "error"),
    _fault("copy of w2 kept by its address", PLAIN, "replay", "error", on_gpu=("accuracy", "error")),
    # In the backward.
    _fault("derivative left out", PLAIN, "accuracy", "error"),
    _fault("derivative at the hidden", PLAIN, "accuracy", "error"),
    _fault("gate's part of x's gradient dropped", GATED, "accuracy", "error"),
    _fault("last part of the rows dropped", PLAIN, "accuracy", "error"),
    _fault("parts rounded to the dtype", PLAIN, "accuracy", "error"),
    _fault("gradient of b1 from the hidden", BIASED, "accuracy", "error"),
    _fault("incoming gradient taken for one", PLAIN, "accuracy", "error"),
    _fault("parts in the order of arrival", PLAIN, "repeat", "repeat"),
    # Around the kernel.
    Wrong("zeros", wrappers.constant(0.0)(fused_mlp), PLAIN, "accuracy", "error"),
    Wrong("nan", wrappers.constant(float("nan"))(fused_mlp), PLAIN, "accuracy", "nonfinite"),
    Wrong("cached by address", wrappers.cached(fused_mlp), PLAIN, "replay", "replay", on_gpu=("accuracy", "error")),
    Wrong("mutated input", wrappers.mutating(fused_mlp), PLAIN, "accuracy", "inputs"),
    Wrong("lazy output", wrappers.lazy(fused_mlp), PLAIN, "accuracy", "lazy"),
    _fault("no checks", PLAIN, "refusal", "accepted", on_gpu=("refusal", "message")),
    _fault("dtype of the fake result", PLAIN, "opcheck", "opcheck"),
    Wrong("looks at values", wrappers.looking_at_values(fused_mlp), PLAIN, "compile", "compile"),
)

# Each tried by the check that it names alone: what other checks see of an unjoined stream is a matter of luck.
ON_A_GPU = (
    Wrong("side stream", wrappers.on_a_side_stream(wait=True)(fused_mlp), PLAIN, "stream", "late"),
    Wrong("side stream that is not joined", wrappers.on_a_side_stream(wait=True)(fused_mlp), PLAIN, "graph", "graph"),
)


def transposed(x, w1, w2, b1=None, b2=None, *, w_gate=None, activation="silu", save="activations"):
    """With columns in place of rows throughout, and w1 and w_gate in one product."""
    check(x, w1, w2, b1, b2, w_gate)
    act = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": partial(F.gelu, approximate="tanh"),
        "relu": F.relu,
        "relu_sq": lambda t: F.relu(t).square(),
    }[activation]
    columns = x.reshape(-1, x.shape[-1]).T
    both = torch.cat([w1] if w_gate is None else [w1, w_gate]) @ columns
    pre = both[: w1.shape[0]]
    if b1 is not None:
        pre = pre + b1[:, None]
    hidden = act(pre) if w_gate is None else act(both[w1.shape[0] :]) * pre
    y = (w2 @ hidden).T.reshape(*x.shape[:-1], w2.shape[0])
    return y.contiguous() if b2 is None else y + b2


CONTROLS = {"plain": fused_mlp, "transposed": transposed}
