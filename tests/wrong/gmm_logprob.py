"""What is wrong with each broken gmm_logprob, and the controls."""

from __future__ import annotations

import itertools
from functools import partial

import torch

from harness.spec import Case
from kernels.gmm_logprob.reference import gmm_logprob_reference

from . import Wrong, wrappers
from .plain_gmm_logprob import check, gmm_logprob

ROWS, MEAN, HALF = "5x10-fp32-none", "5x10-fp32-mean", "5x5-fp16-none"
SUM, LONG = "24x5-fp32-sum", "1000x2-fp16-sum"
HALF_LOG_2PI = 0.9189385332046727
_CALLS = itertools.count()
CASES = (
    Case(ROWS, dict(rows=5, k=10), torch.float32, dict(reduction="none")),
    Case(MEAN, dict(rows=5, k=10), torch.float32, dict(reduction="mean")),
    Case(HALF, dict(rows=5, k=5), torch.float16, dict(reduction="none")),
)
# For faults that only many rows show, which takes the interpreter long: the controls are not run on them.
LONG_CASES = (
    Case(SUM, dict(rows=24, k=5), torch.float32, dict(reduction="sum")),
    Case(LONG, dict(rows=1000, k=2), torch.float16, dict(reduction="sum")),
)
FUZZ = {"rows": (0, 5), "k": (1, 20)}
LIMITS = {"log_sigma": 30.0}


def _fault(name: str, case: str, check: str, cause: str, on_gpu: tuple[str, str] | None = None) -> Wrong:
    return Wrong(name, partial(gmm_logprob, fault=name), case, check, cause, on_gpu)


def half_precision_sum(logits, mu, log_sigma, y, reduction="mean"):
    """In PyTorch, for the interpreter would need long for the many rows that it takes to see this."""
    total = logits.new_zeros(())
    for row in gmm_logprob_reference(logits, mu, log_sigma, y, "none"):
        total = total + row
    return total


def sum_by_arrival(logits, mu, log_sigma, y, reduction="mean"):
    """One after the other, beginning somewhere else each time."""
    rows = gmm_logprob_reference(logits, mu, log_sigma, y, "none")
    total = rows.new_zeros(())
    for row in rows.flatten().roll(5 * next(_CALLS)):
        total = total + row
    return total


WRONG = (
    # In the forward.
    _fault("last component skipped", ROWS, "accuracy", "error"),
    _fault("padded lanes take part", ROWS, "accuracy", "error"),
    _fault("-0.5 log 2 pi dropped", ROWS, "accuracy", "error"),
    _fault("weights not normalised", ROWS, "accuracy", "error"),
    _fault("softmax without the maximum", ROWS, "values", "nonfinite"),
    _fault("log-sum-exp without the maximum", ROWS, "values", "nonfinite"),
    _fault("mu read with the strides of the logits", ROWS, "strides", "nonfinite"),
    _fault("stride of y ignored", ROWS, "strides", "nonfinite"),
    _fault("mean over padded rows", MEAN, "accuracy", "error"),
    Wrong("sum in the order of arrival", sum_by_arrival, SUM, "repeat", "repeat"),
    Wrong("sum in half precision", half_precision_sum, LONG, "accuracy", "error", on_gpu=("strides", "error")),
    # In the backward.
    _fault("incoming gradient taken for one", ROWS, "accuracy", "error"),
    _fault("stride of the incoming gradient ignored", ROWS, "strides", "nonfinite"),
    _fault("gradient of the normalisation dropped", ROWS, "accuracy", "error"),
    _fault("sign of the gradient of log_sigma", ROWS, "accuracy", "error"),
    _fault("sign of the gradient of y", MEAN, "accuracy", "error"),
    _fault("last gradient not written", ROWS, "accuracy", "nonfinite"),
    _fault("gradients written past the end", ROWS, "accuracy", "bounds"),
    # Around the kernel.
    Wrong("zeros", wrappers.constant(0.0)(gmm_logprob), ROWS, "accuracy", "error"),
    Wrong("nan", wrappers.constant(float("nan"))(gmm_logprob), MEAN, "accuracy", "nonfinite"),
    Wrong("cached by address", wrappers.cached(gmm_logprob), ROWS, "replay", "replay", on_gpu=("accuracy", "error")),
    Wrong("mutated input", wrappers.mutating(gmm_logprob), ROWS, "accuracy", "inputs"),
    Wrong("lazy output", wrappers.lazy(gmm_logprob), MEAN, "accuracy", "lazy"),
    Wrong("fp32 out of fp16", wrappers.single_precision(gmm_logprob), HALF, "accuracy", "dtype"),
    _fault("no checks", ROWS, "refusal", "accepted", on_gpu=("refusal", "launched")),
    _fault("dtype of the fake result", ROWS, "opcheck", "opcheck"),
    Wrong("looks at values", wrappers.looking_at_values(gmm_logprob), MEAN, "compile", "compile"),
)

# Each tried by the check that it names alone: what other checks see of an unjoined stream is a matter of luck.
ON_A_GPU = (
    Wrong("side stream", wrappers.on_a_side_stream(wait=True)(gmm_logprob), ROWS, "stream", "late"),
    Wrong("side stream that is not joined", wrappers.on_a_side_stream(wait=True)(gmm_logprob), ROWS, "graph", "graph"),
    Wrong(
        "side stream that waits for nothing",
        wrappers.on_a_side_stream(wait=False)(gmm_logprob),
        ROWS,
        "stream",
        "error or late",
    ),
)


def reference(logits, mu, log_sigma, y, reduction="mean"):
    """The reference itself, behind the checks of a public function."""
    check(logits, mu, log_sigma, y)
    return gmm_logprob_reference(logits, mu, log_sigma, y, reduction)


def by_hand(logits, mu, log_sigma, y, reduction="mean"):
    """Eager with other roundings: the maxima taken by hand, a product with 1/sigma in place of a division."""
    check(logits, mu, log_sigma, y)
    logits, mu, log_sigma, wide_y = logits.float(), mu.float(), log_sigma.float(), y.float().unsqueeze(-1)
    centred = logits - logits.detach().amax(-1, keepdim=True)
    z = (wide_y - mu) * (-log_sigma).exp()
    term = centred - centred.exp().sum(-1, keepdim=True).log() - (0.5 * z * z + log_sigma) - HALF_LOG_2PI
    top = term.detach().amax(-1, keepdim=True)
    top = torch.where(top.isinf(), 0.0, top)
    rows = top.squeeze(-1) + (term - top).exp().sum(-1).log()
    return {"none": rows, "mean": rows.mean(), "sum": rows.sum()}[reduction].to(y.dtype)


CONTROLS = {"plain": gmm_logprob, "reference": reference, "by_hand": by_hand}
