"""The peers that a bench.py declares, read from its source, since reports are made where torch is not installed."""

from __future__ import annotations

import ast
from functools import cache

from ..registry import COLLECTIONS, ROOT

#: the baselines made from the reference, except eager, which is no peer
FROM_REFERENCE = {"COMPILED": "compile", "COMPILED_MAX": "compile-max"}


@cache
def peers(kernel: str) -> tuple[str, ...]:
    """The peers' names, in the order of the source; none for a kernel that is not in the checkout. A name that is
    computed when the file runs is left out."""
    files = [file for kind in COLLECTIONS if (file := ROOT / kind / kernel / "bench.py").is_file()]
    found: dict[str, None] = {}
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))):
        if isinstance(node, ast.Call):
            found.update(dict.fromkeys(_of_call(node)))
    return tuple(found)


def _of_call(node: ast.Call) -> list[str]:
    """The name of a Peer(...), or the names of the baselines from the reference in a KernelSpec(...)."""
    if not isinstance(node.func, ast.Name):
        return []
    if node.func.id == "Peer" and node.args and isinstance(node.args[0], ast.Constant):
        return [str(node.args[0].value)]
    if node.func.id != "KernelSpec":
        return []
    given = [keyword.value for keyword in node.keywords if keyword.arg == "baselines"]
    names = [inner.id for value in given for inner in ast.walk(value) if isinstance(inner, ast.Name)]
    return [FROM_REFERENCE[name] for name in names if name in FROM_REFERENCE]
