"""Start-up of commands that need a GPU: which GPU, and which folder for the results."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from . import environment, options, registry
from .reporting.entries import of_several, slug


@dataclass(frozen=True)
class Place:
    """The device, the name of its folder under reports/ (as in a record), and where results go."""

    device: torch.device
    folder: str
    out: Path


def place(command: str, arguments: argparse.Namespace, selections: Iterable[options.Selection]) -> Place:
    """Place from --gpu, --device, --out and the kernels. ValueError if there is no GPU, or not the one named."""
    device, key = environment.target(arguments.gpu, arguments.device)
    if device.type != "cuda":
        raise ValueError(
            f"{command} needs an NVIDIA GPU, and none was found (torch {torch.__version__}); "
            "check, bench and build also run without one"
        )
    name = folder(device, key)
    return Place(device, name, arguments.out or registry.results(s.spec.name for s in selections) / name)


def folder(device: torch.device, key: str | None, world_size: int = 1) -> str:
    """Name of a CUDA device's folder under reports/: its key in the table or, if it has none, the device's name; for
    several such GPUs with their number, `h200-x2`."""
    return of_several(key or slug(torch.cuda.get_device_name(device)), world_size)
