"""A cache of Triton's compiled kernels, on top of another one that is read-only.

The kernels compiled for the originals are in one folder, which all processes read. A mutant finds its unchanged kernels
there; the others it writes to a folder of its own, which is deleted afterwards. A mutant of CUDA C++ writes to the
common folder: keys are computed from the whole source, so that no other mutant finds its kernels.
"""

from __future__ import annotations

import os

from triton import knobs
from triton.runtime.cache import FileCacheManager


class _Below(FileCacheManager):
    """One entry of the read-only cache. Its folder need not exist."""

    def __init__(self, key: str, folder: str) -> None:
        self.key, self.lock_path = key, None
        self.cache_dir = os.path.join(folder, key)


class Overlay(FileCacheManager):
    """One entry: written files go to `knobs.cache.dir`; files that are not there are read from `below`."""

    below = ""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        super().__init__(key, override, dump)
        self._below = None if override or dump else _Below(key, self.below)

    def get_file(self, filename: str) -> str | None:
        return super().get_file(filename) or (self._below and self._below.get_file(filename))

    def get_group(self, filename: str) -> dict[str, str] | None:
        return super().get_group(filename) or (self._below and self._below.get_group(filename))


def write_to(folder: str | None) -> None:
    """Writes compiled kernels to this folder from now on, above the original cache; None: to the original cache."""
    Overlay.below = Overlay.below or knobs.cache.dir
    knobs.cache.dir = folder or Overlay.below
    knobs.cache.manager_class = Overlay if folder else FileCacheManager
