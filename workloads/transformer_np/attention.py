"""Attention of all points over the context, by any of several implementations; and which one PyTorch would pick."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.attention import attention

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _sdpa(backend: SDPBackend) -> Attend:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v)

    return attend


#: What `attend` knows by name. "fp8" has no gradient.
IMPLEMENTATIONS: dict[str, Attend] = {
    "auto": attention,
    "separate": partial(attention, backward="separate"),
    "fused": partial(attention, backward="fused"),
    "fp8": partial(attention, fp8=True),
    "sdpa": F.scaled_dot_product_attention,
    "sdpa-flash": _sdpa(SDPBackend.FLASH_ATTENTION),
    "sdpa-cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
}


def attend(name: str | Attend) -> Attend:
    """(q [B, H, M + N, D], k and v [B, H, M, D]) -> [B, H, M + N, D]: the implementation of a name, or a function as it
    is. ValueError for an unknown name."""
    if not isinstance(name, str):
        return name
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"TransformerNP: attention must be one of {', '.join(IMPLEMENTATIONS)}, got {name!r}")
    return IMPLEMENTATIONS[name]


def require_flash(
    context: int,
    targets: int,
    batch: int = 1,
    heads: int = 8,
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
) -> str:
    """The backend that F.scaled_dot_product_attention picks for a TransformerNP of these sizes in training:
    "flash_attention", "cudnn_attention", "efficient_attention" or "math". Allocates q, k and v for the question.

    Warns, with PyTorch's reasons, where it is "math", which holds the matrix of scores in memory, or "efficient".
    """
    made = (torch.empty(batch, n, heads, head_dim, dtype=dtype, device=device) for n in (context + targets, context))
    q, k = (t.transpose(1, 2).requires_grad_() for t in made)
    found = SDPBackend(torch._fused_sdp_choice(q, k, k)).name.lower()
    if found in ("math", "efficient_attention"):
        reasons = _reasons(q, k) if q.is_cuda else []
        text = f"scaled_dot_product_attention falls back to {found} for q {tuple(q.shape)} in {dtype} on {q.device}"
        warnings.warn("; ".join([text, *reasons]), stacklevel=2)
    return found


def _reasons(q: torch.Tensor, k: torch.Tensor) -> list[str]:
    params = torch.backends.cuda.SDPAParams(q, k, k, None, 0.0, False, False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.backends.cuda.can_use_flash_attention(params, debug=True)
        torch.backends.cuda.can_use_cudnn_attention(params, debug=True)
    return [str(w.message).split(" (Triggered")[0] for w in caught]
