"""Queries of a checkout through git."""

from __future__ import annotations

import subprocess
from pathlib import Path


def output(root: Path, *arguments: str) -> str | None:
    """The output of `git ARGUMENTS` in that folder; None if it fails or git is missing."""
    content = content_of(root, *arguments)
    return None if content is None else content.decode(errors="replace")


def content_of(root: Path, *arguments: str) -> bytes | None:
    """The same as bytes, for files that may not be text."""
    try:
        run = subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return run.stdout if run.returncode == 0 else None
