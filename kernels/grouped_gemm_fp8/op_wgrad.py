"""The public function of the weights' gradient: argument checks, the eager fast path, registration with
torch.library."""

from __future__ import annotations

import torch

from .checks import no_gradient, no_tangent
from .launch import Plans, lean, signature
from .operands import (
    CODES,
    VECTOR,
    blocks,
    check_codes,
    check_offsets,
    check_options,
    check_scale,
    is_e4m3,
)
from .plans import weights_plan

# As in op.py.
_NAMESPACE = __package__.replace(".", "_")
_NAME = "grouped_gemm_fp8_wgrad"
_PRODUCT = Plans()


def grouped_gemm_fp8_wgrad(
    dy_t: torch.Tensor,
    x_t: torch.Tensor,
    scale_dy: torch.Tensor,
    scale_x: torch.Tensor,
    offsets: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
    backend: str = "auto",
) -> torch.Tensor:
    """Computes the weights' gradient of `grouped_gemm_fp8`. Both operands are passed transposed, because fp8 tensor
    cores require K-major operands, and K is the rows here.

        dweights[g, n, k] = Σ_r dy_t[n, r] · scale_dy[n, r // 128] · x_t[k, r] · scale_x[k, r // 128]
                                    over the rows r of group g: offsets[g - 1] <= r < offsets[g]

    Scale blocks of 128 rows are counted from row 0 of the whole tensor, independent of the groups. If every group
    begins at a multiple of 128 (the padded layout of a mixture's rows), a block has rows of only one group. Else a
    block that two groups share has one scale for both, and each group uses only its own rows, whatever the other rows
    contain. The gradient of a group without rows is zero.

    Tensor cores accumulate the rows of a block. These partial sums are scaled and added in fp32 in a fixed order. The
    result is rounded once. Deterministic. The host never reads the offsets.

    dy_t     [N, T] float8_e4m3fn or float8_e5m2
    x_t      [K, T] float8_e4m3fn or float8_e5m2. N, K and T are multiples of 16, at most 2^31 - 512. Both operands are
             read in place if their rows are contiguous and on 16-byte boundaries, else copied first.
    scale_dy [N, ceil(T / 128)] float32, any strides
    scale_x  [K, ceil(T / 128)] float32, any strides
    offsets  [G], int32 or int64, on dy_t's device, read as in `grouped_gemm_fp8`
    out_dtype   dtype of the result: float32, bfloat16 or float16
    backend  as in `grouped_gemm_fp8`

    Returns dweights [G, N, K], contiguous. Not differentiable, like `grouped_gemm_fp8`.

    Raises the same errors as `grouped_gemm_fp8`.

    Source: DeepSeek-V3 (2024, arXiv:2412.19437, section 3.3).
    """
    no_gradient(_NAME, dy_t=dy_t, x_t=x_t, scale_dy=scale_dy, scale_x=scale_x)
    if lean(dy_t, x_t, scale_dy, scale_x, offsets):
        plan = _product_plan(dy_t, x_t, scale_dy, scale_x, offsets, out_dtype, backend)
        return plan(dy_t, x_t, scale_dy, scale_x, offsets)
    _check(dy_t, x_t, scale_dy, scale_x, offsets, out_dtype, backend)
    no_tangent(_NAME, dy_t, x_t, scale_dy, scale_x)
    codes, formats = (dy_t.view(torch.uint8), x_t.view(torch.uint8)), (is_e4m3(dy_t), is_e4m3(x_t))
    return _product_op(*codes, scale_dy, scale_x, offsets, *formats, out_dtype, backend)


def _check(dy_t, x_t, scale_dy, scale_x, offsets, out_dtype, backend) -> None:
    wanted = f"[N, T] with multiples of {VECTOR}"
    check_codes(_NAME, "dy_t", dy_t, wanted, (None, None), (VECTOR, VECTOR))
    cols, rows = dy_t.shape
    wanted = f"[K, {rows}] like dy_t with K a multiple of {VECTOR}"
    check_codes(_NAME, "x_t", x_t, wanted, (None, rows), (VECTOR, VECTOR))
    check_scale(_NAME, "scale_dy", scale_dy, (cols, blocks(rows)))
    check_scale(_NAME, "scale_x", scale_x, (x_t.shape[0], blocks(rows)))
    check_offsets(_NAME, offsets, None)
    others = dict(x_t=x_t, scale_dy=scale_dy, scale_x=scale_x, offsets=offsets)
    check_options(_NAME, out_dtype, backend, "dy_t", dy_t, **others)


def _product_plan(dy_t, x_t, scale_dy, scale_x, offsets, out_dtype, backend):
    """The cached plan for these arguments. Only for plain tensors: the key does not describe others completely."""
    tensors = signature(dy_t), signature(x_t), signature(scale_dy), signature(scale_x), signature(offsets)
    key = (*tensors, out_dtype, backend)
    plan = _PRODUCT.find(key)
    if plan is None:
        _check(dy_t, x_t, scale_dy, scale_x, offsets, out_dtype, backend)
        plan = _PRODUCT.keep(key, weights_plan(dy_t, x_t, scale_dy, scale_x, offsets, out_dtype, backend))
    return plan


# The custom op takes fp8 tensors as bytes, as in op.py.
@torch.library.custom_op(f"{_NAMESPACE}::grouped_gemm_fp8_wgrad", mutates_args=())
def _product_op(
    dy_t: torch.Tensor,
    x_t: torch.Tensor,
    scale_dy: torch.Tensor,
    scale_x: torch.Tensor,
    offsets: torch.Tensor,
    dy_e4m3: bool,
    x_e4m3: bool,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    dy_t, x_t = dy_t.view(CODES[not dy_e4m3]), x_t.view(CODES[not x_e4m3])
    make = _product_plan if lean(dy_t, x_t, scale_dy, scale_x, offsets) else weights_plan
    plan = make(dy_t, x_t, scale_dy, scale_x, offsets, out_dtype, backend)
    return plan(dy_t, x_t, scale_dy, scale_x, offsets)


@_product_op.register_fake
def _(dy_t, x_t, scale_dy, scale_x, offsets, dy_e4m3, x_e4m3, out_dtype, backend):
    return dy_t.new_empty((offsets.shape[0], dy_t.shape[0], x_t.shape[0]), dtype=out_dtype)
