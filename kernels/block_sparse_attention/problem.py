"""Shared by the launchers: memory layout of tensors, problem sizes, and the kernel arguments that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from .configs import Config, precision

LOG2_E = 1.4426950408889634

# Largest row stride in elements: offsets within a tile of up to 256 rows are 32 bits wide.
MOST_STRIDE = 1 << 22

# `do_not_specialize`: Triton compiles no variants for values of 1 or multiples of 16. `Problem.unit` gives alignment.
_SIZES = ("queries", "padded", "keys", "rows", "columns", "dim", "heads", "all_heads", "group", "section")
_STRIDES = ("qb", "qh", "qm", "kb", "kh", "kn", "vb", "vh", "vn", "ob", "oh", "om", "gb", "gh", "gm")
_MORE_STRIDES = ("db", "dh", "dm", "dn", "eb", "eh", "en", "tb", "th", "bb", "bh", "bm", "bn")
PLAIN = [*_SIZES, "scale", "scale_log2", *(f"stride_{name}" for name in (*_STRIDES, *_MORE_STRIDES))]


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor itself if its rows of D are contiguous, else a contiguous copy."""
    return tensor if _in_place(tensor) else tensor.contiguous()


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Returns uninitialised memory, `readable`: in the tensor's memory order if `keeps_order`, else row-major."""
    if keeps_order(tensor):
        return torch.empty_like(tensor)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def keeps_order(tensor: torch.Tensor) -> bool:
    """Whether the tensor is `readable`, and so is what torch.empty_like makes of it. The latter is not where elements
    overlap so that another dimension than D has stride 1 too, as in the sliding windows of `unfold`."""
    if not _in_place(tensor):
        return False
    return 1 not in tensor.stride()[:3] or torch.empty_like(tensor, device="meta").stride(3) == 1


def _in_place(tensor: torch.Tensor) -> bool:
    return tensor.stride(3) == 1 and tensor.stride(2) <= MOST_STRIDE


