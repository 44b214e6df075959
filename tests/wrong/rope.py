"""What is wrong with each broken rope, and the controls."""

from __future__ import annotations

from functools import partial

import torch

from harness.spec import Case
from kernels.rope.reference import rope_reference

from . import Wrong, wrappers
from .plain_rope import check, rope


def _case(name: str, shape: tuple[int, int, int, int, int], dtype: torch.dtype = torch.float32, **params) -> Case:
    dims = dict(zip(("batch", "seq", "heads", "kv_heads", "dim"), shape, strict=True))
    return Case(name, dims, dtype, params, mutates=("q", "k") if params.get("inplace") else ())


# 12 of 14 columns are rotated: halves of 6 in blocks of 8, and a rest. 4 heads of q and 2 of k.
HALVES, PAIRS, INPLACE, FP16 = "fp32-halves", "fp32-pairs", "fp32-inplace", "fp16-halves"
CASES = (
    _case(HALVES, (2, 5, 4, 2, 14), rotary=0.9),
    _case(INPLACE, (2, 5, 4, 2, 14), rotary=0.9, inplace=True),
)
# The controls are not run on these.
LONG_CASES = (
    _case(PAIRS, (3, 4, 3, 1, 12), interleaved=True, tables="full", positions=2),
    _case(FP16, (2, 5, 2, 1, 8), torch.float16, table_dtype=torch.float32),
)
FUZZ = {"batch": (0, 2), "seq": (0, 5), "heads": (1, 3), "kv_heads": (1, 2), "dim": (7, 10)}
LIMITS: dict[str, float] = {}


def _fault(name: str, case: str, check: str, cause: str, on_gpu: tuple[str, str] | None = None) -> Wrong:
    return Wrong(name, partial(rope, fault=name), case, check, cause, on_gpu)


WRONG = (
    # In the rotation.
    _fault("sign of the sine", HALVES, "accuracy", "error"),
    _fault("halves taken for neighbours", HALVES, "accuracy", "error"),
    _fault("second of a pair from the new first", HALVES, "accuracy", "error"),
    _fault("rest not copied", HALVES, "accuracy", "nonfinite"),
    _fault("no mask on the columns", HALVES, "accuracy", "error"),
    _fault("last token not written", HALVES, "accuracy", "nonfinite"),
    # In what is read.
    _fault("tables indexed by the token of the batch", HALVES, "accuracy", "error"),
    _fault("first half of a table of pairs", PAIRS, "accuracy", "error"),
    _fault("positions of the first sequence for all", PAIRS, "accuracy", "error"),
    _fault("position_ids ignored", PAIRS, "accuracy", "error"),
    _fault("k read with the strides of q", HALVES, "accuracy", "nonfinite"),
    _fault("strides of a contiguous tensor", HALVES, "strides", "error"),
    # In the backward.
    _fault("angle not reversed in the backward", HALVES, "accuracy", "error"),
    _fault("strides of the gradient ignored", HALVES, "strides", "nonfinite"),
    _fault("no gradient of k alone", HALVES, "partial", "error"),
    # In place, or not.
    _fault("writes over q", HALVES, "accuracy", "inputs"),
    _fault("in place on a copy", INPLACE, "accuracy", "inputs"),
    _fault("rest zeroed in place", INPLACE, "accuracy", "error"),
    _fault("packed strides in place", INPLACE, "strides", "error"),
    _fault("not declared as mutating", INPLACE, "opcheck", "opcheck"),
    # Around the kernel.
    Wrong("cached by address", wrappers.cached(rope), HALVES, "replay", "replay", on_gpu=("accuracy", "error")),
    Wrong("fp32 out of fp16", wrappers.single_precision(rope), FP16, "accuracy", "dtype"),
    _fault("no checks", HALVES, "refusal", "accepted", on_gpu=("refusal", "launched")),
    Wrong("nameless refusal", wrappers.nameless(rope), HALVES, "refusal", "message"),
    _fault("shape of the fake result", HALVES, "opcheck", "opcheck"),
)
ON_A_GPU: tuple[Wrong, ...] = ()


def reference(q, k, cos, sin, *, position_ids=None, layout="bshd", inplace=False, **options):
    """The reference itself, behind the checks of a public function."""
    check(q, k, cos, sin, position_ids, layout)
    rotated = rope_reference(q, k, cos, sin, position_ids=position_ids, layout=layout, **options)
    if not inplace:
        return rotated
    return q.copy_(rotated[0]), k.copy_(rotated[1])


def matrices(q, k, cos, sin, *, position_ids=None, layout="bshd", inplace=False, **options):
    """Each pair times its 2 x 2 matrix."""
    check(q, k, cos, sin, position_ids, layout)
    rotated = tuple(_by_matrix(x, cos, sin, position_ids, **options) for x in (q, k))
    return tuple(x.copy_(y) for x, y in zip((q, k), rotated, strict=True)) if inplace else rotated


def _by_matrix(x, cos, sin, position_ids, rotary_dim, interleaved=False):
    if cos.shape[-1] == rotary_dim:
        step = slice(0, rotary_dim, 2) if interleaved else slice(0, rotary_dim // 2)
        cos, sin = cos[..., step], sin[..., step]
    matrix = torch.stack((torch.stack((cos, -sin), -1), torch.stack((sin, cos), -1)), -2).float()
    matrix = matrix[: x.shape[1]] if position_ids is None else matrix[position_ids]
    pairs = x[..., :rotary_dim].float().unflatten(-1, (-1, 2) if interleaved else (2, -1))
    pairs = pairs if interleaved else pairs.transpose(-1, -2)
    rotated = (matrix.unsqueeze(-4) * pairs.unsqueeze(-2)).sum(-1)
    rotated = (rotated if interleaved else rotated.transpose(-1, -2)).flatten(-2)
    return torch.cat((rotated.to(x.dtype), x[..., rotary_dim:]), -1)


CONTROLS = {"plain": rope, "reference": reference, "matrices": matrices}
