"""mxfp_matmul in plain PyTorch: the oracle. Computes in fp32 or, given fp64, in fp64."""

from __future__ import annotations

import torch


def mxfp_matmul_reference(x: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * alpha).to(x.dtype)
