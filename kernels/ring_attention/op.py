"""The public function `ring_attention`: checks, agreement between ranks, autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ..attention import attention
from . import configs
from .agreement import Terms, agree
from .backward import ring_backward
from .blocks import Ring
from .forward import ring_forward
from .layout import check_layout, place
from .layout import positions as positions
from .layout import shard as shard
from .layout import unshard as unshard
from .peer_writes import release as release
from .schedule import ROTATIONS, Problem
from .simulate import Rates as Rates
from .simulate import simulate as simulate

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
TRANSPORTS = ("auto", "peer", "messages", "none")
MAX_DIM = 256


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "zigzag",
    q_lengths: Sequence[int] | None = None,
    k_lengths: Sequence[int] | None = None,
    rotate: str = "auto",
    return_lse: bool = False,
    transport: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes attention over a sequence that is sharded over the ranks of a process group.

        s = scale · q kᵀ     out = softmax(s) v     lse = log Σ exp(s)     over the keys of all ranks that a query sees

    q          [B, Hq, Sq, D], this rank's queries, as `shard` selects them; 1 <= D <= 256, fp32, fp16 or bf16
    k, v       [B, Hkv, Sk, D], this rank's keys and values, dtype and device of q; Hq is a multiple of Hkv
    group      the process group, by default the default group; with one rank or no group this is `attention`
    causal     in the whole sequence, query i sees keys j <= i + ΣSk − ΣSq: the last query sees all
    scale      a positive number, by default 1 / sqrt(D)
    layout     "zigzag", "striped" or "contiguous": which rows a rank has. It matters only with `causal`. Zigzag and
               striped balance the work under a causal mask.
    q_lengths  rows of q on each rank, if they differ; any may be 0. By default all ranks have the same number.
    k_lengths  the same for k and v
    rotate     "keys" (each rank fetches keys and values of the others), "queries" (each rank fetches queries of the
               others, and sends partial outputs back, to be merged), "gather" (all-gather of keys and values before
               the kernels), or "auto": "keys" or "queries", whichever moves fewer bytes (`configs.pick_rotation`)
    return_lse also return lse [B, Hq, Sq], fp32, natural logarithm. Both outputs are differentiable.
    transport  "peer" (copy engines write into the memory of peers), "messages" (send and receive of the group), or
               "auto": "peer" on one host with NCCL and peer access between its GPUs, else "messages". "none" sends
               nothing, and its results are wrong: it serves to measure the exposed time of transfers.

    Returns out, or (out, lse). out has shape and dtype of q. A query that sees no key has out 0, lse −inf and zero
    gradient. Every rank of the group must call this, and its backward, in the same order, with arguments that differ
    only in their rows. That is checked at the first call of each kind, by one gather of a few words, and not again.
    Sums over ranks are fp32, in a fixed order: results are deterministic wherever those of `attention` are.

    Memory on each rank in addition to inputs and outputs. Forward: fp32 out, and two blocks of K and V (with two ranks
    one). Backward: fp32 dq, dk, dv, as many blocks of K and V, and fp32 blocks of dK and dV: one that arrives and two
    that leave (with two ranks one). With "peer", data arrives in memory that is kept between calls (`release` frees
    it). k and v whose heads are not contiguous rows are then copied, so that copy engines can read them.

    Raises TypeError for a wrong dtype or group, ValueError for a wrong shape, device or option and for arguments that
    differ between ranks, RuntimeError for a transport that is not available, and for "peer" in a CUDA graph.

    Source: Liu et al. 2023, arXiv:2310.01889.
    """
    _check_options(group, layout, rotate, transport, scale)
    rank, world = place(group)
    for name, tensor, lengths in (("q", q, q_lengths), ("k", k, k_lengths)):
        if lengths is not None:
            _check_lengths(name, tensor, lengths, rank, world)
    if world == 1:
        return attention(q, k, v, causal=causal, scale=scale, return_lse=return_lse)
    _check(q, k, v)
    told = [None if lengths is None else tuple(lengths) for lengths in (q_lengths, k_lengths)]
    ring = _agreed(q, k, v, group, (bool(causal), scale, layout, rotate, transport), *told)
    out, lse = _RingAttention.apply(q, k, v, ring)
    return (out, lse) if return_lse else out


