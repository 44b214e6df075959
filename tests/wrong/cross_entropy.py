"""What is wrong with each broken cross_entropy, and the controls."""

from __future__ import annotations

from functools import partial

import torch

from harness.spec import Case

from . import Wrong, cheats, wrappers
from .plain_cross_entropy import check, cross_entropy

FP32, FP16, RICH = "9x37-fp32", "9x33-fp16-smooth", "9x37-fp32-rich"
SUM, INPLACE = "9x37-fp32-sum", "9x37-fp32-inplace"
INT32, IGNORED = "9x37-fp32-int32-smooth1", "9x37-fp32-all-ignored-sum"
EVERYTHING = dict(
    weight=True, label_smoothing=0.1, z_loss=1e-2, softcap=5.0, return_z_loss=True, return_lse=True, ignored=True
)
CASES = (
    Case(FP32, dict(rows=9, vocab=37), torch.float32, dict(ignored=True)),
    Case(FP16, dict(rows=9, vocab=33), torch.float16, dict(label_smoothing=0.1)),
    Case(RICH, dict(rows=9, vocab=37), torch.float32, EVERYTHING),
    Case(SUM, dict(rows=9, vocab=37), torch.float32, dict(reduction="sum")),
    Case(INPLACE, dict(rows=9, vocab=37), torch.float32, dict(with_grad=True), mutates=("logits",)),
    Case(INT32, dict(rows=9, vocab=37), torch.float32, dict(index=torch.int32, label_smoothing=1.0)),
)
# Not for the controls: what becomes of a NaN in a row without a target depends on how a formula is written.
LONG_CASES = (
    Case(IGNORED, dict(rows=9, vocab=37), torch.float32, dict(all_ignored=True, reduction="sum", z_loss=1e-2)),
)
FUZZ = {"rows": (0, 3), "vocab": (1, 36)}
LIMITS = {"weight": 1e4}


def _int32(inputs) -> bool:
    return inputs["target"].dtype == torch.int32


def _all_ignored(inputs) -> bool:
    return inputs["target"].numel() > 0 and bool((inputs["target"] == -100).all())


def _fault(name: str, case: str, check: str, cause: str, on_gpu: tuple[str, str] | None = None) -> Wrong:
    return Wrong(name, partial(cross_entropy, fault=name), case, check, cause, on_gpu)


def checks_last(logits, target, weight=None, **options):
    result = cross_entropy(logits, target, weight=weight, **options, fault="no checks")
    check(logits, target, weight)
    return result


WRONG = (
    # The pass over a row.
    _fault("last column not read", FP32, "accuracy", "error"),
    _fault("padding counted", FP32, "accuracy", "error"),
    _fault("sum not rescaled", FP32, "accuracy", "error"),
    _fault("maximum not subtracted", FP32, "values", "nonfinite"),
    _fault("target one off", FP32, "accuracy", "error"),
    _fault("rows in half precision", SUM, "accuracy", "error"),
    _fault("row stride ignored", FP32, "strides", "nonfinite"),
    _fault("label smoothing dropped", FP16, "accuracy", "error"),
    _fault("label smoothing not divided by the classes", FP16, "accuracy", "error"),
    # The batch.
    _fault("ignored rows counted", FP32, "accuracy", "error"),
    _fault("mean over all rows", FP32, "accuracy", "error"),
    _fault("mean over rows in place of weights", RICH, "accuracy", "error"),
    _fault("summed in the order of arrival", SUM, "repeat", "repeat"),
    # The gradient.
    _fault("gradient without the one at the target", FP32, "accuracy", "error"),
    _fault("ignored rows have a gradient", FP32, "accuracy", "error"),
    _fault("gradient of the z-loss dropped", RICH, "accuracy", "error"),
    _fault("gradient of lse dropped", RICH, "accuracy", "error"),
    _fault("softcap not differentiated", RICH, "accuracy", "error"),
    _fault("incoming gradient taken for ones", FP32, "accuracy", "error"),
    _fault("writes past the end", FP32, "accuracy", "bounds"),
    # In place.
    _fault("gradient in a tensor of its own", INPLACE, "accuracy", "inputs"),
    _fault("logits read after the gradient is in their place", INPLACE, "accuracy", "error"),
    # Around the kernel.
    Wrong("zeros", wrappers.constant(0.0)(cross_entropy), FP32, "accuracy", "error"),
    Wrong("cached by address", wrappers.cached(cross_entropy), SUM, "replay", "replay", on_gpu=("accuracy", "error")),
    Wrong("mutated input", wrappers.mutating(cross_entropy), FP32, "accuracy", "inputs"),
    Wrong("fp32 out of fp16", wrappers.single_precision(cross_entropy), FP16, "accuracy", "dtype"),
    _fault("no checks", FP32, "refusal", "accepted", on_gpu=("refusal", "launched")),
    Wrong("checks after the launch", checks_last, FP32, "refusal", "launched"),
    Wrong("nameless refusal", wrappers.nameless(cross_entropy), FP32, "refusal", "message"),
    _fault("shape of the fake result", FP32, "opcheck", "opcheck"),
    Wrong("looks at values", wrappers.looking_at_values(cross_entropy), FP32, "compile", "compile"),
)

