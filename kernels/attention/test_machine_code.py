"""The machine code of the kernels in CUDA C++: they do not spill, and no warp releases a stage to TMA while its
reads of that stage are pending."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from harness.compiling import nvrtc, sass

from .configs import candidates
from .configs.backward import CudaBackwardConfig, Schedule
from .configs.forward import CudaConfig, Fp8Config, pick_fp8_config
from .sm90 import backward, forward, fp8

pytestmark = pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.MISSING)

SOURCES = Path(forward.__file__).parent
CARRIES = 3  # values of CARRY in forward.cu


def usage_of(source: str, function: str, defines: tuple[str, ...]) -> sass.Usage:
    return sass.inspect(nvrtc.compiled(SOURCES / source, "sm_90a", defines), function)


def problem(dim: int, causal: bool, dtype: torch.dtype = torch.bfloat16) -> SimpleNamespace:
    return SimpleNamespace(dim=dim, right=0 if causal else None, q=torch.empty(0, dtype=dtype))


def variants(first: tuple, others: list[tuple]) -> list:
    """Returns the parameters: the first is always compiled, the others by slow tests only."""
    return [first, *(pytest.param(*other, marks=pytest.mark.slow) for other in others if other != first)]


# Head dimension, causal, CARRY, configuration. At D = 64, queries are loaded to registers by ldmatrix.
FORWARD = [
    (dim, bool(i % 2), i % CARRIES, config)
    for i, (dim, config) in enumerate((dim, config) for dim in (64, 128) for config in candidates.cuda(dim))
]


@pytest.mark.parametrize(
    ("dim", "causal", "carry", "config"), variants((64, True, 0, CudaConfig(112, 4, 3, False, True)), FORWARD)
)
def test_the_forward_gives_back_what_it_has_read(dim: int, causal: bool, carry: int, config: CudaConfig) -> None:
    defines = forward._defines(problem(dim, causal), config, carry)  # type: ignore[arg-type]
    usage = usage_of("forward.cu", "attention_cuda_fwd", defines)
    assert usage.spills == 0 and usage.stack == 0
    assert usage.early_arrivals == 0 and usage.early_own_reads == {}


FP8 = [(dim, causal, pick_fp8_config(dim, causal)) for dim in (64, 128) for causal in (False, True)]


@pytest.mark.parametrize(
    ("dim", "causal", "config"),
    variants((64, True, replace(pick_fp8_config(64, False), consumers=2, q_registers=True)), FP8),
)
def test_the_fp8_forward_gives_back_what_it_has_read(dim: int, causal: bool, config: Fp8Config) -> None:
    usage = usage_of("fp8.cu", "attention_fp8_fwd", fp8.defines_of(dim, causal, torch.bfloat16, config))
    assert usage.early_arrivals == 0 and usage.early_own_reads == {}


BACKWARD = [
    (64, False, CudaBackwardConfig(128, 1, schedule=Schedule.SINGLE_BLOCK)),
    (64, True, CudaBackwardConfig(128, 1, schedule=Schedule.CTA_PER_BLOCK)),
    (128, True, CudaBackwardConfig(80, 1, schedule=Schedule.CTA_PER_BLOCK)),
    (128, True, CudaBackwardConfig(64, 1, schedule=Schedule.CTA_PER_KV_HEAD)),
    (128, True, CudaBackwardConfig(64, 1, schedule=Schedule.PERSISTENT)),
    (128, False, CudaBackwardConfig(64, 1, schedule=Schedule.ROLES)),
    (128, False, CudaBackwardConfig(80, 1, schedule=Schedule.ROLES)),
]


@pytest.mark.parametrize(
    ("dim", "causal", "config"),
    variants((64, False, CudaBackwardConfig(128, 1, schedule=Schedule.PERSISTENT)), BACKWARD),
)
def test_the_backward_gives_back_what_it_has_read(dim: int, causal: bool, config: CudaBackwardConfig) -> None:
    """TMA loads lse and delta too; they are read by ld.shared. V is read by ldmatrix where it stays in registers."""
    defines = backward.defines_of(problem(dim, causal), config)  # type: ignore[arg-type]
    accumulates = config.schedule is Schedule.CTA_PER_BLOCK
    for more in ((), ("ACCUMULATE=1",)) if accumulates else ((),):
        usage = usage_of("backward.cu", "attention_cuda_bwd", (*defines, *more))
        assert usage.spills == 0 and usage.stack == 0
        assert usage.early_arrivals == 0 and usage.early_own_reads == {}