class _RingAttention(torch.autograd.Function):
    """The autograd function. Every rank takes part in the transfers of the backward, whichever gradients it needs."""

    @staticmethod
    def forward(ctx, q, k, v, ring):
        out, lse = ring_forward(ring, q, k, v)
        ctx.set_materialize_grads(False)  # lse rarely has a gradient: None, not a tensor of zeros
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        gradients = ring_backward(ctx.ring, dout, dlse, q, k, v, out, lse)
        needed = ctx.needs_input_grad[:3]
        return *(g if need else None for g, need in zip(gradients, needed, strict=True)), None


@torch.compiler.disable
def _agreed(q, k, v, group, options, q_lengths, k_lengths) -> Ring:
    """Returns the Ring of this call, after checking that the arguments of all ranks agree."""
    causal, scale, layout, rotate, transport = options
    differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    shapes = [(*t.shape[:2], t.shape[3]) for t in (q, k)]
    shared = dict(zip(("causal", "scale", "layout", "rotate", "transport"), options, strict=True))
    shared |= {"q's heads and D": shapes[0], "k's heads and D": shapes[1], "q's dtype": str(q.dtype)}
    terms = Terms(q.shape[2], k.shape[2], (*shared.items(), ("whether q, k or v requires grad", differentiated)))
    made = agree(terms, group, q.device, q_lengths, k_lengths)
    problem = Problem(layout, causal, made.q_lengths, made.k_lengths)
    if reason := problem.unsupported_reason():
        raise ValueError(f"ring_attention: layout={layout!r} does not support these arguments: {reason}")
    if transport == "peer" and made.peer_writes_reason:
        raise RuntimeError(f'ring_attention: transport="peer" cannot run here: {made.peer_writes_reason}')
    if rotate == "auto":
        sizes = q.shape[1], k.shape[1], q.shape[3], q.dtype.itemsize
        rotate = configs.pick_rotation(made.q_lengths, made.k_lengths, *sizes)
    if transport == "auto":
        transport = "messages" if made.peer_writes_reason else "peer"
    return Ring(problem, dist.get_rank(group), rotate, scale, group, transport)


def _check_options(group, layout, rotate, transport, scale) -> None:
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"ring_attention: group must be a ProcessGroup or None, got {type(group).__name__}")
    check_layout(layout)
    for name, value, known in (("rotate", rotate, ("auto", *ROTATIONS)), ("transport", transport, TRANSPORTS)):
        if value not in known:
            raise ValueError(f"ring_attention: {name} must be one of {', '.join(known)}, got {value!r}")
    if scale is not None and not 0 < scale < float("inf"):
        raise ValueError(f"ring_attention: scale must be a positive number, got {scale}")


def _check_lengths(name: str, tensor: torch.Tensor, lengths: Sequence[int], rank: int, world: int) -> None:
    if len(lengths) != world or min(lengths) < 0:
        raise ValueError(f"ring_attention: {name}_lengths must be {world} numbers of rows, got {list(lengths)}")
    if isinstance(tensor, torch.Tensor) and tensor.dim() == 4 and lengths[rank] != tensor.shape[2]:
        raise ValueError(
            f"ring_attention: {name} must have the {lengths[rank]} rows that {name}_lengths gives rank {rank}, "
            f"got {tensor.shape[2]}"
        )


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        found = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        wanted = "a tensor of float32, float16 or bfloat16" if name == "q" else "a tensor of q's dtype"
        if found not in FLOATS or found != q.dtype:
            raise TypeError(f"ring_attention: {name} must be {wanted}, got {found}")
        if tensor.device != q.device:
            raise ValueError(f"ring_attention: {name} must be on q's device {q.device}, got {tensor.device}")
        if tensor.dim() != 4 or not 1 <= tensor.shape[3] <= MAX_DIM:
            shape = tuple(tensor.shape)
            raise ValueError(f"ring_attention: {name} must be [B, H, S, D] with 1 <= D <= {MAX_DIM}, got shape {shape}")
        if (tensor.shape[0], tensor.shape[3]) != (q.shape[0], q.shape[3]):
            raise ValueError(
                f"ring_attention: {name} must have the B and D of q {tuple(q.shape)}, got shape {tuple(tensor.shape)}"
            )
    if v.shape != k.shape:
        raise ValueError(f"ring_attention: v must have k's shape {tuple(k.shape)}, got {tuple(v.shape)}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"ring_attention: q must have a multiple of k's {k.shape[1]} heads, got {q.shape[1]}")
