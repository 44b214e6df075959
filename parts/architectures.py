"""A private copy of a transformers module, for a library that patches it. Other models of the family are unaffected."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def own_architectures(family: str) -> Iterator[ModuleType]:
    """Yields a second copy of transformers' module of a model family. Inside the block, sys.modules holds the copy
    under the module's name. Classes and functions patched in the copy stay unpatched for all other models."""
    name = f"transformers.models.{family}.modeling_{family}"
    original = importlib.import_module(name)
    found = importlib.util.find_spec(name)
    assert found is not None and found.loader is not None
    copy = importlib.util.module_from_spec(found)
    parent: Any = sys.modules[name.rpartition(".")[0]]
    attribute = name.rpartition(".")[2]
    sys.modules[name] = copy
    setattr(parent, attribute, copy)
    try:
        found.loader.exec_module(copy)
        yield copy
    finally:
        sys.modules[name] = original
        setattr(parent, attribute, original)
