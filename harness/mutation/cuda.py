"""CUDA in the processes of a worker: it must not be started before they are forked; each starts it for itself."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from . import checkout
from .clock import Clock
from .messages import START, say
from .mutants import is_cuda

START_SECONDS = 180.0  # when many processes start CUDA at once
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED


def is_started() -> bool:
    """Whether something has started CUDA in this process: PyTorch, or other code through cuInit, which PyTorch does not
    notice."""
    import torch

    return torch.cuda.is_initialized() or _driver_is_started()


def is_started_by(module: str) -> bool:
    """Whether an import starts CUDA. It is tried in a separate process."""
    child = os.fork()
    if child == 0:
        started = True
        try:
            with contextlib.suppress(Exception):
                importlib.import_module(module)
            started = is_started()
        finally:
            os._exit(started)
    return os.waitpid(child, 0)[1] != 0


def _driver_is_started() -> bool:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED


def start_ahead(report: TextIO) -> bool:
    """Starts CUDA. Returns whether that worked."""
    return _attempt(_start, report)


def start_for(task: Mapping[str, Any], report: TextIO) -> bool:
    """Starts CUDA if that was not done ahead, and applies the task's limits. Returns whether that worked."""
    return _attempt(lambda: _use(task), report)


def _attempt(start: Callable[[], None], report: TextIO) -> bool:
    """Whether `start` ends within START_SECONDS and does not raise. An exception is reported."""
    clock = Clock()
    clock.limit(START_SECONDS)
    say(report, at=START, limit=START_SECONDS)
    try:
        start()
    except BaseException:
        say(report, error=traceback.format_exc()[-1000:])
        return False
    finally:
        clock.limit(0)
    return True


def _use(task: Mapping[str, Any]) -> None:
    """Limits what the process may allocate, and sets its Triton cache. A mutant has a cache of its own. Mutants of CUDA
    C++ use the common one, since nearly all of it is Triton's code, which equals the original's."""
    import torch

    from . import overlay

    _start()
    torch.cuda.set_per_process_memory_fraction(task["memory"])
    alone = bool(task.get("file")) and not is_cuda(task["file"])
    overlay.write_to(str(checkout.cache_of_mutant()) if alone else None)


def _start() -> None:
    """Starts CUDA and Triton's driver, or checks that they work. RuntimeError if kernels would be interpreted."""
    import torch
    import triton
    from triton import knobs

    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: nothing would be compiled")
    # PyTorch creates a context at first use. These sums are exact, and need neither cuBLAS nor its memory.
    numbers = torch.arange(4096, device="cuda")
    if int((numbers * numbers).sum()) != 4095 * 4096 * 8191 // 6:
        raise RuntimeError("the GPU computes wrong sums")
    triton.runtime.driver.active.get_current_device()
    with contextlib.suppress(Exception):  # without a driver CuPy raises more than ImportError
        importlib.import_module("cupy.cuda.nvrtc")
