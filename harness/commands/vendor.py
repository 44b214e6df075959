"""Rewrites the copies of `parts/` that kernels' folders hold.

Each folder is self-contained, so it has its own copy of what several folders need. A copy is a file that has the name
of a part and says so in its first line. It is rewritten from the part; `--check` only reports which copies differ.
`vendor KERNEL PART` makes a new copy.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from .. import registry

PARTS = "parts"
_COMMENTS = {".py": "#", ".cuh": "//", ".cu": "//"}
_SAYS = "A copy of parts/{part}, made by `nox -s vendor`: change it there."


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kernel", nargs="?", metavar="KERNEL", help="kernel into whose folder PART is copied")
    parser.add_argument("part", nargs="?", metavar="PART", help="file in parts/, e.g. launch.py or sm90/tma.cuh")
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a copy differs")


def main(arguments: argparse.Namespace) -> int:
    root = registry.ROOT
    if arguments.kernel:
        if not arguments.part:
            raise ValueError("PART is missing: vendor KERNEL PART")
        if arguments.check:
            raise ValueError("--check cannot be used with KERNEL PART, which adds a copy")
        add(root, arguments.kernel, arguments.part)
    stale = [path for path, text in copies(root) if path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{path.relative_to(root)}: {'differs from its part' if arguments.check else 'rewritten'}")
    if arguments.check:
        return 1 if stale else 0
    for path, text in copies(root):
        path.write_text(text, encoding="utf-8")
    return 0


def copies(root: Path) -> Iterator[tuple[Path, str]]:
    """Yields every copy in the kernels' folders, with its expected text. ValueError for a copy of an unknown part."""
    for kind in registry.COLLECTIONS:
        for path in sorted((root / kind).rglob("*")):
            if path.suffix in _COMMENTS and (part := part_of(path)):
                yield path, text_of(root, part)


def part_of(path: Path) -> str | None:
    """The part that a file declares to be a copy of."""
    with path.open(encoding="utf-8") as file:
        first = file.readline().strip()
    before, _, after = f"{_COMMENTS[path.suffix]} {_SAYS}".partition("{part}")
    return (
        first.removeprefix(before).removesuffix(after) if first.startswith(before) and first.endswith(after) else None
    )


def text_of(root: Path, part: str) -> str:
    """The text of a copy of a part: its first line, then the part itself."""
    source = root / PARTS / part
    if source.suffix not in _COMMENTS or not source.is_file():
        raise ValueError(f"there is no {PARTS}/{part}; there are {', '.join(names(root))}")
    return f"{_COMMENTS[source.suffix]} {_SAYS.format(part=part)}\n{source.read_text(encoding='utf-8')}"


def names(root: Path) -> list[str]:
    """Every part, by its path below parts/."""
    found = (path for path in (root / PARTS).rglob("*") if path.suffix in _COMMENTS)
    return sorted(path.relative_to(root / PARTS).as_posix() for path in found)


def add(root: Path, kernel: str, part: str) -> None:
    """Adds a copy of a part at the same relative path in a kernel's folder."""
    folders = [root / kind / kernel for kind in registry.COLLECTIONS if (root / kind / kernel).is_dir()]
    if not folders:
        raise ValueError(f"there is no kernel {kernel!r}")
    target = folders[0] / part
    if target.exists() and part_of(target) != part:
        raise ValueError(f"{target.relative_to(root)} exists and is not a copy of {PARTS}/{part}")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text_of(root, part), encoding="utf-8")
    print(f"{target.relative_to(root)}: copied", file=sys.stderr)
