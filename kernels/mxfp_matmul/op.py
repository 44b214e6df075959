"""The public functions: argument checks, the fast eager path, registration with torch.library."""

from __future__ import annotations

import torch

from .checks import FLOATS, kind, no_gradient, no_tangent, runnable
from .formats import BLOCK, CHUNK, TILE_BYTES, chunks, packed_words, tiles, unsigned_scales
from .launch import Plans, lean, signature
from .plans import BACKENDS, product_plan

# Named after the package, so that a copy of this folder under another name registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")
_PRODUCT = Plans()


def mxfp_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    scales: torch.Tensor,
    format: str = "mxfp4",
    *,
    tensor_scale: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """x times packed 4-bit weights, transposed: a linear layer without bias.

        y[..., n] = Σ_k x[..., k] · element[n, k] · scale[n, k // block]      block = 32 (mxfp4) or 16 (nvfp4)
        y         = y · tensor_scale                                          only nvfp4

    Weights are rounded to x's dtype. This is exact in bf16 and fp32, and for nvfp4 in fp16; mxfp4 weights must lie
    within fp16's range. Products are accumulated in fp32, in an order that depends only on the shapes, so repeated runs
    agree bit for bit.

    x             [..., K] fp32, fp16 or bf16, any strides. It is read without a copy where the leading dimensions
                  flatten to one stride and rows are contiguous and 16-byte aligned, and, for "triton" up to 128 rows, K
                  is a multiple of 128; otherwise it is copied first.
    w, scales     uint8, as `mxfp_pack` returns them: [chunks, tiles, 1024] and [chunks, N, 4], for nvfp4
                  [chunks, N, 8], with ceil(K / 128) chunks and ceil(N / 16) tiles
    format        "mxfp4" or "nvfp4"
    tensor_scale  fp32 (), required for nvfp4 and only allowed there
    backend       "triton", "cuda" (CUDA C++, compiled by CuPy, on compute capability 9.0, for fp16 and bf16 and N a
                  multiple of 16), or "auto", the faster of those that can run (`configs.pick_backend`)

    Returns y [..., N] in x's dtype, contiguous. Not differentiable: 4-bit weights are for inference.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or option, RuntimeError for a CPU tensor
    outside Triton's interpreter, for backend="cuda" where it cannot run, and, where gradients are recorded, for an
    input that requires one, NotImplementedError for forward-mode differentiation.

    Sources: OCP Microscaling Formats specification 1.0; for nvfp4 NVIDIA 2025, arXiv:2509.25149.
    """
    no_gradient("mxfp_matmul", x=x, tensor_scale=tensor_scale)
    if lean(x, w, scales, tensor_scale):
        return _product_plan(x, w, scales, tensor_scale, format, backend)(x, w, scales, tensor_scale)
    _check(x, w, scales, tensor_scale, format, backend)
    no_tangent("mxfp_matmul", x, tensor_scale)
    return _product_op(x, w, scales, tensor_scale, format, backend)