# Wrong at the edge of what they take. No other case shows it.
EDGES = (
    Wrong("int32 targets", cheats.wrong_if(_int32)(cross_entropy), INT32, "accuracy", "error"),
    Wrong(
        "every row ignored", cheats.wrong_if(_all_ignored, cheats.one_more)(cross_entropy), IGNORED, "accuracy", "error"
    ),
    Wrong(
        "smoothing of one dropped", cheats.without("label_smoothing", 1.0)(cross_entropy), INT32, "accuracy", "error"
    ),
)

# Each tried by the check that it names alone: what other checks see of an unjoined stream is a matter of luck.
ON_A_GPU = (
    Wrong("side stream", wrappers.on_a_side_stream(wait=True)(cross_entropy), FP32, "stream", "late"),
    Wrong(
        "side stream that is not joined", wrappers.on_a_side_stream(wait=True)(cross_entropy), FP32, "graph", "graph"
    ),
)


def by_log_softmax(
    logits,
    target,
    *,
    weight=None,
    ignore_index=-100,
    label_smoothing=0.0,
    reduction="mean",
    z_loss=0.0,
    softcap=None,
    return_z_loss=False,
    return_lse=False,
    with_grad=False,
):
    """Written out over log-softmax in PyTorch; with_grad for the mean alone and nothing else."""
    check(logits, target, weight)
    flat, live = target.reshape(-1), target.reshape(-1) != ignore_index
    y = logits.reshape(-1, logits.shape[-1]).float()
    y = y if softcap is None else torch.tanh(y / softcap) * softcap
    lse = torch.logsumexp(y, -1)
    if weight is not None:
        y = torch.where(live[:, None], y, 0.0)
    w = y.new_ones(y.shape[-1]) if weight is None else weight.float()
    log_p, at = torch.log_softmax(y, -1), torch.where(live, flat, 0).long()
    ce = -w[at] * log_p.gather(1, at[:, None])[:, 0] * (1 - label_smoothing)
    if label_smoothing:
        ce = ce - label_smoothing / y.shape[-1] * (log_p * w).sum(-1)
    ce = torch.where(live, ce, 0.0)
    z = torch.where(live, z_loss * lse.square(), 0.0) if z_loss else torch.zeros_like(ce)
    if reduction == "none":
        loss, z = (ce + z).view(target.shape), z.view(target.shape)
    else:
        mean = reduction == "mean"
        z = z.sum() / (live.sum() if mean else 1)
        loss = ce.sum() / (torch.where(live, w[at], 0.0).sum() if mean else 1) + z
    found = [loss.to(logits.dtype)]
    if return_z_loss:
        found.append(z.to(logits.dtype))
    if return_lse:
        found.append(lse.view(target.shape))
    if with_grad:
        d = torch.exp(log_p).scatter_add(1, at[:, None], torch.full_like(lse, -1.0)[:, None]) / live.sum()
        found.insert(1, logits.copy_(torch.where(live[:, None], d, 0.0).view(logits.shape)))
    return tuple(found) if len(found) > 1 else found[0]


CONTROLS = {"plain": cross_entropy, "by log-softmax": by_log_softmax}
