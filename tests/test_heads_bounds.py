"""The backward of heads stays within its tensors, for many rows and in each of its ways: every launch that a plan makes
is held against the memory that is there, without a GPU.

Tensors are real and have the sizes of the problem, but nobody writes them, so that they take no memory. Of a launch of
CUDA C++ the parameters are checked: what its tensor maps cover, and where the last element lies that each pointer is
used for. Of one of Triton the kernel itself runs in the interpreter, whose integers overflow as those of a GPU do: its
first, its middle and its last CTA, of the first chunk of rows and of the last. Products are PyTorch's, whose shapes are
checked.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from triton.runtime import interpreter

from harness.correctness import addresses

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run in Triton's interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of NumPy: the numbers are whatever lies in memory
]

FP16 = torch.float16
SMS = 132
#: Rows of x, the last of which give the hidden, and then x itself, more than 2^31 elements.
MANY = 8449, 16_896, 20_010, 131_072, 205_000, 300_001, 2_000_000
MOST = 4_300_001
#: Columns of x, heads, columns of the hidden, and of y.
MODEL, OTHERS = (512, 10, 1365, 3), ((8, 3, 7, 1), (64, 2, 1408, 8), (72, 1, 128, 3))
LIMITS = {"i": 2**31, "q": 2**63, "P": 2**63}  # of a parameter, by its letter


class Memory(TorchDispatchMode):
    """What is allocated while it is on, beside what it was given: where addresses may lie."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self._held: dict[int, tuple[int, StorageWeakRef]] = {}
        self.parts: dict[int, int] = {}  # how many have been written, by their address
        for tensor in given:
            self._note(tensor)

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.device.type == "cpu":
            self._held[storage.data_ptr()] = storage.nbytes(), StorageWeakRef(storage)
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return tree_map_only(torch.Tensor, self._note, func(*args, **(kwargs or {})))

    def holds(self, address: int, sizes: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> None:
        """All elements of such a tensor lie in one allocation, which has not been given back. Strides in elements."""
        assert min(sizes) > 0 and min(strides) >= 0 and address % itemsize == 0
        end = address + (sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)) + 1) * itemsize
        first = max((at for at in self._held if at <= address), default=0)
        size, storage = self._held[first]
        assert end <= first + size, f"{end - first - size} bytes beyond {size}"
        assert not storage.expired()

    def holds_all(self, address: int, sizes: tuple[int, ...], itemsize: int) -> None:
        """The same of a contiguous one."""
        self.holds(address, (prod(sizes),), (1,), itemsize)


# ---- CUDA C++ -----------------------------------------------------------------------------------------------------


