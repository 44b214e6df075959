"""The JSON files of build, profile and tune: an object with a schema version and `rows`, a line for each row."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def dumps(document: Mapping[str, Any]) -> str:
    """The rows last and one to a line, so that the difference between two files reads as one."""
    rows = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in document["rows"])
    head = json.dumps({key: value for key, value in document.items() if key != "rows"}, indent=1, ensure_ascii=False)
    return head.removesuffix("\n}") + (f',\n "rows": [\n{rows}\n ]\n}}\n' if rows else ',\n "rows": []\n}\n')


def read(path: Path, schema: int) -> dict[str, Any]:
    """The document. ValueError for one of another schema."""
    document = json.loads(path.read_text(encoding="utf-8"))
    if document.get("schema") != schema:
        raise ValueError(f"{path}: schema {document.get('schema')!r}, this version reads schema {schema}")
    return document


def merge(path: Path, document: dict[str, Any], schema: int, key: Callable[[dict[str, Any]], object]) -> None:
    """Writes the document to `path`, with the rows that are there already and are not replaced by one of the same key.

    Earlier rows stay only where they are of the same card, commit and versions: the file has one `environment` for all.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file():
        earlier = read(path, schema)
        if _identity(earlier) == _identity(document):
            fresh = {key(row) for row in document["rows"]}
            document = {**document, "rows": [r for r in earlier["rows"] if key(r) not in fresh] + document["rows"]}
    path.write_text(dumps(document), encoding="utf-8")


def _identity(document: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document["environment"].items() if name != "time"}
