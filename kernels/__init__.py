"""GPU kernels, one folder each: `from ridgeline.rmsnorm import rmsnorm` (in a checkout, `from kernels.rmsnorm …`).

Nothing is imported here, so that the import of one kernel does not load the others. `patch` and `unpatch`, which take a
Hugging Face model, are imported on first access.
"""

import importlib

__version__ = "0.1.0"


def __getattr__(name: str):
    if name in ("patch", "unpatch"):
        # Not `from . import patch`, which would call this function for the attribute first.
        return getattr(importlib.import_module(f"{__name__}.patch"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
