"""What is wrong with each broken block-sparse attention, and the controls."""

from __future__ import annotations

import math
from functools import partial

import torch

from harness.spec import Case
from kernels.block_sparse_attention.reference import block_sparse_attention_reference

from . import Wrong, wrappers
from .plain_block_sparse_attention import block_sparse_attention, check

PLAIN, OPTIONS, EMPTY, BATCHES = (
    "b1-h2-1-q70-k130-d5-fp32",
    "b1-h1-1-q100-k120-d5-fp32-options",
    "b1-h1-1-q150-k70-d5-fp32-empty",
    "b2-h4-2-q70-k130-d5-fp32-batches",
)


def _case(name: str, queries: int, keys: int, empty: int = 0, **params) -> Case:
    batch, heads, kv_heads = int(name[1]), int(name[4]), int(name[6])
    dims = dict(batch=batch, kv_heads=kv_heads, group=heads // kv_heads, queries=queries, keys=keys, dim=5)
    dims |= dict(mask_batch=batch, mask_heads=heads, kept=50, empty=empty)
    return Case(name, dims, torch.float32, dict(block_size=64, **params))


CASES = (
    _case(PLAIN, 70, 130),
    _case(OPTIONS, 100, 120, bias=True, causal=True, scale=0.7, return_lse=True),
    _case(EMPTY, 150, 70, empty=2),
    _case(BATCHES, 70, 130),
)
LONG_CASES: tuple[Case, ...] = ()
FUZZ = {"queries": (65, 100), "keys": (65, 100)}
LIMITS: dict[str, float] = {}


def _fault(name: str, case: str, check: str, cause: str, on_gpu: tuple[str, str] | None = None) -> Wrong:
    return Wrong(name, partial(block_sparse_attention, fault=name), case, check, cause, on_gpu)


WRONG = (
    # Which blocks are gone over.
    _fault("last kept block dropped", PLAIN, "accuracy", "error"),
    _fault("one block too many", PLAIN, "accuracy", "error"),
    _fault("no more than one block", PLAIN, "accuracy", "error"),
    _fault("lists of the first head", PLAIN, "accuracy", "error"),
    _fault("lists of the first batch", BATCHES, "accuracy", "error"),
    _fault("rows taken for columns", PLAIN, "accuracy", "error"),
    _fault("diagonal block dropped", OPTIONS, "accuracy", "error"),
    _fault("strides of the mask ignored", PLAIN, "strides", "error"),
    _fault("lists cached by address", PLAIN, "replay", "error"),
    # Which pairs of a block see each other.
    _fault("padded keys counted", PLAIN, "accuracy", "error"),
    _fault("diagonal block not masked", OPTIONS, "accuracy", "error"),
    _fault("diagonal at the top left", OPTIONS, "accuracy", "error"),
    _fault("not causal", OPTIONS, "accuracy", "error"),
    _fault("empty rows not a number", EMPTY, "accuracy", "nonfinite"),
    _fault("key heads interleaved", BATCHES, "accuracy", "error"),
    # The online softmax.
    _fault("accumulator not rescaled", PLAIN, "accuracy", "error"),
    _fault("scale dropped", PLAIN, "accuracy", "error"),
    _fault("scale ignored", OPTIONS, "accuracy", "error"),
    _fault("lse in base 2", OPTIONS, "accuracy", "error"),
    _fault("bias ignored", OPTIONS, "accuracy", "error"),
    _fault("bias before the scale", OPTIONS, "accuracy", "error"),
    _fault("bias of the next block", OPTIONS, "accuracy", "error"),
    # The backward.
    _fault("keys by the lists of the rows", OPTIONS, "accuracy", "error"),
    _fault("keys by the lists of a group's first head", PLAIN, "accuracy", "error"),
    _fault("no causal mask in the backward", OPTIONS, "accuracy", "error"),
    _fault("dk of one head of the group", PLAIN, "accuracy", "error"),
    _fault("delta dropped", PLAIN, "accuracy", "error"),
    _fault("gradient of lse dropped", OPTIONS, "accuracy", "error"),
    _fault("scale missing in dq", PLAIN, "accuracy", "error"),
    _fault("gradient of the bias dropped", OPTIONS, "accuracy", "error"),
    _fault("gradient of the bias from one tile", OPTIONS, "accuracy", "error"),
    _fault("gradient of the bias scaled", OPTIONS, "accuracy", "error"),
    _fault("queries in the order of arrival", PLAIN, "repeat", "repeat"),
    # Around the kernel.
    Wrong("zeros", wrappers.constant(0.0)(block_sparse_attention), PLAIN, "accuracy", "error"),
    Wrong("nan", wrappers.constant(float("nan"))(block_sparse_attention), PLAIN, "accuracy", "nonfinite"),
    Wrong("copy of the input", wrappers.input_copy(block_sparse_attention), PLAIN, "accuracy", "error"),
    Wrong(
        "cached by address",
        wrappers.cached(block_sparse_attention),
        PLAIN,
        "replay",
        "replay",
        on_gpu=("accuracy", "error"),
    ),
    Wrong("mutated input", wrappers.mutating(block_sparse_attention), PLAIN, "accuracy", "inputs"),
    Wrong("lazy output", wrappers.lazy(block_sparse_attention), PLAIN, "accuracy", "lazy"),
    Wrong("one output too many", wrappers.repeated(block_sparse_attention), PLAIN, "accuracy", "count"),
    _fault("no checks", PLAIN, "refusal", "accepted", on_gpu=("refusal", "message")),
    _fault("shape of the fake result", PLAIN, "opcheck", "opcheck"),
    Wrong("looks at values", wrappers.looking_at_values(block_sparse_attention), PLAIN, "compile", "compile"),
)

# Each tried by the check that it names alone: what other checks see of an unjoined stream is a matter of luck.
_ASIDE = wrappers.on_a_side_stream(wait=True)(block_sparse_attention)
ON_A_GPU = (
    Wrong("side stream", _ASIDE, PLAIN, "stream", "late"),
    Wrong("side stream that is not joined", _ASIDE, PLAIN, "graph", "graph"),
)


def reference(q, k, v, block_mask, *, block_size=128, block_bias=None, **options):
    """The reference itself, behind the checks of a public function."""
    check(q, k, v, block_mask, block_bias, block_size)
    options |= dict(block_size=block_size, block_bias=block_bias)
    return block_sparse_attention_reference(q, k, v, block_mask, **options)


def softmax(q, k, v, block_mask, *, block_size=128, scale=None, causal=False, return_lse=False, block_bias=None):
    """By PyTorch's softmax and log-sum-exp over all pairs, with the scores scaled after the product."""
    check(q, k, v, block_mask, block_bias, block_size)
    (queries, dim), keys = q.shape[2:], k.shape[2]
    k, v = (t.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))

    def pairs(blocks: torch.Tensor) -> torch.Tensor:
        ones = torch.ones(block_size, block_size, dtype=blocks.dtype, device=blocks.device)
        return torch.kron(blocks.contiguous(), ones)[..., :queries, :keys]

    s = q.float() @ k.transpose(-1, -2) * (dim**-0.5 if scale is None else scale)
    s = s if block_bias is None else s + pairs(block_bias)
    apart = torch.arange(keys, device=q.device) - torch.arange(queries, device=q.device)[:, None] - (keys - queries)
    hidden = ~pairs(block_mask) | ((apart > 0) & causal)
    empty = hidden.all(-1, keepdim=True)
    s = s.masked_fill(hidden & ~empty, -math.inf)
    out = (s.softmax(-1).masked_fill(empty, 0) @ v).to(q.dtype)
    return (out, torch.logsumexp(s, -1).masked_fill(empty[..., 0], -math.inf)) if return_lse else out


CONTROLS = {"plain": block_sparse_attention, "reference": reference, "softmax": softmax}
