"""The public functions that make a compressed weight: prune, compress, decompress."""

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
# Infinity as an integer of its bits: what is larger without its sign is NaN.
_INFINITY = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80, torch.float32: 0x7F800000, torch.float64: 0x7FF << 52}
PRUNE_BLOCK = 2048  # 16 numbers a thread
MAX_SIZE = 2**31 - 512  # tile coordinates have 32 bits, also those of the last tile's end
_NAMES = "float32, float16, bfloat16, float8_e4m3fn or float8_e5m2"


class Compressed(NamedTuple):
    """A weight [N, K] of which two in four are kept. A pytree, as every named tuple is.

    values    [N, K / 2] the elements that are kept, in their order
    metadata  [ceil(K / 64), ceil(N / 16), 64] int16: where they were, in an order of its own where values have 8 bits
    """

    values: torch.Tensor
    metadata: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K] of the weight."""
        return self.values.shape[0], 2 * self.values.shape[1]


def prune(w: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros two of each four elements along the last dimension: w · mask, and the mask. Without a mask it is
    one pass of a kernel where that can run; else plain PyTorch, which gives the same bits.

        mask[..., 4 c + p] = w[..., 4 c + p] is one of the two largest magnitudes of its chunk c

    Of equal magnitudes the one of the lower index stays; NaN counts as the largest. The result has zeros where the mask
    is False, whatever was there, and is differentiable in w.

    w     [..., K] floating-point, K a multiple of 4. Of numbers of 8 bits, which have no gradient, magnitudes are those
          of the codes.
    mask  boolean, of w's shape, at most two of each chunk True; None: by magnitudes

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or mask, RuntimeError for a w of 8 bits
    that requires a gradient.

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
    """Whether the op can have w: where kernels run, and outside of forward AD and functorch's transforms, whose grad an
    op of torch.library has not."""
    if not (w.is_cuda or (w.device.type == "cpu" and INTERPRETED)):
        return False
    if torch.compiler.is_compiling():
        return True
    return forward_ad._current_level < 0 and not torch._C._are_functorch_transforms_active()


@torch.library.custom_op(f"{_NAMESPACE}::prune", mutates_args=())
def _prune_op(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """By magnitudes, of numbers of 16 bits or more."""
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
    """By PyTorch, so that it can be derived again."""
    (mask,) = ctx.saved_tensors
    return torch.where(mask, dkept, 0)


_prune_op.register_autograd(_gradient, setup_context=_save)


def _pruned(w: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """`prune`, also of codes of 8 bits: without their sign they are in the order of magnitudes, NaN last."""
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
    """The compressed form of a weight that has 2:4 sparsity: its non-zeros, and where they are.

    Where a chunk has fewer than two non-zeros, zeros at the lowest other positions are kept as values too. Where it has
    more, the first two are kept and the others lost, or with `check`, which synchronises, a ValueError raised. Not
    differentiable: what is trained is `values`, whose gradient `sparse_matmul` gives.

    w      [N, K] float32, float16 or bfloat16, K a multiple of 4; or float8_e4m3fn or float8_e5m2, K a multiple of 64,
           whose codes 0x00 and 0x80 are zeros. N and K are at most 2^31 - 512. Read in place if the last stride is 1.
    check  whether to look if w has 2:4 sparsity

    Returns Compressed(values [N, K / 2] in w's dtype, metadata int16); `formats.py` has the order of the metadata.

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
    """The dense weight [N, K] of a compressed one, with its zeros. Not differentiable.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape or device, RuntimeError for a CPU tensor outside
    Triton's interpreter.
    """
    check_compressed("decompress", compressed)
    runnable("decompress", "values", compressed.values)
    values = compressed.values.detach()
    return _numbers(_decompress_op(_bytes(values), compressed.metadata), values.dtype)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Numbers of 8 bits as bytes, which every function of PyTorch and Triton's interpreter take; others as they are."""
    return x.view(torch.uint8) if x.dtype in EIGHT_BITS else x


def _numbers(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The way back."""
    return x.view(dtype) if dtype in EIGHT_BITS else x


def check_compressed(function: str, compressed: object) -> None:
    """TypeError or ValueError where this is no compressed weight."""
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
