"""Compiles CUDA C++ for a GPU that need not be present, with the NVRTC of PyTorch's CUDA builds or of its wheel.

A kernel folder with CUDA C++ has a module `cuda_driver`, in itself or in its folder sm90/ beside the sources. Its
launchers compile and launch through this module:

    no_compiler() -> reason or None          kernels(device, source, names, defines, shared) -> a handle for each name
    Launch(device, handle, grid, threads, shared, layout)(*values)           tensor_map(...)(address)

`recording` replaces these functions: launched kernels are compiled and recorded, and nothing runs.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from ..spec import KernelSpec

MISSING = "NVRTC is not installed (pip install nvidia-cuda-nvrtc)"


@dataclass(frozen=True)
class Launch:
    """A kernel of a source file and its launch: its name, the defines, threads and shared memory."""

    name: str
    source: str
    defines: tuple[str, ...]
    threads: int
    shared: int
    cubin: bytes


@dataclass(frozen=True)
class _Handle:
    name: str
    source: str
    defines: tuple[str, ...]
    cubin: bytes


def package_of(spec: KernelSpec) -> str:
    """The package of a kernel's folder."""
    return spec.reference.__module__.rpartition(".")[0]


def driver_of(package: str) -> ModuleType | None:
    """The `cuda_driver` of a kernel's package, if it has one."""
    if not package:
        return None
    for folder in (package, f"{package}.sm90"):
        name = f"{folder}.cuda_driver"
        if name in sys.modules or (_exists(folder) and _exists(name)):
            return importlib.import_module(name)
    return None


def _exists(module: str) -> bool:
    return module in sys.modules or importlib.util.find_spec(module) is not None


@contextmanager
def recording(package: str, capability: tuple[int, int], note: Callable[[Launch], None]) -> Iterator[None]:
    """Context that passes the launches of a kernel's package to `note`. Without NVRTC its launchers are told so."""
    driver = driver_of(package)
    if driver is None:
        yield
        return
    folder = Path(str(driver.__file__)).parent
    architecture = f"sm_{capability[0]}{capability[1]}" + "a" * (capability >= (9, 0))

    def kernels(device: int, source: str, names: tuple[str, ...], defines: tuple[str, ...], shared: int) -> tuple:
        cubin = compiled(folder / source, architecture, defines)
        return tuple(_Handle(name, source, defines, cubin) for name in names)

    def launch(handle: _Handle, grid: int, threads: int, shared: int, *_: Any) -> None:
        note(Launch(handle.name, handle.source, handle.defines, threads, shared, handle.cubin))

    stand_ins: dict[str, Callable[..., Any]] = {
        "no_compiler": lambda: None if library() else MISSING,
        "kernels": kernels,
        "launch": launch,
        "Launch": lambda device, handle, grid, threads, shared, layout: partial(launch, handle, grid, threads, shared),
    }
    stand_ins["tensor_map"] = lambda *_, **__: lambda address: b""
    stand_ins = {name: stand_in for name, stand_in in stand_ins.items() if hasattr(driver, name)}
    with ExitStack() as stack:
        users = [m for n, m in sys.modules.items() if n.startswith(f"{package}.") and m is not None]
        for module in users:  # some have imported the functions by name
            for name, stand_in in stand_ins.items():
                if getattr(module, name, None) is getattr(driver, name) and module is not driver:
                    stack.enter_context(mock.patch.object(module, name, stand_in))
        for name, stand_in in stand_ins.items():
            stack.enter_context(mock.patch.object(driver, name, stand_in))
        yield


@cache
def library() -> ctypes.CDLL | None:
    """NVRTC 13: that of the wheel nvidia-cuda-nvrtc, else one that the system's loader finds; None without any."""
    found = importlib.util.find_spec("nvidia")
    folders = [Path(path) / "cu13" / "lib" for path in (found.submodule_search_locations or ())] if found else []
    for folder in folders:
        if (folder / "libnvrtc.so.13").is_file():
            for helper in folder.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(helper), ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(folder / "libnvrtc.so.13"))
    try:
        return ctypes.CDLL("libnvrtc.so.13")
    except OSError:
        return None


def version() -> tuple[int, int] | None:
    """The major and minor version of that library; None without any."""
    nvrtc, major, minor = library(), ctypes.c_int(), ctypes.c_int()
    if nvrtc is None:
        return None
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


@cache
def compiled(source: Path, architecture: str, defines: tuple[str, ...]) -> bytes:
    """The cubin of a source file; includes are searched in its folder. RuntimeError with NVRTC's log."""
    nvrtc = library()
    if nvrtc is None:
        raise RuntimeError(MISSING)
    options = [f"--gpu-architecture={architecture}", "--std=c++17", f"-I{source.parent}", *(f"-D{d}" for d in defines)]
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    text = source.read_bytes()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, source.name.encode(), 0, None, None)
    try:
        arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), arguments):
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"NVRTC does not compile {source.name}: {log.value.decode().strip()}")
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, cubin)
        return cubin.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
