"""Launch plans of gmm_logprob: everything about a call that does not depend on the tensors' contents and addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

from . import checks, configs
from .arrival import MAX_PROGRAMS, fixed_point, words
from .kernel import _gmm_logprob_bwd_kernel, _gmm_logprob_fwd_kernel
from .launch import Launch

REDUCTIONS = ("none", "sum", "mean")
MAX_STRIDE = 1 << 20  # a tile of at most 1024 rows stays within 32-bit offsets
ALIGNMENT = 16  # bytes

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Backward = Callable[..., tuple[torch.Tensor | None, ...]]  # a function of the incoming gradient and the four inputs
Conversion = Callable[[torch.Tensor], torch.Tensor] | None


def fwd_plan(
    logits: torch.Tensor, mu: torch.Tensor, log_sigma: torch.Tensor, y: torch.Tensor, reduction: str
) -> Forward:
    """Returns a function of (logits, mu, log_sigma, y), for tensors with the signatures of these, that returns log p(y)
    of each row, its sum or its mean, in their dtype. `op` must have checked the inputs."""
    rows, k, dtype, device = y.numel(), logits.shape[-1], y.dtype, y.device
    size, stride = _contiguous(y) if reduction == "none" else ((), ())
    if rows == 0:
        nothing = {"none": None, "sum": 0.0, "mean": float("nan")}[reduction]

        def empty(*inputs: torch.Tensor) -> torch.Tensor:
            out = torch.empty_strided(size, stride, dtype=dtype, device=device)
            return out if nothing is None else out.fill_(nothing)

        return empty
    capability, sms = _device(y)
    config = configs.pick_fwd_config(rows, k, dtype, capability)
    programs, tiles = _programs(rows, config, sms), triton.cdiv(rows, config.block_m)
    scale = unit = 1.0
    if reduction != "none":
        programs = min(programs, MAX_PROGRAMS)
        if programs > 1:
            scale, unit = fixed_point(triton.cdiv(tiles, programs) * config.block_m)
    counted = reduction != "none" and programs > 1
    conversions, layout = _layout(logits, mu, log_sigma)
    convert_y, stride_y = _vector(y)
    write = Launch(
        _gmm_logprob_fwd_kernel,
        (programs,),
        device,
        (scale, unit, rows),
        **layout,
        STRIDE_Y=stride_y,
        REDUCTION=reduction,
        RESIDUAL=_residual(dtype),
        K=k,
        BLOCK_M=config.block_m,
        LOAD=config.load_n,
        HOLD=config.hold_n,
        LOOP=programs < tiles,
        num_warps=config.num_warps,
    )
    all_conversions = (*conversions, convert_y)
    any_converted = any(convert is not None for convert in all_conversions)

    def run(logits: torch.Tensor, mu: torch.Tensor, log_sigma: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.empty_strided(size, stride, dtype=dtype, device=device)
        if any_converted:
            logits, mu, log_sigma, y = _converted((logits, mu, log_sigma, y), all_conversions)
        write(logits, mu, log_sigma, y, out, words(out) if counted else None)
        return out

    return run


def bwd_plan(
    grad: torch.Tensor,
    logits: torch.Tensor,
    mu: torch.Tensor,
    log_sigma: torch.Tensor,
    y: torch.Tensor,
    reduction: str,
    needed: Sequence[bool],
) -> Backward:
    """Returns a function of (grad, logits, mu, log_sigma, y), for tensors with the signatures of these, that returns
    contiguous gradients of those of the four inputs that are `needed`, None for the others. `grad`, the incoming
    gradient, is [...] for "none", otherwise a scalar, with any strides."""
    rows, k, dtype = y.numel(), logits.shape[-1], y.dtype
    need_logits, need_mu, need_log_sigma, need_y = needed
    write = None
    all_conversions: tuple[Conversion, ...] = ()
    if rows and any(needed):
        capability, sms = _device(y)
        config = configs.pick_bwd_config(rows, k, dtype, capability)
        conversions, layout = _layout(logits, mu, log_sigma)
        (convert_grad, stride_grad), (convert_y, stride_y) = _vector(grad), _vector(y)
        write = Launch(
            _gmm_logprob_bwd_kernel,
            (_programs(rows, config, sms),),
            y.device,
            (rows,),
            **layout,
            STRIDE_GRAD=stride_grad,
            STRIDE_Y=stride_y,
            REDUCTION=reduction,
            RESIDUAL=_residual(dtype),
            NEED_LOGITS=need_logits,
            NEED_MU=need_mu,
            NEED_LOG_SIGMA=need_log_sigma,
            NEED_Y=need_y,
            K=k,
            BLOCK_M=config.block_m,
            LOAD=config.load_n,
            HOLD=config.hold_n,
            STORE=config.store_n,
            num_warps=config.num_warps,
        )
        all_conversions = (convert_grad, *conversions, convert_y)
    any_converted = any(convert is not None for convert in all_conversions)

    def run(
        grad: torch.Tensor, logits: torch.Tensor, mu: torch.Tensor, log_sigma: torch.Tensor, y: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        grads = (
            torch.empty_like(logits, memory_format=torch.contiguous_format) if need_logits else None,
            torch.empty_like(mu, memory_format=torch.contiguous_format) if need_mu else None,
            torch.empty_like(log_sigma, memory_format=torch.contiguous_format) if need_log_sigma else None,
            torch.empty_like(y, memory_format=torch.contiguous_format) if need_y else None,
        )
        if write is not None:
            if any_converted:
                grad, logits, mu, log_sigma, y = _converted((grad, logits, mu, log_sigma, y), all_conversions)
            write(grad, logits, mu, log_sigma, y, *grads)
        return grads

    return run


def skipped(tensor: torch.Tensor) -> int:
    """The number of elements from the last 16-byte boundary to the tensor's first element. 0 if that boundary is before
    its storage, or not an integral number of elements away."""
    past = tensor.data_ptr() % ALIGNMENT
    if not past:
        return 0
    elements, rest = divmod(past, tensor.element_size())
    return elements if not rest and elements <= tensor.storage_offset() else 0


def _layout(*tensors: torch.Tensor) -> tuple[list[Conversion], dict[str, int]]:
    """(conversions, constexprs) for logits, mu and log_sigma: the conversion that each needs before the launch (None if
    none), and the kernel's STRIDE_* and SKIP_*.

    The strides are constexprs, so that the compiler can prove the alignment of rows and vectorise loads. For the same
    reason a view into a larger tensor (mu of a packed [rows, 3K]) is passed as an address rounded down to 16 bytes, and
    the number of elements to skip from there is also a constexpr.
    """
    conversions: list[Conversion] = []
    layout: dict[str, int] = {}
    for name, tensor in zip(("LOGITS", "MU", "LOG_SIGMA"), tensors, strict=True):
        matrix = _matrix(tensor)
        copied = matrix.data_ptr() != tensor.data_ptr()
        skip = 0 if copied else skipped(tensor)
        conversions.append(_matrix if copied else _rounded_down(skip) if skip else None)
        layout[f"STRIDE_{name}"] = matrix.stride(0) if matrix.shape[0] > 1 else matrix.shape[1]
        layout[f"SKIP_{name}"] = skip
    return conversions, layout


def _rounded_down(skip: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.as_strided((1,), (1,), tensor.storage_offset() - skip)


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as [rows, K] with unit inner stride: a view where strides allow it, otherwise a copy."""
    tensor = tensor.reshape(-1, tensor.shape[-1])
    in_place = tensor.shape[1] == 1 or tensor.stride(1) == 1
    return tensor if in_place and tensor.stride(0) <= MAX_STRIDE else tensor.contiguous()


