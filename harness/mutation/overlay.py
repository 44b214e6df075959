"""A cache of what Triton compiles, over another one that is only read.

What the originals have compiled is in one folder, which all processes read. A mutant finds there what it has not
changed; the rest it writes to a folder of its own, which is deleted after it. A mutant of CUDA C++ writes to the common
folder: keys are made from all of the source, so that no other finds what it alone has.
"""

from __future__ import annotations

import os

from triton import knobs
from triton.runtime.cache import FileCacheManager


class _Below(FileCacheManager):
    """One entry of the cache that is read. Its folder need not be there."""

    def __init__(self, key: str, folder: str) -> None:
        self.key, self.lock_path = key, None
        self.cache_dir = os.path.join(folder, key)


class Overlay(FileCacheManager):
    """One entry: what is written goes to `knobs.cache.dir`, what is not found there is read in `below`."""

    below = ""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        super().__init__(key, override, dump)
        self._below = None if override or dump else _Below(key, self.below)

    def get_file(self, filename: str) -> str | None:
        return super().get_file(filename) or (self._below and self._below.get_file(filename))

    def get_group(self, filename: str) -> dict[str, str] | None:
        return super().get_group(filename) or (self._below and self._below.get_group(filename))


def write_to(folder: str | None) -> None:
    """From now on what is compiled goes to this folder, and the cache as it first was is read; None: to that cache."""
    Overlay.below = Overlay.below or knobs.cache.dir
    knobs.cache.dir = folder or Overlay.below
    knobs.cache.manager_class = Overlay if folder else FileCacheManager
