"""The aligned body and the unaligned fringe of a row, loads of targets and weights, stores of the results of a row and
of a CTA. The narrow and the wide kernels share them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def body(base, vocab, LAYOUT: tl.constexpr, VECTOR: tl.constexpr):
    """(offset of the first vector of the row that begins at offset `base`, columns before it, columns in vectors).
    LAYOUT:

    aligned  every row begins and ends on a boundary of VECTOR elements
    fringed  rows may begin and end anywhere; the body is between the row's first and last boundary, the rest is fringe
    any      rows may begin and end anywhere; the entire row is body, read one element per load

    The multiplications by VECTOR let the compiler infer the alignment.
    """
    first, head, length = base, 0, vocab
    if LAYOUT == "aligned":
        first, length = base // VECTOR * VECTOR, vocab // VECTOR * VECTOR
    if LAYOUT == "fringed":
        first = (base + VECTOR - 1) // VECTOR * VECTOR
        head = (first - base).to(tl.int32)
        length = ((base + vocab) // VECTOR - first // VECTOR).to(tl.int32) * VECTOR
    return first, head, length


@triton.jit
def fringe(head, length, vocab, VECTOR: tl.constexpr):
    """The column indices of a row's fringe, [2 · VECTOR], padded with `vocab`."""
    i = tl.arange(0, 2 * VECTOR)
    before = tl.where(i < head, i, vocab)
    after = tl.minimum(head + length + i - VECTOR, vocab)
    return tl.where(i < VECTOR, before, after)


@triton.jit
def load_target(target_ptr, row, stride_target, vocab, ignore_index):
    """(column of the target, whether the row is live, that is, not ignored). An ignored row gets column 0."""
    target = tl.load(target_ptr + row.to(tl.int64) * stride_target)
    live = target != ignore_index
    tl.device_assert(
        (target >= 0) & (target < vocab) | (target == ignore_index),
        "cross_entropy: target must be ignore_index or in [0, vocabulary)",
    )
    return tl.where(live, target, 0).to(tl.int32), live


@triton.jit
def load_weights(weight_ptr, columns, mask, WEIGHTED: tl.constexpr):
    """The weights of the columns, or 1 without WEIGHTED."""
    w = 1.0
    if WEIGHTED:
        w = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    return w


@triton.jit
def store_rows(
    row,
    rows,
    here,
    loss,
    z,
    lse,
    m,
    s,
    results,
    REDUCTION: tl.constexpr,
    RETURN_Z: tl.constexpr,
    RETURN_LSE: tl.constexpr,
    SAVE: tl.constexpr,
):
    """Stores the results of each row where the mask `here` is true. `results`: pointers to loss, z-loss, lse and the
    workspace, which begins with the maxima of all rows, followed by their sums."""
    loss_ptr, z_ptr, lse_ptr, scratch_ptr = results
    if RETURN_LSE:
        tl.store(lse_ptr + row, lse, mask=here)
    if SAVE:
        tl.store(scratch_ptr + row, m, mask=here)
        tl.store(scratch_ptr + rows + row, s, mask=here)
    if REDUCTION == "none":
        tl.store(loss_ptr + row, (loss + z).to(loss_ptr.dtype.element_ty), mask=here)
        if RETURN_Z:
            tl.store(z_ptr + row, z.to(z_ptr.dtype.element_ty), mask=here)


@triton.jit
def store_sums(
    loss, z, count, weight, partial_ptr, REDUCTION: tl.constexpr, HAS_Z: tl.constexpr, HAS_WEIGHT: tl.constexpr
):
    """Stores a CTA's column of the partial sums, for reduction sum or mean."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    tl.store(partial_ptr + program, loss)
    if HAS_Z:
        tl.store(partial_ptr + programs + program, z)
    if REDUCTION == "mean":
        tl.store(partial_ptr + 2 * programs + program, count)
        if HAS_WEIGHT:
            tl.store(partial_ptr + 3 * programs + program, weight)
