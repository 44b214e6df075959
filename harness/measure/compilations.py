"""Dynamo's events: the beginning and the end of each compilation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

ON_HOST = ("DYNAMO", "LAZY_BACKWARD")  # Dynamo's names of the triggers of compilations that need no GPU


@contextmanager
def watched(begin: Callable[[Any], None], end: Callable[[Any], None]) -> Iterator[None]:
    """Context in which compilations, nested ones too, call `begin` and `end` with their event. A `torch._dynamo.reset`
    inside ends its effect on later compilations."""
    handler = torch._dynamo.callback_handler
    handler.register_start_callback(begin)
    handler.register_end_callback(end)
    try:
        yield
    finally:
        with suppress(ValueError):  # a reset has removed them
            handler.remove_start_callback(begin)
            handler.remove_end_callback(end)
