"""The public function: checks, fast path of eager calls, registration with torch.library. Hooks: `hook` and `fsdp`."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .break_even import break_even_bandwidth as break_even_bandwidth
from .checks import FLOATS, kind, runnable
from .chunks import KINDS
from .exchange import all_reduce, group_of
from .fsdp import CompressedReduceScatter as CompressedReduceScatter
from .fsdp import compress_fsdp as compress_fsdp
from .hook import compress_hook as compress_hook
from .launch import lean
from .state import CompressState as CompressState
from .transport import TRANSPORTS
from .transport import release as release

# Named after the package, so that a copy of this folder under another name registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")


def gradient_compression(
    tensor: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    kind: str = "int8",
    average: bool = True,
    transport: str = "auto",
) -> torch.Tensor:
    """Computes an all-reduce in place that sends 8 or 4 bits per element: a two-shot algorithm on quantised chunks,
    which are summed in fp32.

        x        = tensor + residual
        q        = quantise(x)                           residual ← x − dequantise(q)
        mean_r   = Σ over ranks of dequantise(q_r) / N   of chunk r on rank r, in the order of the ranks
        p_r      = quantise(mean_r)                      residual_r ← residual_r + N · (mean_r − dequantise(p_r))
        tensor   = dequantise(p_0), dequantise(p_1), …

    A block of 256 consecutive elements of the flattened tensor shares a scale, max |x| of the block / largest, in fp32:
    largest is 127 for int8, 7 for int4, 448 for fp8 (e4m3). Chunks are an integral number of blocks. All ranks get the
    same bits, and repeated calls agree bit for bit. The residual carries the errors of both quantisations into the next
    call (error feedback; the owner of a chunk keeps the error of the second one within its residual). So over many
    calls the sum of the outputs equals that of the inputs, except for one call's error.

    An element that is NaN or infinite on any rank becomes NaN on all ranks. It does not affect the scale of its block
    or the residual, which stays finite. Not differentiable.

    tensor     fp32, fp16 or bf16, any shape, with the same number of elements on each rank; updated in place. Copied
               and copied back if it is not contiguous, as is the residual.
    residual   None or a tensor of tensor's shape, of any of these dtypes (bf16 is enough), initially zeros; updated.
               In fp16 errors beyond ±65504 are stored as these, and the rest of them is lost.
    group      the process group, by default the world. Without a group, or with one rank, the formula is computed for
               N = 1: quantised and dequantised twice, nothing sent.
    kind       "int8", "fp8" or "int4"
    average    True: the sum over the ranks divided by their number; False: the sum
    transport  "collectives": all_to_all and all_gather of the group's backend, any number of hosts. "peers": GPUs of
               one host write into each other's memory (torch's symmetric memory); all ranks must make their calls of
               the same size and stream in the same order. "auto": "peers" if possible, unless NCCL_P2P_DISABLE is set.
               With one rank: "collectives" runs the kernels of several ranks, the others one fused kernel.

    Returns tensor. With several ranks the first call of a size may synchronise with the other ranks on the host
    (symmetric memory): make it before a CUDA graph is captured.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device, kind or transport, RuntimeError for a CPU
    tensor outside Triton's interpreter.

    Error feedback: Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847. That of the second quantisation is as
    in DoubleSqueeze, Tang et al. 2019, arXiv:1905.05957.
    """
    if not lean(tensor, residual):
        _check(tensor, residual, kind, transport)
        found = group_of(group)
        name = "" if found is None else found.group_name
        with torch.no_grad():
            _all_reduce_op(tensor, residual, name, kind, average, transport)
        return tensor
    _check(tensor, residual, kind, transport)
    with torch.no_grad():
        _run(tensor, residual, group_of(group), kind, average, transport)
    torch.autograd.graph.increment_version([tensor] if residual is None else [tensor, residual])
    return tensor


def _check(tensor: torch.Tensor, residual: torch.Tensor | None, compression: str, transport: str) -> None:
    for name, value in (("tensor", tensor), ("residual", residual)):
        if name == "residual" and value is None:
            continue
        if not isinstance(value, torch.Tensor) or value.dtype not in FLOATS:
            wanted = "a tensor of float32, float16 or bfloat16"
            raise TypeError(f"gradient_compression: {name} must be {wanted}, got {kind(value)}")
    if residual is not None and residual.shape != tensor.shape:
        shapes = f"{tuple(tensor.shape)}, got {tuple(residual.shape)}"
        raise ValueError(f"gradient_compression: residual must have tensor's shape {shapes}")
    if residual is not None and residual.device != tensor.device:
        devices = f"{tensor.device}, got {residual.device}"
        raise ValueError(f"gradient_compression: residual must be on tensor's device {devices}")
    for name, option, known in (("kind", compression, KINDS), ("transport", transport, TRANSPORTS)):
        if option not in known:
            wanted = ", ".join(map(repr, known))
            raise ValueError(f"gradient_compression: {name} must be one of {wanted}, got {option!r}")
    if transport == "peers" and not tensor.is_cuda:
        raise ValueError(f"gradient_compression: tensor must be on a GPU with transport 'peers', got {tensor.device}")
    runnable("gradient_compression", "tensor", tensor)


def _run(tensor, residual, group, compression, average, transport) -> None:
    """Runs the all-reduce on checked tensors of any strides."""
    flat = tensor.detach().contiguous()
    kept = None if residual is None else residual.detach().contiguous()
    all_reduce(flat.view(-1), None if kept is None else kept.view(-1), group, compression, average, transport)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat)
    if kept is not None and residual is not None and kept.data_ptr() != residual.data_ptr():
        residual.copy_(kept)


@torch.library.custom_op(f"{_NAMESPACE}::gradient_compression", mutates_args=("tensor", "residual"))
def _all_reduce_op(
    tensor: torch.Tensor, residual: torch.Tensor | None, group_name: str, kind: str, average: bool, transport: str
) -> None:
    group = (
        dist.distributed_c10d._resolve_process_group(dist.distributed_c10d.GroupName(group_name))
        if group_name
        else None
    )
    _run(tensor, residual, group, kind, average, transport)


@_all_reduce_op.register_fake
def _(tensor, residual, group_name, kind, average, transport):
    return None
