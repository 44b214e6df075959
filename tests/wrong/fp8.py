"""What is wrong with each broken fp8, and the controls."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from harness.spec import Case
from kernels.fp8.reference import fp8_reference

from . import Wrong, cheats, wrappers
from .plain_fp8 import LARGEST, check, fp8

BLOCKS, FP16, POW2, TRANSPOSE = "9x300-fp32", "9x130-fp16-e5m2", "9x300-fp32-pow2", "20x150-fp32-transpose"
CASES = (
    Case(BLOCKS, dict(rows=9, dim=300), torch.float32, dict(granularity="1x128")),
    Case(FP16, dict(rows=9, dim=130), torch.float16, dict(granularity="1x128", format="e5m2")),
    Case(POW2, dict(rows=9, dim=300), torch.float32, dict(granularity="1x128", scale_format="pow2")),
    Case(TRANSPOSE, dict(rows=20, dim=150), torch.float32, dict(granularity="1x128", transpose=True)),
)
LONG_CASES: tuple[Case, ...] = ()
FUZZ = {"rows": (0, 9), "dim": (1, 300)}
LIMITS: dict[str, float] = {}


def _fault(name: str, case: str, check: str, cause: str, on_gpu: tuple[str, str] | None = None) -> Wrong:
    return Wrong(name, partial(fp8, fault=name), case, check, cause, on_gpu)


def checks_last(x, dtype=torch.float8_e4m3fn, granularity="1x128", **options):
    result = fp8(x, dtype, granularity, **options, fault="no checks")
    check(x)
    return result


def reference(x, dtype=torch.float8_e4m3fn, granularity="1x128", **options):
    """The reference itself, behind the checks of a public function."""
    check(x)
    return fp8_reference(x, dtype, granularity, **options)


WRONG = (
    # The scale.
    _fault("scale upside down", BLOCKS, "accuracy", "error"),
    _fault("scale of the block before", BLOCKS, "accuracy", "error"),
    _fault("largest of the other format", BLOCKS, "accuracy", "error"),
    _fault("padding counted", BLOCKS, "accuracy", "error"),
    _fault("power of two rounded down", POW2, "accuracy", "error"),
    _fault("no smallest scale", BLOCKS, "values", "error"),
    _fault("nan counted", BLOCKS, "values", "error"),
    _fault("inf counted", BLOCKS, "values", "error"),
    # The data.
    _fault("not divided by the scale", BLOCKS, "accuracy", "error"),
    _fault("rounded towards zero", BLOCKS, "accuracy", "error"),
    _fault("saturates at half", BLOCKS, "accuracy", "error"),
    _fault("inf saturates", BLOCKS, "values", "nonfinite"),
    _fault("last block not written", BLOCKS, "accuracy", "nonfinite"),
    _fault("writes past the end", BLOCKS, "accuracy", "bounds"),
    _fault("row stride ignored", BLOCKS, "strides", "nonfinite"),
    _fault("rounded at random", BLOCKS, "repeat", "repeat"),
    # The transposed copy.
    _fault("data_t with the scales of data", TRANSPOSE, "accuracy", "error"),
    _fault("data_t not transposed", TRANSPOSE, "accuracy", "error"),
    Wrong("last column two steps off", cheats.last_column_two_steps_off(reference), BLOCKS, "accuracy", "error"),
    # Around the kernel.
    Wrong("cached by address", wrappers.cached(fp8), BLOCKS, "replay", "replay", on_gpu=("accuracy", "error")),
    Wrong("mutated input", wrappers.mutating(fp8), BLOCKS, "accuracy", "inputs"),
    Wrong("lazy output", wrappers.lazy(fp8), FP16, "accuracy", "lazy"),
    Wrong("fp32 out of fp8", wrappers.single_precision(fp8), FP16, "accuracy", "dtype"),
    _fault("no checks", BLOCKS, "refusal", "accepted"),
    Wrong("checks after the launch", checks_last, BLOCKS, "refusal", "launched"),
    _fault("shape of the fake result", BLOCKS, "opcheck", "opcheck"),
    Wrong("looks at values", wrappers.looking_at_values(fp8), BLOCKS, "compile", "compile"),
)

# Tried by the check that it names alone: what other checks see of an unjoined stream is a matter of luck.
ON_A_GPU = (Wrong("side stream", wrappers.on_a_side_stream(wait=True)(fp8), BLOCKS, "stream", "late"),)


def divided(x, dtype=torch.float8_e4m3fn, granularity="1x128", *, scale_format="fp32", transpose=False):
    """Eager with other roundings: x / (amax / largest), and a power of two by logarithms."""
    check(x)
    *lead, dim = x.shape
    blocks = F.pad(x.float(), (0, -dim % 128)).reshape(*lead, (dim + 127) // 128, 128)
    blocks = torch.where(blocks.isfinite(), blocks, torch.nan)
    amax = blocks.abs().nan_to_num(nan=0).amax(-1)
    scale = (amax / LARGEST[dtype]).clamp(min=2.0**-126)
    if scale_format == "pow2":
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    scale = torch.where(amax > 0, scale, 1.0)
    data = (blocks / scale[..., None]).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
    data = data.reshape(*lead, blocks.shape[-2] * 128)[..., :dim].contiguous()
    if not transpose:
        return data, scale
    x_t = x.reshape(lead[0] if len(lead) == 1 else -1, dim).t()
    return data, scale, *divided(x_t, dtype, scale_format=scale_format)


CONTROLS = {"plain": fp8, "reference": reference, "divided": divided}

# Around the reference. No other check rejects it.
CHEATS = (
    Wrong("autograd on", cheats.wrong_if(cheats.nothing_requires_grad)(reference), BLOCKS, "interleave", "error"),
)
