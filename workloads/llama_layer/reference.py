"""llama_layer in plain PyTorch, in the dtype of its inputs, with the matrix of scores in memory: in fp64 the oracle.

A weight may be a pair of codes [N, K] in float8_e4m3fn and scales [N, 1]. The other operand of its GEMM is then also
rounded to e4m3 with a scale per row, as kernels/fp8 defines it. With `fp8` weights are tensors, and all operands of
GEMMs are rounded so, also in the backward.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

Weight = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
_WEIGHTS = ("norm_attention", "w_qkv", "w_o", "norm_ffn", "w_up", "w_down")


def llama_layer_reference(
    x: torch.Tensor,
    norm_attention: torch.Tensor | None = None,
    w_qkv: Weight | None = None,
    w_o: Weight | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    norm_ffn: torch.Tensor | None = None,
    w_up: Weight | None = None,
    w_down: Weight | None = None,
    *,
    heads: int,
    kv_heads: int,
    eps: float = 1e-5,
    part: str = "layer",
    fp8: bool = False,
) -> torch.Tensor:
    if part != "ffn":
        groups = heads + 2 * kv_heads
        qkv = _product(_normed(x, norm_attention, eps), w_qkv, fp8).unflatten(-1, (groups, -1))
        q, k, v = (t.transpose(1, 2) for t in qkv.split((heads, kv_heads, kv_heads), dim=2))
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
        x = x + _product((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), w_o, fp8)
    if part != "attention":
        up = _product(_normed(x, norm_ffn, eps), w_up, fp8)
        if up.shape[-1] == (w_down if isinstance(w_down, torch.Tensor) else w_down[0]).shape[1]:
            inner = F.gelu(up)
        else:
            gate, up = up.chunk(2, -1)
            inner = F.silu(gate) * up
        x = x + _product(inner, w_down, fp8)
    return x


def llama_train_reference(dout: torch.Tensor, **inputs) -> tuple[torch.Tensor, ...]:
    """A training step: dx, then the weights, their masters, and both moments after AdamW's step 10, as new tensors.

    w ← w − lr · 0.1 · w − lr / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + eps)      m, v: the new moments, w: the master
    """
    names = [name for name in _WEIGHTS if name in inputs]
    states = [
        [inputs.pop(f"{name}_{kind}") for name in names if f"{name}_{kind}" in inputs]
        for kind in ("master", "exp_avg", "exp_avg_sq")
    ]
    weights = [inputs[name] for name in names]
    leaves = {name: inputs[name].detach().requires_grad_() for name in ("x", *names)}
    with torch.enable_grad():
        dx, *grads = torch.autograd.grad(llama_layer_reference(**{**inputs, **leaves}), list(leaves.values()), dout)
    masters, first, second = states
    wide = [w.to(m.dtype) for w, m in zip(masters or weights, first, strict=True)]
    grads = [g.to(m.dtype) for g, m in zip(grads, first, strict=True)]
    lr, beta1, beta2 = 1e-3, 0.9, 0.999
    first = [beta1 * m + (1 - beta1) * g for m, g in zip(first, grads, strict=True)]
    second = [beta2 * v + (1 - beta2) * g * g for v, g in zip(second, grads, strict=True)]
    step_size, root = lr / (1 - beta1**10), (1 - beta2**10) ** 0.5
    new = [
        w - lr * 0.1 * w - step_size * m / (v.sqrt() / root + 1e-8) for w, m, v in zip(wide, first, second, strict=True)
    ]
    rounded = [w.to(old.dtype) for w, old in zip(new, weights, strict=True)]
    return dx, *rounded, *(new if masters else ()), *first, *second


def _product(x: torch.Tensor, weight: Weight, fp8: bool) -> torch.Tensor:
    if not isinstance(weight, torch.Tensor):
        codes, scale = weight
        return _of_codes(*_quantised(_wide(x)), _wide(codes, x), _wide(scale, x)).to(x.dtype)
    return _Rounded.apply(x, weight) if fp8 else F.linear(x, weight)


class _Rounded(torch.autograd.Function):
    """The autograd function of a GEMM whose operands are rounded, in the backward too."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return _rounded_product(x, weight)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dw = _rounded_product(dy.flatten(0, -2).t(), x.flatten(0, -2).t())
        return _rounded_product(dy, weight.t()), dw


def _rounded_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _of_codes(*_quantised(_wide(a)), *_quantised(_wide(b))).to(a.dtype)


def _of_codes(a: torch.Tensor, scale_a: torch.Tensor, b: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
    return F.linear(a, b) * scale_a * scale_b.t()


def _wide(x: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    return x.to(torch.promote_types((x if like is None else like).dtype, torch.float32))


def _quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 values, scale of each row): x ≈ values · scale. Values that are not finite become NaN."""
    x = torch.where(x.isfinite(), x, torch.nan)
    amax = torch.where(x.isnan(), 0, x.abs()).amax(-1, keepdim=True)
    scale = torch.where(amax > 0, (amax * (1 / 448)).clamp(min=2.0**-126), 1.0)
    return (x * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype), scale


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, cos.dtype)
    a, b = x.to(wide).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
