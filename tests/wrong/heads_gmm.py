"""What is wrong with each broken heads_gmm, and the controls."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F

from harness.spec import Case

from . import Wrong, wrappers
from .plain_heads_gmm import check, heads_gmm

ROWS, MEAN = "11x8-2x7-fp32-none", "10x8-2x7-fp32-mean"
CASES = (
    Case(
        ROWS,
        dict(rows=11, dim=8, heads=2, hidden=7),
        torch.float32,
        dict(activation="silu", reduction="none", biased=True),
    ),
    Case(
        MEAN,
        dict(rows=10, dim=8, heads=2, hidden=7),
        torch.float32,
        dict(activation="gelu", reduction="mean", biased=True),
    ),
)
LONG_CASES: tuple[Case, ...] = ()
FUZZ = {"rows": (0, 12), "dim": (1, 9), "heads": (1, 3), "hidden": (1, 9)}
LIMITS: dict[str, float] = {}


def _fault(name: str, case: str, check: str, cause: str, on_gpu: tuple[str, str] | None = None) -> Wrong:
    return Wrong(name, partial(heads_gmm, fault=name), case, check, cause, on_gpu)


WRONG = (
    # In the forward.
    _fault("last head skipped", ROWS, "accuracy", "error"),
    _fault("bias left out", ROWS, "accuracy", "error"),
    _fault("mean and deviation exchanged", ROWS, "accuracy", "error"),
    _fault("parameters rounded to half precision", ROWS, "accuracy", "error"),
    _fault("weights not normalised", ROWS, "accuracy", "error"),
    _fault("-0.5 log 2 pi dropped", ROWS, "accuracy", "error"),
    _fault("sign of the log-likelihood", ROWS, "accuracy", "error"),
    _fault("tail of the rows dropped", ROWS, "accuracy", "error"),
    _fault("log-sum-exp without the maximum", ROWS, "values", "nonfinite"),
    _fault("strides of y ignored", ROWS, "strides", "nonfinite"),
    # In the backward.
    _fault("prior taken for the posterior", ROWS, "accuracy", "error"),
    _fault("gradient of sigma without its own term", ROWS, "accuracy", "error"),
    _fault("gradient of sigma in place of its logarithm", ROWS, "accuracy", "error"),
    _fault("sign of y's gradient", ROWS, "accuracy", "error"),
    _fault("bias's gradient of the last row", ROWS, "accuracy", "error"),
    _fault("gradient of the mean not divided", MEAN, "accuracy", "error"),
    _fault("last chunk of the rows alone", ROWS, "accuracy", "error"),
    _fault("incoming gradient taken for one", ROWS, "accuracy", "error"),
    _fault("chunks in the order of arrival", ROWS, "repeat", "repeat"),
    # Around the kernel.
    Wrong("zeros", wrappers.constant(0.0)(heads_gmm), ROWS, "accuracy", "error"),
    Wrong("nan", wrappers.constant(float("nan"))(heads_gmm), ROWS, "accuracy", "nonfinite"),
    Wrong("cached by address", wrappers.cached(heads_gmm), ROWS, "replay", "replay", on_gpu=("accuracy", "error")),
    Wrong("mutated input", wrappers.mutating(heads_gmm), ROWS, "accuracy", "inputs"),
    Wrong("lazy output", wrappers.lazy(heads_gmm), ROWS, "accuracy", "lazy"),
    _fault("no checks", ROWS, "refusal", "accepted", on_gpu=("refusal", "message")),
    _fault("dtype of the fake result", ROWS, "opcheck", "opcheck"),
    Wrong("looks at values", wrappers.looking_at_values(heads_gmm), ROWS, "compile", "compile"),
)

# Each tried by the check that it names alone: what other checks see of an unjoined stream is a matter of luck.
ON_A_GPU = (
    Wrong("side stream", wrappers.on_a_side_stream(wait=True)(heads_gmm), ROWS, "stream", "late"),
    Wrong("side stream that is not joined", wrappers.on_a_side_stream(wait=True)(heads_gmm), ROWS, "graph", "graph"),
)


def one_by_one(x, w1, w2, y, bias=None, activation="silu", reduction="mean"):
    """Two linear layers for each head, and a mixture whose components come last first."""
    check(x, w1, w2, y, bias, activation, reduction)
    act = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "relu": F.relu}[activation]
    heads = [F.linear(act(F.linear(x, first)), second) for first, second in zip(w1, w2, strict=True)]
    found = torch.stack(heads, -2) if bias is None else torch.stack(heads, -2) + bias
    logits, mu, log_sigma = found.float().unbind(-1)
    z = (y.float()[..., None] - mu) * torch.exp(-log_sigma)
    log_p = torch.logsumexp((logits.log_softmax(-1) - log_sigma - 0.5 * z * z).flip(-1), -1)
    loss = 0.5 * math.log(2 * math.pi) - log_p
    return {"mean": torch.mean, "sum": torch.sum, "none": torch.clone}[reduction](loss)


CONTROLS = {"plain": heads_gmm, "one by one": one_by_one}
