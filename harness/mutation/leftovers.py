"""The state that a task leaves in its process, and how it is kept from the next task, of another mutant.

On a GPU a process runs one task of CUDA C++ after another: starting CUDA takes seconds, and blocks all other processes
meanwhile. The Python source is the original's in all of these tasks. What the process has cached of the CUDA C++ is
dropped after each: everything that a kernel's folder keeps in a `functools.cache`, as its `cuda_driver` does with
cubins and functions, and in launch plans. Modules loaded by the driver API are kept: their functions may be in a CUDA
graph that is not collected yet, and TASKS limits their number.

Writes of a mutant outside of its tensors cannot be undone. So no failure is accepted from a process in which another
mutant has run, unless immediately afterwards, in the same process, the original passes that check; otherwise the mutant
is repeated in a new process (`verdict.holds`). A pass of all checks is accepted: each fills the results with NaN first
and compares them with an oracle, on inputs of its own, so that leftover data would have to equal the correct results.
But the mutant must have been loaded: CUDA C++ that was neither compiled anew nor found in the cache on disk was that of
another task.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Mapping
from types import FunctionType
from typing import Any

from .. import plans
from .mutants import is_cuda

TASKS = 200  # per process
_CACHED = type(functools.cache(len))


def is_for_used(task: Mapping[str, Any]) -> bool:
    """Whether a process can run this task among others: of CUDA C++ or of an original, on a GPU, without tests and
    torch.compile, which leave more state than is dropped here."""
    of_cuda = not task.get("file") or is_cuda(task["file"])
    return task.get("device") == "cuda" and bool(task.get("quick")) and of_cuda


def forget() -> None:
    """Drops everything that the kernels cache, and unused memory. Raises if CUDA has failed."""
    import torch

    for name, module in list(sys.modules.items()):
        if name.startswith("kernels.") and module:
            for kept in plans.kept_in(name):
                kept.clear()
            for value in list(vars(module).values()):
                while isinstance(value, FunctionType | _CACHED):
                    if isinstance(value, _CACHED):
                        value.cache_clear()
                    value = getattr(value, "__wrapped__", None)
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
