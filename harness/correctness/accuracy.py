"""The criterion of correctness: error against an fp64 oracle, compared with that of PyTorch eager in the same dtype.

For one output, with r the result, o the oracle (fp64), e eager (the reference in the case's own dtype):

shape, dtype      those of e.
nan, inf          Every element is finite, nan, +inf or -inf. Its class must be that of o rounded to e's dtype, or that
                  of e: eager's own dtype may overflow (in an intermediate result, or at the last rounding) where fp64
                  does not. Where |o| is within the allowed error of the largest value of e's dtype, r may be finite or
                  infinite.
error             With e_r = |r - o| and e_e = |e - o|, each over the elements where both sides are finite,
                      max e_r <= ratio · max e_e + floor · eps · max |o| + step
                      rms e_r <= ratio · rms e_e + floor · eps · rms o + step
                  ratio and floor come from `spec.Tolerance`, eps from e's dtype; max and rms of o are taken over its
                  finite elements. step is the subnormal spacing of that dtype, and at least the smallest normal fp32
                  number, since GPUs may flush subnormals to zero.
small values      The RMS rule must also hold separately for the elements whose |o| is between 0.01 % and 1 % of the
                  largest, and for those below. Otherwise all of them could be wrong within the tolerance that the
                  largest elements imply. There rms e_e is increased by max e_e / √n for n elements, since few of them
                  may dominate it. Applies from 32 elements on, where the comparison covers all elements.
bfloat16          also max e_r <= 2e-2 · max |o| and (from 64 elements on, where an RMS is meaningful)
                  rms e_r <= 4e-3 · rms o, unless the rule above, with its ratio of 2, already allows more because
                  eager's arithmetic is less accurate.
fp8 cases         instead of the error rules: 1 - 2·Σ r·o / Σ (r² + o²) < 1e-3, and each element of an fp8 result is at
                  most one step of its dtype from that of e, or from o rounded to it.
integers, bool    equal to o.

This module knows nothing about kernels; `check` does. Tensors are compared in chunks, so that a result of 10⁹ elements
needs little additional memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..spec import Tolerance

PIECE = 1 << 24  # elements compared at a time: 128 MiB in fp64
FP8 = tuple(getattr(torch, n) for n in dir(torch) if n.startswith("float8_") and n != "float8_e8m0fnu")
BF16_MAX, BF16_RMS, BF16_RMS_FROM = 2e-2, 4e-3, 64
RATIO = Tolerance().ratio
FP8_DISTANCE = 1e-3
# Magnitude bins as fractions of the largest |o|: the upper bound is inclusive, the lower one exclusive.
BINS, BIN_LEAST = ((1e-2, 1e-4), (1e-4, 0.0)), 32
_CLASSES = ("finite", "nan", "+inf", "-inf")


@dataclass(frozen=True)
class Verdict:
    """Whether a result is accepted, and why not. `cause` is one word for the kind of fault (see `CAUSES`). `numbers`
    are the errors measured: max, rms (of the result), eager_max, eager_rms, scale_max, scale_rms, yardstick_max,
    yardstick_rms (the larger of eager's error and the noise), limit_max, limit_rms."""

    ok: bool
    reason: str = ""
    cause: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)


# Every cause that a Verdict may have.
CAUSES = {
    "count": "wrong number of outputs",
    "shape": "wrong shape",
    "dtype": "wrong dtype",
    "nonfinite": "nan or inf in the wrong places, or missing from the right ones",
    "error": "further from the oracle than allowed",
    "inputs": "an input was changed",
    "bounds": "memory outside the outputs or around an input was written",
    "replay": "the answer to earlier inputs was given again",
    "late": "the outputs were not complete on the current stream when the call returned",
    "strides": "the outputs have other strides than eager's",
    "overwritten": "a later call changed the outputs or gradients of an earlier one",
    "kept": "the outputs stay in memory when nobody uses them any more",
    "state": "global state was set, used or left changed",
    "lazy": "the outputs are not plain tensors",
    "repeat": "repeats differ bit-wise although determinism is declared",
    "accepted": "bad input was not refused",
    "launched": "bad input was refused only after a kernel had been launched",
    "message": "bad input was refused by the wrong kind of exception, or without naming the argument",
    "raised": "the call raised an exception",
    "opcheck": "the op breaks the rules of torch.library",
    "compile": "torch.compile(fullgraph=True) fails",
    "graph": "it cannot be captured in a CUDA graph",
}


