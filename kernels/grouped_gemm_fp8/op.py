"""The public function of the forward: checks, the lean eager call, registration with torch.library."""

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
from .plans import rows_plan

# Named after the package, so that a copy of this folder under another name registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")
_NAME = "grouped_gemm_fp8"
_PRODUCT = Plans()


def grouped_gemm_fp8(
    x: torch.Tensor,
    weights: torch.Tensor,
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
    offsets: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> torch.Tensor:
    """A linear layer on numbers of 8 bits for each group of rows, as the experts of a mixture have them.

        y[r, n] = Σ_k x[r, k] · scale_x[r, k // 128] · weights[g, n, k] · scale_w[g, n // 128, k // 128]
                                    for the rows r of group g: offsets[g - 1] <= r < offsets[g]
        y[r, n] = 0                 for the rows behind the last offset

    Tensor cores form sums over 128 of k, which are scaled and added in fp32. The result is rounded once. Deterministic.
    The host never reads the offsets: no synchronisation, and one CUDA graph for all of their values.

    x        [T, K] float8_e4m3fn or float8_e5m2
    weights  [G, N, K] either of them. K and N are multiples of 16; T, K and N at most 2^31 - 512. Rows of both that are
             contiguous and on 16-byte boundaries are read in place, others are copied first.
    scale_x  [T, ceil(K / 128)] float32, any strides: what 1x128 elements of x are multiplied by
    scale_w  [G, ceil(N / 128), ceil(K / 128)] float32, any strides: of 128x128 elements of a weight
    offsets  [G], int32 or int64, on x's device: the end of each group's rows, from the first row on. They should be
             monotonic and at most T, which is not checked: each is clamped to [0, T], and one that is less than an
             earlier one counts as that one.
    out_dtype   of the result: bfloat16, float16 or float32
    backend  "triton", "cuda" (CUDA C++, compiled by CuPy, on compute capability 9.0), or "auto", the faster of those
             that can run (`configs.pick_backend`)

    Returns y [T, N], contiguous. Not differentiable: numbers of 8 bits have no gradient, and the README shows the three
    products of a layer. An input that requires a gradient is an error where gradients are recorded, never a zero.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or backend, RuntimeError for a GPU below
    compute capability 8.9, a CPU tensor outside Triton's interpreter, an input that requires a gradient, and for
    backend="cuda" where it cannot run.

    Source: the grouped product is that of MegaBlocks (Gale et al. 2022, arXiv:2211.15841); blocks and the promotion to
    fp32 are DeepSeek-V3's (2024, arXiv:2412.19437, section 3.3).
    """
    no_gradient(_NAME, x=x, weights=weights, scale_x=scale_x, scale_w=scale_w)
    if lean(x, weights, scale_x, scale_w, offsets):
        plan = _product_plan(x, weights, scale_x, scale_w, offsets, out_dtype, backend)
        return plan(x, weights, scale_x, scale_w, offsets)
    _check(x, weights, scale_x, scale_w, offsets, out_dtype, backend)
    no_tangent(_NAME, x, weights, scale_x, scale_w)
    codes, formats = (x.view(torch.uint8), weights.view(torch.uint8)), (is_e4m3(x), is_e4m3(weights))
    return _product_op(*codes, scale_x, scale_w, offsets, *formats, out_dtype, backend)


def _check(x, weights, scale_x, scale_w, offsets, out_dtype, backend) -> None:
    wanted = f"[T, K] with K a multiple of {VECTOR}"
    check_codes(_NAME, "x", x, wanted, (None, None), (1, VECTOR))
    depth = x.shape[1]
    wanted = f"[G, N, {depth}] like x with N a multiple of {VECTOR}"
    check_codes(_NAME, "weights", weights, wanted, (None, None, depth), (1, VECTOR, VECTOR))
    groups, cols = weights.shape[:2]
    check_scale(_NAME, "scale_x", scale_x, (x.shape[0], blocks(depth)))
    check_scale(_NAME, "scale_w", scale_w, (groups, blocks(cols), blocks(depth)))
    check_offsets(_NAME, offsets, groups)
    others = dict(weights=weights, scale_x=scale_x, scale_w=scale_w, offsets=offsets)
    check_options(_NAME, out_dtype, backend, "x", x, **others)


def _product_plan(x, weights, scale_x, scale_w, offsets, out_dtype, backend):
    """The plan for these arguments, kept. For plain tensors alone: of others the key does not say all."""
    tensors = signature(x), signature(weights), signature(scale_x), signature(scale_w), signature(offsets)
    key = (*tensors, out_dtype, backend)
    plan = _PRODUCT.find(key)
    if plan is None:
        _check(x, weights, scale_x, scale_w, offsets, out_dtype, backend)
        plan = _PRODUCT.keep(key, rows_plan(x, weights, scale_x, scale_w, offsets, out_dtype, backend))
    return plan


# Codes are bytes here: most of what torch.library's own checks do with tensors is not defined for float8.
@torch.library.custom_op(f"{_NAMESPACE}::grouped_gemm_fp8", mutates_args=())
def _product_op(
    x: torch.Tensor,
    weights: torch.Tensor,
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
    offsets: torch.Tensor,
    x_e4m3: bool,
    w_e4m3: bool,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    x, weights = x.view(CODES[not x_e4m3]), weights.view(CODES[not w_e4m3])
    make = _product_plan if lean(x, weights, scale_x, scale_w, offsets) else rows_plan
    plan = make(x, weights, scale_x, scale_w, offsets, out_dtype, backend)
    return plan(x, weights, scale_x, scale_w, offsets)


@_product_op.register_fake
def _(x, weights, scale_x, scale_w, offsets, x_e4m3, w_e4m3, out_dtype, backend):
    return x.new_empty((x.shape[0], weights.shape[1]), dtype=out_dtype)
