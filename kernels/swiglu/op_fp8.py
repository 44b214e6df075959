"""swiglu_fp8, the forward with an fp8 output: argument checks, the fast eager path, registration with
torch.library."""

from __future__ import annotations

import torch

from .checks import no_gradient, no_tangent
from .configs import MAX_ROW
from .launch import Plans, lean
from .op import _check as _check_tensors
from .op import _signature
from .plans_fp8 import quantise_plan, result_shapes, scale_dtype

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
GRANULARITIES, SCALE_FORMATS = ("row", "1x128"), ("fp32", "pow2", "e8m0")

# Named after the package, so that a copy of this folder under another name registers ops of its own.
_NAMESPACE = __package__.replace(".", "_")
_QUANTISE = Plans()


def swiglu_fp8(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    dtype: torch.dtype = torch.float8_e4m3fn,
    granularity: str = "1x128",
    scale_format: str = "fp32",
    transpose: bool = False,
) -> tuple[torch.Tensor, ...]:
    """swiglu with its result y quantised to fp8 in the same pass: the operand of an fp8 GEMM.

        y    = swiglu(gate, up, activation=activation), rounded to gate's dtype
        data = y / scale                        scale = amax / largest of a group, 1 where amax is 0

    Bit-identical to `ridgeline.fp8` of that y (from backend "triton"), with its rules for NaN, infinities and zeros.
    y is not written to memory.

    gate, up, activation   as for swiglu; gate is [..., D], or [..., 2·D] without `up`, with D and the number of rows
                  at most 2^31 - 2048
    dtype         of the data: torch.float8_e4m3fn or torch.float8_e5m2
    granularity   the group of a scale: "row", scales [..., 1], for D <= 32768, or "1x128", scales [..., ceil(D / 128)]
    scale_format  "fp32"; "pow2", powers of two in fp32; "e8m0", the same values as torch.float8_e8m0fnu
    transpose     also return data_t [D, R] and scale_t [D, ceil(R / 128)], for R rows, with one scale per 128 rows of a
                  column: the operand of the weight gradient. Only with granularity "1x128"; in the same pass where R
                  and D are multiples of 128.

    Returns data [..., D] and scale; with transpose also data_t and scale_t. All are contiguous. Not differentiable.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or option, RuntimeError for a CPU tensor
    outside Triton's interpreter and, where gradients are recorded, for an input that requires one,
    NotImplementedError for forward-mode differentiation.
    """
    no_gradient("swiglu_fp8", gate=gate, up=up)
    options = (activation, dtype, granularity, scale_format, transpose)
    if lean(gate, up):
        made = _quantise_plan(gate, up, *options)(gate, up)
    else:
        _check(gate, up, *options)
        no_tangent("swiglu_fp8", gate, up)
        made = _quantise_op(gate, up, activation, dtype == FORMATS[0], granularity, scale_format, transpose)
    # Data and scales alternate.
    of_scales = torch.float8_e8m0fnu if scale_format == "e8m0" else torch.float32
    return tuple(tensor.view(of_scales if index % 2 else dtype) for index, tensor in enumerate(made))


def _check(gate, up, activation, dtype, granularity, scale_format, transpose) -> None:
    _check_tensors(gate, up, activation, "auto")
    if gate.dim() == 0:
        raise ValueError("swiglu_fp8: gate must be [..., D], got a tensor without dimensions")
    if dtype not in FORMATS:
        raise TypeError(f"swiglu_fp8: dtype must be float8_e4m3fn or float8_e5m2, got {dtype}")
    for name, value, known in (
        ("granularity", granularity, GRANULARITIES),
        ("scale_format", scale_format, SCALE_FORMATS),
    ):
        if value not in known:
            raise ValueError(f"swiglu_fp8: {name} must be one of {', '.join(map(repr, known))}, got {value!r}")
    if not isinstance(transpose, bool):
        raise TypeError(f"swiglu_fp8: transpose must be a bool, got {type(transpose).__name__}")
    if transpose and granularity != "1x128":
        raise ValueError(f"swiglu_fp8: transpose requires granularity '1x128', got {granularity!r}")
    cols = gate.shape[-1] // 2 if up is None else gate.shape[-1]
    if granularity == "row" and cols > MAX_ROW:
        raise ValueError(f"swiglu_fp8: gate must have rows of at most {MAX_ROW} with granularity 'row', got {cols}")


def _quantise_plan(gate, up, activation, dtype, granularity, scale_format, transpose):
    """The cached plan for these arguments. For plain tensors only: the key does not fully describe other tensors."""
    options = (activation, dtype, granularity, scale_format, transpose)
    key = (_signature(gate, up), *options)
    plan = _QUANTISE.find(key)
    if plan is None:
        _check(gate, up, *options)
        rest = (granularity, scale_format, transpose)
        plan = _QUANTISE.keep(key, quantise_plan(gate, up, activation, dtype == FORMATS[0], *rest))
    return plan


@torch.library.custom_op(f"{_NAMESPACE}::swiglu_fp8", mutates_args=())
def _quantise_op(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    activation: str,
    e4m3: bool,
    granularity: str,
    scale_format: str,
    transpose: bool,
) -> list[torch.Tensor]:
    rest = (granularity, scale_format, transpose)
    if lean(gate, up):
        return _quantise_plan(gate, up, activation, FORMATS[not e4m3], *rest)(gate, up)
    return quantise_plan(gate, up, activation, e4m3, *rest)(gate, up)


@_quantise_op.register_fake
def _(gate, up, activation, e4m3, granularity, scale_format, transpose):
    shape = (*gate.shape[:-1], gate.shape[-1] // 2) if up is None else gate.shape
    return [
        gate.new_empty(size, dtype=scale_dtype(scale_format) if scales else torch.uint8)
        for size, scales in result_shapes(shape, granularity, transpose)
    ]
