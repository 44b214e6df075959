"""A module of transformers of one's own, for a library that changes it: no other model of the family changes."""

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
    """transformers' module of a family, executed once more under its own name, which means this copy inside the block.
    What is changed in it, classes and functions that others call by their names, is changed for no other model."""
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
