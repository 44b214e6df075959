"""Launches of the Triton kernels, for tensors like those given. All operands are read in place, by their strides."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from . import configs
from .gradients import _fused_mlp_gradients_kernel
from .kernel import _fused_mlp_dhidden_kernel, _fused_mlp_hidden_kernel, _fused_mlp_rows_kernel
from .launch import Launch
from .single import _fused_mlp_single_kernel
from .sums import _fused_mlp_bias_kernel, _fused_mlp_pitch_kernel, _fused_mlp_sum_kernel, _fused_mlp_weights_kernel

Optional = torch.Tensor | None


def hidden_launch(
    x: torch.Tensor, w1: torch.Tensor, b1: Optional, w_gate: Optional, activation: str, copied: Optional = None
) -> Launch:
    """Writes hidden, pre and gate [rows, pitch], given (x, w1, w_gate, b1, hidden, pre, gate, w2, copy). If `copied` is
    a weight like w2, the launch also copies w2 to rows of `pitch` elements; else w2 and copy are None."""
    (rows, depth), cols, gated = x.shape, w1.shape[0], w_gate is not None
    pitch, (capability, sms) = configs.pick_pitch(cols), device_of(x)
    aligned = whole_vectors(x) and whole_vectors(w1) and (w_gate is None or whole_vectors(w_gate))
    config = configs.pick_hidden_config(rows, pitch, depth, gated, aligned, x.dtype, capability, sms)
    strides = *x.stride(), *w1.stride(), *_strides(w_gate, 2), *_strides(b1, 1)
    (workers,), copy = _persistent(config, rows, pitch, sms), configs.pick_copy_config(pitch)
    copy_rows = 0 if copied is None else copied.shape[0]
    copies = triton.cdiv(copy_rows, copy.block_n) * triton.cdiv(pitch, copy.block_k)
    return Launch(
        _fused_mlp_hidden_kernel,
        (workers + copies,),
        x.device,
        (rows, cols, pitch, depth, *strides, copy_rows, *_strides(copied, 2), workers),
        ACTIVATION=activation,
        **_tile(config, depth),
        COPY_N=copy.block_n,
        COPY_K=copy.block_k,
    )


def rows_launch(a: torch.Tensor, b: torch.Tensor, b_gate: Optional, bias: Optional) -> Launch:
    """Writes out [rows, cols] = a · bᵀ + a_gate · b_gateᵀ + bias, given (a, b, a_gate, b_gate, bias, out). a may have
    more columns than b, if they are zero."""
    (rows, depth_a), (cols, depth_b), (capability, sms) = a.shape, b.shape, device_of(a)
    aligned = whole_vectors(a) and whole_vectors(b) and (b_gate is None or whole_vectors(b_gate))
    config = configs.pick_rows_config(rows, cols, depth_a, aligned, a.dtype, capability, sms)
    strides = *a.stride(), *b.stride(), *_strides(b_gate, 2), *_strides(bias, 1)
    return Launch(
        _fused_mlp_rows_kernel,
        _persistent(config, rows, cols, sms),
        a.device,
        (rows, cols, depth_a, depth_b, *strides),
        **_tile(config, depth_a, depth_b),
    )


def dhidden_launch(dy: torch.Tensor, w2: torch.Tensor, hidden: int, gated: bool, activation: str) -> Launch:
    """Writes dpre, dgate and the hidden [rows, pitch], given (dy, w2, pre, gate, dpre, dgate, hidden)."""
    (rows, depth), (_, loaded), (capability, sms) = dy.shape, w2.shape, device_of(dy)
    pitch, aligned = configs.pick_pitch(hidden), whole_vectors(dy) and whole_vectors(w2)
    config = configs.pick_dhidden_config(rows, pitch, depth, gated, aligned, dy.dtype, capability, sms)
    return Launch(
        _fused_mlp_dhidden_kernel,
        _persistent(config, rows, pitch, sms),
        dy.device,
        (rows, hidden, loaded, pitch, depth, *dy.stride(), *w2.mT.stride()),
        ACTIVATION=activation,
        **_tile(config, depth),
    )


def single_launch(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    b1: Optional,
    b2: Optional,
    w_gate: Optional,
    activation: str,
) -> Callable[..., None]:
    """Writes y, pre and gate with the single kernel, given (x, w1, w2, w_gate, b1, b2, y, pre, gate). w2 may have more
    columns than the hidden."""
    (rows, dim), (hidden, _), (dim_out, loaded), device = x.shape, w1.shape, w2.shape, x.device
    aligned = all(t is None or whole_vectors(t) for t in (x, w1, w2, w_gate))
    _, sms = device_of(x)
    config = configs.pick_fused_config(rows, hidden, dim, dim_out, w_gate is not None, aligned, x.dtype, sms)
    blocks = triton.cdiv(max(1, hidden), config.block_h)
    part, splits = triton.cdiv(blocks, config.splits) * config.block_h, config.splits
    sizes = rows, hidden, loaded, configs.pick_pitch(hidden), dim, dim_out, part
    strides = *x.stride(), *w1.stride(), *_strides(w_gate, 2), *w2.stride(), *_strides(b1, 1), *_strides(b2, 1)
    launch = Launch(
        _fused_mlp_single_kernel,
        (triton.cdiv(rows, config.block_m) * splits,),
        device,
        (*sizes, *strides),
        ACTIVATION=activation,
        BLOCK_M=config.block_m,
        BLOCK_H=config.block_h,
        BLOCK_K=config.block_k,
        BLOCK_O=max(configs.MIN_BLOCK, triton.next_power_of_2(dim_out)),
        EVEN_K=dim % config.block_k == 0,
        num_warps=config.num_warps,
        num_stages=config.stages,
    )
    if splits == 1:
        return launch
    add = sum_launch((rows, dim_out), splits, b2, device)

    def run(
        x: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        w_gate: Optional,
        b1: Optional,
        b2: Optional,
        y: torch.Tensor,
        pre: Optional,
        gate: Optional,
    ) -> None:
        parts = torch.empty((splits, rows, dim_out), dtype=torch.float32, device=device)
        launch(x, w1, w2, w_gate, b1, None, parts, pre, gate)
        add(parts, b2, y)

    return run


def weights_launch(a: torch.Tensor, b: torch.Tensor, cols: int, depth: int) -> Callable[..., None]:
    """Writes a gradient [cols, depth] = aᵀ · b, contiguous, given (a, b, out). K is the number of rows. a and b may
    have more columns than cols and depth; rows of a are contiguous."""
    (rows, loaded_a), loaded_b, device, (capability, sms) = a.shape, b.shape[1], a.device, device_of(a)
    aligned = whole_vectors(a) and whole_vectors(b)
    config = configs.pick_weights_config(rows, cols, depth, aligned, a.dtype, capability, sms)
    part, splits = _parts(rows, config.splits, config.block_r)
    launch = Launch(
        _fused_mlp_weights_kernel,
        (triton.cdiv(cols, config.block_n) * triton.cdiv(depth, config.block_k) * splits,),
        device,
        (rows, cols, depth, loaded_a, loaded_b, part, a.stride(0), *b.stride()),
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        BLOCK_R=config.block_r,
        RASTER=config.raster,
        num_warps=config.num_warps,
        num_stages=config.stages,
    )
    if splits == 1:
        return launch
    add = sum_launch((cols, depth), splits, None, device)

    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        parts = torch.empty((splits, cols, depth), dtype=torch.float32, device=device)
        launch(a, b, parts)
        add(parts, None, out)

    return run


def gradients_launch(
    dy: torch.Tensor, x: torch.Tensor, w1: torch.Tensor, pitched: torch.Tensor, hidden: int
) -> Launch | None:
    """Writes the gradients of x, w1 and w2, contiguous, given (dpre, w1, x, dy, hidden, dx, dw1, dw2); dpre and the
    hidden are like `pitched`. None if each gradient should have its own launch."""
    (rows, dim), dim_out, pitch, (capability, sms) = x.shape, dy.shape[1], pitched.shape[1], device_of(x)
    aligned = all(whole_vectors(t) for t in (dy, x, pitched)) and w1.stride(1) == 1 and w1.stride(0) % 16 == 0
    config = configs.pick_gradients_config(rows, dim, hidden, dim_out, aligned, x.dtype, capability, sms)
    if config is None:
        return None
    of_weights = ((hidden, dim), (dim_out, hidden))
    tiles = triton.cdiv(rows, config.block_m) * triton.cdiv(dim, config.block_c)
    tiles += sum(triton.cdiv(n, config.block_n) * triton.cdiv(k, config.block_k) for n, k in of_weights)
    return Launch(
        _fused_mlp_gradients_kernel,
        (tiles,),
        x.device,
        (rows, dim, hidden, dim_out, pitch, *x.stride(), *w1.stride(), dy.stride(0)),
        BLOCK_M=config.block_m,
        BLOCK_C=config.block_c,
        BLOCK_H=config.block_h,
        EVEN_H=hidden % config.block_h == 0 and pitch % config.block_h == 0,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        BLOCK_R=config.block_r,
        num_warps=config.num_warps,
        num_stages=config.stages,
    )


def bias_launch(a: torch.Tensor, cols: int) -> Callable[..., None]:
    """Writes a bias's gradient [cols], given (a, out): the sum of a's rows, each of which is contiguous."""
    rows, device, (_, sms) = a.shape[0], a.device, device_of(a)
    config = configs.pick_bias_config(rows, cols, a.dtype, sms)
    part, splits = _parts(rows, config.splits, config.block_r)
    launch = Launch(
        _fused_mlp_bias_kernel,
        (triton.cdiv(cols, config.block_n) * splits,),
        device,
        (rows, cols, part, a.stride(0)),
        BLOCK_N=config.block_n,
        BLOCK_R=config.block_r,
        num_warps=config.num_warps,
    )
    if splits == 1:
        return launch
    add = sum_launch((1, cols), splits, None, device)

    def run(a: torch.Tensor, out: torch.Tensor) -> None:
        parts = torch.empty((splits, cols), dtype=torch.float32, device=device)
        launch(a, parts)
        add(parts, None, out)

    return run


def sum_launch(shape: tuple[int, int], parts: int, bias: Optional, device: torch.device) -> Launch:
    """Adds up partial results and the bias: writes out [rows, cols], contiguous, given (parts [parts, rows, cols] in
    fp32, bias, out)."""
    elements, cols = shape[0] * shape[1], shape[1]
    config = configs.pick_sum_config(elements)
    grid = (triton.cdiv(elements, config.block),)
    fixed = elements, cols, parts, *_strides(bias, 1)
    return Launch(_fused_mlp_sum_kernel, grid, device, fixed, BLOCK=config.block, num_warps=config.num_warps)


def pitch_launch(weight: torch.Tensor) -> Launch:
    """Copies a weight to rows padded to whole vectors, given (weight, copy)."""
    (rows, cols), pitch = weight.shape, configs.pick_pitch(weight.shape[1])
    return _copy_launch(weight, rows, cols, pitch, weight.stride())


def lengthen_launch(weight: torch.Tensor, rows: int) -> Launch:
    """Copies a contiguous weight and appends rows of zeros, up to `rows` rows, given (weight, copy). The weight is
    treated as a single row that is padded. One launch, where torch.nn.functional.pad is two."""
    return _copy_launch(weight, 1, weight.numel(), rows * weight.shape[1], (0, 1))


def _copy_launch(weight: torch.Tensor, rows: int, cols: int, pitch: int, strides: tuple[int, ...]) -> Launch:
    config = configs.pick_sum_config(pitch)
    return Launch(
        _fused_mlp_pitch_kernel,
        (rows * triton.cdiv(pitch, config.block),),
        weight.device,
        (rows, cols, pitch, *strides),
        BLOCK_N=1,
        BLOCK_K=config.block,
        num_warps=config.num_warps,
    )


def whole_vectors(t: torch.Tensor) -> bool:
    """Whether Triton can prove that a matrix consists of whole 16-byte vectors. One stride must be 1. The size of that
    dimension, the other stride and the address, for which it specialises kernels, must be multiples of 16."""
    for inner, outer in ((1, 0), (0, 1)):
        if t.stride(inner) == 1 and t.shape[inner] % 16 == 0 and t.stride(outer) % 16 == 0:
            return t.data_ptr() % 16 == 0
    return False


def device_of(tensor: torch.Tensor) -> tuple[tuple[int, int], int]:
    """Compute capability and number of SMs; in the interpreter those of an sm_80 with 2 SMs."""
    if not tensor.is_cuda:
        return (8, 0), 2
    properties = torch.cuda.get_device_properties(tensor.device)
    return (properties.major, properties.minor), properties.multi_processor_count


def _persistent(config: configs.ProductConfig, rows: int, cols: int, sms: int) -> tuple[int]:
    tiles = triton.cdiv(rows, config.block_m) * triton.cdiv(cols, config.block_n)
    return (min(sms * config.ctas, tiles),)


def _tile(config: configs.ProductConfig, *depths: int) -> dict[str, int | bool]:
    return dict(
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        RASTER=config.raster,
        EVEN_K=all(depth % config.block_k == 0 for depth in depths),
        num_warps=config.num_warps,
        num_stages=config.stages,
    )


def _parts(rows: int, splits: int, block: int) -> tuple[int, int]:
    """Rows of a split-K partition, a multiple of `block`, and the number of partitions."""
    part = max(1, triton.cdiv(triton.cdiv(rows, splits), block)) * block
    return part, max(1, triton.cdiv(rows, part))


def _strides(tensor: Optional, dims: int) -> tuple[int, ...]:
    return (0,) * dims if tensor is None else tensor.stride()
