"""Baselines to compare candidates with. Each is made from the benchmark's reference when it is needed, or loaded; one
that cannot be loaded becomes a row that says why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from .. import execute

Make = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Baseline:
    """`make` turns the reference into the timed callable, or returns another one that takes the same arguments. If it
    raises ImportError or `execute.Unavailable`, its rows are skipped with that reason."""

    name: str
    make: Make


def eager() -> Baseline:
    """The reference unchanged."""
    return Baseline("eager", lambda reference: reference)


def compiled(mode: str | None = None) -> Baseline:
    """The reference under torch.compile in the given mode, for static shapes."""

    def make(reference: Callable[..., Any]) -> Callable[..., Any]:
        torch._dynamo.reset()  # a graph of other shapes would make this one's dynamic
        return torch.compile(reference, mode=mode, dynamic=False)

    return Baseline("compile" if mode is None else f"compile-{mode}", make)


def flash() -> Baseline:
    """The reference with every `F.scaled_dot_product_attention` in it on the flash backend. PyTorch raises if that does
    not support a problem."""

    def make(reference: Callable[..., Any]) -> Callable[..., Any]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def with_flash(*arguments: Any, **named: Any) -> Any:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return reference(*arguments, **named)

        return with_flash

    return Baseline("flash", make)


def hugging_face(build: Callable[[ModuleType], Callable[..., Any]], name: str = "hugging-face") -> Baseline:
    """The callable that `build(transformers)` returns: a function, or a module that is given the reference's weights if
    it has the same ones. Skipped if `transformers` is not installed."""

    def make(reference: Callable[..., Any]) -> Callable[..., Any]:
        import transformers

        return build(transformers)

    return Baseline(name, make)


NAMED: dict[str, Callable[[], Baseline]] = {"eager": eager, "compile": compiled, "flash": flash}


def chosen(baselines: Sequence[str | Baseline]) -> tuple[Baseline, ...]:
    """Resolves baselines given by name or as objects. ValueError for an unknown name, with the known ones."""
    if unknown := sorted(b for b in baselines if isinstance(b, str) and b not in NAMED):
        known = ", ".join(NAMED)
        raise ValueError(f"unknown baseline {', '.join(map(repr, unknown))}; known: {known}, or a Baseline")
    return tuple(NAMED[b]() if isinstance(b, str) else b for b in baselines)


def unavailable(error: ImportError) -> execute.Unavailable:
    """The reason to skip a baseline that cannot be loaded."""
    return execute.Unavailable(f"not installed: {error}")
