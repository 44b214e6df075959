"""The decoder layer: a function of its weights, and a module that owns the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from kernels.fp8 import fp8 as quantised
from kernels.gelu import gelu
from kernels.rmsnorm import rmsnorm, rmsnorm_fp8
from kernels.swiglu import swiglu, swiglu_fp8

from .fp8_linear import fp8_linear
from .fp8_weights import UNIT, FP8Weight, check_backend, fp8_weight, product
from .self_attention import eager, self_attention

PARTS = ("layer", "attention", "ffn")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
MATRICES = ("w_qkv", "w_o", "w_up", "w_down")
Weight = torch.Tensor | FP8Weight
Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class LayerConfig:
    """Sizes of a decoder layer. `ffn`: "swiglu" (Llama's: gate, up and down) or "gelu" (up and down)."""

    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    ffn: str = "swiglu"
    eps: float = 1e-5
    rope_base: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


#: Touvron et al. 2023, Llama 2 (arXiv:2307.09288), table 1, and the published configurations
LLAMA2 = {
    "7b": LayerConfig(4096, 32, 32, 11008),
    "13b": LayerConfig(5120, 40, 40, 13824),
    "70b": LayerConfig(8192, 64, 8, 28672),
}


def llama_layer(
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
    backend: str = "auto",
) -> torch.Tensor:
    """Computes a decoder layer of Llama.

        a   = x + W_o · attention(rope(q), rope(k), v)        q, k, v = W_qkv · rmsnorm(x), causal
        out = a + W_down · (silu(gate) · up)                  gate, up = W_up · rmsnorm(a)
        out = a + W_down · gelu(W_up · rmsnorm(a))            if W_up has as many rows as W_down has columns

    x               [B, S, hidden]
    norm_attention  [hidden], the weight of the norm before attention; norm_ffn that before the feed-forward
    w_qkv           [(heads + 2 · kv_heads) · D, hidden]: the rows of W_q, W_k and W_v, concatenated
    w_o             [hidden, heads · D]
    cos, sin        [S, D / 2] of `rope`, halves
    w_up            [2 · intermediate, hidden], the rows of the gate first, or [intermediate, hidden] for GELU
    w_down          [hidden, intermediate]
    part            "layer", "attention" (returns a) or "ffn" (x is a); weights that a part does not use may be None
    fp8             GEMMs in fp8, forward and backward. Implied by matrices that are already in fp8.
    backend         of the GEMMs in fp8: "cublas" (torch's scaled_mm: bf16 on compute capability 9.0), "fp8_matmul", or
                    "auto", which is "cublas" where it can run

    cuBLAS computes the GEMMs. The first residual is added in the norm's launch, the second in the epilogue of W_down's
    GEMM.

    GEMMs in fp8 read e4m3 operands with a scale per row; attention itself, norms and residuals stay in x's dtype. The
    four matrices, or those that a part uses, may be `fp8_weight`s, which are quantised once; otherwise each call
    quantises them. Without a gradient, RMSNorm and SwiGLU quantise their results in the same launch; after attention
    and GELU a separate launch does. With a gradient, see `fp8_linear`.

    Returns [B, S, hidden] in dtype of x. Differentiable in x and all weights, unless the matrices are `fp8_weight`s.

    Raises TypeError for a wrong dtype, ValueError for an unknown part or backend and for a weight that is missing, of a
    wrong shape or on another device, RuntimeError for CPU tensors outside Triton's interpreter, for a gradient through
    weights in fp8, and for a backend that cannot run.

    Source: Touvron et al. 2023, arXiv:2302.13971, section 2.2.
    """
    given = dict(norm_attention=norm_attention, w_qkv=w_qkv, w_o=w_o, cos=cos, sin=sin)
    given |= dict(norm_ffn=norm_ffn, w_up=w_up, w_down=w_down)
    in_fp8 = _check(part, x, heads, kv_heads, **given)
    check_backend(backend, fp8 or in_fp8, x)
    if in_fp8:
        _no_gradient(x=x, norm_attention=norm_attention, norm_ffn=norm_ffn)
    elif fp8:
        _check_sizes({name: given[name] for name in MATRICES if given[name] is not None})
    if fp8 and not in_fp8 and not _recorded(x, *given.values()):
        given = {name: fp8_weight(w) if name in MATRICES and w is not None else w for name, w in given.items()}
        in_fp8 = True
    if in_fp8:
        return _fp8_layer(x, **given, heads=heads, kv_heads=kv_heads, eps=eps, part=part, backend=backend)
    # The gradient of the residual path is added in the backward kernel of the norm.
    normed, x = rmsnorm(x, norm_ffn if part == "ffn" else norm_attention, eps, return_h=True)
    linear = partial(fp8_linear, backend=backend) if fp8 else F.linear
    if part != "ffn":
        mixed = self_attention(linear(normed, w_qkv), cos, sin, heads, kv_heads)
        if part == "attention":
            return _added(mixed, w_o, x, linear)
        normed, x = rmsnorm(linear(mixed, w_o), norm_ffn, eps, residual=x)
        del mixed  # here and below: the feed-forward determines peak memory
    up = linear(normed, w_up)
    del normed
    return _ffn(up, x, w_up, w_down, linear, own=part == "layer")


def _fp8_layer(
    x, norm_attention, w_qkv, w_o, cos, sin, norm_ffn, w_up, w_down, heads, kv_heads, eps, part, backend
) -> torch.Tensor:
    """`llama_layer` with matrices in fp8, without a gradient."""

    def times(made: tuple[torch.Tensor, ...], weight: FP8Weight) -> torch.Tensor:
        data, scale = made
        return product(data, scale, weight, x.dtype, backend)

    if part == "ffn":
        normed, a = rmsnorm_fp8(x, norm_ffn, eps), x
    else:
        mixed = self_attention(times(rmsnorm_fp8(x, norm_attention, eps), w_qkv), cos, sin, heads, kv_heads)
        projected = times(quantised(mixed), w_o)
        if part == "attention":
            return projected.add_(x)
        *normed, a = rmsnorm_fp8(projected, norm_ffn, eps, residual=x)
        del mixed, projected
    up = times(normed, w_up)
    del normed
    # gelu has no fp8 output with a scale per row.
    inner = quantised(gelu(up)) if _is_gelu(w_up, w_down) else swiglu_fp8(up, granularity="row")
    return times(inner, w_down).add_(a)


def _recorded(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _no_gradient(**inputs: torch.Tensor | None) -> None:
    for name, tensor in inputs.items():
        if _recorded(tensor):
            raise RuntimeError(
                f"llama_layer: {name} must not require grad with fp8 weights: detach it, or use torch.no_grad()"
            )


def _ffn(up, residual, w_up, w_down, linear: Linear, own: bool) -> torch.Tensor:
    """The feed-forward after W_up. `own`: nothing else refers to the residual, so it may be overwritten."""
    inner = gelu(up) if _is_gelu(w_up, w_down) else swiglu(up)
    if own and linear is F.linear and eager() and not _recorded(inner, w_down):
        # In place, which avoids the copy of the residual that addmm begins with.
        return residual.flatten(0, -2).addmm_(inner.flatten(0, -2), w_down.t()).view(residual.shape)
    return _added(inner, w_down, residual, linear)


def _is_gelu(w_up: Weight, w_down: Weight) -> bool:
    return _matrix(w_up).shape[0] == _matrix(w_down).shape[1]


def _added(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, linear: Linear) -> torch.Tensor:
    """residual + x · weightᵀ, added in the epilogue of cuBLAS's GEMM."""
    if linear is not F.linear:
        return residual + linear(x, weight)
    sum_ = torch.addmm(residual.flatten(0, -2), x.flatten(0, -2), weight.t())
    return sum_.view(residual.shape)


def _matrix(weight: Weight) -> torch.Tensor:
    """The tensor that has a weight's shape: the weight, or its fp8 data."""
    return weight.data if isinstance(weight, FP8Weight) else weight


def _check(part, x, heads, kv_heads, norm_attention, w_qkv, w_o, cos, sin, norm_ffn, w_up, w_down) -> bool:
    """Checks all arguments. Returns whether the weights are in fp8."""
    if part not in PARTS:
        raise ValueError(f"llama_layer: part must be one of {', '.join(PARTS)}, got {part!r}")
    if x.dim() != 3:
        raise ValueError(f"llama_layer: x must be [B, S, hidden], got {tuple(x.shape)}")
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"llama_layer: heads must be a multiple of kv_heads, got {heads} and {kv_heads}")
    hidden = x.shape[-1]
    needed = {}
    if part != "ffn":
        needed |= dict(norm_attention=norm_attention, w_qkv=w_qkv, w_o=w_o, cos=cos, sin=sin)
    if part != "attention":
        needed |= dict(norm_ffn=norm_ffn, w_up=w_up, w_down=w_down)
    if missing := [name for name, value in needed.items() if value is None]:
        raise ValueError(f"llama_layer: {', '.join(missing)} must be given with part={part!r}, got None")
    if x.dtype not in FLOATS:
        raise TypeError(f"llama_layer: x must be float32, float16 or bfloat16, got {x.dtype}")
    in_fp8 = _check_kinds(x, needed)
    needed = {name: _matrix(value) for name, value in needed.items()}
    for name in ("norm_attention", "norm_ffn"):
        if name in needed:
            _shape(name, needed[name], (hidden,))
    if part != "ffn":
        groups, w_qkv = heads + 2 * kv_heads, needed["w_qkv"]
        if w_qkv.dim() != 2 or w_qkv.shape[1] != hidden or w_qkv.shape[0] % groups:
            raise ValueError(f"llama_layer: w_qkv must be [{groups} · D, {hidden}], got {tuple(w_qkv.shape)}")
        head_dim = w_qkv.shape[0] // groups
        _shape("w_o", needed["w_o"], (hidden, head_dim * heads))
        _shape("cos", cos, (x.shape[1], head_dim // 2))
        _shape("sin", sin, (x.shape[1], head_dim // 2))
    if part != "attention":
        w_up, w_down = needed["w_up"], needed["w_down"]
        if w_down.dim() != 2 or w_down.shape[0] != hidden:
            raise ValueError(f"llama_layer: w_down must be [{hidden}, intermediate], got {tuple(w_down.shape)}")
        rows = w_down.shape[1]
        if w_up.dim() != 2 or w_up.shape[1] != hidden or w_up.shape[0] not in (rows, 2 * rows):
            wanted = f"[{2 * rows} or {rows}, {hidden}]"
            raise ValueError(f"llama_layer: w_up must be {wanted} like w_down, got {tuple(w_up.shape)}")
    return in_fp8


def _check_kinds(x: torch.Tensor, needed: dict[str, Weight]) -> bool:
    """Checks dtypes and devices. Returns whether the matrices are in fp8."""
    matrices = {name: value for name, value in needed.items() if name in MATRICES}
    in_fp8 = [name for name, value in matrices.items() if isinstance(value, FP8Weight)]
    if in_fp8 and len(in_fp8) < len(matrices):
        raise TypeError(f"llama_layer: {', '.join(matrices)} must all be in fp8 or none, got {', '.join(in_fp8)}")
    for name, value in needed.items():
        if isinstance(value, FP8Weight):
            _check_fp8_weight(name, value)
        elif value.dtype != x.dtype and not (name in ("cos", "sin") and value.dtype in FLOATS):
            raise TypeError(f"llama_layer: {name} must be of x's dtype {x.dtype}, got {value.dtype}")
        if _matrix(value).device != x.device:
            raise ValueError(f"llama_layer: {name} must be on x's device {x.device}, got {_matrix(value).device}")
    return bool(in_fp8)


def _check_fp8_weight(name: str, weight: FP8Weight) -> None:
    data, scale = weight
    if data.dtype != torch.float8_e4m3fn:
        raise TypeError(f"llama_layer: {name}.data must be float8_e4m3fn, as fp8_weight gives it, got {data.dtype}")
    if scale.dtype != torch.float32:
        raise TypeError(f"llama_layer: {name}.scale must be float32, as fp8_weight gives it, got {scale.dtype}")
    if scale.shape != (data.shape[0], 1) or scale.device != data.device:
        wanted, got = f"[{data.shape[0]}, 1] on {data.device}", f"{list(scale.shape)} on {scale.device}"
        raise ValueError(f"llama_layer: {name}.scale must be {wanted}, got {got}")


def _check_sizes(matrices: dict[str, torch.Tensor]) -> None:
    """Checks that matrices which are not in fp8 yet have sizes that GEMMs in fp8 support."""
    for name, matrix in matrices.items():
        if matrix.shape[0] % UNIT or matrix.shape[1] % UNIT:
            got = list(matrix.shape)
            raise ValueError(f"llama_layer: in fp8 rows and columns of {name} must be multiples of {UNIT}, got {got}")


def _shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(f"llama_layer: {name} must be {list(shape)}, got {list(tensor.shape)}")


class LlamaLayer(nn.Module):
    """A module of `llama_layer` that owns its weights, initialised as in Hugging Face: normal, standard deviation 0.02.

    forward(x [B, S, hidden]) returns [B, S, hidden]; positions are 0 … S − 1. `load_llama` loads the state dict of a
    LlamaDecoderLayer, whose matrices it concatenates.

    fp8: GEMMs in fp8. Without a gradient each matrix is quantised at the first call and cached with the parameter,
    until that is replaced or changed in place. A change that the tensor's version does not count (through `.data`, by
    another library, by FSDP's gathering, in the replay of a CUDA graph) is not noticed: call `forget_fp8` after it. A
    parameter that was created in inference mode has no version: it is quantised at each call.
    """

    def __init__(
        self,
        config: LayerConfig,
        *,
        fp8: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if config.ffn not in ("swiglu", "gelu"):
            raise ValueError(f"LlamaLayer: ffn must be 'swiglu' or 'gelu', got {config.ffn!r}")
        self.config, self.fp8 = config, fp8
        rows = (config.heads + 2 * config.kv_heads) * config.head_dim
        up = config.intermediate * (2 if config.ffn == "swiglu" else 1)

        def matrix(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(rows, columns, device=device, dtype=dtype).normal_(std=0.02))

        def ones() -> nn.Parameter:
            return nn.Parameter(torch.ones(config.hidden, device=device, dtype=dtype))

        self.norm_attention, self.norm_ffn = ones(), ones()
        self.w_qkv, self.w_o = matrix(rows, config.hidden), matrix(config.hidden, config.heads * config.head_dim)
        self.w_up, self.w_down = matrix(up, config.hidden), matrix(config.hidden, config.intermediate)
        self._angles: dict[tuple[torch.device, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._quantised: dict[str, tuple[nn.Parameter, tuple, FP8Weight]] = {}

    def load_llama(self, state: dict[str, torch.Tensor]) -> None:
        """Loads the weights of a LlamaDecoderLayer. Raises KeyError for a missing one, ValueError for one that this
        layer does not have, such as a bias."""
        joined = {
            "norm_attention": ["input_layernorm.weight"],
            "w_qkv": [f"self_attn.{name}_proj.weight" for name in "qkv"],
            "w_o": ["self_attn.o_proj.weight"],
            "norm_ffn": ["post_attention_layernorm.weight"],
            "w_up": [f"mlp.{name}_proj.weight" for name in ("gate", "up")],
            "w_down": ["mlp.down_proj.weight"],
        }
        known = {part for parts in joined.values() for part in parts}
        others = [name for name in state if name not in known and not name.endswith("rotary_emb.inv_freq")]
        if others:
            raise ValueError(f"LlamaLayer: state must be that of a Llama layer without biases, got {', '.join(others)}")
        self.load_state_dict({name: torch.cat([state[part] for part in parts]) for name, parts in joined.items()})

    def angles(self, device: torch.device, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [length, D / 2] in fp32, cached by length."""
        key = device, length
        if key not in self._angles:
            if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
                # Tensors of inference mode could not be saved for a backward later.
                with torch.inference_mode(False):
                    return self.angles(device, length)
            made = rope_tables(length, self.config.head_dim, self.config.rope_base, device)
            if type(made[0]) is not torch.Tensor:  # of FakeTensorMode: it has no values for later calls
                return made
            self._angles[key] = made
        return self._angles[key]

    def quantised(self, name: str) -> FP8Weight:
        """A matrix in fp8, cached while the parameter is the same and unchanged."""
        weight = getattr(self, name)
        if weight.is_inference():  # it has no version, so a change could not be noticed
            return fp8_weight(weight)
        state = weight._version, weight.data_ptr(), weight.dtype, weight.device
        kept = self._quantised.get(name)
        if kept is None or kept[0] is not weight or kept[1] != state:
            kept = self._quantised[name] = weight, state, fp8_weight(weight)
        return kept[2]

    def forget_fp8(self) -> None:
        """Clears the cache, so that the next call quantises all matrices again."""
        self._quantised.clear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = self.angles(x.device, x.shape[1])
        config = self.config
        kept = self.fp8 and not _recorded(x, *self.parameters())
        w_qkv, w_o, w_up, w_down = (self.quantised(n) if kept else getattr(self, n) for n in MATRICES)
        return llama_layer(
            x,
            self.norm_attention,
            w_qkv,
            w_o,
            cos,
            sin,
            self.norm_ffn,
            w_up,
            w_down,
            heads=config.heads,
            kv_heads=config.kv_heads,
            eps=config.eps,
            fp8=self.fp8,
        )

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_angles": {}, "_quantised": {}}


def rope_tables(
    length: int, head_dim: int, base: float, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [length, head_dim / 2] of the angles p · base^(−2i / head_dim), in fp32."""
    pairs = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), base**-pairs)
    return angles.cos(), angles.sin()