@dataclass
class _Sums:
    """Running maxima, counts and sums over the chunks of one output."""

    count: int = 0
    max: float = 0.0
    squares: float = 0.0
    eager_count: int = 0
    eager_max: float = 0.0
    eager_squares: float = 0.0
    scale_count: int = 0
    scale_max: float = 0.0
    scale_squares: float = 0.0
    product: float = 0.0
    result_squares: float = 0.0
    misplaced: int = 0
    first_misplaced: str = ""


def compare(
    result: torch.Tensor,
    oracle: torch.Tensor,
    eager: torch.Tensor,
    dtype: torch.dtype,
    tolerance: Tolerance,
    where: torch.Tensor | None = None,
    noise: Sequence[torch.Tensor] = (),
    scale: torch.Tensor | None = None,
    bin_noise: Sequence[torch.Tensor] = (),
) -> Verdict:
    """Verdict on one output by the rule above. `dtype` is the case's. `where` (bool, of the output's shape) restricts
    the comparison to some elements. The errors of the tensors in `noise` replace eager's where they are larger
    (`oracle.Expected.verdict` says why), those in `bin_noise` only in the rule for small values. The max and RMS of
    `scale` replace those of the oracle where they are larger."""
    if result.shape != eager.shape:
        return Verdict(False, f"shape is {tuple(result.shape)}, expected {tuple(eager.shape)}", "shape")
    if result.dtype != eager.dtype:
        return Verdict(False, f"dtype is {result.dtype}, expected {eager.dtype}", "dtype")
    if not result.dtype.is_floating_point:
        differs = result != oracle.to(result.dtype)
        wrong = int((differs if where is None else differs & where).sum())
        return Verdict(
            not wrong, f"{wrong} of {result.numel()} elements differ" if wrong else "", "error" if wrong else ""
        )
    sums = _Sums()
    for start, r, o, e, w in _pieces(result, oracle, eager, where):
        _add(sums, start, r, o, e, w, eager.dtype)
    errors = [_error(n, oracle, where) for n in noise]
    numbers = _numbers(sums, eager.dtype, tolerance, errors, (0.0, 0.0) if scale is None else _size(scale))
    if sums.misplaced and not _at_the_limit(result, oracle, eager, where, numbers["limit_max"]):
        reason = f"{sums.misplaced} of {result.numel()} elements are not finite where they should be or the reverse: "
        return Verdict(False, reason + sums.first_misplaced, "nonfinite", numbers)
    for fails, reason in _rules(sums, numbers, dtype, eager.dtype):
        if fails:
            return Verdict(False, reason, "error", numbers)
    reason = ""
    if eager.dtype in FP8:
        reason = _beyond_a_step(result, oracle, eager, where)
    elif dtype not in FP8 and where is None:
        reason = _wrong_bin(result, oracle, eager, [*noise, *bin_noise], tolerance, numbers)
    return Verdict(not reason, reason, "error" if reason else "", numbers)


