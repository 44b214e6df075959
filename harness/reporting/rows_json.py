"""The JSON files of build, profile, tune, sanitize and stress: an object with a schema version and `rows`, one line for
each row.

Rows of a GPU accumulate over several runs: `environments` has the environment of each run, and "run" of a row is an
index into that list.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def dumps(document: Mapping[str, Any]) -> str:
    """The document with the rows last and one per line, so that diffs between two files are readable."""
    rows = ",\n".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in document["rows"])
    head = json.dumps({key: value for key, value in document.items() if key != "rows"}, indent=1, ensure_ascii=False)
    return head.removesuffix("\n}") + (f',\n "rows": [\n{rows}\n ]\n}}\n' if rows else ',\n "rows": []\n}\n')


def read(path: Path, schema: int) -> dict[str, Any]:
    """The document. ValueError for one of another schema."""
    document = json.loads(path.read_text(encoding="utf-8"))
    if document.get("schema") != schema:
        raise ValueError(f"{path}: schema {document.get('schema')!r}, this version reads schema {schema}")
    return document


def merge(
    path: Path,
    head: Mapping[str, Any],
    environment: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    key: Callable[[Mapping[str, Any]], object],
) -> None:
    """Writes a document to `path`: `head`, which has its schema, these rows, and existing rows whose key is not among
    theirs."""
    fresh = {key(row) for row in rows}
    together: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
    if path.is_file():
        earlier = read(path, head["schema"])
        together = [(earlier["environments"][row["run"]], row) for row in earlier["rows"] if key(row) not in fresh]
    together += [(environment, row) for row in rows]
    environments: list[Mapping[str, Any]] = []
    for own, _ in together:
        if own not in environments:
            environments.append(own)
    numbered = [{**row, "run": environments.index(own)} for own, row in together]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dumps({**head, "environments": environments, "rows": numbered}), encoding="utf-8")
