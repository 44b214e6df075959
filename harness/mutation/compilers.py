"""Watches Triton and NVRTC in the process of a mutant: the clock of the checks is stopped while they compile, and their
output or failure is reported.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from . import launched_code
from .clock import Clock
from .messages import say

_watched: set[str] = set()  # in this process


def watch(package: str, clock: Clock, report: TextIO) -> None:
    """Watches Triton and the NVRTC of a kernel's package from now on; once per process, with the clock and the report
    of its first task."""
    _watch_triton(clock, report)
    with contextlib.suppress(Exception):  # without a driver CuPy raises more than ImportError
        _watch_nvrtc(clock, report)
    _say_what_nvrtc_makes(package, report)


def _watch_triton(clock: Clock, report: TextIO) -> None:
    import triton.compiler

    def note(*given: Any, **options: Any) -> None:
        try:
            code = launched_code.of_triton(*given, **options)
        except Exception as error:
            code = ("", f"{type(error).__name__}: {error}", "")  # equals no original's
        say(report, code=code)

    _wrap(triton.compiler, "compile", clock, report, lambda error: None, note)


def _watch_nvrtc(clock: Clock, report: TextIO) -> None:
    nvrtc = importlib.import_module("cupy.cuda.nvrtc")

    def refused(error: Exception) -> None:
        say(report, log=" ".join(str(error).split())[:300])

    _wrap(nvrtc, "compileProgram", clock, report, refused)


def _say_what_nvrtc_makes(package: str, report: TextIO) -> None:
    """Reports NVRTC's output, also where it is already in the cache."""
    from ..compiling import nvrtc

    if (driver := nvrtc.driver_of(package)) and driver.__name__ not in _watched:
        _watched.add(driver.__name__)
        # Line information is not code, and a mutant may change its columns.
        driver.OPTIONS = tuple(option for option in driver.OPTIONS if option != "-lineinfo")  # type: ignore[attr-defined]
        compiled = driver._compiled

        @wraps(compiled)
        def said(source: str, defines: tuple[str, ...]) -> bytes:
            code = compiled(source, defines)
            found = launched_code.of_nvrtc(Path(str(driver.__file__)).parent, source, defines, code)
            say(report, code=found, of="nvrtc")
            return code

        driver._compiled = said  # type: ignore[attr-defined]


def _wrap(
    module: ModuleType,
    name: str,
    clock: Clock,
    report: TextIO,
    failed: Callable[[Exception], None],
    made: Callable[..., None] | None = None,
) -> None:
    """Replaces a compiler's function by one that stops the clock, and calls `failed` with an exception, or `made` with
    the result and the arguments."""
    called = f"{module.__name__}.{name}"
    if called in _watched:
        return
    _watched.add(called)
    function = getattr(module, name)

    @wraps(function)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        with clock.stopped():
            say(report, compiler=called)
            try:
                result = function(*arguments, **options)
            except Exception as error:
                failed(error)
                raise
            finally:
                say(report, compiler="")
            if made:
                made(result, *arguments, **options)
            return result

    setattr(module, name, wrapped)
