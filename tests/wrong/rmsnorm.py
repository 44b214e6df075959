"""What is wrong with each broken rmsnorm, and the controls."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from harness.spec import Case
from kernels.rmsnorm.reference import rmsnorm_reference

from . import Wrong, cheats, wrappers
from .plain_rmsnorm import check, rmsnorm

FP32, FP16, RESIDUAL, EPS, TALL = "9x37-fp32", "9x33-fp16-offset", "9x37-fp32-residual", "5x37-fp32-eps", "4096x16-fp16"
CASES = (
    Case(FP32, dict(rows=9, dim=37), torch.float32),
    Case(FP16, dict(rows=9, dim=33), torch.float16, dict(weight_offset=1.0)),
    Case(RESIDUAL, dict(rows=9, dim=37), torch.float32, dict(residual=True)),
    Case(EPS, dict(rows=5, dim=37), torch.float32, dict(eps=0.1)),
)
# For a fault that only many rows show, which takes the interpreter long: the controls are not run on it.
LONG_CASES = (Case(TALL, dict(rows=4096, dim=16), torch.float16),)
FUZZ = {"rows": (0, 9), "dim": (1, 40)}
LIMITS: dict[str, float] = {}


def _fault(name: str, case: str, check: str, cause: str, on_gpu: tuple[str, str] | None = None) -> Wrong:
    return Wrong(name, partial(rmsnorm, fault=name), case, check, cause, on_gpu)


class _HalfPrecisionDW(torch.autograd.Function):
    """In PyTorch, for the interpreter would need a minute for the thousands of rows that it takes to see this."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return rmsnorm_reference(x, weight)

    @staticmethod
    def backward(ctx, dy):
        x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            (dx,) = torch.autograd.grad(rmsnorm_reference(x, weight), x, dy)
        total = torch.zeros_like(weight)
        for row in dy * rmsnorm_reference(x):
            total += row  # rounded to fp16 each time
        return dx, total


def half_precision_dw(x, weight, **kwargs):
    return _HalfPrecisionDW.apply(x, weight)


@triton.jit
def _look_kernel(x_ptr, found_ptr, place):
    tl.store(found_ptr, tl.load(x_ptr + place))


def reads_past_the_end(x, weight=None, eps=1e-6, residual=None, weight_offset=0.0):
    """And does not use what it finds there, four elements on: a tensor's end is a vector's at most from memory's."""
    _look_kernel[(1,)](x, torch.empty_like(x[0]), x.numel() + 3)
    return rmsnorm(x, weight, eps, residual, weight_offset)


def checks_last(x, weight=None, eps=1e-6, residual=None, weight_offset=0.0):
    result = rmsnorm(x, weight, eps, residual, weight_offset, fault="no checks")
    check(x, weight, residual)
    return result


def reference(x, weight=None, eps=1e-6, residual=None, weight_offset=0.0):
    """The reference itself, behind the checks of a public function."""
    check(x, weight, residual)
    return rmsnorm_reference(x, weight, eps, residual, weight_offset)


def product_in_half_precision(x, weight=None, eps=1e-6, residual=None, weight_offset=0.0):
    """Multiplies by the weight before it divides by the root mean square."""
    check(x, weight, residual)
    h = x if residual is None else x + residual
    product = h if weight is None else h * (weight + weight_offset)
    rstd = torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True) + eps)
    y = (product.float() * rstd).to(x.dtype)
    return y if residual is None else (y, h)


def _cheat(around, case: str, check: str, cause: str, name: str = "") -> Wrong:
    return Wrong(name or around.__name__.replace("_", " "), around(reference), case, check, cause)


