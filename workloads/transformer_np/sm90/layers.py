"""Launches of layers_forward.cu and layers_backward.cu: the layers that they support, the tensors that they write."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from . import cuda_driver
from .cuda_driver import address, tensor_map

WIDTH, HEADS, ROWS, PANEL, CLUSTER, THREADS = 512, 8, 64, 64, 8, 224  # as in layers.cuh
HIDDEN = (CLUSTER * PANEL, 22 * PANEL)  # the narrowest and the widest
SHARED = 22 * 8192 + 6 * 8192 + 2048 + 8 * 33  # bytes: panels, pipeline stages, sums, mbarriers
ALIGNMENT = 16  # bytes; TMA requires it of addresses and strides

_SHAPE = "iiiiff"
_FORWARD, _BACKWARD = f"MMMMMMMM({13 * 'P'}q{_SHAPE})", f"MMMMMMMMM({17 * 'P'}q{_SHAPE})"


class Weights(NamedTuple):
    """The weights of the first of equal layers, and the distances in elements to those of the next layer, for the
    GEMMs' weights and for the norms'."""

    qkv: torch.Tensor
    out: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    attention_gamma: torch.Tensor
    mlp_gamma: torch.Tensor
    layers: int
    pitch: int
    gamma_pitch: int


class Saved(NamedTuple):
    """The tensors that the forward writes for the backward, for L layers and rows [B, S].

    h         [2, L, B, S, 512]     inputs of the norms before attention [0] and MLP [1]; that of the first layer is the
                                    input of the layers, and not written
    n, rstd   and [2, L, B, S]      outputs of the norms, and 1 / rms in fp32
    qkv       [L, B, S, 1536]       k and v are written only for the context
    attended  [L, B, S, 512]        concatenated outputs of the heads
    lse       [L, B, 8, S]          fp32
    pre       [L, B, S, hidden]     pre-activations; hidden is the activation's output
    """

    h: torch.Tensor
    n: torch.Tensor
    rstd: torch.Tensor
    qkv: torch.Tensor
    attended: torch.Tensor
    lse: torch.Tensor
    pre: torch.Tensor
    hidden: torch.Tensor


class Gradients(NamedTuple):
    """The gradients of the input; of the rows after attention [0] and after the MLP [1] of each layer; of the
    pre-activations; of q, k and v, zero where these are not read; and of the norms' weights, as partial sums
    [L, 2, parts, 512]."""

    dx: torch.Tensor
    dx_at: torch.Tensor
    dpre: torch.Tensor
    dqkv: torch.Tensor
    dgamma: torch.Tensor


def weights_of(layers: Sequence[dict[str, torch.Tensor]]) -> Weights | None:
    """The weights of equal layers as `Weights`, if each kind has the same distance from layer to layer, k and v follow
    q in memory, and all GEMMs' weights have one dtype and so have all norms'. Otherwise None."""
    pitch, gamma_pitch = (_pitch([layer[kind] for layer in layers]) for kind in ("q", "before attention"))
    if pitch is None or gamma_pitch is None:
        return None
    for kind, expected in dict(kv=pitch, out=pitch, up=pitch, down=pitch, **{"before mlp": gamma_pitch}).items():
        if _pitch([layer[kind] for layer in layers]) != expected:
            return None
    first = {kind: weight.detach() for kind, weight in layers[0].items()}
    q, kv = first["q"], first["kv"]
    if kv.data_ptr() != q.data_ptr() + q.numel() * q.element_size():
        return None
    if any(first[kind].dtype != q.dtype for kind in ("kv", "out", "up", "down")):
        return None
    if first["before mlp"].dtype != first["before attention"].dtype:
        return None
    qkv = q.as_strided((q.shape[0] + kv.shape[0], q.shape[1]), q.stride())
    products = (qkv, *(first[kind] for kind in ("out", "up", "down")))
    return Weights(*products, first["before attention"], first["before mlp"], len(layers), pitch, gamma_pitch)


def _pitch(tensors: Sequence[torch.Tensor]) -> int | None:
    """The distance in elements between successive tensors, if they are contiguous, equally spaced in one buffer, and of
    the same dtype and shape; otherwise None. 0 for a single tensor."""
    first, size = tensors[0], tensors[0].element_size()
    memory, step = first.untyped_storage().data_ptr(), 0
    if len(tensors) > 1:
        step = tensors[1].data_ptr() - first.data_ptr()
    for i, tensor in enumerate(tensors):
        if not tensor.is_contiguous() or tensor.untyped_storage().data_ptr() != memory or tensor.dtype != first.dtype:
            return None
        if tensor.shape != first.shape or tensor.data_ptr() != first.data_ptr() + i * step:
            return None
    return step // size


def missing(x: torch.Tensor, context: int, heads: int, weights: Weights) -> str | None:
    """Why the kernels do not support rows x [B, S, d] and these layers, or None."""
    if not x.is_cuda or torch.cuda.get_device_capability(x.device) != (9, 0):
        return "it needs a GPU of compute capability 9.0 (Hopper)"
    if x.dtype != torch.bfloat16 or weights.qkv.dtype != x.dtype:
        return "it supports bfloat16 only"
    if not len(x):
        return "it requires at least one sequence"
    if weights.attention_gamma.dtype not in (x.dtype, torch.float32):
        return "it requires norm weights in bfloat16 or float32"
    reason = missing_sizes(x.shape[2], heads, weights.up.shape[0], context, x.shape[1] - context)
    if reason is not None:
        return reason
    tensors = (x, weights.qkv, weights.out, weights.up, weights.down)
    if any(t.data_ptr() % ALIGNMENT for t in tensors) or weights.pitch * x.element_size() % ALIGNMENT:
        return f"it requires rows and weights on {ALIGNMENT}-byte boundaries"
    return cuda_driver.no_compiler()


def missing_sizes(width: int, heads: int, hidden: int, context: int, targets: int) -> str | None:
    """Why the kernels do not support these sizes, or None."""
    if width != WIDTH or heads != HEADS or hidden % PANEL or not HIDDEN[0] <= hidden <= HIDDEN[1]:
        return f"it supports d_model {WIDTH}, {HEADS} heads, d_ff {HIDDEN[0]} to {HIDDEN[1]} in multiples of {PANEL}"
    if not 0 < context <= ROWS or targets < 1:
        return f"it supports 1 to {ROWS} rows of context, and at least one target"
    return None


def clusters(batch: int, context: int, targets: int) -> int:
    """The number of clusters of 8 CTAs for rows with at most 64 context rows per sequence."""
    return batch * (1 + -(-targets // ROWS))


def forward(
    x: torch.Tensor, weights: Weights, context: int, eps: float, save: bool
) -> tuple[torch.Tensor, Saved | None]:
    """(output rows [B, S, 512] of all layers, tensors for the backward if `save`, otherwise None). x must be
    contiguous, and so is the output."""
    batch, rows, _ = x.shape
    layers, hidden = weights.layers, weights.up.shape[0]

    def made(*shape: int, dtype: torch.dtype = x.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    kept = layers if save else 0
    h = made(2 * kept + 1, batch, rows, WIDTH)
    n, rstd = made(2, kept, batch, rows, WIDTH), made(2, kept, batch, rows, dtype=torch.float32)
    scaled, attended = made(2, batch, rows, WIDTH), made(layers, batch, rows, WIDTH)
    qkv, lse = made(layers, batch, rows, 3 * WIDTH), made(kept, batch, HEADS, rows, dtype=torch.float32)
    pre, act = made(kept, batch, rows, hidden), made(layers, batch, rows, hidden)
    written = torch.zeros((layers, batch, CLUSTER), dtype=torch.int32, device=x.device)
    read = (weights.qkv, weights.out, weights.up, weights.down, qkv, scaled, attended, act)
    gammas = weights.attention_gamma, weights.mlp_gamma
    pointers = (x, *gammas, h, n, scaled, rstd, qkv, attended, lse, pre, act, written)
    _start(_forward_launch(_key(x, weights, context), save), read, pointers, x, weights, context, eps)
    if not save:
        return h[0], None
    return h[-1], Saved(h[:-1].unflatten(0, (2, layers)), n, rstd, qkv, attended, lse, pre, act)


def backward(dy: torch.Tensor, x: torch.Tensor, saved: Saved, weights: Weights, context: int, eps: float) -> Gradients:
    """The gradients, given the contiguous gradient dy of the output rows of all layers."""
    batch, rows, _ = x.shape
    layers = weights.layers
    dx = torch.empty_like(dy)
    dx_at = torch.empty_like(saved.n)
    dpre, dqkv = torch.empty_like(saved.pre), torch.empty_like(saved.qkv)
    parts, floats = clusters(batch, context, rows - context) * 4, dict(dtype=torch.float32, device=x.device)
    dgamma = torch.empty((layers, 2, parts, WIDTH), **floats)
    sums = torch.empty((layers, batch, CLUSTER, 2, PANEL * PANEL), **floats)
    written = torch.zeros((layers, batch, CLUSTER), dtype=torch.int32, device=x.device)
    read = (weights.qkv, weights.out, weights.up, weights.down, saved.qkv, saved.qkv, dx_at, dpre, dqkv)
    pointers = (
        *(weights.attention_gamma, weights.mlp_gamma, saved.h, x, saved.rstd, saved.qkv, saved.attended, saved.lse),
        *(saved.pre, dy, dx, dx_at, dpre, dqkv, dgamma, sums, written),
    )
    _start(_backward_launch(_key(x, weights, context)), read, pointers, x, weights, context, eps)
    return Gradients(dx, dx_at, dpre, dqkv, dgamma)


class _Key(NamedTuple):
    """The parameters of a launch other than addresses."""

    device: int
    dtype: torch.dtype
    batch: int
    rows: int
    context: int
    layers: int
    hidden: int
    pitch: int
    exact_norms: bool


def _key(x: torch.Tensor, weights: Weights, context: int) -> _Key:
    exact = weights.attention_gamma.dtype == torch.float32
    return _Key(
        x.device.index, x.dtype, *x.shape[:2], context, weights.layers, weights.up.shape[0], weights.pitch, exact
    )


_Made = tuple[cuda_driver.Launch, tuple[cuda_driver.TensorMap, ...]]


def _start(
    made: _Made,
    read: Sequence[torch.Tensor],
    pointers: Sequence[torch.Tensor],
    x: torch.Tensor,
    weights: Weights,
    context: int,
    eps: float,
) -> None:
    """Launches a kernel with the tensor maps for TMA and the struct Problem: pointers, the norms' pitch, Shape."""
    launch, maps = made
    (batch, rows, _), scale = x.shape, PANEL**-0.5
    tensors = (make(t.data_ptr()) for make, t in zip(maps, read, strict=True))
    launch(*tensors, *map(address, pointers), weights.gamma_pitch, batch, context, rows, weights.layers, eps, scale)


