"""Which ptxas assembles the kernels that Inductor compiles in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .compilations import ON_HOST, watched

PTXAS = "TRITON_PTXAS_PATH"
OF_PYTORCH = Path(torch.__file__).with_name("bin") / "ptxas"


@contextmanager
def inductors_ptxas() -> Iterator[None]:
    """Context in which Inductor assembles by the ptxas in PyTorch's wheel in this process too, as in its compiler
    processes. By default this process takes the one in Triton's wheel. Its version is part of the keys of Triton's
    cache: max-autotune then compiles the candidates of each GEMM in the other processes, and again, one at a time,
    while it times them in this one. Kernels that Inductor does not compile are assembled by Triton's.

    Has no effect where TRITON_PTXAS_PATH is set, or PyTorch's wheel has no ptxas. A `torch._dynamo.reset` inside ends
    its effect on later compilations."""
    if PTXAS in os.environ or not os.access(OF_PYTORCH, os.X_OK):
        yield
        return
    nested = [0]

    def begin(event: Any) -> None:
        if event.callback_trigger.name in ON_HOST:
            nested[0] += 1
            _take(str(OF_PYTORCH))

    def end(event: Any) -> None:
        if event.callback_trigger.name in ON_HOST:
            nested[0] -= 1
            if not nested[0]:
                _take(None)

    try:
        with watched(begin, end):
            yield
    finally:
        _take(None)


def _take(ptxas: str | None) -> None:
    """Has Triton assemble by this ptxas, or by its own."""
    from triton.backends.nvidia.compiler import get_ptxas_version

    if ptxas is None:
        os.environ.pop(PTXAS, None)
    else:
        os.environ[PTXAS] = ptxas
    get_ptxas_version.cache_clear()
