"""Declare, check, time, profile and report GPU kernels. Start reading at `spec.py`.

The modules at this level are the declaration and what the packages share. `commands` has one module for each command of
`python -m harness`, built from `correctness`, `measure`, `compiling`, `nsight` and `reporting`.

`harness.bench` and `harness.Benchmark` measure code of your own: `candidates/benchmark.py`.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .candidates import Benchmark as Benchmark
    from .candidates import bench as bench

# Streams that share one of the GPU's hardware queues run in the order in which they were filled, and so may seem to
# be synchronised. The default is 8 queues. CUDA reads the variable at initialisation, so it must be set before that.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def __getattr__(name: str) -> Any:
    """Imports on demand: the commands that read records work without torch."""
    if name in ("Benchmark", "bench"):
        return getattr(importlib.import_module("harness.candidates"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