@lru_cache(maxsize=64)
def _forward_launch(key: _Key, save: bool) -> _Made:
    keys, scaled = _rows_map(key, 3 * WIDTH, key.layers, key.context), _rows_map(key, WIDTH, 2)
    attended, hidden = (_rows_map(key, columns, key.layers) for columns in (WIDTH, key.hidden))
    launch = _launch(key, "forward", (f"SAVE={int(save)}",), _FORWARD)
    return launch, (*_weights_maps(key), keys, scaled, attended, hidden)


@lru_cache(maxsize=64)
def _backward_launch(key: _Key) -> _Made:
    keys = _rows_map(key, 3 * WIDTH, key.layers, key.context)
    three, two, hidden = (
        _rows_map(key, columns, tensors)
        for columns, tensors in ((3 * WIDTH, key.layers), (WIDTH, 2 * key.layers), (key.hidden, key.layers))
    )
    return _launch(key, "backward", (), _BACKWARD), (*_weights_maps(key), keys, three, two, hidden, three)


def _launch(key: _Key, which: str, defines: tuple[str, ...], layout: str) -> cuda_driver.Launch:
    defines = (*common_defines(key.hidden, key.exact_norms), *defines)
    with torch.cuda.device(key.device):
        (kernel,) = cuda_driver.kernels(
            key.device, f"layers_{which}.cu", (f"transformer_np_layers_{which}",), defines, SHARED
        )
    grid = CLUSTER * clusters(key.batch, key.context, key.rows - key.context)
    return cuda_driver.Launch(key.device, kernel, grid, THREADS, SHARED, layout)


