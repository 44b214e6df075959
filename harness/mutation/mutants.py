"""The mutants of a kernel's own source, each with a description that stays the same while its line does.

The kernel's own source is what the folder ships, without the copies of parts/, the configurations (configs.py or
configs/: values that only affect speed), the reference, the example, and the modules of `__init__`. Python is mutated
through its syntax tree, CUDA C++ by its tokens.
"""

from __future__ import annotations

import ast
import bisect
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .. import registry
from . import cuda_tokens, operators, plain

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EQUIVALENT = "equivalent_mutants.toml"
LEFT_OUT = {"__init__.py", "bench.py", "example.py", "reference.py", "configs.py"}
COPY = "A copy of parts/"
CUDA_SOURCES = (".cu", ".cuh")


def is_cuda(file: str | None) -> bool:
    """Whether a file of a kernel's folder is CUDA C++; False if there is no file, as for an original."""
    return file is not None and file.endswith(CUDA_SOURCES)


@dataclass(frozen=True)
class Mutant:
    """One fault: the text from `start` to `end` of a file becomes `text`.

    file, function, line, operator, ordinal   its identity: the file in the folder, the qualified name of the function,
                                              the text of the line, what changes, and an index among equal ones
    number    the present number of the line
    digest    of the function's source: when that changes, results become invalid
    device    "cuda" if only a GPU can detect it: in CUDA C++, its launchers, and 64-bit offsets
    """

    kernel: str
    file: str
    function: str
    line: str
    operator: str
    ordinal: int
    number: int
    start: int
    end: int
    text: str
    digest: str
    device: str = "any"

    @property
    def identity(self) -> tuple[str, str, str, str, int]:
        return self.file, self.function, self.line, self.operator, self.ordinal

    @property
    def key(self) -> str:
        """A short name of the identity."""
        return hashlib.sha256(json.dumps([self.kernel, *self.identity]).encode()).hexdigest()[:16]

    @property
    def kind(self) -> str:
        """The class of the fault."""
        return self.operator.partition(":")[0]

    def applied(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]


def of_kernel(kernel: str) -> list[Mutant]:
    """Every mutant of a kernel, in the order of its files and lines."""
    return [mutant for path in own_files(registry.folder(kernel)) for mutant in of_file(kernel, path)]


def own_files(folder: Path) -> list[Path]:
    """The files of a kernel's folder that are mutated."""
    found = []
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if path.suffix not in (".py", *CUDA_SOURCES) or path.name in LEFT_OUT or path.name.startswith("test_"):
            continue
        if "configs" in inside.parts or "__pycache__" in inside.parts:
            continue
        if COPY not in path.read_text(encoding="utf-8").partition("\n")[0]:
            found.append(path)
    return found


def of_file(kernel: str, path: Path) -> list[Mutant]:
    source = path.read_text(encoding="utf-8")
    name = path.relative_to(registry.folder(kernel)).as_posix()
    if path.suffix == ".py":
        return _of_python(kernel, name, source)
    digests = {function: plain.digest(plain.cuda(text)) for function, text in cuda_tokens.functions(source).items()}
    return _numbered(kernel, name, source, ((*change, "cuda") for change in cuda_tokens.changes(source)), digests)


def _of_python(kernel: str, name: str, source: str) -> list[Mutant]:
    tree, starts, lines = ast.parse(source), _line_starts(source), source.splitlines()
    # A module that launches CUDA C++ does nothing without a GPU.
    on_gpu = "cuda_driver" in source or name.startswith("sm90/")

    def place(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())  # the tree counts bytes

    def found() -> Iterator[tuple[str, str, int, int, str, str]]:
        for function, edit in operators.edits(tree):
            node = edit.node
            start, end = place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
            text = _written(edit)
            device = "cuda" if on_gpu or edit.huge else "any"
            yield function, edit.name, start, end, text, device

    return _numbered(kernel, name, source, found(), _functions(tree, source))


def _written(edit: operators.Edit) -> str:
    if edit.replacement is None:
        return "pass"
    text = ast.unparse(ast.fix_missing_locations(edit.replacement))
    return text if isinstance(edit.replacement, ast.stmt | ast.Constant) else f"({text})"


def _functions(tree: ast.Module, source: str) -> dict[str, str]:
    """Digest of each function of the module and of each class, by name. Code outside of them has that of its line."""
    named = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {node.name: plain.digest(plain.python(ast.get_source_segment(source, node) or "")) for node in named}


def _numbered(
    kernel: str,
    file: str,
    source: str,
    changes: Iterator[tuple[str, str, int, int, str, str]],
    digests: dict[str, str],
) -> list[Mutant]:
    """Mutants of changes (function, operator, start, end, text, device); changes to the same text count once."""
    starts, lines = _line_starts(source), source.splitlines()
    seen, counts, found = set(), Counter[tuple[str, str, str]](), []
    for function, operator, start, end, text, device in changes:
        if (start, end, text) in seen or source[start:end] == text:
            continue
        seen.add((start, end, text))
        number = bisect.bisect_right(starts, start) - 1
        line = lines[number].strip()
        digest = digests.get(function.partition(".")[0]) or plain.digest(line)
        ordinal = counts[function, line, operator]
        counts[function, line, operator] += 1
        found.append(
            Mutant(kernel, file, function, line, operator, ordinal, number + 1, start, end, text, digest, device)
        )
    return found


def _line_starts(source: str) -> list[int]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts[:-1] or [0]


def order(mutants: list[Mutant], seed: int) -> list[Mutant]:
    """The mutants in an order drawn from the seed. The position of a mutant depends only on its identity, so any prefix
    is a random sample, which does not change when other lines do."""
    return sorted(mutants, key=lambda m: hashlib.sha256(f"{seed} {m.key}".encode()).digest())


def equivalent(kernel: str) -> dict[tuple[str, str, str, str, int], str]:
    """Identity → the argument why the mutant is no fault, from the folder's equivalent_mutants.toml."""
    path = registry.folder(kernel) / EQUIVALENT
    if not path.is_file():
        return {}
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("mutant", [])
    fields = ("file", "function", "line", "operator")
    return {(*(e[f] for f in fields), e.get("ordinal", 0)): e["why"] for e in entries}  # type: ignore[misc]
