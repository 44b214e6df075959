# A copy of parts/cuda_driver.py, made by `nox -s vendor`: change it there.
"""The CUDA C++ kernels of this folder: compiled by NVRTC on first use, loaded and launched through the CUDA driver API.

NVRTC comes with CuPy. Launches call the driver API by ctypes, because tensor maps are kernel parameters by value. They
go to torch's current stream, without allocation or synchronisation, so that they can be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from triton.runtime.cache import get_cache_manager

OPTIONS = ("--gpu-architecture=sm_90a", "--std=c++17", "-lineinfo")
_FOLDER = Path(__file__).parent
# The name of the kernel's folder: the parent folder, if the CUDA C++ is in its subfolder sm90/.
_OP = _FOLDER.parent.name if _FOLDER.name.startswith("sm") else _FOLDER.name

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_NON_PORTABLE_CLUSTERS = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
# Arguments of cuTensorMapEncodeTiled: data type, swizzle mode by the bytes of a box row, L2 promotion to 256 bytes,
# zero fill outside the tensor.
_TYPES = {torch.uint8: 0, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_NO_INTERLEAVE, _SWIZZLES, _PROMOTE_256B, _FILL_ZEROS = 0, {32: 1, 64: 2, 128: 3}, 3, 0
_MAP_BYTES, _MAP_ALIGNMENT, _MAPS_KEPT = 128, 64, 64
# For each letter of a layout (see Launch): the `struct` format code, the size and the alignment.
_PARAMETERS = {
    "M": (f"{_MAP_BYTES}s", _MAP_BYTES, _MAP_ALIGNMENT),
    "P": ("Q", 8, 8),
    "q": ("q", 8, 8),
    "i": ("i", 4, 4),
    "I": ("I", 4, 4),
    "f": ("f", 4, 4),
}

# A PyTorch without CUDA has neither function. There only the ahead-of-time build calls them, for device 0.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: 0)
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)


@functools.cache
def no_compiler() -> str | None:
    """Why NVRTC cannot be used, or None."""
    try:
        from cupy.cuda import nvrtc  # noqa: F401
    except Exception as error:  # without a driver CuPy raises more than ImportError
        return f"it is compiled by NVRTC through CuPy, which cannot be imported (pip install cupy-cuda13x): {error}"
    return None


def kernels(device: int, source: str, names: tuple[str, ...], defines: tuple[str, ...], shared: int) -> tuple:
    """The kernels `names` of a source file of this folder, loaded on `device`, which must be current. The first may use
    `shared` bytes of dynamic shared memory; all may use clusters of 16 CTAs."""
    _enter_context()
    return _loaded(device, source, names, defines, shared)


@functools.cache
def _loaded(device: int, source: str, names: tuple[str, ...], defines: tuple[str, ...], shared: int) -> tuple:
    module, functions = ctypes.c_void_p(), []
    _call("cuModuleLoadData", ctypes.byref(module), _compiled(source, defines))
    for name in names:
        functions.append(ctypes.c_void_p())
        _call("cuModuleGetFunction", ctypes.byref(functions[-1]), module, name.encode())
        _call("cuFuncSetAttribute", functions[-1], _NON_PORTABLE_CLUSTERS, 1)
    _call("cuFuncSetAttribute", functions[0], _MAX_DYNAMIC_SHARED, shared)
    return tuple(functions)


@functools.cache
def _compiled(source: str, defines: tuple[str, ...]) -> bytes:
    """The cubin of a source file, cached in Triton's cache on disk."""
    from cupy.cuda import nvrtc

    text = (_FOLDER / source).read_text(encoding="utf-8")
    headers = [path.read_text(encoding="utf-8") for path in sorted(_FOLDER.glob("*.cuh"))]
    options = (*OPTIONS, *(f"-D{define}" for define in defines))
    key = hashlib.sha256(repr((text, headers, options, nvrtc.getVersion())).encode()).hexdigest()
    manager = get_cache_manager(key)
    if path := manager.get_file("kernels.cubin"):
        return Path(path).read_bytes()
    program = nvrtc.createProgram(text, source, (), ())
    try:
        nvrtc.compileProgram(program, (*options, f"-I{_FOLDER}"))
        code = nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"{_OP}: NVRTC failed to compile {source}: {nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)
    manager.put(code, "kernels.cubin", binary=True)
    return code