def strides(name: str, tensor: torch.Tensor, unit: int, row: str = "m") -> dict[str, int]:
    """Returns the strides of batch, head and row as kernel arguments, in units of `unit` elements."""
    return {f"stride_{name}{axis}": tensor.stride(i) // unit for i, axis in enumerate(("b", "h", row))}


@dataclass(frozen=True)
class Problem:
    """Attention of q [B, Hq, Sq, D] to k and v [B, Hkv, Sk, D], all `readable`, over the blocks of `table`.

    table   the table of `index`, int32 [1 or B, 1 or Hq, :]
    bias    None, or fp32 [B, Hq, nq, nk] of any strides: added to scale · q kᵀ
    block   block size: queries, and keys, of a block
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    bias: torch.Tensor | None
    scale: float
    block: int
    causal: bool

    @property
    def queries(self) -> int:
        return self.q.shape[2]

    @property
    def keys(self) -> int:
        return self.k.shape[2]

    @property
    def dim(self) -> int:
        return self.q.shape[3]

    @property
    def all_heads(self) -> int:
        """Query heads of all batches."""
        return self.q.shape[0] * self.q.shape[1]

    @property
    def all_kv_heads(self) -> int:
        """KV heads of all batches."""
        return self.k.shape[0] * self.k.shape[1]

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def rows(self) -> int:
        """Blocks of queries."""
        return triton.cdiv(self.queries, self.block)

    @property
    def columns(self) -> int:
        """Blocks of keys."""
        return triton.cdiv(self.keys, self.block)

    def row_tiles(self, config: Config) -> int:
        """Tiles of queries, including those of the last block that are past the last query."""
        return self.rows * (self.block // config.block_m)

    def column_tiles(self, config: Config) -> int:
        """Tiles of keys, likewise."""
        return self.columns * (self.block // config.block_n)

    def key_bytes(self) -> int:
        """Bytes of k and v per query head."""
        return 2 * self.keys * self.dim * self.k.element_size() // self.group

    def query_bytes(self) -> int:
        """Bytes of q and the incoming gradient per KV head."""
        return 2 * self.queries * self.dim * self.q.element_size() * self.group

    def unit(self, *others: torch.Tensor) -> int:
        """The unit, in elements, in which D and all strides are passed to a kernel: 16 bytes if all rows are 16-byte
        aligned, else one element. The compiler derives the alignment from it. So two kernels are compiled, not one for
        each combination of strides that are multiples of 16."""
        tensors = (self.q, self.k, self.v, *others)
        elements = 16 // self.q.element_size()
        sizes = {size for t in tensors for size in (t.shape[3], *t.stride()[:3])}
        aligned = all(size % elements == 0 for size in sizes) and all(t.data_ptr() % 16 == 0 for t in tensors)
        return elements if aligned else 1

    def table_strides(self) -> tuple[int, int]:
        """Strides of batch and head; 0 if batches or heads share one table."""
        batches, heads = self.table.shape[:2]
        return self.table.stride(0) if batches > 1 else 0, self.table.stride(1) if heads > 1 else 0

    def bias_strides(self) -> tuple[int, ...]:
        return (0, 0, 0, 0) if self.bias is None else self.bias.stride()

    def arguments(self, unit: int) -> dict[str, Any]:
        """Kernel arguments: q, k, v, table, bias, sizes and strides."""
        return {
            "q_ptr": self.q,
            "k_ptr": self.k,
            "v_ptr": self.v,
            "table_ptr": self.table,
            "bias_ptr": self.bias,
            "queries": self.queries,
            "keys": self.keys,
            "rows": self.rows,
            "columns": self.columns,
            "dim": self.dim // unit,
            "group": self.group,
            "scale_log2": self.scale * LOG2_E,
            **strides("q", self.q, unit),
            **strides("k", self.k, unit, "n"),
            **strides("v", self.v, unit, "n"),
            **dict(zip(("stride_tb", "stride_th"), self.table_strides(), strict=True)),
            **{f"stride_b{axis}": stride for axis, stride in zip("bhmn", self.bias_strides(), strict=True)},
            "UNIT": unit,
            "CAUSAL": self.causal,
            "BLOCK": self.block,
        }

    def tiles(self, config: Config) -> dict[str, Any]:
        """The constexprs of the tile shape, and the compiler's options."""
        return {
            "EVEN_D": self.dim == config.block_d,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_D": config.block_d,
            "PRECISION": precision(self.q.dtype),
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            # Without it ptxas limits registers so that two CTAs fit an SM: some fp32 kernels then spill a few bytes.
            "maxnreg": 255 if self.q.dtype == torch.float32 else None,
        }

    def even_rows(self) -> bool:
        """Whether the last block of queries is full."""
        return self.queries % self.block == 0

    def kind(self) -> tuple[int, int, bool, torch.dtype, tuple[int, int]]:
        """(dim, block, causal, dtype, capability): the arguments of the `pick_*` functions of the Triton kernels."""
        return self.dim, self.block, self.causal, self.q.dtype, self.capability()

    def capability(self) -> tuple[int, int]:
        """Compute capability of the GPU; (0, 0) in the interpreter."""
        return torch.cuda.get_device_capability(self.q.device) if self.q.is_cuda else (0, 0)

    def sms(self) -> int:
        """SMs of the GPU; 4 in the interpreter."""
        return torch.cuda.get_device_properties(self.q.device).multi_processor_count if self.q.is_cuda else 4


@dataclass(frozen=True)
class Saved:
    """Saved tensors of the forward, and incoming gradients. out and dout are `readable`, the others contiguous."""

    out: torch.Tensor
    lse: torch.Tensor
    statistics: torch.Tensor | None
    dout: torch.Tensor
    dlse: torch.Tensor | None


def unexpanded(x: torch.Tensor) -> torch.Tensor:
    """Returns x, or a copy if it is expanded (stride 0): CUDA's documentation does not define tensor maps for that."""
    expanded = any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.contiguous() if expanded else x
