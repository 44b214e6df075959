"""What git says of a checkout."""

from __future__ import annotations

import subprocess
from pathlib import Path


def output(root: Path, *arguments: str) -> str | None:
    """What `git ARGUMENTS` prints in that folder; None where it fails or there is no git."""
    try:
        run = subprocess.run(["git", *arguments], cwd=root, capture_output=True, encoding="utf-8", check=False)
    except FileNotFoundError:
        return None
    return run.stdout if run.returncode == 0 else None
