"""CUDA C++ of this folder: compiled by NVRTC when it is first needed, launched through the driver.

CuPy brings NVRTC. Launches go through the driver itself, by ctypes, to torch's current stream; they allocate nothing
and wait for nothing, so that they can be captured in a CUDA graph.
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
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_NON_PORTABLE_CLUSTERS = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED


@functools.cache
def no_compiler() -> str | None:
    """Why nothing can be compiled here, or None."""
    try:
        from cupy.cuda import nvrtc  # noqa: F401
    except Exception as error:  # without a driver CuPy raises more than ImportError
        return f"it is compiled by NVRTC, which comes with CuPy (pip install ridgeline-kernels[cuda]): {error}"
    return None


def kernels(device: int, source: str, names: tuple[str, ...], defines: tuple[str, ...], shared: int) -> tuple:
    """The kernels of a source file of this folder, on a device, which is the current one. They may have `shared` bytes
    of dynamic shared memory, and clusters of 16 CTAs.

    Launchers ask for them first: from then on their thread has a context, which launches need.
    """
    _enter_context()
    return _loaded(device, source, names, defines, shared)


@functools.cache
def _loaded(device: int, source: str, names: tuple[str, ...], defines: tuple[str, ...], shared: int) -> tuple:
    module, functions = ctypes.c_void_p(), []
    _call("cuModuleLoadData", ctypes.byref(module), _compiled(source, defines))
    for name in names:
        function = ctypes.c_void_p()
        _call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        _call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, shared)
        _call("cuFuncSetAttribute", function, _NON_PORTABLE_CLUSTERS, 1)
        functions.append(function)
    return tuple(functions)


@functools.cache
def _compiled(source: str, defines: tuple[str, ...]) -> bytes:
    """Machine code of a source file, kept in Triton's cache on disk."""
    from cupy.cuda import nvrtc

    text = (Path(__file__).parent / source).read_text(encoding="utf-8")
    options = (*OPTIONS, *(f"-D{define}" for define in defines))
    key = hashlib.sha256(repr((text, options, nvrtc.getVersion())).encode()).hexdigest()
    manager = get_cache_manager(key)
    if path := manager.get_file("kernels.cubin"):
        return Path(path).read_bytes()
    program = nvrtc.createProgram(text, source, (), ())
    try:
        nvrtc.compileProgram(program, options)
        code = nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"NVRTC does not compile {source}: {nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)
    manager.put(code, "kernels.cubin", binary=True)
    return code


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
        raise RuntimeError(f"cross_entropy: {name} failed: {(text.value or b'unknown error').decode()} ({code})")