def common_defines(hidden: int, exact_norms: bool) -> tuple[str, ...]:
    """The defines that layers.cuh requires."""
    return f"SHARED={SHARED}", f"HIDDEN_PANELS={hidden // PANEL}", f"GAMMA32={int(exact_norms)}", "FP16=0"


def _weights_maps(key: _Key) -> tuple[cuda_driver.TensorMap, ...]:
    """The tensor maps of all layers' weights: of q, k and v, the output projection, up and down; boxes of 64 by 64."""
    found = []
    for rows, columns in ((3 * WIDTH, WIDTH), (WIDTH, WIDTH), (key.hidden, WIDTH), (WIDTH, key.hidden)):
        like = torch.empty_strided(
            (1, key.layers, rows, columns), (0, key.pitch, columns, 1), dtype=key.dtype, device="meta"
        )
        found.append(tensor_map(like, rows, PANEL))
    return tuple(found)


def _rows_map(key: _Key, columns: int, tensors: int, rows: int | None = None) -> cuda_driver.TensorMap:
    """The tensor map of [tensors, batch, rows, columns]. TMA reads only the first `rows` rows of a sequence."""
    like = torch.empty((1, tensors * key.batch, key.rows, columns), dtype=key.dtype, device="meta")
    return tensor_map(like, key.rows if rows is None else rows, ROWS)