class TensorMap:
    """CUtensorMaps of tensors that differ only in their address. A call with an address returns the map as bytes.

    Maps are cached, because the caching allocator returns the same addresses again.
    """

    __slots__ = ("_layout", "_made")

    def __init__(self, *layout: Any) -> None:
        self._layout = layout
        self._made: dict[int, bytes] = {}

    def __call__(self, address: int) -> bytes:
        found = self._made.get(address)
        if found is None:
            if len(self._made) >= _MAPS_KEPT:
                self._made.clear()
            found = self._made[address] = _encoded(address, *self._layout)
        return found


def tensor_map(x: torch.Tensor, rows: int, block_rows: int, columns: int = 64) -> TensorMap:
    """Tensor maps of [B, H, S, D] tensors like x. They cover the first `rows` rows (S), in boxes of block_rows by
    `columns` elements. A box row has 32, 64 or 128 bytes and is swizzled.

    The strides of B, H and S must be multiples of 16 bytes. Elements outside the tensor are read as zeros.
    """
    size = x.element_size()
    batch, heads, _, dim = x.shape
    # The stride of a dimension of size 1 is arbitrary in PyTorch, but TMA needs a multiple of 16 bytes.
    strides = tuple(16 if n == 1 else x.stride(i) * size for n, i in ((rows, 2), (heads, 1), (batch, 0)))
    sizes, box = (dim, rows, heads, batch), (columns, block_rows, 1, 1)
    return TensorMap(_TYPES[x.dtype], sizes, strides, box, _SWIZZLES[columns * size])


def _encoded(
    address: int, kind: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: int
) -> bytes:
    """The tensor map that cuTensorMapEncodeTiled returns for these arguments."""
    _enter_context()
    buffer = (ctypes.c_char * (_MAP_BYTES + _MAP_ALIGNMENT))()
    aligned = (ctypes.c_char * _MAP_BYTES).from_buffer(buffer, -ctypes.addressof(buffer) % _MAP_ALIGNMENT)
    rank = len(sizes)
    _call(
        "cuTensorMapEncodeTiled",
        aligned,
        kind,
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*(1,) * rank),
        _NO_INTERLEAVE,
        swizzle,
        _PROMOTE_256B,
        _FILL_ZEROS,
    )
    return aligned.raw


class Launch:
    """A launch of a kernel in which only the values of the parameters change from call to call.

    layout   a letter for each parameter in order: M a tensor map (bytes), P an address, i and I 32-bit integers, q a
             64-bit integer, f a float. A parameter that is a struct is its members in parentheses.
    """

    __slots__ = ("_device", "_function", "_grid", "_pack", "_shared", "_threads")

    def __init__(self, device: int, function: Any, grid: int, threads: int, shared: int, layout: str) -> None:
        self._device, self._function, self._grid = device, function, grid
        self._threads, self._shared = threads, shared
        self._pack = _packer(layout, parameters(function))

    def __call__(self, *values: Any) -> None:
        """Launches the kernel with these parameters: bytes for a tensor map, else a number; 0 is the null pointer."""
        if self._device != _current_device():
            with torch.cuda.device(self._device):
                return self(*values)
        return launch(
            self._function, self._grid, self._threads, self._shared, _raw_stream(self._device), self._pack(*values)
        )