WRONG = (
    # In the forward.
    _fault("last column not written", FP32, "accuracy", "nonfinite"),
    _fault("no mask on the load", FP32, "accuracy", "nonfinite"),
    _fault("padding counted", FP32, "accuracy", "error"),
    _fault("writes past the end", FP32, "accuracy", "bounds"),
    _fault("row stride ignored", FP32, "strides", "nonfinite"),
    _fault("residual read with the strides of x", RESIDUAL, "strides", "nonfinite"),
    _fault("eps dropped", EPS, "accuracy", "error"),
    _fault("weight_offset dropped", FP16, "accuracy", "error"),
    _fault("squares summed in half precision", FP16, "values", "error"),
    _fault("residual not added", RESIDUAL, "accuracy", "error"),
    _fault("residual returned unsummed", RESIDUAL, "accuracy", "error"),
    # In the backward.
    _fault("sign of the mean in dx", FP32, "accuracy", "error"),
    _fault("sign of dW", FP32, "accuracy", "error"),
    _fault("dW without the last partial block of rows", FP32, "accuracy", "error"),
    Wrong("dW summed in half precision", half_precision_dw, TALL, "accuracy", "error", on_gpu=("replay", "error")),
    _fault("dW summed in the order of arrival", FP32, "repeat", "repeat"),
    _fault("incoming gradient taken for ones", FP32, "accuracy", "error"),
    _fault("stride of the incoming gradient ignored", FP32, "strides", "nonfinite"),
    _fault("gradient of h dropped", RESIDUAL, "accuracy", "error"),
    # Around the kernel.
    Wrong("zeros", wrappers.constant(0.0)(rmsnorm), FP32, "accuracy", "error"),
    Wrong("nan", wrappers.constant(float("nan"))(rmsnorm), FP32, "accuracy", "nonfinite"),
    Wrong("copy of the input", wrappers.input_copy(rmsnorm), FP32, "accuracy", "error"),
    Wrong("cached by address", wrappers.cached(rmsnorm), FP32, "replay", "replay", on_gpu=("accuracy", "error")),
    Wrong("mutated input", wrappers.mutating(rmsnorm), FP32, "accuracy", "inputs"),
    Wrong("writes into the gap after a row", wrappers.writing_into_gaps(rmsnorm), FP32, "accuracy", "bounds"),
    Wrong("lazy output", wrappers.lazy(rmsnorm), FP32, "accuracy", "lazy"),
    Wrong("filled by a thread", wrappers.on_a_thread(rmsnorm), FP32, "accuracy", "nonfinite"),
    Wrong("fp32 out of fp16", wrappers.single_precision(rmsnorm), FP16, "accuracy", "dtype"),
    Wrong("flattened output", wrappers.flattened(rmsnorm), FP32, "accuracy", "shape"),
    Wrong("one output too many", wrappers.repeated(rmsnorm), FP32, "accuracy", "count"),
    Wrong("raises", wrappers.raising(rmsnorm), FP32, "accuracy", "raised"),
    _fault("no checks", FP32, "refusal", "accepted", on_gpu=("refusal", "launched")),
    Wrong("checks after the launch", checks_last, FP32, "refusal", "launched"),
    Wrong("nameless refusal", wrappers.nameless(rmsnorm), FP32, "refusal", "message"),
    _fault("shape of the fake result", FP32, "opcheck", "opcheck"),
    Wrong("looks at values", wrappers.looking_at_values(rmsnorm), FP32, "compile", "compile"),
)

