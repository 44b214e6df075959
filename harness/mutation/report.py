"""reports/faults.md."""

from pathlib import Path


def page(folder: Path) -> str:
    return ""
