"""The launch of heads_gmm's forward for Hopper in CUDA C++ (forward.cu)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..configs.heads_forward import CudaConfig
from .cuda_driver import address
from .heads import forward_launch

Optional = torch.Tensor | None

# Output of forward.cu: bias and its strides, y and its stride, statistics, parameters, whether bias and y are fp32.
_LAYOUT = "PqqPqPPii"


def launch(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    y: torch.Tensor,
    bias: Optional,
    activation: str,
    config: CudaConfig,
    first: int = 0,
) -> Callable[..., None]:
    """Returns a function of (x, w1, w2, bias, y, statistics, parameters), for tensors like these, that writes
    statistics [groups, rows, 4] and parameters [rows, K, 3], each unless None. x [rows, D] and y are read from row
    `first` on. Requires that `heads.unsupported_reason` is None."""
    start = forward_launch("forward.cu", "heads_gmm_forward", _LAYOUT, x, w1, w2, activation, config)
    stride_bg, stride_bo = (0, 0) if bias is None else bias.stride()
    stride_y = y.stride(0)
    skipped = first * stride_y * y.element_size()
    wide = tuple(int(t is not None and t.dtype == torch.float32) for t in (bias, y))

    def run(
        x: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        bias: Optional,
        y: torch.Tensor,
        statistics: Optional,
        parameters: Optional,
    ) -> None:
        from_y = y.data_ptr() + skipped, stride_y
        to = address(statistics), address(parameters)
        start(x[first:], w1, w2, address(bias), stride_bg, stride_bo, *from_y, *to, *wide)

    return run