def compare_all(
    results: Sequence[torch.Tensor],
    oracles: Sequence[torch.Tensor],
    eagers: Sequence[torch.Tensor],
    names: Sequence[str],
    dtype: torch.dtype,
    tolerance: Tolerance,
    where: Sequence[torch.Tensor] | None = None,
    noise: Sequence[Sequence[torch.Tensor]] = (),
    scale: Sequence[torch.Tensor] | None = None,
    bin_noise: Sequence[Sequence[torch.Tensor]] = (),
) -> Verdict:
    """Verdict on all outputs of a call. The first one that fails decides; otherwise the numbers are those of the output
    that comes closest to its limit."""
    if len(results) != len(eagers):
        return Verdict(False, f"{len(results)} outputs, expected {len(eagers)}", "count")
    worst: Mapping[str, float] = {}
    for index, (result, oracle, eager, name) in enumerate(zip(results, oracles, eagers, names, strict=True)):
        part, other = (None if given is None else given[index] for given in (where, scale))
        samples, of_bins = ([sample[index] for sample in given] for given in (noise, bin_noise))
        verdict = compare(result, oracle, eager, dtype, tolerance, part, samples, other, of_bins)
        if not verdict.ok:
            return Verdict(False, f"{name}: {verdict.reason}", verdict.cause, verdict.numbers)
        worst = max(worst, verdict.numbers, key=_closeness)
    return Verdict(True, numbers=worst)


