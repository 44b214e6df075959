"""What modules import, read from their syntax trees. Nothing is run."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path


@dataclass(frozen=True)
class Import:
    """`module` is dotted, without the leading dots, whose number is `level`. A `deferred` import does not run when
    the file is imported: it stands in a function, or under `if TYPE_CHECKING`."""

    module: str
    names: tuple[str, ...]
    level: int
    line: int
    deferred: bool

    @property
    def root(self) -> str:
        return self.module.split(".")[0]


def imports(path: Path) -> list[Import]:
    """Every import statement of a file, and every import_module or __import__ of a constant name."""
    return list(_imports(path.read_text(encoding="utf-8"), str(path)))


@lru_cache(2048)  # each rule reads the same files again
def _imports(text: str, filename: str) -> tuple[Import, ...]:
    found: list[Import] = []

    def visit(node: ast.AST, deferred: bool) -> None:
        if isinstance(node, ast.expr_context | ast.Constant | ast.Name):
            return
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, (), 0, node.lineno, deferred) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            found.append(Import(node.module or "", names, node.level, node.lineno, deferred))
        elif isinstance(node, ast.Call) and (name := _dynamic_import(node)):
            found.append(Import(name.lstrip("."), (), len(name) - len(name.lstrip(".")), node.lineno, deferred))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                visit(child, True)
            for child in node.orelse:
                visit(child, deferred)
            return
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            visit(child, deferred or inside)

    visit(ast.parse(text, filename=filename), False)
    return tuple(found)


def _dynamic_import(call: ast.Call) -> str | None:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
    if name not in ("import_module", "__import__") or not call.args:
        return None
    argument = call.args[0]
    return argument.value if isinstance(argument, ast.Constant) and isinstance(argument.value, str) else None


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def depth(folder: Path, path: Path) -> int:
    """How many dots lead from a module to its folder."""
    return len(path.relative_to(folder).parts)


def targets(folder: Path, path: Path, item: Import) -> list[Path]:
    """The modules of its own folder that a relative import of a module names. A package stands as its __init__.py, and
    so does what is no module: it is a name of that package."""
    package = path.relative_to(folder).parent.parts
    base = folder.joinpath(*package[: len(package) - (item.level - 1)], *filter(None, item.module.split(".")))
    if base.with_suffix(".py").is_file() and item.module:
        return [base.with_suffix(".py")]
    inside = [_module(base / name) for name in item.names]
    return list(dict.fromkeys(found or _module(base) or folder / "__init__.py" for found in inside or [None]))


def _module(place: Path) -> Path | None:
    """The file of a module or package; None where there is none."""
    return next((file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()), None)


def way_back(graph: dict[Path, list[Path]], start: Path) -> tuple[Path, ...]:
    """The shortest chain of imports that leads from a module back to it; empty if there is none."""
    queue, seen = [(start,)], {start}
    while queue:
        chain = queue.pop(0)
        for target in graph.get(chain[-1], []):
            if target == start:
                return chain
            if target not in seen:
                seen.add(target)
                queue.append((*chain, target))
    return ()
