"""Shared by the launchers: memory layout of tensors, problem sizes, and the kernel arguments that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .configs.forward import ROWS as HOPPER_ROWS
from .configs.portable import Config, precision

LOG2_E = 1.4426950408889634

# Normal fp32 numbers, also times log2(e): a smaller scale is 0 in a kernel, and 0 times a masked score of −inf is NaN.
LEAST_SCALE, MOST_SCALE = 2.0**-126, 2.0**126

# Largest row stride in elements: offsets within a tile of up to 256 rows are 32 bits wide.
MOST_STRIDE = 1 << 22

# `do_not_specialize`: Triton compiles no variants for values of 1 or multiples of 16. `Problem.unit` gives alignment.
_SIZES = ("queries", "padded", "keys", "dim", "heads", "all_heads", "group", "section", "splits", "keys_per_split")
_STRIDES = (
    "qb",
    "qh",
    "qm",
    "kb",
    "kh",
    "kn",
    "vb",
    "vh",
    "vn",
    "ob",
    "oh",
    "om",
    "gb",
    "gh",
    "gm",
    "eb",
    "eh",
    "en",
    "rb",
    "rh",
    "rm",
    "lh",
)
PLAIN = [
    *(*_SIZES, "left", "right", "scale", "scale_log2"),
    *(f"stride_{name}" for name in (*_STRIDES, "db", "dh", "dm", "dn")),
]


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor itself if its rows of D are contiguous, else a contiguous copy."""
    return tensor if _in_place(tensor) else tensor.contiguous()


def zero(x: torch.Tensor) -> None:
    """Zeros a slice of rows of each head, 8 bytes at a time if alignment permits. PyTorch fills a non-contiguous tensor
    element by element: 33 MB of bf16 take 22 us on an H200, and 8 us this way."""
    wide = 8 // x.element_size()
    if x.stride(-1) == 1 and not any(n % wide for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1])):
        x = x.view(torch.int64)
    x.zero_()


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


def head_stride(lse: torch.Tensor) -> int:
    """Returns the stride between consecutive heads of [B, H, S], over all batches."""
    return lse.stride(0) if lse.shape[1] == 1 else lse.stride(1)


@dataclass(frozen=True)
class Problem:
    """Attention of q [B, Hq, Sq, D] to the first `keys` rows of k and v [B, Hkv, Sk, D], all `readable`.

    Scores are multiplied by `scale`. Query i sees keys i + keys − Sq − left to i + keys − Sq + right; -1 is no bound.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    left: int
    right: int
    keys: int

    @property
    def queries(self) -> int:
        return self.q.shape[2]

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
    def banded(self) -> bool:
        """Whether there is a causal mask or a window."""
        return self.left >= 0 or self.right >= 0

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

    def arguments(self, unit: int) -> dict[str, Any]:
        """Kernel arguments: q, k, v, sizes, strides and the band (causal mask or window)."""
        return {
            "q_ptr": self.q,
            "k_ptr": self.k,
            "v_ptr": self.v,
            "queries": self.queries,
            "keys": self.keys,
            "dim": self.dim // unit,
            "group": self.group,
            "left": self.left,
            "right": self.right,
            "scale_log2": self.scale * LOG2_E,
            **strides("q", self.q, unit),
            **strides("k", self.k, unit, "n"),
            **strides("v", self.v, unit, "n"),
            "UNIT": unit,
            "HAS_LEFT": self.left >= 0,
            "HAS_RIGHT": self.right >= 0,
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

    def kind(self) -> tuple[int, bool, torch.dtype, tuple[int, int]]:
        """(dim, banded, dtype, capability): the arguments of the `pick_*` functions of the Triton kernels."""
        return self.dim, self.banded, self.q.dtype, self.capability()

    def capability(self) -> tuple[int, int]:
        """Compute capability of the GPU; (0, 0) in the interpreter."""
        return torch.cuda.get_device_capability(self.q.device) if self.q.is_cuda else (0, 0)

    def sms(self) -> int:
        """SMs of the GPU. 4 in the interpreter, so that small problems exercise all schedules."""
        return torch.cuda.get_device_properties(self.q.device).multi_processor_count if self.q.is_cuda else 4


@dataclass(frozen=True)
class Saved:
    """Saved tensors of the forward, and incoming gradients. out and dout are `readable`, the others contiguous."""

    out: torch.Tensor
    lse: torch.Tensor
    statistics: torch.Tensor | None
    dout: torch.Tensor
    dlse: torch.Tensor | None


def tma_unsupported_reason(problem: Problem, *others: torch.Tensor) -> str | None:
    """Returns why TMA cannot read the tensors of the problem and `others`, or None if it can."""
    reason = hopper_unsupported_reason(problem)
    if reason is None and problem.unit(*others) != 8:
        reason = "TMA needs rows, heads and batches on 16-byte boundaries"
    return reason


def hopper_unsupported_reason(problem: Problem) -> str | None:
    """Returns why the versions for Hopper cannot run the problem, or None. Alignment is not checked here."""
    if problem.capability() != (9, 0):
        return "it needs a GPU of compute capability 9.0 (Hopper)"
    if problem.q.dtype not in (torch.float16, torch.bfloat16):
        return f"it supports float16 and bfloat16, not {problem.q.dtype}"
    if problem.left >= 0 or problem.right > 0:
        return "it does not support a window"
    tiles = problem.all_heads * -(-problem.queries // HOPPER_ROWS)
    if max(tiles, problem.queries + problem.k.shape[2]) >= 2**31:
        return "its 32-bit indices of tiles and rows would overflow"
    return None


def unexpanded(x: torch.Tensor) -> torch.Tensor:
    """Returns x, or a copy if it is expanded (stride 0): CUDA's documentation does not define tensor maps for that."""
    expanded = any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.contiguous() if expanded else x
