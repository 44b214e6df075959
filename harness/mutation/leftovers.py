"""What a task leaves in its process, and how the next one, of another mutant, gets none of it.

On a GPU a process is used for one task of CUDA C++ after another: to start CUDA takes seconds, and holds up all other
processes meanwhile. The Python source is the original's in all of these tasks. What the process knows of the CUDA C++
is forgotten after each: all that a kernel's folder keeps in a `functools.cache`, as its `cuda_driver` does with cubins
and functions, and in launch plans. The modules that the driver API has loaded stay: their functions may be in a CUDA
graph that is not collected yet, and TASKS bounds how many they are.

What a mutant has written outside of its tensors cannot be undone. So nothing that goes wrong in a process in which
another mutant has run is believed, unless right after it, in the same process, the original passes the very check:
else the mutant is judged again in a process of its own (`verdict.holds`). That all checks pass is believed: each fills
the results with NaN first and holds them against an oracle, on inputs of its own, so that what was left behind would
have to be the right results. But the mutant must have been loaded: CUDA C++ that was not compiled anew, or found in the
cache on disk, was that of another task.
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

TASKS = 200  # of one process
_CACHED = type(functools.cache(len))


def is_for_used(task: Mapping[str, Any]) -> bool:
    """Whether a process can have this task among others: of CUDA C++ or of an original, on a GPU, without tests and
    torch.compile, which keep more than is forgotten here."""
    of_cuda = not task.get("file") or is_cuda(task["file"])
    return task.get("device") == "cuda" and bool(task.get("quick")) and of_cuda


def forget() -> None:
    """Drops all that the kernels keep, and the memory that nothing uses any more. Raises where CUDA has failed."""
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
