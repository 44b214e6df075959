"""Access from outside to the launch plans that a kernel's folder caches (`launch.Plans`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .spec import KernelSpec

Kept = list[dict[Any, Any]]


def kept_by(spec: KernelSpec) -> list[Any]:
    """Every `Plans` of a kernel's folder; none if it caches no plans."""
    return kept_in(spec.reference.__module__.rpartition(".")[0])


def kept_in(package: str) -> list[Any]:
    """Every `Plans` of the folder that is this package."""
    return list(getattr(sys.modules.get(f"{package}.launch"), "_EVERY", ()))


@contextmanager
def apart(spec: KernelSpec, own: Kept) -> Iterator[None]:
    """Context in which the kernel uses only the plans in `own`, and adds new ones there. Code that replaces a `pick_*`
    function must neither find plans made before nor leave its own behind."""
    every = kept_by(spec)
    before = [dict(plans) for plans in every]
    own.extend({} for _ in range(len(every) - len(own)))
    _put(every, own)
    try:
        yield
    finally:
        own[:] = [dict(plans) for plans in every]
        _put(every, before)


def _put(every: list[Any], contents: Kept) -> None:
    for plans, content in zip(every, contents, strict=True):
        plans.clear()
        plans.update(content)
