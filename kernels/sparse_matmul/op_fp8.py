"""The fp8 GEMM of `sparse_matmul`: argument checks, the fast eager path, registration with torch.library."""

from __future__ import annotations

import torch

from .activation import ACTIVATIONS
from .checks import FLOATS, kind, no_gradient, no_tangent, runnable
from .formats import EIGHT_BITS
from .launch import Plans, lean, signature
from .op_compress import MAX_SIZE, check_compressed
from .plans import BACKENDS, capability
from .plans_fp8 import E4M3, product_plan

FIRST_CAPABILITY = (8, 9)

# Named after the package, so that a copy of this folder under another name registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")
_PRODUCT = Plans()


def product(x, compressed, bias, activation, scale_x, scale_w, out_dtype, backend) -> torch.Tensor:
    """`sparse_matmul` for fp8 x; out_dtype None is bfloat16."""
    out_dtype = torch.bfloat16 if out_dtype is None else out_dtype
    values, metadata = compressed
    no_gradient("sparse_matmul", x=x, values=values, bias=bias, scale_x=scale_x, scale_w=scale_w)
    options = activation, out_dtype, backend
    if _tensors(values, metadata, scale_x, scale_w, bias) and lean(x, values, metadata, scale_x, scale_w, bias):
        plan = _product_plan(x, values, metadata, scale_x, scale_w, bias, *options)
        return plan(x, values, metadata, scale_x, scale_w, bias)
    _check(x, values, metadata, scale_x, scale_w, bias, *options)
    no_tangent("sparse_matmul", scale_x, scale_w, bias)
    codes, formats = (x.view(torch.uint8), values.view(torch.uint8)), (x.dtype == E4M3, values.dtype == E4M3)
    return _product_op(*codes, metadata, scale_x, scale_w, bias, *formats, *options)


def _tensors(values, metadata, scale_x, scale_w, bias) -> bool:
    """Whether all tensor arguments are tensors, which `lean` assumes."""
    needed = (values, metadata, scale_x, scale_w)
    return all(isinstance(t, torch.Tensor) for t in needed) and isinstance(bias, torch.Tensor | None)


def _of_rows(scale: torch.Tensor, rows: int) -> bool:
    """Whether scale is [rows] or [rows, 1]. Compares sizes, because torch.compile cannot look up dynamic shapes in a
    tuple."""
    return scale.dim() in (1, 2) and scale.shape[0] == rows and (scale.dim() == 1 or scale.shape[1] == 1)


def _check(x, values, metadata, scale_x, scale_w, bias, activation, out_dtype, backend) -> None:
    check_compressed("sparse_matmul", (values, metadata))
    if values.dtype not in EIGHT_BITS:
        wanted = "float8_e4m3fn or float8_e5m2 with fp8 x"
        raise TypeError(f"sparse_matmul: values must be a tensor of {wanted}, got {kind(values)}")
    (cols, half) = values.shape
    if x.dim() != 2 or x.shape[1] != 2 * half or x.shape[0] > MAX_SIZE:
        wanted = f"[M, {2 * half}] like fp8 values with M at most {MAX_SIZE}"
        raise ValueError(f"sparse_matmul: x must be {wanted}, got {list(x.shape)}")
    for name, scale in (("scale_x", scale_x), ("scale_w", scale_w)):
        if not isinstance(scale, torch.Tensor) or scale.dtype != torch.float32:
            raise TypeError(f"sparse_matmul: {name} must be a tensor of float32 with fp8 x, got {kind(scale)}")
    rows = x.shape[0]
    of_rows = _of_rows(scale_x, rows) and _of_rows(scale_w, cols)
    if not of_rows and (scale_x.shape or scale_w.shape):
        got = f"{list(scale_x.shape)} and {list(scale_w.shape)}"
        wanted = f"[] and [], or [{rows}] or [{rows}, 1] and [{cols}] or [{cols}, 1]"
        raise ValueError(f"sparse_matmul: scale_x and scale_w must be {wanted}; got {got}")
    if out_dtype not in FLOATS:
        raise TypeError(f"sparse_matmul: out_dtype must be float32, float16 or bfloat16, got {out_dtype}")
    if bias is not None:
        if not isinstance(bias, torch.Tensor) or bias.dtype not in (torch.float32, out_dtype):
            wanted = f"a tensor of float32 or of out_dtype {out_dtype}"
            raise TypeError(f"sparse_matmul: bias must be {wanted}, got {kind(bias)}")
        if bias.shape != (cols,):
            raise ValueError(f"sparse_matmul: bias must be [{cols}], got {list(bias.shape)}")
    for name, tensor in (("values", values), ("scale_x", scale_x), ("scale_w", scale_w), ("bias", bias)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"sparse_matmul: {name} must be on x's device {x.device}, got {tensor.device}")
    _check_options(x, activation, backend)


def _check_options(x, activation, backend) -> None:
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"sparse_matmul: activation must be None or one of {ACTIVATIONS}, got {activation!r}")
    if backend not in BACKENDS:
        raise ValueError(f"sparse_matmul: backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    runnable("sparse_matmul", "x", x)
    if x.is_cuda and capability(x) < FIRST_CAPABILITY:
        needed, found = ("{}.{}".format(*of) for of in (FIRST_CAPABILITY, capability(x)))
        wanted = f"on a GPU of compute capability {needed} or later with fp8 x"
        raise RuntimeError(f"sparse_matmul: x must be {wanted}, got {found}")


def _product_plan(x, values, metadata, scale_x, scale_w, bias, activation, out_dtype, backend):
    """The cached plan for these arguments. For plain tensors only: the key does not fully describe other tensors."""
    tensors = x, values, metadata, scale_x, scale_w, bias
    key = (*map(signature, tensors), activation, out_dtype, backend)
    plan = _PRODUCT.find(key)
    if plan is None:
        _check(*tensors, activation, out_dtype, backend)
        plan = _PRODUCT.keep(key, product_plan(*tensors, activation, out_dtype, backend))
    return plan


# x and values are uint8 here: most operations of torch.library's own checks are not defined for float8.
@torch.library.custom_op(f"{_NAMESPACE}::sparse_matmul_fp8", mutates_args=())
def _product_op(
    x: torch.Tensor,
    values: torch.Tensor,
    metadata: torch.Tensor,
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
    bias: torch.Tensor | None,
    x_e4m3: bool,
    w_e4m3: bool,
    activation: str | None,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    tensors = x.view(EIGHT_BITS[not x_e4m3]), values.view(EIGHT_BITS[not w_e4m3]), metadata, scale_x, scale_w, bias
    make = _product_plan if lean(*tensors) else product_plan
    return make(*tensors, activation, out_dtype, backend)(*tensors)


@_product_op.register_fake
def _(x, values, metadata, scale_x, scale_w, bias, x_e4m3, w_e4m3, activation, out_dtype, backend):
    return x.new_empty((x.shape[0], values.shape[0]), dtype=out_dtype)
