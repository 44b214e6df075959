"""Marks in CUDA C++ that show at run time which statements were executed, and the mark that stands for a position.

A mark is a statement `COVERED(n);` between two statements of a block, or a condition `&& COVERED(n)` of an `if` whose
statement has no braces. It stands for all that follows in its block, up to the next mark. Functions that are constexpr
have none: they may be evaluated at compile time, where nothing can be written. So a position in them, or outside of
functions, has no mark.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .cuda_tokens import CONDITION, DIRECTIVE, SKIPPED

#: Array of a byte for each mark of a kernel, and the macro that sets one.
ARRAY = "covered_statements"
PRELUDE = 'extern "C" {{ __device__ unsigned char {array}[{size}]; }}\n#define COVERED(n) (({array}[n] = 1) != 0)\n'

_OPENS_A_BODY = re.compile(r"(?:[)\]]|\b(?:else|do|const|mutable|noexcept)|->\s*[\w:<>*& ]+)$")
_NO_STATEMENT = re.compile(r"[;,)(.}\]]|else\b|case\b|default\b|$")
_DO_WHILE = re.compile(r"do\b.*[;}]while$", re.DOTALL)


@dataclass(frozen=True)
class Mark:
    """`at` is its position in the original text. It stands for positions from there to `end`. `condition`: the start of
    the condition that it extends, None for a statement."""

    at: int
    end: int
    condition: int | None = None


@dataclass
class _Block:
    """Text in braces: whether it consists of statements, whether marks are allowed, and what opened it."""

    code: bool
    quiet: bool
    head: str
    parentheses: int = 0
    begin: int = 0  # where its current statement begins
    marks: list[int] = field(default_factory=list)


def marks(source: str) -> list[Mark]:
    """The marks of a source file, by their position."""
    text = _plain(source)
    found = [Mark(at, end) for at, end in _between_statements(source, text)]
    found += _of_conditions(text, found)
    return sorted(found, key=lambda mark: mark.at)


def marked(source: str, places: Sequence[Mark], first: int) -> str:
    """The source with its marks, numbered from `first`."""
    pieces, before = list[str](), 0
    edits: list[tuple[int, str]] = []
    for number, mark in enumerate(places, first):
        if mark.condition is None:
            edits.append((mark.at, f" COVERED({number});"))
        else:
            edits += [(mark.condition, "("), (mark.at, f") && COVERED({number})")]
    for at, text in sorted(edits, key=lambda edit: edit[0]):
        pieces += [source[before:at], text]
        before = at
    return "".join((*pieces, source[before:]))


def mark_of(places: Sequence[Mark], position: int) -> int | None:
    """The index of the mark that stands for a position, None if there is none."""
    standing = [index for index, mark in enumerate(places) if mark.at <= position < mark.end]
    return max(standing, key=lambda index: places[index].at, default=None)


def _plain(source: str) -> str:
    """The text without comments and directives; inline PTX, strings and the like are one word."""

    def blank(found: re.Match[str]) -> str:
        is_text = not found[0].lstrip().startswith(("//", "/*", "#"))
        return re.sub(r"[^\n]", "x" if is_text else " ", found[0])

    return SKIPPED.sub(blank, source)


def _between_statements(source: str, text: str) -> Iterator[tuple[int, int]]:
    """Yields (position, end of the block) of each place between two statements of a block."""
    blocks, before = [_Block(code=False, quiet=False, head="")], list[list[_Block]]()
    other: dict[int, list[int]] = {}  # depth → the marks of a block that another branch of a conditional has opened
    tokens = sorted((*re.finditer(r"[{};()]", text), *DIRECTIVE.finditer(source)), key=lambda found: found.start())
    for token in tokens:
        if directive := token.groupdict().get("directive"):
            # Each branch of a preprocessor conditional starts in the block of the first, as it may open its own.
            if directive.startswith("if"):
                before.append(list(blocks))
            elif directive == "endif":
                before.pop()
            else:
                other |= {depth: block.marks for depth, block in enumerate(blocks) if depth >= len(before[-1])}
                blocks = list(before[-1])
            continue
        at, block = token.start(), blocks[-1]
        if token[0] in "()":
            block.parentheses += 1 if token[0] == "(" else -1
        elif token[0] == "{":
            inner = _opened(block, text[block.begin : at].strip(), at)
            inner.marks += other.pop(len(blocks), [])
            blocks.append(inner)
            if inner.code and not inner.quiet and _starts_a_statement(text, at + 1):
                inner.marks.append(at + 1)
        elif token[0] == "}" and len(blocks) > 1:
            blocks.pop()
            yield from ((place, at) for place in block.marks)
            outer = blocks[-1]
            if block.code and not outer.parentheses:
                _end_statement(outer, text, at)
        elif token[0] == ";" and not block.parentheses:
            _end_statement(block, text, at)


def _opened(outer: _Block, head: str, at: int) -> _Block:
    """The block that begins with a brace after `head`."""
    code = bool(_OPENS_A_BODY.search(head)) or (outer.code and not head)
    quiet = outer.quiet or bool(re.search(r"(?<!if )\bconstexpr\b", head))
    return _Block(code, quiet, head, begin=at + 1)


def _end_statement(block: _Block, text: str, at: int) -> None:
    """Notes that a statement of the block ends at `at`, and that a mark can follow."""
    is_do = _DO_WHILE.match(text[block.begin : at].lstrip() + text[at : at + 1] + text[at + 1 :].lstrip()[:5])
    if block.code and not block.quiet and not is_do and _starts_a_statement(text, at + 1):
        block.marks.append(at + 1)
    block.begin = at + 1


def _starts_a_statement(text: str, at: int) -> bool:
    return not _NO_STATEMENT.match(text[at:].lstrip())


def _of_conditions(text: str, places: Sequence[Mark]) -> Iterator[Mark]:
    """Yields a mark for each `if (…) statement;` without braces that is known at run time."""
    for found in CONDITION.finditer(text):
        start, end = found.span("test")
        whole = text[start:end]
        if found[0].startswith("if constexpr") or whole.count("(") != whole.count(")"):
            continue
        after = text[found.end() :].lstrip()
        stop = text.find(";", found.end())
        if after.startswith("{") or stop < 0 or mark_of(places, start) is None:
            continue
        yield Mark(end, stop, start)
