"""CUDA C++ of this folder: compiled by NVRTC when it is first needed, launched through the driver.

CuPy brings NVRTC. Launches go through the driver itself, by ctypes, because tensor maps are parameters by value. They
go to torch's current stream, allocate nothing and wait for nothing, so that they can be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from triton.runtime.cache import get_cache_manager

OPTIONS = ("--gpu-architecture=sm_90a", "--std=c++17", "-lineinfo")
SWIZZLED = 64  # columns of a box: with two bytes each, the 128 bytes that TMA swizzles
# CUtensorMapDataType, and what else a tensor map is made with: 128 bytes of swizzle, promotion to 256 bytes in L2,
# zeros beyond the tensor.
_TYPES = {torch.float16: 6, torch.bfloat16: 9}
_NO_INTERLEAVE, _SWIZZLE_128B, _PROMOTE_256B, _FILL_ZEROS = 0, 3, 3, 0
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Rows(ctypes.Structure):
    """Address and strides, in elements, of a [B, H, S, D] tensor."""

    _fields_ = [("at", ctypes.c_void_p), *((name, ctypes.c_longlong) for name in ("batch", "head", "row"))]

    @classmethod
    def of(cls, x: torch.Tensor) -> Rows:
        return cls(x.data_ptr(), x.stride(0), x.stride(1), x.stride(2))


@functools.cache
def no_compiler() -> str | None:
    """Why nothing can be compiled here, or None."""
    try:
        from cupy.cuda import nvrtc  # noqa: F401
    except Exception as error:  # without a driver CuPy raises more than ImportError
        return f"it is compiled by NVRTC, which comes with CuPy (pip install ridgeline-kernels[cuda]): {error}"
    return None


def kernels(device: int, source: str, names: tuple[str, ...], defines: tuple[str, ...], shared: int) -> tuple:
    """The kernels of a source file of this folder, on a device, which is the current one. The first of them may have
    `shared` bytes of dynamic shared memory.

    Launchers ask for them first: from then on their thread has a context, which launches need.
    """
    _enter_context()
    return _loaded(device, source, names, defines, shared)


@functools.cache
def _loaded(device: int, source: str, names: tuple[str, ...], defines: tuple[str, ...], shared: int) -> tuple:
    module, functions = ctypes.c_void_p(), []
    _call("cuModuleLoadData", ctypes.byref(module), _compiled(source, defines))
    for name in names:
        functions.append(ctypes.c_void_p())
        _call("cuModuleGetFunction", ctypes.byref(functions[-1]), module, name.encode())
    _call("cuFuncSetAttribute", functions[0], _MAX_DYNAMIC_SHARED, shared)
    return tuple(functions)


@functools.cache
def _compiled(source: str, defines: tuple[str, ...]) -> bytes:
    """Machine code of a source file, kept in Triton's cache on disk."""
    from cupy.cuda import nvrtc

    folder = Path(__file__).parent
    text = (folder / source).read_text(encoding="utf-8")
    headers = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.cuh"))]
    options = (*OPTIONS, *(f"-D{define}" for define in defines))
    key = hashlib.sha256(repr((text, headers, options, nvrtc.getVersion())).encode()).hexdigest()
    manager = get_cache_manager(key)
    if path := manager.get_file("kernels.cubin"):
        return Path(path).read_bytes()
    program = nvrtc.createProgram(text, source, (), ())
    try:
        nvrtc.compileProgram(program, (*options, f"-I{folder}"))
        code = nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"NVRTC does not compile {source}: {nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)
    manager.put(code, "kernels.cubin", binary=True)
    return code


def tensor_map(x: torch.Tensor, rows: int, block_rows: int) -> ctypes.Array:
    """CUtensorMap of the first `rows` rows of a [B, H, S, D] tensor, in boxes of block_rows by SWIZZLED.

    Strides of more than one element are multiples of 16 bytes; what is beyond the tensor reads as zeros.
    """
    room = (ctypes.c_char * 192)()
    aligned = (ctypes.c_char * 128).from_buffer(room, -ctypes.addressof(room) % 64)
    sizes = (x.shape[3], rows, x.shape[1], x.shape[0])
    # The stride of a dimension of one element is arbitrary in PyTorch, but TMA wants a multiple of 16 bytes.
    strides = [16 if n == 1 else x.stride(i) * x.element_size() for n, i in zip(sizes[1:], (2, 1, 0), strict=True)]
    _call(
        "cuTensorMapEncodeTiled",
        aligned,
        _TYPES[x.dtype],
        4,
        ctypes.c_void_p(x.data_ptr()),
        (ctypes.c_uint64 * 4)(*sizes),
        (ctypes.c_uint64 * 3)(*strides),
        (ctypes.c_uint32 * 4)(SWIZZLED, block_rows, 1, 1),
        (ctypes.c_uint32 * 4)(1, 1, 1, 1),
        _NO_INTERLEAVE,
        _SWIZZLE_128B,
        _PROMOTE_256B,
        _FILL_ZEROS,
    )
    return aligned


def launch(function: ctypes.c_void_p, grid: int, threads: int, shared: int, arguments: Sequence) -> None:
    """One launch on the current stream of the current device. Arguments are ctypes objects, passed by value."""
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(x) for x in arguments))
    _call("cuLaunchKernel", function, grid, 1, 1, threads, 1, 1, shared, stream, pointers, None)


def pointer(x: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(0 if x is None else x.data_ptr())


def _enter_context() -> None:
    """A thread that PyTorch has served from its cache alone has no context yet. The runtime would make the device's own
    current; the driver does not."""
    context = ctypes.c_void_p()
    _call("cuCtxGetCurrent", ctypes.byref(context))
    if not context.value:
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), torch.cuda.current_device())
        _call("cuCtxSetCurrent", context)


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: object) -> None:
    """A function of the driver. RuntimeError says what it answers."""
    code = getattr(_driver(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        reason = (text.value or b"unknown error").decode()
        raise RuntimeError(f"block_sparse_attention: {name} failed: {reason} ({code})")
