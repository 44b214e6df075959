"""The GEMMs for Hopper in CUDA C++ (products.cu): which operands they support, and their launches."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import configs
from ..activation import ACTIVATIONS
from ..launches import device_of, sum_launch
from . import cuda_driver
from .cuda_driver import address, tensor_map

BLOCK_M, BLOCK_K, THREADS = 128, 64, 384  # of products.cu
PLAIN, ACT, GATE, DACT, DGATE, PARTS = range(6)  # epilogues of products.cu
EPILOGUES = tuple(configs.CUDA_EPILOGUES)  # their names, in this order
HALVES = (torch.float16, torch.bfloat16)
VECTOR = 8  # elements of 16 bytes

# Tensor maps of a, b, a_more and b_more, and products.cu's Problem: out, pre, gate, dpre, dgate, bias; the bias's
# stride; rows, cols, pitch, K-blocks, split-K partitions, K-blocks of a partition.
_LAYOUT = "MMMM(PPPPPPqiiiiii)"

Optional = torch.Tensor | None


def missing(x: torch.Tensor) -> str | None:
    """Why products.cu does not support x's dtype or device, or None if it does."""
    if device_of(x)[0] != (9, 0):
        return "it needs a GPU of compute capability 9.0 (Hopper)"
    if x.dtype not in HALVES:
        return f"it supports float16 and bfloat16, not {x.dtype}"
    return cuda_driver.no_compiler()


def takes(*matrices: Optional) -> bool:
    """Whether TMA can read these matrices: rows or columns are contiguous and start on 16-byte boundaries."""
    for t in matrices:
        if t is None:
            continue
        outer = t.stride(0) if t.stride(1) == 1 else t.stride(1)
        if 1 not in t.stride() or not t.numel() or outer <= 0 or outer % VECTOR or t.data_ptr() % 16:
            return False
    return True


def hidden_launch(
    x: torch.Tensor, w1: torch.Tensor, b1: Optional, w_gate: Optional, activation: str
) -> Callable[..., None]:
    """Writes hidden, pre and gate [rows, pitch], given (x, w1, w_gate, b1, hidden, pre, gate)."""
    pitch = configs.pick_pitch(w1.shape[0])
    epilogue = ACT if w_gate is None else GATE
    start = _Product(x, w1, epilogue, activation, w1.shape[0], pitch, b_more=w_gate, bias=b1)

    def run(
        x: torch.Tensor,
        w1: torch.Tensor,
        w_gate: Optional,
        b1: Optional,
        hidden: Optional,
        pre: Optional,
        gate: Optional,
    ) -> None:
        start((x, w1, x, w1 if w_gate is None else w_gate), hidden, pre, gate, None, None, b1)

    return run


def rows_launch(a: torch.Tensor, b: torch.Tensor, b_gate: Optional, bias: Optional) -> Callable[..., None]:
    """Writes out [rows, cols] = a · bᵀ + a_gate · b_gateᵀ + bias, given (a, b, a_gate, b_gate, bias, out)."""
    cols = b.shape[0]
    start = _Product(a, b, PLAIN, "silu", cols, cols, b_more=b_gate, two=b_gate is not None, bias=bias)

    def run(
        a: torch.Tensor, b: torch.Tensor, a_gate: Optional, b_gate: Optional, bias: Optional, out: torch.Tensor
    ) -> None:
        more = (a, b) if a_gate is None or b_gate is None else (a_gate, b_gate)
        start((a, b, *more), out, None, None, None, None, bias)

    return run


def dhidden_launch(
    dy: torch.Tensor, w2: torch.Tensor, hidden: int, gated: bool, activation: str
) -> Callable[..., None]:
    """Writes dpre, dgate and the hidden [rows, pitch], given (dy, w2, pre, gate, dpre, dgate, hidden)."""
    start = _Product(dy, w2.mT, DGATE if gated else DACT, activation, hidden, configs.pick_pitch(hidden))

    def run(
        dy: torch.Tensor,
        w2: torch.Tensor,
        pre: torch.Tensor,
        gate: Optional,
        dpre: Optional,
        dgate: Optional,
        hidden: Optional,
    ) -> None:
        start((dy, w2, dy, w2), hidden, pre, gate, dpre, dgate, None)

    return run


