"""The public function: checks, registration with torch.library, autograd."""

from __future__ import annotations

import torch
import triton

from .activation import ACTIVATIONS
from .kernel import swiglu_bwd, swiglu_fwd

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# As @triton.jit decided it when the kernels were imported; torch.compile cannot trace the knob itself.
INTERPRETED: bool = triton.knobs.runtime.interpret

# Named after the package, so that a copy of this folder under another name registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")


def swiglu(gate: torch.Tensor, up: torch.Tensor | None = None, *, activation: str = "silu") -> torch.Tensor:
    """A gated linear unit without its matrices (Shazeer 2020, arXiv:2002.05202, equations 5 and 6), in fp32.

        y = act(gate) · up                                    up given
        y = act(gate[..., :D]) · gate[..., D:]                up=None: both packed in one tensor

    activation    act(x)
    "silu"        x · σ(x)                                                       SwiGLU (β = 1)
    "gelu"        x · Φ(x) = x · (1 + erf(x / √2)) / 2                           GEGLU
    "gelu_tanh"   x · (1 + tanh(√(2/π) · (x + 0.044715 · x³))) / 2               GEGLU as in Gemma
    "relu"        max(x, 0)                                                      ReGLU
    "sigmoid"     σ(x) = 1 / (1 + exp(−x))                                       GLU (Dauphin et al. 2017)
    "identity"    x                                                              bilinear

    Differentiable in gate and up, which are all that is saved: the backward computes the activation again. The
    gradient of a packed tensor is one packed tensor, written in place by the kernel.

    gate    any shape and strides, or [..., 2·D] without `up`; fp32, fp16 or bf16
    up      shape, dtype and device of gate

    Tensors are read in place where all of them can be walked as rows of one stride each: any slices of rows or columns,
    hence the two halves of one projection, and the halves of a packed tensor; dense tensors in any order of their
    dimensions, if in the same one. Otherwise they are copied first. The same holds for the incoming gradient.

    Returns y in shape and dtype of gate (of its half) and in gate's memory order, as torch.empty_like.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape or device or an unknown activation, RuntimeError
    for a CPU tensor outside Triton's interpreter.
    """
    if not isinstance(gate, torch.Tensor) or gate.dtype not in DTYPES:
        raise TypeError(f"swiglu: gate must be a tensor of float32, float16 or bfloat16, got {_kind(gate)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"swiglu: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if up is None:
        if gate.dim() == 0 or gate.shape[-1] % 2:
            raise ValueError(f"swiglu: gate must be [..., 2·D] where up is not given, got shape {tuple(gate.shape)}")
    else:
        if not isinstance(up, torch.Tensor) or up.dtype != gate.dtype:
            raise TypeError(f"swiglu: up must be a tensor of gate's dtype {gate.dtype}, got {_kind(up)}")
        if up.shape != gate.shape:
            raise ValueError(f"swiglu: up must have gate's shape {tuple(gate.shape)}, got {tuple(up.shape)}")
        if up.device != gate.device:
            raise ValueError(f"swiglu: up must be on gate's device {gate.device}, got {up.device}")
    if not gate.is_cuda and not (gate.device.type == "cpu" and INTERPRETED):
        needed = "on a GPU, or on the CPU with TRITON_INTERPRET=1"
        raise RuntimeError(f"swiglu: gate must be {needed}, got {gate.device}")
    return _fwd_op(gate, up, activation)


def _kind(value: object) -> str:
    return str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__


@torch.library.custom_op(f"{_NAMESPACE}::swiglu_fwd", mutates_args=())
def _fwd_op(gate: torch.Tensor, up: torch.Tensor | None, activation: str) -> torch.Tensor:
    return swiglu_fwd(gate, up, activation)


@_fwd_op.register_fake
def _(gate, up, activation):
    return torch.empty_like(gate.chunk(2, dim=-1)[0] if up is None else gate)


@torch.library.custom_op(f"{_NAMESPACE}::swiglu_bwd", mutates_args=())
def _bwd_op(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    activation: str,
    need_dgate: bool,
    need_dup: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    dgate, dup = swiglu_bwd(dy, gate, up, activation, need_dgate, need_dup)
    return gate.new_empty(0) if dgate is None else dgate, gate.new_empty(0) if dup is None else dup


@_bwd_op.register_fake
def _(dy, gate, up, activation, need_dgate, need_dup):
    def like(needed: bool) -> torch.Tensor:
        return torch.empty_like(gate) if needed else gate.new_empty(0)

    return like(need_dgate), like(need_dup and up is not None)


def _save(ctx, inputs, output) -> None:
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx, dy):
    gate, up = ctx.saved_tensors
    need_dgate, need_dup = ctx.needs_input_grad[:2]
    dgate, dup = _bwd_op(dy, gate, up, ctx.activation, need_dgate, need_dup)
    return dgate if need_dgate else None, dup if need_dup else None, None


_fwd_op.register_autograd(_backward, setup_context=_save)