def mxfp_pack(data: torch.Tensor, scales: torch.Tensor, format: str = "mxfp4") -> tuple[torch.Tensor, torch.Tensor]:
    """Packs weights into the layout that `mxfp_matmul` reads (`formats.py`), once per weight. Plain PyTorch.

    data    uint8 [N, K / 2], K a multiple of the block: two elements per byte, the first in the lower half
    scales  uint8 [N, K / 32] of E8M0, or [N, K / 16] of e4m3 for nvfp4
    format  "mxfp4" or "nvfp4"

    Returns w [chunks, tiles, 1024] and scales [chunks, N, 4], for nvfp4 [chunks, N, 8], contiguous. Raises TypeError
    for a wrong dtype, ValueError for a wrong shape, device or format.
    """
    _check_format("mxfp_pack", format)
    for name, tensor in (("data", data), ("scales", scales)):
        _check_bytes("mxfp_pack", name, tensor)
    if scales.dim() != 2 or data.shape != (scales.shape[0], scales.shape[1] * BLOCK[format] // 2):
        got = f"{list(data.shape)} and {list(scales.shape)}"
        raise ValueError(f"mxfp_pack: data and scales must be [N, K / 2] and [N, K / {BLOCK[format]}], got {got}")
    if scales.device != data.device:
        raise ValueError(f"mxfp_pack: scales must be on {data.device} like data, got {scales.device}")
    if format == "nvfp4":
        data, scales = unsigned_scales(data, scales)
    columns, count, each = data.shape[0], chunks(2 * data.shape[1]), CHUNK // BLOCK[format]
    padded = scales.new_zeros((columns, count * each))
    padded[:, : scales.shape[1]] = scales
    return packed_words(data), padded.view(columns, count, each).transpose(0, 1).contiguous()


def _check(x, w, scales, tensor_scale, format, backend) -> None:
    if not isinstance(x, torch.Tensor) or x.dtype not in FLOATS:
        raise TypeError(f"mxfp_matmul: x must be a tensor of float32, float16 or bfloat16, got {kind(x)}")
    if x.dim() == 0:
        raise ValueError("mxfp_matmul: x must be [..., K], got a tensor without dimensions")
    _check_format("mxfp_matmul", format)
    for name, tensor in (("w", w), ("scales", scales)):
        _check_bytes("mxfp_matmul", name, tensor)
        if tensor.device != x.device:
            raise ValueError(f"mxfp_matmul: {name} must be on x's device {x.device}, got {tensor.device}")
    depth = chunks(x.shape[-1])
    each = CHUNK // BLOCK[format]
    if scales.dim() != 3 or scales.shape[0] != depth or scales.shape[2] != each:
        raise ValueError(
            f"mxfp_matmul: scales must be [{depth}, N, {each}] for this x, as mxfp_pack returns them, got "
            f"{list(scales.shape)}"
        )
    wanted = [depth, tiles(scales.shape[1]), TILE_BYTES]
    if list(w.shape) != wanted:
        raise ValueError(f"mxfp_matmul: w must be {wanted} for these scales, got {list(w.shape)}")
    if (format == "nvfp4") != (tensor_scale is not None):
        raise ValueError(
            f"mxfp_matmul: tensor_scale must be given with 'nvfp4' only, got {kind(tensor_scale)} with {format!r}"
        )
    if tensor_scale is not None:
        if not isinstance(tensor_scale, torch.Tensor) or tensor_scale.dtype != torch.float32:
            raise TypeError(f"mxfp_matmul: tensor_scale must be a tensor of float32, got {kind(tensor_scale)}")
        if tensor_scale.dim():
            raise ValueError(f"mxfp_matmul: tensor_scale must have no dimensions, got {list(tensor_scale.shape)}")
        if tensor_scale.device != x.device:
            raise ValueError(f"mxfp_matmul: tensor_scale must be on x's device {x.device}, got {tensor_scale.device}")
    if backend not in BACKENDS:
        raise ValueError(f"mxfp_matmul: backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    runnable("mxfp_matmul", "x", x)


def _check_format(function: str, format: str) -> None:
    if format not in BLOCK:
        raise ValueError(f"{function}: format must be 'mxfp4' or 'nvfp4', got {format!r}")


def _check_bytes(function: str, name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.uint8:
        raise TypeError(f"{function}: {name} must be a tensor of uint8, got {kind(tensor)}")


def _product_plan(x, w, scales, tensor_scale, format, backend):
    """The cached plan for these arguments. For plain tensors only (see `lean`)."""
    key = (signature(x), signature(w), signature(scales), signature(tensor_scale), format, backend)
    plan = _PRODUCT.find(key)
    if plan is None:
        _check(x, w, scales, tensor_scale, format, backend)
        plan = _PRODUCT.keep(key, product_plan(x, w, scales, tensor_scale, format, backend))
    return plan


@torch.library.custom_op(f"{_NAMESPACE}::mxfp_matmul", mutates_args=())
def _product_op(
    x: torch.Tensor,
    w: torch.Tensor,
    scales: torch.Tensor,
    tensor_scale: torch.Tensor | None,
    format: str,
    backend: str,
) -> torch.Tensor:
    make = _product_plan if lean(x, w, scales, tensor_scale) else product_plan
    return make(x, w, scales, tensor_scale, format, backend)(x, w, scales, tensor_scale)


@_product_op.register_fake
def _(x, w, scales, tensor_scale, format, backend):
    return x.new_empty((*x.shape[:-1], scales.shape[1]))
