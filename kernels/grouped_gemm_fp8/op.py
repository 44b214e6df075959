"""The public function of the forward: argument checks, the eager fast path, registration with torch.library."""

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
    """Computes a grouped GEMM in fp8 with block scales: a linear layer for each group of consecutive rows.

        y[r, n] = Σ_k x[r, k] · scale_x[r, k // 128] · weights[g, n, k] · scale_w[g, n // 128, k // 128]
                                    for the rows r of group g: offsets[g - 1] <= r < offsets[g]
        y[r, n] = 0                 for the rows past the last offset

    Tensor cores accumulate K-blocks of 128. These partial sums are scaled and added in fp32 (promotion), and the result
    is rounded once. Deterministic. The host never reads the offsets: there is no synchronisation, and one CUDA graph
    serves all of their values.

    x        [T, K] float8_e4m3fn or float8_e5m2
    weights  [G, N, K] float8_e4m3fn or float8_e5m2. K and N are multiples of 16; T, K and N are at most 2^31 - 512.
             Both operands are read in place if their rows are contiguous and on 16-byte boundaries, else copied first.
    scale_x  [T, ceil(K / 128)] float32, any strides: the factor of each 1x128 block of x
    scale_w  [G, ceil(N / 128), ceil(K / 128)] float32, any strides: the factor of each 128x128 block of a weight
    offsets  [G], int32 or int64, on x's device: the end of each group's rows; group 0 begins at row 0. They should be
             monotonic and at most T, which is not checked: each is clamped to [0, T], and to the largest offset before
             it.
    out_dtype   dtype of the result: bfloat16, float16 or float32
    backend  "triton", "cuda" (CUDA C++, compiled by CuPy, on compute capability 9.0), or "auto", the faster of those
             that can run (`configs.pick_backend`)

    Returns y [T, N], contiguous. Not differentiable: fp8 tensors have no gradient. The README shows the three GEMMs of
    a layer. An input that requires a gradient is an error in grad mode.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or backend, RuntimeError for a GPU below
    compute capability 8.9, a CPU tensor outside Triton's interpreter, an input that requires a gradient, and for
    backend="cuda" where it cannot run.

    Source: grouped GEMM, MegaBlocks (Gale et al. 2022, arXiv:2211.15841); block scales and promotion to fp32,
    DeepSeek-V3 (2024, arXiv:2412.19437, section 3.3).
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
    """The cached plan for these arguments. Only for plain tensors: the key does not describe others completely."""
    tensors = signature(x), signature(weights), signature(scale_x), signature(scale_w), signature(offsets)
    key = (*tensors, out_dtype, backend)
    plan = _PRODUCT.find(key)
    if plan is None:
        _check(x, weights, scale_x, scale_w, offsets, out_dtype, backend)
        plan = _PRODUCT.keep(key, rows_plan(x, weights, scale_x, scale_w, offsets, out_dtype, backend))
    return plan


# The custom op takes fp8 tensors as bytes: most operations that torch.library's checks use are undefined for float8.
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
