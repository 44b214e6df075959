"""The public functions for compressed weights: prune, compress, decompress."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch.autograd import forward_ad

from . import configs
from .checks import FLOATS, INTERPRETED, kind, no_gradient, runnable
from .compression import _sparse_matmul_compress_kernel, _sparse_matmul_prune_kernel
from .formats import CHUNK, EIGHT_BITS, metadata_shape, multiple
from .launch import Launch
from .library import decompress_plan
from .plans import capability

_NAMESPACE = __package__.replace(".", "_")
_DTYPES = (*FLOATS, *EIGHT_BITS)
# The bits of infinity as an integer: a magnitude with larger bits is NaN.
_INFINITY = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80, torch.float32: 0x7F800000, torch.float64: 0x7FF << 52}
PRUNE_BLOCK = 2048  # 16 elements per thread
MAX_SIZE = 2**31 - 512  # the end of the last tile must fit in 32 bits
_NAMES = "float32, float16, bfloat16, float8_e4m3fn or float8_e5m2"


class Compressed(NamedTuple):
    """A weight [N, K] with two of each four elements kept. A pytree, like every named tuple.

    values    [N, K / 2]: the kept elements, in order
    metadata  [ceil(K / 64), ceil(N / 16), 64] int16: their positions; with fp8 values in a different order
    """

    values: torch.Tensor
    metadata: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K] of the weight."""
        return self.values.shape[0], 2 * self.values.shape[1]