# Around the reference, which is right and quick. No other check rejects one of these, unless for the same cause.
CHEATS = (
    _cheat(cheats.result_in_a_static_buffer, FP32, "replay", "overwritten"),
    _cheat(cheats.gradient_in_a_static_buffer, FP32, "replay", "overwritten"),
    _cheat(cheats.saved_in_a_static_buffer, FP32, "interleave", "error"),
    _cheat(cheats.keeping_every_result, FP32, "interleave", "kept"),
    _cheat(cheats.zeroing_and_restoring, FP32, "interleave", "inputs"),
    _cheat(cheats.in_another_order_in_memory, FP32, "accuracy", "strides"),
    _cheat(cheats.cached_by_address_and_first_element, FP32, "replay", "replay"),
    _cheat(cheats.wrong_if(cheats.strided_without_autograd), FP32, "strides", "error", "strided without autograd"),
    _cheat(cheats.wrong_if(cheats.nothing_requires_grad), FP32, "partial", "error", "autograd on for nothing"),
    _cheat(cheats.wrong_if(cheats.gradients_required_in_vain), FP32, "partial", "error", "wrong under no_grad"),
    _cheat(
        cheats.wrong_if(cheats.gradients_required_in_vain, cheats.and_allocates),
        FP32,
        "partial",
        "memory",
        "kept under no_grad",
    ),
    _cheat(cheats.wrong_gradient_if(cheats.only_frozen("weight")), RESIDUAL, "partial", "error", "weight frozen"),
    _cheat(cheats.wrong_gradient_if(cheats.only_frozen("x")), RESIDUAL, "partial", "error", "x frozen"),
    _cheat(cheats.wrong_if(cheats.one_tensor("x", "residual")), RESIDUAL, "alias", "error", "x is residual"),
    _cheat(cheats.wrong_if(lambda inputs: inputs["x"].dim() > 2), FP32, "leading", "error", "more dimensions"),
    _cheat(cheats.wrong_if(lambda inputs: inputs["x"].shape[-1] == 1), FP32, "sizes", "error", "one column"),
    _cheat(cheats.unchecked_under_a_mode(rmsnorm_reference), FP32, "refusal", "message"),
    *(_cheat(cheats.touching(touch), FP32, "accuracy", "state", name) for name, touch in cheats.TOUCHES.items()),
    Wrong("product in half precision", product_in_half_precision, FP16, "values", "nonfinite"),
)

# Each tried by the check that it names alone: what other checks see of an unjoined stream is a matter of luck.
ON_A_GPU = (
    Wrong("side stream", wrappers.on_a_side_stream(wait=True)(rmsnorm), FP32, "stream", "late"),
    Wrong("side stream that is not joined", wrappers.on_a_side_stream(wait=True)(rmsnorm), FP32, "graph", "graph"),
    Wrong(
        "side stream that waits for nothing",
        wrappers.on_a_side_stream(wait=False)(rmsnorm),
        FP32,
        "stream",
        "error or late",
    ),
    Wrong(
        "on the current device",
        cheats.on_the_current_device(reference),
        FP32,
        "device",
        "error or raised or shape",
        gpus=2,
    ),
    Wrong(
        "leaves another current device",
        cheats.touching(cheats.leaving_another_device)(reference),
        FP32,
        "accuracy",
        "state",
        gpus=2,
    ),
    Wrong("reads past the end", reads_past_the_end, FP32, "unmapped", "raised", fatal=True),
)


def reordered(x, weight=None, eps=1e-6, residual=None, weight_offset=0.0):
    """Eager with other roundings: division in place of rsqrt, the weight multiplied in first."""
    check(x, weight, residual)
    h = x if residual is None else x + residual
    wide = h.float()
    scaled = wide if weight is None else wide * (weight.float() + weight_offset)
    y = (scaled / (wide.pow(2).sum(-1, keepdim=True) / wide.shape[-1] + eps).sqrt()).to(x.dtype)
    return y if residual is None else (y, h)


def functional(x, weight=None, eps=1e-6, residual=None, weight_offset=0.0):
    """PyTorch's own."""
    check(x, weight, residual)
    h = x if residual is None else x + residual
    wide = None if weight is None else weight.float() + weight_offset
    y = F.rms_norm(h.float(), h.shape[-1:], wide, eps).to(x.dtype)
    return y if residual is None else (y, h)


CONTROLS = {"plain": rmsnorm, "reference": reference, "reordered": reordered}
if not torch.cuda.is_available():
    # On a GPU it answers a row that holds an infinity with NaN throughout, where the formula has zeros.
    CONTROLS["functional"] = functional
