"""What git says of a checkout."""

from __future__ import annotations

import subprocess
from pathlib import Path


def output(root: Path, *arguments: str) -> str | None:
    """What `git ARGUMENTS` prints in that folder; None where it fails or there is no git."""
    content = content_of(root, *arguments)
    return None if content is None else content.decode(errors="replace")


def content_of(root: Path, *arguments: str) -> bytes | None:
    """The same as bytes, for files that may not be text."""
    try:
        run = subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return run.stdout if run.returncode == 0 else None