def prune(w: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros two of each four elements along the last dimension.

        mask[..., 4 c + p] = w[..., 4 c + p] is one of the two largest magnitudes of its chunk c
        pruned = where(mask, w, 0)

    Among equal magnitudes the one with the lower index is kept; NaN counts as the largest. Differentiable in w. Without
    a mask it is one pass of a kernel where that can run, otherwise plain PyTorch with the same bits.

    w     [..., K] floating-point, K a multiple of 4. For fp8, which has no gradient, magnitudes are those of the codes.
    mask  boolean, of w's shape, at most two of each chunk True; None: by magnitudes

    Returns (pruned, mask), both of w's shape.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or mask, RuntimeError for fp8 w that
    requires a gradient.

    Source: Mishra et al. 2021 (arXiv:2104.08378).
    """
    if not isinstance(w, torch.Tensor) or not w.is_floating_point():
        raise TypeError(f"prune: w must be a floating-point tensor, got {kind(w)}")
    if w.dim() == 0 or w.shape[-1] % CHUNK:
        raise ValueError(f"prune: w must be [..., K] with K a multiple of {CHUNK}, got {list(w.shape)}")
    if w.dtype in EIGHT_BITS:
        no_gradient("prune", w=w)
        codes, mask = _pruned(w.detach().view(torch.uint8), mask)
        return codes.view(w.dtype), mask
    if mask is None and w.numel() and _takes(w):
        return _prune_op(w)
    return _pruned(w, mask)


def _takes(w: torch.Tensor) -> bool:
    """Whether the custom op supports w: where kernels run, and outside of forward AD and functorch transforms, which
    cannot differentiate a custom op."""
    if not (w.is_cuda or (w.device.type == "cpu" and INTERPRETED)):
        return False
    if torch.compiler.is_compiling():
        return True
    return forward_ad._current_level < 0 and not torch._C._are_functorch_transforms_active()


@torch.library.custom_op(f"{_NAMESPACE}::prune", mutates_args=())
def _prune_op(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Prunes by magnitudes; for dtypes of 16 bits or more."""
    w = w.contiguous()
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[w.itemsize]
    kept, mask = torch.empty_like(w), torch.empty_like(w, dtype=torch.bool)
    options = {"SIGN_OFF": torch.iinfo(bits).max, "NAN": _INFINITY[w.dtype] + 1, "BLOCK": PRUNE_BLOCK, "num_warps": 4}
    grid = (triton.cdiv(w.numel(), PRUNE_BLOCK),)
    launch = Launch(_sparse_matmul_prune_kernel, grid, w.device, (w.numel(),), **options)
    launch(w.view(bits), kept.view(bits), mask.view(torch.uint8))
    return kept, mask


@_prune_op.register_fake
def _(w):
    return w.new_empty(w.shape), w.new_empty(w.shape, dtype=torch.bool)


@_prune_op.register_vmap
def _(info, in_dims, w):
    return _prune_op(w.movedim(in_dims[0], 0)), (0, 0)


def _save(ctx, inputs, output) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _gradient(ctx, dkept, _):
    """The gradient in PyTorch, so that it can be differentiated again."""
    (mask,) = ctx.saved_tensors
    return torch.where(mask, dkept, 0)


_prune_op.register_autograd(_gradient, setup_context=_save)


def _pruned(w: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """`prune` in PyTorch, also for fp8 codes: without sign they are ordered as the magnitudes, NaN above all."""
    if mask is None:
        sizes = w.detach() & 0x7F if w.dtype == torch.uint8 else w.detach().abs()
        chunks = sizes.unflatten(-1, (-1, CHUNK)) if w.shape[-1] else sizes.reshape(*w.shape[:-1], 0, CHUNK)
        largest = chunks.sort(dim=-1, descending=True, stable=True).indices[..., :2]
        mask = torch.zeros_like(chunks, dtype=torch.bool).scatter(-1, largest, True).reshape(w.shape)
    else:
        if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
            raise TypeError(f"prune: mask must be a boolean tensor, got {kind(mask)}")
        if mask.shape != w.shape or mask.device != w.device:
            wanted = f"{list(w.shape)} on {w.device} like w"
            raise ValueError(f"prune: mask must be {wanted}, got {list(mask.shape)} on {mask.device}")
        if _overfull(mask):
            raise ValueError("prune: mask must have at most two True of each four along the last dimension")
    return torch.where(mask, w, 0), mask


def compress(w: torch.Tensor, check: bool = False) -> Compressed:
    """Compresses a weight of 2:4 sparsity to its non-zeros and their positions.

    Where a chunk has fewer than two non-zeros, zeros at the lowest other positions are kept as values too. Where it has
    more, the first two are kept and the others lost or, with `check`, a ValueError is raised. Not differentiable: train
    `values`, whose gradient `sparse_matmul` computes.

    w      [N, K] float32, float16 or bfloat16, K a multiple of 4; or float8_e4m3fn or float8_e5m2, K a multiple of 64,
           whose codes 0x00 and 0x80 are zeros. N and K are at most 2^31 - 512. Read without a copy if the last stride
           is 1.
    check  verify that w has 2:4 sparsity, which synchronises with the GPU

    Returns Compressed(values [N, K / 2] in w's dtype, metadata int16); `formats.py` defines the order of the metadata.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape and, with `check`, for other sparsity, RuntimeError
    for a CPU tensor outside Triton's interpreter.
    """
    if not isinstance(w, torch.Tensor) or w.dtype not in _DTYPES:
        raise TypeError(f"compress: w must be a tensor of {_NAMES}, got {kind(w)}")
    if w.dim() != 2 or w.shape[1] % multiple(w.dtype) or max(w.shape) > MAX_SIZE:
        wanted = f"[N, K] with K a multiple of {multiple(w.dtype)}"
        raise ValueError(f"compress: w must be {wanted} in {w.dtype}, both at most {MAX_SIZE}, got {list(w.shape)}")
    runnable("compress", "w", w)
    dtype, w = w.dtype, _bytes(w.detach())
    if check and _overfull((w & 0x7F if w.dtype == torch.uint8 else w) != 0):
        raise ValueError("compress: w must have at most two non-zeros of each four along the last dimension")
    values, metadata = _compress_op(w)
    return Compressed(_numbers(values, dtype), metadata)


def decompress(compressed: Compressed) -> torch.Tensor:
    """Decompresses a weight to its dense form. Not differentiable.

    compressed  as `compress` returns it

    Returns the weight [N, K] in the dtype of values, with zeros at the pruned positions.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape or device, RuntimeError for a CPU tensor outside
    Triton's interpreter.
    """
    check_compressed("decompress", compressed)
    runnable("decompress", "values", compressed.values)
    values = compressed.values.detach()
    return _numbers(_decompress_op(_bytes(values), compressed.metadata), values.dtype)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """fp8 as uint8, which all functions of PyTorch and Triton's interpreter support; other dtypes unchanged."""
    return x.view(torch.uint8) if x.dtype in EIGHT_BITS else x


def _numbers(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `_bytes`."""
    return x.view(dtype) if dtype in EIGHT_BITS else x


def check_compressed(function: str, compressed: object) -> None:
    """Raises TypeError or ValueError where `compressed` is not a valid compressed weight."""
    if not isinstance(compressed, tuple) or len(compressed) != 2:
        raise TypeError(f"{function}: compressed must be a Compressed, got {type(compressed).__name__}")
    values, metadata = compressed
    if not isinstance(values, torch.Tensor) or values.dtype not in _DTYPES:
        raise TypeError(f"{function}: values must be a tensor of {_NAMES}, got {kind(values)}")
    if (
        values.dim() != 2
        or 2 * values.shape[1] % multiple(values.dtype)
        or max(values.shape[0], 2 * values.shape[1]) > MAX_SIZE
    ):
        wanted = f"[N, K / 2] with K a multiple of {multiple(values.dtype)}"
        sizes = f"N and K at most {MAX_SIZE}"
        raise ValueError(f"{function}: values must be {wanted} in {values.dtype}, {sizes}, got {list(values.shape)}")
    if not isinstance(metadata, torch.Tensor) or metadata.dtype != torch.int16:
        raise TypeError(f"{function}: metadata must be a tensor of int16, got {kind(metadata)}")
    wanted = metadata_shape(values.shape[0], 2 * values.shape[1])
    if metadata.shape != wanted:
        raise ValueError(f"{function}: metadata must be {list(wanted)} for these values, got {list(metadata.shape)}")
    if metadata.device != values.device:
        raise ValueError(f"{function}: metadata must be on {values.device} like values, got {metadata.device}")


def _overfull(kept: torch.Tensor) -> bool:
    return kept.numel() > 0 and bool((kept.unflatten(-1, (-1, CHUNK)).sum(-1) > 2).any())


@torch.library.custom_op(f"{_NAMESPACE}::compress", mutates_args=())
def _compress_op(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    w = w if w.stride(1) == 1 else w.contiguous()
    (rows, depth), shape = w.shape, metadata_shape(*w.shape)
    values = w.new_empty(rows, depth // 2)
    metadata = w.new_empty(shape, dtype=torch.int16)
    if w.numel():
        config = configs.pick_compress_config(rows, depth, w.dtype, capability(w))
        grid = (triton.cdiv(rows, config.block_n) * triton.cdiv(depth, config.block_k),)
        options = {"BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "num_warps": config.num_warps}
        launch = Launch(_sparse_matmul_compress_kernel, grid, w.device, (rows, depth, w.stride(0)), **options)
        launch(w, values, metadata)
    return values, metadata


@_compress_op.register_fake
def _(w):
    rows, depth = w.shape
    return w.new_empty(rows, depth // 2), w.new_empty(metadata_shape(rows, depth), dtype=torch.int16)


@torch.library.custom_op(f"{_NAMESPACE}::decompress", mutates_args=())
def _decompress_op(values: torch.Tensor, metadata: torch.Tensor) -> torch.Tensor:
    values = values if values.stride(1) == 1 else values.contiguous()
    if not values.numel():
        return values.new_empty(values.shape[0], 2 * values.shape[1])
    return decompress_plan(values, capability(values))(values, metadata.contiguous())


@_decompress_op.register_fake
def _(values, metadata):
    return values.new_empty(values.shape[0], 2 * values.shape[1])
