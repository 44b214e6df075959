"""One call of gmm_logprob, small or of a size typical of models.

`selftest` compares it with the reference; `info` records which kernels it launches.
"""

from __future__ import annotations

from typing import Any

import torch


def example(device: torch.device | str, dtype: torch.dtype, small: bool) -> dict[str, Any]:
    """`inputs` of the public function, those that have a gradient."""
    rows, components = (11, 3) if small else (205_000, 10)
    inputs = {name: torch.randn(rows, components, device=device, dtype=dtype) for name in ("logits", "mu", "log_sigma")}
    inputs["y"] = torch.randn(rows, device=device, dtype=dtype)
    return {"inputs": inputs, "grads": ("logits", "mu", "log_sigma", "y")}