def _vector(tensor: torch.Tensor) -> tuple[Conversion, int]:
    """(conversion of a tensor to [rows], stride of the result). The conversion is None if none is needed."""
    flat = _flat(tensor)
    return None if flat.data_ptr() == tensor.data_ptr() else _flat, flat.stride(0) if flat.shape[0] > 1 else 1


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as [rows]: a view where strides allow it, otherwise a copy."""
    tensor = tensor.reshape(-1)
    return tensor.contiguous() if tensor.stride(0) > MAX_STRIDE else tensor


def _converted(tensors: Sequence[torch.Tensor], all_conversions: Sequence[Conversion]) -> tuple[Any, ...]:
    return tuple(t if convert is None else convert(t) for t, convert in zip(tensors, all_conversions, strict=True))


def _contiguous(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, strides) of a contiguous tensor of the same shape."""
    return tensor.shape, torch.empty(tensor.shape, device="meta").stride()


def _programs(rows: int, config: configs.Config, sms: int) -> int:
    tiles = triton.cdiv(rows, config.block_m)
    return min(tiles, sms * config.programs_per_sm) if config.programs_per_sm else tiles


def _device(tensor: torch.Tensor) -> tuple[tuple[int, int], int]:
    """(compute capability, number of SMs). In the interpreter, those of a small sm_80 GPU."""
    if not tensor.is_cuda:
        return (8, 0), 2
    properties = torch.cuda.get_device_properties(tensor.device)
    return (properties.major, properties.minor), properties.multi_processor_count


def _residual(dtype: torch.dtype) -> str:
    """The constexpr that selects how `mixture` corrects 1/sigma."""
    if dtype != torch.float32:
        return "none"
    return "fp64" if checks.INTERPRETED else "fma"
