"""The machine code of the kernels in CUDA C++: they do not spill, and no warp releases a stage to TMA while its
reads of that stage are pending. Reads of single words may be pending, as threads, not TMA, write those next."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from harness.compiling import nvrtc, sass

from .configs import CUDA_CANDIDATES, CudaConfig, pick_cuda_config
from .sm90 import forward

pytestmark = pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.MISSING)

SOURCES = Path(forward.__file__).parent
WORDS = {"LDS.32"}  # loads of the words that a producer passes to consumers; tiles of TMA are read by wider loads


def usage_of(source: str, function: str, defines: tuple[str, ...]) -> sass.Usage:
    return sass.inspect(nvrtc.compiled(SOURCES / source, "sm_90a", defines), function)


# The first is always compiled, with queries in registers by ldmatrix; the others by slow tests only.
FORWARD = [(128, 128, pick_cuda_config(128, 128))]
FORWARD += [(dim, block, c) for (dim, block), found in CUDA_CANDIDATES.items() for c in found if c != FORWARD[0][2]]


@pytest.mark.parametrize("biased", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("dim", "block", "config"),
    [FORWARD[0], *(pytest.param(*other, marks=pytest.mark.slow) for other in FORWARD[1:])],
)
def test_the_forward_gives_back_what_it_has_read(dim: int, block: int, config: CudaConfig, biased: bool) -> None:
    bias, q = torch.empty(0) if biased else None, torch.empty(0, dtype=torch.bfloat16)
    problem = SimpleNamespace(dim=dim, block=block, causal=not biased, bias=bias, q=q)
    defines = forward._defines(problem, config)  # type: ignore[arg-type]
    usage = usage_of("forward.cu", "block_sparse_attention_cuda_fwd", defines)
    if config == pick_cuda_config(dim, block):
        assert usage.spills == 0 and usage.stack == 0
    assert usage.early_arrivals == 0 and set(usage.early_own_reads) <= WORDS


@pytest.mark.parametrize(
    ("dim", "causal"), [(64, 1), *(pytest.param(*b, marks=pytest.mark.slow) for b in ((64, 0), (128, 0), (128, 1)))]
)
def test_the_backward_gives_back_what_it_has_read(dim: int, causal: int) -> None:
    """TMA loads lse and delta too; they are read in pairs."""
    defines = f"HEAD_DIM={dim}", f"IS_CAUSAL={causal}", "FP16=0"
    usage = usage_of("backward.cu", "block_sparse_attention_cuda_bwd", defines)
    assert usage.spills == 0 and usage.stack == 0
    assert usage.early_arrivals == 0 and set(usage.early_own_reads) <= WORDS
