"""Hugging Face models on these kernels: `ridgeline.patch(model)`, and `ridgeline.unpatch(model)`."""

import sys
from types import ModuleType

from .model import OPS, patch, patched, unpatch

__all__ = ["OPS", "patch", "patched", "unpatch"]


class _Callable(ModuleType):
    """A callable module: once imported, `ridgeline.patch` is this module, and calling it calls the function `patch`."""

    __call__ = staticmethod(patch)


sys.modules[__name__].__class__ = _Callable
