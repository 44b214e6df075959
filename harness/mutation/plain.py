"""Sources without comments, docstrings and blank lines: digests of results are computed from these, so that results
remain valid when only comments change.

The text is the same under every version of Python, since only positions of comments and docstrings are used, not a dump
of a tree.
"""

from __future__ import annotations

import ast
import hashlib
import io
import re
import tokenize

_IN_CUDA = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)  # in a string it is no comment


def digest(text: str) -> str:
    """The digest of a plain source, as results record it."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def cuda(text: str) -> str:
    return _dense(_IN_CUDA.sub(lambda found: found[0] if found[0][0] == '"' else "", text).splitlines())


def python(text: str) -> str:
    """The source without comments and docstrings. SyntaxError if it does not parse."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                end = first.end_lineno or first.lineno
                before = lines[first.lineno - 1].encode()[: first.col_offset].decode()  # `class A(B): """One line."""`
                lines[first.lineno - 1 : end] = [before, *[""] * (end - first.lineno)]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return _dense(lines)


def _dense(lines: list[str]) -> str:
    kept = (line.rstrip() for line in lines)
    return "\n".join(line for line in kept if line)
