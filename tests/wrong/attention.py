"""What is wrong with each broken attention, and the controls."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch

from harness.spec import Case, Rows
from kernels.attention.reference import attention_reference

from . import Wrong, cheats, wrappers
from .plain_attention import attention, check

PLAIN, CAUSAL, TALL, WINDOW, CONTEXT = (
    "b1-h2-1-q7-k19-d5-fp32",
    "b1-h2-q7-k19-d5-causal-fp32",
    "b1-h2-q19-k7-d5-causal-fp32",
    "b1-h4-2-q19-k17-d5-fp32-window",
    "b1-h2-q7-k19-d5-fp32-context",
)
NOTHING, SELF, LONG = "b1-h2-q7-k19-d5-fp32-no-context", "b1-h2-q7-k9-d5-fp32-self", "b1-h1-q400-k7-d5-fp32"


def _case(name: str, kv_heads: int, queries: int, keys: int, **params) -> Case:
    group = int(name.split("-")[1].removeprefix("h")) // kv_heads
    dims = dict(batch=1, kv_heads=kv_heads, group=group, queries=queries, keys=keys, dim=5)
    return Case(name, dims, torch.float32, params)


CASES = (
    _case(PLAIN, 1, 7, 19),
    _case(CAUSAL, 2, 7, 19, causal=True),
    _case(TALL, 2, 19, 7, causal=True),
    _case(WINDOW, 2, 19, 17, window=(4, 2), scale=0.7),
    _case(CONTEXT, 2, 7, 19, num_context=11, return_lse=True),
    _case(NOTHING, 2, 7, 19, num_context=0),
    _case(SELF, 2, 7, 9, window=(0, 0)),
)
# That there is one in fp16 says that products may be planted in fp16.
LONG_CASES = (_case(LONG, 1, 400, 7), replace(_case("b1-h1-q7-k7-d5-fp16", 1, 7, 7), dtype=torch.float16))
# Of the long case few queries are compared with the reference.
ROWS = Rows(40, {"q": 2}, 2)


def sampled(case: Case) -> Rows | None:
    return ROWS if case.name == LONG else None


FUZZ = {"queries": (0, 9), "keys": (12, 20)}
LIMITS: dict[str, float] = {}


def _fault(name: str, case: str, check: str, cause: str, on_gpu: tuple[str, str] | None = None) -> Wrong:
    return Wrong(name, partial(attention, fault=name), case, check, cause, on_gpu)


WRONG = (
    # Which pairs see each other.
    _fault("mask aligned at the top left", CAUSAL, "accuracy", "error"),
    _fault("mask off by one", CAUSAL, "accuracy", "error"),
    _fault("not causal", CAUSAL, "accuracy", "error"),
    _fault("empty rows not a number", TALL, "accuracy", "nonfinite"),
    _fault("left bound off by one", WINDOW, "accuracy", "error"),
    _fault("left bound ignored", WINDOW, "accuracy", "error"),
    _fault("padded keys counted", PLAIN, "accuracy", "error"),
    _fault("last key dropped", PLAIN, "accuracy", "error"),
    _fault("context ignored", CONTEXT, "accuracy", "error"),
    _fault("key heads interleaved", WINDOW, "accuracy", "error"),
    _fault("v read with the strides of k", PLAIN, "strides", "nonfinite"),
    # The online softmax.
    _fault("accumulator not rescaled", PLAIN, "accuracy", "error"),
    _fault("not divided by the sum", PLAIN, "accuracy", "error"),
    _fault("no maximum", PLAIN, "values", "nonfinite"),
    _fault("maximum of the first tile", PLAIN, "values", "nonfinite"),
    _fault("probabilities rounded to fp16", PLAIN, "accuracy", "error"),
    _fault("scale dropped", PLAIN, "accuracy", "error"),
    _fault("scale ignored", WINDOW, "accuracy", "error"),
    _fault("lse in base 2", CONTEXT, "accuracy", "error"),
    # The backward.
    _fault("context ignored in the backward", CONTEXT, "accuracy", "error"),
    _fault("no mask in the backward", CAUSAL, "accuracy", "error"),
    _fault("dk of one head of the group", PLAIN, "accuracy", "error"),
    _fault("delta dropped", PLAIN, "accuracy", "error"),
    _fault("gradient of lse dropped", CONTEXT, "accuracy", "error"),
    _fault("scale missing in dq", PLAIN, "accuracy", "error"),
    _fault("dq rounded at each tile", PLAIN, "accuracy", "error"),
    _fault("incoming gradient taken for ones", PLAIN, "accuracy", "error"),
    _fault("tiles in the order of arrival", PLAIN, "repeat", "repeat"),
    # Around the kernel.
    Wrong("zeros", wrappers.constant(0.0)(attention), PLAIN, "accuracy", "error"),
    Wrong("nan", wrappers.constant(float("nan"))(attention), PLAIN, "accuracy", "nonfinite"),
    Wrong("copy of the input", wrappers.input_copy(attention), PLAIN, "accuracy", "error"),
    Wrong("cached by address", wrappers.cached(attention), PLAIN, "replay", "replay", on_gpu=("accuracy", "error")),
    Wrong("mutated input", wrappers.mutating(attention), PLAIN, "accuracy", "inputs"),
    Wrong("lazy output", wrappers.lazy(attention), PLAIN, "accuracy", "lazy"),
    Wrong("one output too many", wrappers.repeated(attention), PLAIN, "accuracy", "count"),
    _fault("no checks", PLAIN, "refusal", "accepted", on_gpu=("refusal", "message")),
    _fault("shape of the fake result", PLAIN, "opcheck", "opcheck"),
    Wrong("looks at values", wrappers.looking_at_values(attention), PLAIN, "compile", "compile"),
    Wrong("right in a known sample", cheats.right_in_a_known_sample(ROWS)(attention), LONG, "accuracy", "error"),
    Wrong("nan in a row that may not be sampled", cheats.nan_in_row(200, 2)(attention), LONG, "accuracy", "nonfinite"),
)

# Wrong at the edge of an option. No other case shows it.
EDGES = (
    Wrong("no context taken for all", cheats.without("num_context", 0)(attention), NOTHING, "accuracy", "error"),
    Wrong("no neighbours taken for all", cheats.without("window", (0, 0))(attention), SELF, "accuracy", "error"),
)

# No other check rejects them.
CHEATS = (
    Wrong("k is v", cheats.wrong_if(cheats.one_tensor("k", "v"))(attention), PLAIN, "alias", "error"),
    _fault("scores in half precision", PLAIN, "values", "nonfinite"),
)

# Each tried by the check that it names alone: what other checks see of an unjoined stream is a matter of luck.
ON_A_GPU = (
    Wrong("side stream", wrappers.on_a_side_stream(wait=True)(attention), PLAIN, "stream", "late"),
    Wrong("side stream that is not joined", wrappers.on_a_side_stream(wait=True)(attention), PLAIN, "graph", "graph"),
)


def reference(q, k, v, **options):
    """The reference itself, behind the checks of a public function."""
    check(q, k, v)
    return attention_reference(q, k, v, **options)


def softmax(q, k, v, *, causal=False, scale=None, num_context=None, window=None, return_lse=False):
    """By PyTorch's softmax, with the scores scaled after the product."""
    check(q, k, v)
    keys = k.shape[2] if num_context is None else num_context
    (queries, dim), group = q.shape[2:], q.shape[1] // k.shape[1]
    k, v = (t[:, :, :keys].float().repeat_interleave(group, dim=1) for t in (k, v))
    s = q.float() @ k.transpose(-1, -2) * (dim**-0.5 if scale is None else scale)
    left, right = (-1, -1) if window is None else window
    right = 0 if causal else right
    apart = torch.arange(keys, device=q.device) - torch.arange(queries, device=q.device)[:, None] - (keys - queries)
    hidden = (apart < -left) & (left >= 0) | (apart > right) & (right >= 0)
    empty = hidden.all(-1, keepdim=True)
    s = s.masked_fill(hidden & ~empty, -math.inf)
    out = (s.softmax(-1).masked_fill(empty, 0) @ v).to(q.dtype)
    if not return_lse:
        return out
    top = s.amax(-1, keepdim=True)  # an infinite one makes NaN of its row, as in the reference
    return out, ((s - top).exp().sum(-1).log() + top[..., 0]).masked_fill(empty[..., 0], -math.inf)


CONTROLS = {"plain": attention, "reference": reference, "softmax": softmax}
