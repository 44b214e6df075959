"""The GEMMs of small K with an activation, for Hopper in CUDA C++ (narrow.cu): which operands they support, and their
launches."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import configs
from ..activation import ACTIVATIONS
from ..launches import device_of
from . import cuda_driver, products
from .cuda_driver import address

BLOCK_M, BLOCK_K, ROWS, THREADS = 128, 64, 64, 384  # of narrow.cu
ACT, GATE, DACT, DGATE = range(4)  # epilogues of narrow.cu
LOADED = {ACT: 0, GATE: 0, DACT: 1, DGATE: 2}  # number of tensors that are loaded into the epilogue's tiles
MAX_TERMS = configs.MAX_NARROW

# Tensor maps of a, b and b_more, of pre and gate, and of three result tensors; narrow.cu's Problem: the bias and its
# stride; the weight that is copied, the copy, and the weight's strides; rows, cols, pitch; rows of the weight.
_LAYOUT = "MMMMMMMM(PqPPqqiiii)"

Optional = torch.Tensor | None


def takes(a: torch.Tensor, b: torch.Tensor, b_more: Optional = None) -> bool:
    """Whether narrow.cu can multiply a [rows, K] by b [columns, K] and b_more: K is small, rows of a are contiguous,
    both weights are contiguous along the same dimension, all on 16-byte boundaries."""
    alike = b_more is None or (b_more.stride(1) == 1) == (b.stride(1) == 1)
    return 0 < a.shape[1] <= MAX_TERMS and a.stride(1) == 1 and alike and products.takes(a, b, b_more)


def hidden_launch(
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: Optional,
    w_gate: Optional,
    activation: str,
    written: tuple[bool, bool],
    copied: Optional = None,
) -> Callable[..., None]:
    """Writes hidden, pre and gate [rows, pitch], given (x, w1, w_gate, b1, hidden, pre, gate, w2, copy). `written` says
    whether the hidden is stored, and whether pre and gate are; a tensor that is not may be None. If `copied` is a
    weight like w2, w2 is copied to padded rows as well; else w2 and copy are None."""
    hidden, kept = written
    wanted = (hidden, kept, kept and w_gate is not None)
    product = _Product(x, w1, ACT if w_gate is None else GATE, activation, w1.shape[0], wanted, w_gate, b1, copied)

    def run(
        x: torch.Tensor,
        w1: torch.Tensor,
        w_gate: Optional,
        b1: Optional,
        hidden: Optional,
        pre: Optional,
        gate: Optional,
        w2: Optional,
        copy: Optional,
    ) -> None:
        product(x, w1, w_gate, b1, None, None, w2, copy, hidden, pre, gate)

    return run


def dhidden_launch(
    dy: torch.Tensor, w2: torch.Tensor, hidden: int, gated: bool, activation: str, written: tuple[bool, bool, bool]
) -> Callable[..., None]:
    """Writes dpre, dgate and the hidden [rows, pitch], given (dy, w2, pre, gate, dpre, dgate, hidden). `written` says
    which of the three are stored; a tensor that is not may be None."""
    for_pre, for_gate, for_w2 = written
    wanted = (for_pre, for_gate, for_w2) if gated else (for_pre, for_w2, False)
    product = _Product(dy, w2.mT, DGATE if gated else DACT, activation, hidden, wanted)

    def run(
        dy: torch.Tensor,
        w2: torch.Tensor,
        pre: torch.Tensor,
        gate: Optional,
        dpre: Optional,
        dgate: Optional,
        hidden: Optional,
    ) -> None:
        written = (dpre, dgate, hidden) if gated else (dpre, hidden, None)
        product(dy, w2, None, None, pre, gate, None, None, *written)

    return run


class _Product:
    """A launch of narrow.cu: the GEMM a [rows, K] times b [columns, K], with `cols` columns of the result, padded to
    the pitch. `written` says which of the epilogue's tensors are stored, in the order of narrow.cu."""

    def __init__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        epilogue: int,
        activation: str,
        cols: int,
        written: tuple[bool, bool, bool],
        b_more: Optional = None,
        bias: Optional = None,
        copied: Optional = None,
    ) -> None:
        rows, pitch, steps = a.shape[0], configs.pick_pitch(cols), -(-a.shape[1] // BLOCK_K)
        transposed, (_, sms) = b.stride(1) != 1, device_of(a)
        stores = sum(wanted << i for i, wanted in enumerate(written))
        weights, tensors = sizes_of(epilogue, stores)
        config = configs.pick_narrow_config(rows, steps, weights, tensors)
        box = (BLOCK_K if transposed else config.columns) // config.cluster
        like_result = torch.empty((rows, pitch), dtype=a.dtype, device="meta")
        self._a_map, self._result_map = products.matrix_map(a, ROWS), products.matrix_map(like_result, ROWS)
        self._b_maps = tuple(products.matrix_map(t, box, transposed) for t in (b, b if b_more is None else b_more))
        self._written = written
        self._bias_stride = 0 if bias is None else bias.stride(0)
        self._copy_strides = (0, 0) if copied is None else copied.stride()
        self._sizes = rows, cols, pitch, 0 if copied is None else copied.shape[0]
        defines = (
            f"EPILOGUE={epilogue}",
            f"ACTIVATION={ACTIVATIONS.index(activation)}",
            f"FP16={int(a.dtype == torch.float16)}",
            f"STEPS={steps}",
            f"STAGES={config.stages}",
            f"A_STAGES={config.a_stages}",
            f"CLUSTER={config.cluster}",
            f"COLUMNS={config.columns}",
            f"B_TRANS={int(transposed)}",
            f"BIAS={int(bias is not None)}",
            f"STORES={stores}",
            f"TAIL={tail_of(pitch, config.columns)}",
        )
        shared, index = configs.narrow_bytes(config, weights, tensors), a.device.index
        with torch.cuda.device_of(a):
            (kernel,) = cuda_driver.kernels(index, "narrow.cu", ("fused_mlp_narrow",), defines, shared)
        blocks = -(-rows // (BLOCK_M * config.cluster)) * -(-pitch // config.columns)
        grid = config.cluster * min(configs.clusters_at_once(sms, config.cluster), blocks)
        self._launch = cuda_driver.Launch(index, kernel, grid, THREADS, shared, _LAYOUT)

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        b_more: Optional,
        bias: Optional,
        pre: Optional,
        gate: Optional,
        copied: Optional,
        copy: Optional,
        *written: Optional,
    ) -> None:
        """`pre` and `gate` are read. `written` are the epilogue's tensors. `copy` receives the copy of `copied`."""
        from_a = self._a_map(a.data_ptr())  # also a placeholder for absent tensors, whose map the kernel does not use
        b_map, b_more_map = self._b_maps
        from_b = b_map(b.data_ptr()), from_a if b_more is None else b_more_map(b_more.data_ptr())
        read = (from_a if t is None else self._result_map(t.data_ptr()) for t in (pre, gate))
        to = (
            self._result_map(t.data_ptr()) if t is not None and wanted else from_a
            for t, wanted in zip(written, self._written, strict=True)
        )
        weights = address(bias), self._bias_stride, address(copied), address(copy), *self._copy_strides
        self._launch(from_a, *from_b, *read, *to, *weights, *self._sizes)


def tail_of(pitch: int, columns: int) -> int:
    """Columns of the last block, rounded up to a multiple of 32."""
    return -(-((pitch - 1) % columns + 1) // 32) * 32


def sizes_of(epilogue: int, stores: int) -> tuple[int, int]:
    """The number of weights in b, and of tensors that have a tile: those that are loaded or stored (bits of
    `stores`)."""
    return 2 if epilogue == GATE else 1, (stores | (1 << LOADED[epilogue]) - 1).bit_count()