def weights_launch(a: torch.Tensor, b: torch.Tensor, cols: int, depth: int) -> Callable[..., None]:
    """Writes a gradient [cols, depth] = aᵀ · b, contiguous, given (a, b, out). K is the number of rows."""
    rows, device, (_, sms) = a.shape[0], a.device, device_of(a)
    steps = -(-rows // BLOCK_K)
    tiles = -(-cols // BLOCK_M) * -(-depth // 256)
    part = -(-steps // configs.pick_cuda_parts(steps, tiles, sms))
    parts = -(-steps // part)
    if parts == 1 and depth % VECTOR == 0:
        whole = _Product(a.mT, b.mT, PLAIN, "silu", depth, depth, rows=cols)
        return lambda a, b, out: whole((a, b, a, b), out, None, None, None, None, None)
    start = _Product(a.mT, b.mT, PARTS, "silu", depth, depth, rows=cols, parts=parts, part=part)
    add = sum_launch((cols, depth), parts, None, device)

    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        sums = torch.empty((parts, cols, depth), dtype=torch.float32, device=device)
        start((a, b, a, b), sums, None, None, None, None, None)
        add(sums, None, out)

    return run


class _Product:
    """A launch of products.cu: the GEMM a [rows, K] times b [columns, K], with a result of `rows` by `cols` elements in
    rows of `pitch` elements."""

    def __init__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        epilogue: int,
        activation: str,
        cols: int,
        pitch: int,
        *,
        b_more: Optional = None,
        two: bool = False,
        bias: Optional = None,
        rows: int | None = None,
        parts: int = 1,
        part: int | None = None,
    ) -> None:
        rows, terms, device = a.shape[0] if rows is None else rows, a.shape[1], a.device
        a_rows, b_rows = a.stride(1) != 1, b.stride(1) != 1  # whether a is M-major, and b N-major
        steps, (_, sms) = -(-terms // BLOCK_K), device_of(a)
        config = configs.pick_cuda_config(
            rows, pitch, steps * (1 + two), parts, EPILOGUES[epilogue], sms, activation == "gelu"
        )
        columns = config.block_n // 2 if epilogue == GATE else config.block_n
        # Each CTA of a cluster multicasts its share of b: some columns, some of K if b is N-major, or one of two
        # weights.
        box = BLOCK_K // config.cluster if b_rows else columns // (1 if epilogue == GATE else config.cluster)
        a_map, b_map = matrix_map(a, BLOCK_K if a_rows else BLOCK_M, a_rows), matrix_map(b, box, b_rows)
        self._maps = a_map, b_map, a_map, b_map if b_more is None else matrix_map(b_more, box, b_rows)
        stride = 0 if bias is None else bias.stride(0)
        self._sizes = stride, rows, cols, pitch, steps, parts, steps if part is None else part
        defines = (
            f"EPILOGUE={epilogue}",
            f"ACTIVATION={ACTIVATIONS.index(activation)}",
            f"FP16={int(a.dtype == torch.float16)}",
            f"BLOCK_N={config.block_n}",
            f"TURNS={int(config.turns)}",
            f"STAGES={config.stages}",
            f"RASTER={config.raster}",
            f"CLUSTER={config.cluster}",
            f"A_TRANS={int(a_rows)}",
            f"B_TRANS={int(b_rows)}",
            f"TWO={int(two)}",
        )
        shared = shared_bytes(config)
        with torch.cuda.device_of(a):
            (kernel,) = cuda_driver.kernels(device.index, "products.cu", ("fused_mlp_products",), defines, shared)
        clusters = parts * -(-rows // (BLOCK_M * config.cluster)) * -(-pitch // columns)
        grid = config.cluster * min(sms // config.cluster, clusters)
        self._launch = cuda_driver.Launch(device.index, kernel, grid, THREADS, shared, _LAYOUT)

    def __call__(self, operands: tuple[torch.Tensor, ...], *written: Optional) -> None:
        """`operands` are a, b, a_more and b_more; `written` are out, pre, gate, dpre, dgate and the bias."""
        maps = (make(t.data_ptr()) for make, t in zip(self._maps, operands, strict=True))
        self._launch(*maps, *map(address, written), *self._sizes)


def shared_bytes(config: configs.CudaConfig) -> int:
    """Shared memory of a CTA: the pipeline stages of both operands, and their barriers."""
    return config.stages * configs.cuda_step_bytes(config.block_n)


def matrix_map(t: torch.Tensor, block: int, transposed: bool = False) -> cuda_driver.TensorMap:
    """The tensor map of a matrix, or of its transpose if that is row-major, in boxes of `block` rows by 64 columns."""
    stored = t.mT if transposed else t
    return tensor_map(stored[None, None], stored.shape[0], block)