def upcast(tensor: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The tensor as the oracle reads it: floating-point tensors in `dtype`, all others unchanged."""
    return tensor.to(dtype) if tensor.dtype.is_floating_point else tensor


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bit patterns as integers of the same size and strides: NaN equals NaN, and -0 differs from 0."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().view(integers[tensor.element_size()])


def same_bits(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    """Whether two sets of tensors agree in shape, dtype and every bit."""
    return len(a) == len(b) and all(
        x.shape == y.shape and x.dtype == y.dtype and torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True)
    )


def _pieces(first: torch.Tensor, *others: torch.Tensor | None) -> Iterator[tuple]:
    """Yields flat views of the same PIECE elements of each tensor, with the index of the first."""
    flat = [None if t is None else t.detach().reshape(-1) for t in (first, *others)]
    for start in range(0, first.numel(), PIECE):
        yield start, *(None if t is None else t[start : start + PIECE] for t in flat)


def _classes(tensor: torch.Tensor) -> torch.Tensor:
    wide = tensor.float() if tensor.dtype.is_floating_point and tensor.element_size() == 1 else tensor
    classes = torch.zeros(wide.shape, dtype=torch.uint8, device=wide.device)
    for number, test in enumerate((torch.isnan, torch.isposinf, torch.isneginf), start=1):
        classes[test(wide)] = number
    return classes


def _at_the_limit(result, oracle, eager, where, error: float) -> bool:
    """Whether every element of the wrong class lies where an error of this size can cause or prevent overflow."""
    if eager.dtype in FP8:  # fp8 conversions saturate
        return False
    most = torch.finfo(eager.dtype).max
    for _, r, o, e, w in _pieces(result, oracle, eager, where):
        wrong = (_classes(r) != _classes(o.to(eager.dtype))) & (_classes(r) != _classes(e))
        near = ((o.abs().double() - most).abs() <= error) & ~r.isnan() & ((r > 0) == (o > 0))
        if bool((wrong & ~near if w is None else wrong & ~near & w).any()):
            return False
    return True


def _add(sums: _Sums, start: int, r, o, e, where, dtype: torch.dtype) -> None:
    """Adds one chunk. The oracle counts as overflowing where it does so after rounding to the result's dtype."""
    r_class, o_class, e_class = _classes(r), _classes(o.to(dtype)), _classes(e)
    wrong = (r_class != o_class) & (r_class != e_class)
    r, o, e = r.double(), o.double(), e.double()
    r_judged, e_judged = (r_class == 0) & (o_class == 0), (e_class == 0) & (o_class == 0)
    o_judged = o_class == 0
    if where is not None:
        wrong, r_judged, e_judged, o_judged = (mask & where for mask in (wrong, r_judged, e_judged, o_judged))
    if (misplaced := int(wrong.sum())) and not sums.misplaced:
        index = int(wrong.nonzero()[0])
        found, expected = _CLASSES[int(r_class[index])], _CLASSES[int(o_class[index])]
        sums.first_misplaced = f"element {start + index} is {found}, the oracle's is {expected} ({float(o[index]):.6g})"
    sums.misplaced += misplaced
    sums.count, sums.max, sums.squares = _fold(sums.count, sums.max, sums.squares, r - o, r_judged)
    sums.eager_count, sums.eager_max, sums.eager_squares = _fold(
        sums.eager_count, sums.eager_max, sums.eager_squares, e - o, e_judged
    )
    sums.scale_count, sums.scale_max, sums.scale_squares = _fold(
        sums.scale_count, sums.scale_max, sums.scale_squares, o, o_judged
    )
    judged = torch.where(r_judged, r, 0.0)
    sums.product += float((judged * torch.where(r_judged, o, 0.0)).sum())
    sums.result_squares += float(judged.square().sum())


def _fold(
    count: int, maximum: float, squares: float, values: torch.Tensor, mask: torch.Tensor
) -> tuple[int, float, float]:
    """Count, largest magnitude and sum of squares with the masked values added. A chunk is never empty."""
    values = torch.where(mask, values, 0.0)
    return count + int(mask.sum()), max(maximum, float(values.abs().max())), squares + float(values.square().sum())


def _error(tensor: torch.Tensor, oracle: torch.Tensor, where: torch.Tensor | None) -> tuple[float, float]:
    """(max, rms) of the error where both are finite."""
    count, maximum, squares = 0, 0.0, 0.0
    for _, t, o, w in _pieces(tensor, oracle, where):
        mask = t.isfinite() & o.isfinite()
        count, maximum, squares = _fold(
            count, maximum, squares, t.double() - o.double(), mask if w is None else mask & w
        )
    return maximum, _rms(squares, count)


def _size(tensor: torch.Tensor) -> tuple[float, float]:
    """(max, rms) of the finite elements."""
    return _error(torch.where(tensor.isfinite(), tensor, 0.0), torch.zeros_like(tensor), None)


def _rms(squares: float, count: int) -> float:
    return math.sqrt(squares / count) if count else 0.0


def _numbers(
    sums: _Sums,
    dtype: torch.dtype,
    tolerance: Tolerance,
    noise: Sequence[tuple[float, float]],
    scale: tuple[float, float],
) -> dict[str, float]:
    info = torch.finfo(dtype)
    step = max(info.smallest_normal * info.eps, torch.finfo(torch.float32).smallest_normal)
    n = {
        "max": sums.max,
        "rms": _rms(sums.squares, sums.count),
        "eager_max": sums.eager_max,
        "eager_rms": _rms(sums.eager_squares, sums.eager_count),
        "scale_max": max(sums.scale_max, scale[0]),
        "scale_rms": max(_rms(sums.scale_squares, sums.scale_count), scale[1]),
    }
    for index, kind in enumerate(("max", "rms")):
        yardstick = max([n[f"eager_{kind}"], *(errors[index] for errors in noise)])
        n[f"yardstick_{kind}"] = yardstick
        n[f"limit_{kind}"] = tolerance.ratio * yardstick + tolerance.floor * info.eps * n[f"scale_{kind}"] + step
    return n


def _rules(
    sums: _Sums, n: Mapping[str, float], dtype: torch.dtype, result_dtype: torch.dtype
) -> Iterator[tuple[bool, str]]:
    """Yields (fails, reason) for every rule that applies."""
    if dtype in FP8 or result_dtype in FP8:
        total = sums.result_squares + sums.scale_squares
        distance = 1 - 2 * sums.product / total if total else 0.0
        yield not distance < FP8_DISTANCE, f"distance 1 - 2·Σxy/Σ(x²+y²) is {distance:.3g}, allowed {FP8_DISTANCE}"
        return
    for kind in ("max", "rms"):
        error, limit = n[kind], n[f"limit_{kind}"]
        reason = f"{kind} error {error:.3g} exceeds {limit:.3g} (eager's is {n[f'eager_{kind}']:.3g}, "
        # "not <=" so that a nan fails
        yield not error <= limit, reason + f"{kind} of the oracle {n[f'scale_{kind}']:.3g})"
    if result_dtype == torch.bfloat16:
        for kind, bound, least in (("max", BF16_MAX, 1), ("rms", BF16_RMS, BF16_RMS_FROM)):
            limit = bound * n[f"scale_{kind}"]
            applies = sums.count >= least and RATIO * n[f"yardstick_{kind}"] <= limit
            yield (
                applies and n[kind] > limit,
                f"relative {kind} error {n[kind]:.3g} exceeds {limit:.3g} (bfloat16: {bound})",
            )


def _wrong_bin(
    result: torch.Tensor,
    oracle: torch.Tensor,
    eager: torch.Tensor,
    noise: Sequence[torch.Tensor],
    tolerance: Tolerance,
    numbers: Mapping[str, float],
) -> str:
    """Which of BINS violates the RMS rule, and by how much; "" if none does."""
    info = torch.finfo(eager.dtype)
    step = max(info.smallest_normal * info.eps, torch.finfo(torch.float32).smallest_normal)
    sums = torch.zeros(len(BINS), 3 + len(noise), dtype=torch.float64, device=result.device)
    largest = torch.zeros_like(sums)
    counts = torch.zeros(len(BINS), dtype=torch.int64, device=result.device)
    for _, o, r, e, *others in _pieces(oracle, result, eager, *noise):
        size, o = o.abs().double(), o.double()
        finite = r.isfinite() & e.isfinite()
        for index, (upper, lower) in enumerate(BINS):
            inside = finite & (size <= upper * numbers["scale_max"]) & (size > lower * numbers["scale_max"])
            counts[index] += inside.sum()
            for column, tensor in enumerate((torch.zeros_like(o), r, e, *others)):
                errors = (tensor[inside].double() - o[inside]).abs()
                sums[index, column] += errors.square().sum()
                if errors.numel():
                    largest[index, column] = torch.maximum(largest[index, column], errors.max())
    for (upper, lower), count, squares, most in zip(
        BINS, counts.tolist(), sums.tolist(), largest.tolist(), strict=True
    ):
        scale, error, *yardsticks = (_rms(s, count) for s in squares)
        # Small values are often differences of large ones, and then a few of them dominate the RMS. Its uncertainty is
        # the contribution of one more such element.
        chance = max(most[2:]) / math.sqrt(max(count, 1))
        limit = tolerance.ratio * (max(yardsticks) + chance) + tolerance.floor * info.eps * scale + step
        if count >= BIN_LEAST and not error <= limit:
            share = f"{100 * lower:g} to {100 * upper:g} % of the largest"
            return f"rms error {error:.3g} of the {count} elements of {share} exceeds {limit:.3g}"
    return ""


def _beyond_a_step(result: torch.Tensor, oracle: torch.Tensor, eager: torch.Tensor, where: torch.Tensor | None) -> str:
    """How many elements of an fp8 result are more than one step from both eager's and the oracle's; "" if none."""
    wrong, first = 0, -1
    for start, r, o, e, w in _pieces(result, oracle, eager, where):
        rounded = o.to(eager.dtype)
        judged = (_classes(r) == 0) & (_classes(rounded) == 0) & (_classes(e) == 0)
        place = _places(r)
        far = judged & ((place - _places(e)).abs() > 1) & ((place - _places(rounded)).abs() > 1)
        far = far if w is None else far & w
        if count := int(far.sum()):
            first = first if wrong else start + int(far.nonzero()[0])
            wrong += count
    return (
        f"{wrong} of {result.numel()} elements are more than one step of fp8 off, the first is {first}" if wrong else ""
    )


def _places(tensor: torch.Tensor) -> torch.Tensor:
    """Maps consecutive values of an fp8 dtype to consecutive integers."""
    pattern = tensor.view(torch.uint8).to(torch.int16)
    return torch.where(pattern < 128, pattern, 128 - pattern)


def _closeness(numbers: Mapping[str, float]) -> float:
    """The larger of the two ratios of error to limit."""
    return max((numbers[k] / numbers[f"limit_{k}"] for k in ("max", "rms") if numbers.get(f"limit_{k}")), default=-1.0)
