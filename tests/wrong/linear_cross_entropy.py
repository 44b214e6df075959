"""What is wrong with each broken linear_cross_entropy, and the controls."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from harness.spec import Case

from . import Wrong, cheats, wrappers
from .plain_linear_cross_entropy import check, linear_cross_entropy

PLAIN, ALL, ROWS = "10x7x37-fp32", "10x7x37-fp32-all", "9x6x35-fp32-none"
INT32, IGNORED = "9x6x35-fp32-int32-smooth1", "9x6x35-fp32-all-ignored-sum"
CASES = (
    Case(PLAIN, dict(rows=10, dim=7, vocab=37), torch.float32),
    Case(
        ALL,
        dict(rows=10, dim=7, vocab=37),
        torch.float32,
        dict(bias=True, label_smoothing=0.2, softcap=2.0, z_loss=0.01, reduction="sum"),
    ),
    Case(ROWS, dict(rows=9, dim=6, vocab=35), torch.float32, dict(reduction="none")),
    Case(INT32, dict(rows=9, dim=6, vocab=35), torch.float32, dict(index=torch.int32, label_smoothing=1.0)),
)
# Not for the controls: what becomes of a NaN in a row without a target depends on how a formula is written.
LONG_CASES = (
    Case(IGNORED, dict(rows=9, dim=6, vocab=35), torch.float32, dict(all_ignored=True, reduction="sum", z_loss=1e-2)),
)
FUZZ = {"rows": (0, 9), "dim": (1, 9), "vocab": (2, 40)}
LIMITS: dict[str, float] = {}


def _int32(inputs) -> bool:
    return inputs["target"].dtype == torch.int32


def _all_ignored(inputs) -> bool:
    return inputs["target"].numel() > 0 and bool((inputs["target"] == -100).all())


def _fault(name: str, case: str, check: str, cause: str, on_gpu: tuple[str, str] | None = None) -> Wrong:
    return Wrong(name, partial(linear_cross_entropy, fault=name), case, check, cause, on_gpu)


WRONG = (
    # In the forward.
    _fault("last slice of the vocabulary dropped", PLAIN, "accuracy", "error"),
    _fault("sum not rescaled to the new maximum", PLAIN, "accuracy", "error"),
    _fault("softmax without the maximum", PLAIN, "values", "nonfinite"),
    _fault("ignored rows counted in", PLAIN, "accuracy", "error", on_gpu=("replay", "error")),
    _fault("mean over ignored rows too", PLAIN, "accuracy", "error", on_gpu=("replay", "error")),
    _fault("smoothing over one entry less", ALL, "accuracy", "error"),
    _fault("bias dropped", ALL, "accuracy", "error"),
    _fault("logits rounded twice", PLAIN, "accuracy", "error"),
    _fault("strides ignored", PLAIN, "strides", "error"),
    _fault("stride of target ignored", PLAIN, "strides", "error"),
    # In the backward.
    _fault("rows of the last chunk not in the weight's gradient", PLAIN, "accuracy", "error"),
    _fault("slice overwritten before it is read", PLAIN, "accuracy", "error"),
    _fault("target off by one slice", PLAIN, "accuracy", "error"),
    _fault("gradient of hidden rounded at each slice", PLAIN, "accuracy", "error"),
    _fault("gradient of ignored rows", PLAIN, "accuracy", "error", on_gpu=("replay", "error")),
    _fault("gradient of the z-loss dropped", ALL, "accuracy", "error"),
    _fault("derivative of the softcap dropped", ALL, "accuracy", "error"),
    _fault("incoming gradient taken for one", PLAIN, "accuracy", "error"),
    _fault("gradient of the first row for all", ROWS, "accuracy", "error"),
    _fault("slices in the order of arrival", PLAIN, "repeat", "repeat"),
    # Around the kernel.
    Wrong("zeros", wrappers.constant(0.0)(linear_cross_entropy), PLAIN, "accuracy", "error"),
    Wrong("nan", wrappers.constant(float("nan"))(linear_cross_entropy), PLAIN, "accuracy", "nonfinite"),
    Wrong(
        "cached by address",
        wrappers.cached(linear_cross_entropy),
        PLAIN,
        "replay",
        "replay",
        on_gpu=("accuracy", "error"),
    ),
    Wrong("mutated input", wrappers.mutating(linear_cross_entropy), PLAIN, "accuracy", "inputs"),
    Wrong("lazy output", wrappers.lazy(linear_cross_entropy), PLAIN, "accuracy", "lazy"),
    _fault("no checks", PLAIN, "refusal", "accepted", on_gpu=("refusal", "message")),
    _fault("dtype of the fake result", PLAIN, "opcheck", "opcheck"),
    Wrong("looks at values", wrappers.looking_at_values(linear_cross_entropy), PLAIN, "compile", "compile"),
)

# Wrong at the edge of what they take. No other case shows it.
EDGES = (
    Wrong("int32 targets", cheats.wrong_if(_int32)(linear_cross_entropy), INT32, "accuracy", "error"),
    Wrong(
        "every row ignored",
        cheats.wrong_if(_all_ignored, cheats.one_more)(linear_cross_entropy),
        IGNORED,
        "accuracy",
        "error",
    ),
    Wrong(
        "smoothing of one dropped",
        cheats.without("label_smoothing", 1.0)(linear_cross_entropy),
        INT32,
        "accuracy",
        "error",
    ),
)

# Each tried by the check that it names alone: what other checks see of an unjoined stream is a matter of luck.
ON_A_GPU = (
    Wrong("side stream", wrappers.on_a_side_stream(wait=True)(linear_cross_entropy), PLAIN, "stream", "late"),
    Wrong(
        "side stream that is not joined",
        wrappers.on_a_side_stream(wait=True)(linear_cross_entropy),
        PLAIN,
        "graph",
        "graph",
    ),
)


def functional(
    hidden,
    weight,
    target,
    *,
    bias=None,
    ignore_index=-100,
    label_smoothing=0.0,
    softcap=None,
    z_loss=0.0,
    reduction="mean",
    scratch_bytes=None,
):
    """PyTorch's own cross entropy, with the z-loss beside it."""
    check(hidden, weight, target, bias)
    logits = F.linear(hidden, weight, bias).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    flat, index = logits.view(-1, logits.shape[-1]), target.reshape(-1).long()
    loss = F.cross_entropy(flat, index, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none")
    valid = index != ignore_index
    if z_loss:
        loss = loss + torch.where(valid, z_loss * flat.logsumexp(-1).square(), 0)
    return {"none": loss.view(target.shape), "sum": loss.sum(), "mean": loss.sum() / valid.sum()}[reduction]


CONTROLS = {"plain": linear_cross_entropy, "functional": functional}