def parameters(function: Any) -> tuple[tuple[int, int], ...]:
    """(offset, size) of each parameter of a kernel, as the compiler chose them. It pads before the first parameter, so
    that a tensor map is 64-byte aligned in the constant bank, where parameters do not start at a multiple of 64."""
    found: list[tuple[int, int]] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    places = ctypes.byref(offset), ctypes.byref(size)
    while not _driver().cuFuncGetParamInfo(function, ctypes.c_size_t(len(found)), *places):
        found.append((offset.value, size.value))
    return tuple(found)


@functools.cache
def _packer(layout: str, places: tuple[tuple[int, int], ...]) -> Callable[..., bytes]:
    """A function that packs values into the parameter buffer of a kernel. `places` are its parameters' (offset, size).
    ValueError if the layout has other sizes."""
    members = [found[0] or found[1] for found in re.findall(r"\(([^)]*)\)|(\w)", layout)]
    codes, at = "", 0
    shapes = [_struct(letters) for letters in members]
    if [size for _, size in shapes] != [size for _, size in places]:
        raise ValueError(
            f"{_OP}: the layout {layout} is not that of parameters of {[size for _, size in places]} bytes"
        )
    for (code, size), (offset, _) in zip(shapes, places, strict=True):
        codes += f"{offset - at}x{code}"
        at = offset + size
    return struct.Struct(f"={codes}").pack


def _struct(letters: str) -> tuple[str, int]:
    """The `struct` format of a parameter with these members, laid out as in C, and its size in bytes."""
    codes, at, widest = "", 0, 1
    for letter in letters:
        code, size, step = _PARAMETERS[letter]
        codes += f"{-at % step}x{code}"
        at, widest = at + -at % step + size, max(widest, step)
    return f"{codes}{-at % widest}x", at + -at % widest


class _Extra(ctypes.Structure):
    """cuLaunchKernel's `extra`: all parameters in one buffer, instead of an array of their addresses."""

    _fields_ = (
        ("buffer_follows", ctypes.c_void_p),
        ("buffer", ctypes.c_char_p),
        ("size_follows", ctypes.c_void_p),
        ("size", ctypes.c_void_p),
        ("end", ctypes.c_void_p),
    )


def launch(function: Any, grid: int, threads: int, shared: int, stream: int, parameters: bytes) -> None:
    """Launches `grid` CTAs on a stream of the current device."""
    size = ctypes.c_size_t(len(parameters))
    extra = _Extra(1, parameters, 2, ctypes.addressof(size), 0)
    arguments = (function, grid, 1, 1, threads, 1, 1, shared, stream, None, ctypes.byref(extra))
    code = _driver().cuLaunchKernel(*arguments)
    if code == _INVALID_CONTEXT:
        _enter_context()
        code = _driver().cuLaunchKernel(*arguments)
    if code:
        _fail("cuLaunchKernel", code)


def address(x: torch.Tensor | None) -> int:
    """The address of a tensor; 0 for None."""
    return 0 if x is None else x.data_ptr()


def _enter_context() -> None:
    """Makes the device's primary context current in a thread that has none. PyTorch may not have called CUDA in this
    thread yet, if all allocations came from its cache. The runtime API does this itself; the driver API does not."""
    context = ctypes.c_void_p()
    _call("cuCtxGetCurrent", ctypes.byref(context))
    if not context.value:
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), torch.cuda.current_device())
        _call("cuCtxSetCurrent", context)


@functools.cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    numbers, pointer = (ctypes.c_uint,) * 7, ctypes.c_void_p
    library.cuLaunchKernel.argtypes = (pointer, *numbers, pointer, pointer, pointer)
    return library


def _call(name: str, *arguments: object) -> None:
    """Calls a function of the driver API. RuntimeError with the driver's message if it fails."""
    if code := getattr(_driver(), name)(*arguments):
        _fail(name, code)


def _fail(name: str, code: int) -> None:
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(code, ctypes.byref(text))
    raise RuntimeError(f"{_OP}: {name} failed: {(text.value or b'unknown error').decode()} ({code})")
