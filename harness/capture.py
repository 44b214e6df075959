"""Captures of CUDA graphs that may fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """`torch.cuda.graph(graph, **options)`, after whose failure the process can continue. A failed capture leaves
    PyTorch's random number generator in the capturing state, unable to draw; it then gets a copy of its state."""
    try:
        with torch.cuda.graph(graph, **options):
            yield
    except BaseException:
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())
        raise
