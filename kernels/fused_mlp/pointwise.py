"""The activation and its derivative as elementwise Triton kernels, used where cuBLAS computes the GEMMs.

Estimate, 205000 x 1376 in bf16: a tensor is 564 MB. The activation reads one and writes one, 265 us at 4254 GB/s. The
derivative reads two and writes two, 530 us. Each GEMM takes 366 us at 790 TFLOP/s.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activation import _activation, _activation_and_gradient


@triton.jit
def _in_column(value, COLS: tl.constexpr, PITCH: tl.constexpr, BLOCK: tl.constexpr):
    """The values of a CTA, zero from column COLS of a row of PITCH elements on: there a GEMM gives NaN if a row of x or
    dy is not finite, which the next GEMM would multiply by zero. Without such columns both are 0.

    They are constants because the remainder of a division by a variable costs 30 instructions an element, and of one by
    a constant 6.
    """
    if COLS < PITCH:
        first = (tl.program_id(0).to(tl.int64) * BLOCK % PITCH).to(tl.int32)
        value = tl.where((first + tl.arange(0, BLOCK)) % PITCH < COLS, value, 0.0)
    return value


@triton.jit
def _fused_mlp_activation_kernel(
    pre_ptr,
    gate_ptr,
    hidden_ptr,
    count,
    ACTIVATION: tl.constexpr,
    COLS: tl.constexpr,
    PITCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """hidden = act(pre), or act(gate) · pre, for `count` elements, in rows of PITCH that are zero from column COLS on
    (see `_in_column`); hidden may alias pre."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    pre = tl.load(pre_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if gate_ptr is None:
        hidden = _activation(pre, ACTIVATION)
    else:
        hidden = _activation(tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32), ACTIVATION) * pre
    hidden = _in_column(hidden, COLS, PITCH, BLOCK)
    tl.store(hidden_ptr + at, hidden.to(hidden_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _fused_mlp_derivative_kernel(
    dhidden_ptr,
    pre_ptr,
    gate_ptr,
    dpre_ptr,
    dgate_ptr,
    hidden_ptr,
    count,
    ACTIVATION: tl.constexpr,
    COLS: tl.constexpr,
    PITCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes those of the gradients of pre and gate and the hidden that are not None, for `count` elements, in rows of
    PITCH that are zero from column COLS on (see `_in_column`). dpre or dgate may alias dhidden."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    dhidden = tl.load(dhidden_ptr + at, mask=inside, other=0.0).to(tl.float32)
    pre = tl.load(pre_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if gate_ptr is None:
        hidden, dpre = _activation_and_gradient(pre, dhidden, ACTIVATION)
    else:
        gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
        factor, dgate = _activation_and_gradient(gate, dhidden * pre, ACTIVATION)
        hidden, dpre = factor * pre, dhidden * factor
        if dgate_ptr is not None:
            dgate = _in_column(dgate, COLS, PITCH, BLOCK)
            tl.store(dgate_ptr + at, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
    if dpre_ptr is not None:
        dpre = _in_column(dpre, COLS, PITCH, BLOCK)
        tl.store(dpre_ptr + at, dpre.to(dpre_ptr.dtype.element_ty), mask=inside)
    if hidden_ptr is not None:
        hidden = _in_column(hidden, COLS, PITCH, BLOCK)
        tl.store(hidden_ptr + at, hidden.to(hidden_ptr.dtype.element_ty), mask=inside)
