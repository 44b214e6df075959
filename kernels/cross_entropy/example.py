"""One call of cross_entropy, small or of a size typical of models.

`selftest` compares it with the reference; `info` records which kernels it launches.
"""

from __future__ import annotations

from typing import Any

import torch


def example(device: torch.device | str, dtype: torch.dtype, small: bool) -> dict[str, Any]:
    """`inputs` of the public function, those that have a gradient, and options that choose a version, and
    what "auto" is of them on Hopper."""
    rows, vocab = (7, 131) if small else (4096, 32000)
    target = torch.randint(vocab, (rows,), device=device).index_fill_(0, torch.tensor([1], device=device), -100)
    inputs = {"logits": torch.randn(rows, vocab, device=device, dtype=dtype), "target": target}
    versions = {"versions": {"backend": ("triton", "cuda")}, "hopper": {"backend": "triton"}}
    return {"inputs": inputs, "grads": ("logits",), **versions}