def encoded(
    address: int, kind: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: int
) -> tuple[int, ...]:
    """In place of a tensor map: what it was made of, once that has been held against what TMA takes."""
    assert address % 16 == 0 and len(sizes) == len(box) == len(strides) + 1
    assert all(0 < n <= 2**32 for n in sizes) and all(0 < n <= 256 for n in box)
    assert all(0 < n < 2**40 and n % 16 == 0 for n in strides) and box[0] * 2 <= 128
    return address, *sizes, *(n // 2 for n in strides)


def covers(memory: Memory, tensor_map: tuple[int, ...], columns: int, rows: int, heads: int) -> None:
    address, *sizes, of_row, of_head, _ = tensor_map
    assert sizes == [columns, rows, heads, 1]
    memory.holds(address, (columns, rows, heads), (1, of_row, of_head), 2)


def dhidden(memory: Memory, w1: Any, x: Any, dpre: Any, *values: int) -> None:
    dy, *dy_strides, w2, of_head, of_out, of_column, dw2, rows, heads, hidden, dim_out, tiles, write, added, rounded = (
        values
    )
    dim, pitch = x[1], triton.cdiv(hidden, 16) * 16
    covers(memory, w1, dim, hidden, heads)
    covers(memory, x, dim, rows, 1)
    if write:
        covers(memory, dpre, pitch, rows, heads)
    memory.holds(dy, (rows, heads, dim_out), tuple(dy_strides), 2)
    memory.holds(w2, (heads, dim_out, hidden), (of_head, of_out, of_column), 2)
    if dw2:
        parts = triton.cdiv(triton.cdiv(rows, 128), tiles)
        memory.holds_all(dw2, (parts, heads, dim_out, hidden), 2 if rounded else 4)
        assert not rounded or (parts == 1 and added == 0)
        assert added == memory.parts.get(dw2, 0), "it adds to parts that are not there, or writes over others"
        memory.parts[dw2] = max(parts, added)


def products(memory: Memory, dpre: Any, w1: Any, x: Any, *values: int) -> None:
    parts, dx, sums, dw1, rows, heads, hidden, dim, dx_heads, terms, _, _, add = values
    covers(memory, dpre, triton.cdiv(hidden, 16) * 16, rows, heads)
    covers(memory, w1, dim, hidden, heads)
    covers(memory, x, dim, rows, 1)
    if dx_heads and parts:
        memory.parts[parts] = triton.cdiv(heads, dx_heads)
        memory.holds_all(parts, (memory.parts[parts], rows, dim), 4)
    elif dx_heads:
        assert dx_heads >= heads and dx % 16 == 0
        memory.holds_all(dx, (rows, dim), 2)
    if terms:
        assert terms == rows and (dw1 or sums) and (dw1 or sums) % 16 == 0
        if add or not dw1:
            memory.holds_all(sums, (heads, hidden, dim), 4)
        if dw1:
            memory.holds_all(dw1, (heads, hidden, dim), 2)


def forward_of_mlp(memory: Memory, x: Any, w1: Any, *values: int) -> None:
    w2, *strides, rows, heads, hidden, dim_out, _, y = values
    covers(memory, x, x[1], rows, 1)
    covers(memory, w1, x[1], hidden, heads)
    memory.holds(w2, (heads, hidden, dim_out), (strides[0], strides[2], strides[1]), 2)
    memory.holds_all(y, (rows, heads, dim_out), 2)


def forward_of_gmm(memory: Memory, x: Any, w1: Any, *values: int) -> None:
    w2, *strides, rows, heads, hidden, dim_out, unit_heads = values[:9]
    bias, of_head, of_column, y, of_row, statistics, parameters, wide_bias, wide_y = values[9:]
    covers(memory, x, x[1], rows, 1)
    covers(memory, w1, x[1], hidden, heads)
    memory.holds(w2, (heads, hidden, dim_out), (strides[0], strides[2], strides[1]), 2)
    memory.holds(y, (rows,), (of_row,), 4 if wide_y else 2)
    if bias:
        memory.holds(bias, (heads, 3), (of_head, of_column), 4 if wide_bias else 2)
    if statistics:
        memory.holds_all(statistics, (triton.cdiv(heads, unit_heads), rows, 4), 4)
    if parameters:
        memory.holds_all(parameters, (rows, heads, 3), 4)


KERNELS: dict[str, Callable[..., None]] = {
    "heads_dhidden": dhidden,
    "heads_products": products,
    "heads_mlp_forward": forward_of_mlp,
    "heads_gmm_forward": forward_of_gmm,
}


def cuda_launch(memory: Memory, seen: list[str]) -> Callable[..., Callable[..., None]]:
    def made(device: int, kernel: str, grid: int, threads: int, shared: int, layout: str) -> Callable[..., None]:
        assert 0 < grid <= SMS and threads == 384 and shared <= 227 << 10
        letters = layout.replace("(", "").replace(")", "")

        def launch(*values: Any) -> None:
            for letter, value in zip(letters, values, strict=True):
                assert letter == "M" or -LIMITS[letter] <= value < LIMITS[letter]
            seen.append(kernel)
            KERNELS[kernel](memory, *values)

        return launch

    return made


# ---- Triton -------------------------------------------------------------------------------------------------------


@contextmanager
def of_these(ctas: list[int], count: int) -> Iterator[None]:
    """A launch of as many CTAs in the interpreter has these numbers, of a grid of `count`. Products are not made, which
    take all of its time, and no tensor is copied to where it lies already, which would touch all of its memory."""
    builder = interpreter.interpreter_builder
    place, size = builder.set_grid_idx, builder.set_grid_dim
    with (
        mock.patch.object(builder, "set_grid_idx", lambda x, y, z: place(ctas[x], y, z)),
        mock.patch.object(builder, "set_grid_dim", lambda x, y, z: size(count, y, z)),
        mock.patch.object(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None),
        mock.patch.object(interpreter.InterpreterBuilder, "create_dot", lambda self, a, b, acc, *_: acc),
    ):
        yield


def triton_launch(memory: Memory, seen: list[str], all_rows: int) -> type:
    class Launch:
        def __init__(
            self, kernel: Any, grid: tuple[int], device: torch.device, fixed: tuple[int, ...], **options: Any
        ) -> None:
            (self.count,) = grid
            assert 0 < self.count < 2**31 and all(-(2**63) <= value < 2**63 for value in fixed)
            self.kernel, self.fixed, self.options = kernel, fixed, options

        def __call__(self, *arguments: Any) -> None:
            name = self.kernel.fn.__name__
            seen.append(name)
            given = dict(zip(self.kernel.arg_names, (*arguments, *self.fixed), strict=False))
            if name == "_heads_sum_kernel" and given["parts_ptr"].data_ptr() in memory.parts:
                assert memory.parts[given["parts_ptr"].data_ptr()] == given["parts"]
            start = given.get("start", 0)
            if 0 < start < all_rows - given["rows"]:
                return
            ctas = sorted({0, self.count // 2, self.count - 1})
            with of_these(ctas, self.count), addresses.checked():
                self.kernel[(len(ctas),)](*arguments, *self.fixed, **self.options)

    return Launch


# ---- Both ---------------------------------------------------------------------------------------------------------


def multiply(a: torch.Tensor, b: torch.Tensor, *, out: Any = None, out_dtype: Any = None) -> torch.Tensor:
    """In place of torch.mm: the shapes, and no product."""
    assert a.shape[1] == b.shape[0] and a.dtype == b.dtype
    if out is None:
        return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype or a.dtype)
    assert out.shape == (a.shape[0], b.shape[1]) and out.dtype == (out_dtype or a.dtype)
    return out


def add_product(sums: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, out: Any, out_dtype: Any) -> torch.Tensor:
    assert sums.shape == out.shape and sums.data_ptr() == out.data_ptr()
    return multiply(a, b, out=out, out_dtype=out_dtype)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Replaces what launches, of a kernel's folder, and what its plans ask of a GPU: of one of compute capability 9.0.
    Returns the list of kernels, which grows as they are launched."""

    def replace(folder: str, way: str, rows: int, memory: Memory) -> list[str]:
        seen: list[str] = []
        driver, launch = module(folder, "sm90.cuda_driver"), module(folder, "launch")
        products, original = module(folder, "heads_backward.products"), launch.Launch
        triton_stand_in = triton_launch(memory, seen, rows)
        for name, found in list(sys.modules.items()):
            if name.startswith(f"kernels.{folder}."):
                if hasattr(found, "device_of"):
                    monkeypatch.setattr(found, "device_of", lambda tensor: ((9, 0), SMS))
                if getattr(found, "Launch", None) is original:
                    monkeypatch.setattr(found, "Launch", triton_stand_in)
        monkeypatch.setattr(driver, "no_compiler", lambda: None if way.startswith("cuda") else "there is none")
        monkeypatch.setattr(driver, "kernels", lambda device, source, names, *_: names)
        monkeypatch.setattr(driver, "Launch", cuda_launch(memory, seen))
        monkeypatch.setattr(driver, "_encoded", encoded)
        monkeypatch.setattr(products, "torch", SimpleNamespace(**{**vars(torch), "mm": multiply, "addmm": add_product}))
        configs = module(folder, "configs.heads_backward")
        monkeypatch.setattr(configs, "pick_products", lambda *_, possible: possible and way == "cuda products")
        monkeypatch.setattr(configs, "pick_library", lambda *_: way == "library")
        return seen

    return replace


def module(folder: str, name: str) -> ModuleType:
    return importlib.import_module(f"kernels.{folder}.{name}")


#: Ways, and the kernels of each: of the gradient of the hidden and, where they are ours, its products.
WAYS = {
    "cuda": {"heads_dhidden"},
    "cuda products": {"heads_dhidden", "heads_products"},
    "library": {"_heads_dhidden_kernel"},
    "triton": {"_heads_dhidden_kernel", "_heads_dx_kernel", "_heads_dw1_kernel"},
}
CUDA = "cuda", "cuda products"
PROBLEMS = [
    *((way, rows, MODEL) for way in CUDA for rows in (300, 564, 5000, 8448, *MANY)),
    *((way, rows, sizes) for way in CUDA for rows in (300, 20_010) for sizes in OTHERS),
    *((way, MOST, MODEL) for way in ("cuda", "triton")),
    *(("library", rows, MODEL) for rows in (564, 205_000)),
    *(("triton", rows, (64, 2, 70, 3)) for rows in (1, 128, 129, 20_010)),
]
#: Of heads_gmm: way, rows, reduction, and whether the parameters of the mixture are kept.
MIXTURES = [
    *(("cuda", rows, "mean", True) for rows in (564, 8449, 131_072, 205_000)),
    *(("cuda", rows, "none", False) for rows in (564, 20_010, 205_000, 300_001, 2_000_000)),
    ("cuda products", 20_010, "none", True),
    ("library", 205_000, "none", False),
    ("triton", 20_010, "mean", False),
]


#: What runs in every test run; the rest, which takes minutes of the interpreter, is slow.
QUICK = ("cuda", 205_000, MODEL), ("cuda products", 300, OTHERS[0]), ("cuda", 205_000, "none", False)


def marked(problems: list[tuple[Any, ...]]) -> list[Any]:
    return [each if each in QUICK else pytest.param(*each, marks=pytest.mark.slow) for each in problems]


def problem(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value).replace(" ", "-")


@pytest.mark.parametrize(("way", "rows", "sizes"), marked(PROBLEMS), ids=problem)
def test_the_backward_of_heads_mlp(way: str, rows: int, sizes: tuple[int, ...], stand_ins: Any) -> None:
    dim, heads, hidden, dim_out = sizes
    shapes = (rows, heads, dim_out), (rows, dim), (heads, hidden, dim), (heads, dim_out, hidden)
    tensors = [torch.empty(shape, dtype=FP16) for shape in shapes]
    memory = Memory(*tensors)
    seen = stand_ins("heads_mlp", way, rows, memory)
    with memory:
        run = module("heads_mlp", "plans").bwd_plan(*tensors, "silu", (True, True, True))
        gradients = run(*tensors)
    assert [grad.shape for grad in gradients] == [t.shape for t in tensors[1:]]
    assert all(grad.is_contiguous() and grad.dtype == FP16 for grad in gradients)
    assert set(seen) - {"_heads_sum_kernel"} == WAYS[way]
    chunks = triton.cdiv(rows, 8448)
    assert all(seen.count(name) == chunks for name in WAYS[way])


@pytest.mark.parametrize(("way", "rows", "reduction", "kept"), marked(MIXTURES), ids=problem)
def test_heads_gmm(way: str, rows: int, reduction: str, kept: bool, stand_ins: Any) -> None:
    """With the forward, which keeps the parameters of the mixture for the backward, or makes them again."""
    dim, heads, hidden, dim_out = MODEL if way != "triton" else (64, 10, 70, 3)
    shapes = (rows, dim), (heads, hidden, dim), (heads, dim_out, hidden), (rows,), (heads, dim_out)
    tensors = [torch.empty(shape, dtype=FP16) for shape in shapes]
    dloss = torch.empty((rows,) if reduction == "none" else (), dtype=torch.float32)
    memory = Memory(*tensors, dloss)
    seen = stand_ins("heads_gmm", way, rows, memory)
    plans = module("heads_gmm", "plans")
    with memory:
        loss, parameters = plans.fwd_plan(*tensors, "silu", reduction, kept, "auto")(*tensors)
        everything = dloss, *tensors, parameters
        gradients = plans.bwd_plan(*everything, "silu", reduction, (True,) * 5)(*everything)
    assert loss.shape == dloss.shape and (parameters is not None) == kept
    assert [grad.shape for grad in gradients] == list(shapes)
    assert {"heads_gmm_forward", *WAYS[way]} <= set(seen) if way.startswith("cuda") else WAYS[way] <= set(seen)


@pytest.mark.parametrize("rows", [300, *(pytest.param(n, marks=pytest.mark.slow) for n in (205_000, MOST))])
def test_the_forward_of_heads_mlp(rows: int, stand_ins: Any) -> None:
    dim, heads, hidden, dim_out = MODEL
    shapes = (rows, dim), (heads, hidden, dim), (heads, dim_out, hidden)
    tensors = [torch.empty(shape, dtype=FP16) for shape in shapes]
    memory = Memory(*tensors)
    seen = stand_ins("heads_mlp", "cuda", rows, memory)
    with memory:
        for backend in ("cuda", "triton"):
            module("heads_mlp", "plans").fwd_plan(*tensors, "silu", backend)(*tensors)
    assert seen == ["heads_mlp_forward", "_heads_mlp_fwd_kernel"]


def test_what_is_not_there_is_found() -> None:
    x = torch.empty(10, 16, dtype=FP16)
    memory = Memory(x)
    memory.holds(x.data_ptr(), (10, 16), (16, 1), 2)
    with pytest.raises(AssertionError, match="2 bytes beyond 320"):
        memory.holds(x.data_ptr() + 2, (10, 16), (16, 1), 2)
    address = x.data_ptr()
    del x
    with pytest.raises(AssertionError):
        memory.holds(address, (10, 16), (16, 1), 2)
