"""Faults of CUDA C++, found in its tokens: operators, comparisons, numbers and dropped statements.

Comments, strings, inline PTX (`asm`), preprocessor lines, template parameter lists and `static_assert` are left alone,
and so are `&`, `*` and `<` where they may be a reference, a pointer or a template's bracket.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Iterator

Change = tuple[str, str, int, int, str]

# What is blanked before anything is sought; a string may hold PTX.
_SKIPPED = re.compile(
    r"//[^\n]*|/\*.*?\*/|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*"
    r'|\basm\b(?:\s*volatile)?\s*\((?:"(?:\\.|[^"\\])*"|[^()"]|\((?:[^()"]|"(?:\\.|[^"\\])*"|\([^()]*\))*\))*\)'
    r'|"(?:\\.|[^"\\])*"|\bstatic_assert\s*\([^;]*;|\btemplate\s*<[^>]*>',
    re.DOTALL | re.MULTILINE,
)
_TEMPLATE = re.compile(r"(?m)^template\s*<[^>]*>")
_BINARY = {
    "+=": ("-=",),
    "-=": ("+=",),
    "*=": ("+=",),
    "<=": ("<", ">"),
    ">=": (">", "<"),
    "==": ("!=",),
    "!=": ("==",),
    "&&": ("||",),
    "||": ("&&",),
    "<<": (">>",),
    ">>": ("<<",),
    "+": ("-",),
    "-": ("+",),
    "*": ("+",),
    "/": ("*",),
    "%": ("/",),
    "<": ("<=", ">="),
    ">": (">=", "<="),
    "|": ("&",),
    "&": ("|",),
    "^": ("|",),
}
_COMPARISONS = {"<=", ">=", "==", "!=", "<", ">"}
# With a space on both sides, as clang-format writes binary operators; a pointer or a reference has none.
_OPERATOR = re.compile(r"(?<= )(\+=|-=|\*=|<=|>=|==|!=|&&|\|\||<<|>>|[-+*/%<>|&^])(?= )")
_NUMBER = re.compile(r"(?<![\w.])(\d+\.\d*(?:[eE][-+]?\d+)?f?|0x[0-9a-fA-F]+u?|\d+u?(?:ll)?)(?![\w.])")
_STATEMENT = re.compile(
    r"(?m)^[ \t]+(?P<call>(?!return\b|else\b|case\b|if\b|for\b|while\b)[\w:]+(?:<[^;{}()]*>)?\([^;{}]*\);)"
)
_CONDITION = re.compile(r"\bif(?: constexpr)? \((?P<test>[^;{}]*?)\)(?= [\w{*])")
_FUNCTION = re.compile(r"(?m)^(?=[A-Za-z_])[^;{}=#]*\b(?P<name>\w+)\s*\([^;{}]*\)\s*\{")


def changes(source: str) -> Iterator[Change]:
    """(function, what changes, start, end, text) of every fault of a source file."""
    blank = _blanked(source)
    begins = _begins(source, blank)
    for start, end, kind, text in sorted(_found(blank)):
        at = start - source.rfind("\n", 0, start) - 1
        line = source[start - at :].partition("\n")[0]
        around = " ".join(line[max(0, at - 20) : at + 30].split())
        change = f"{kind}: {' '.join(source[start:end].split())[:60]} → {text or 'nothing'} in {around}"
        index = bisect.bisect_right(begins, (start, "~")) - 1
        yield begins[index][1] if index >= 0 else "", change[:140], start, end, text


def functions(source: str) -> dict[str, str]:
    """The text of each function, to where the next one begins; of several that share a name, all of them."""
    begins = _begins(source, _blanked(source))
    found: dict[str, str] = {}
    for (start, name), (end, _) in itertools.pairwise([*begins, (len(source), "")]):
        found[name] = found.get(name, "") + source[start:end]
    return found


def _blanked(source: str) -> str:
    return _SKIPPED.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), source)


def _begins(source: str, blank: str) -> list[tuple[int, str]]:
    return [(found.start(), found["name"]) for found in _FUNCTION.finditer(_with_templates(blank, source))]


def _with_templates(blank: str, source: str) -> str:
    """The text with a name in place of each `template <…>`, so that a function begins where its line does."""
    text = list(blank)
    for found in _TEMPLATE.finditer(source):
        text[found.start() : found.end()] = "_" * (found.end() - found.start())
    return "".join(text)


def _found(blank: str) -> Iterator[tuple[int, int, str, str]]:
    for found in _OPERATOR.finditer(blank):
        kind = "comparison" if found[1] in _COMPARISONS else "condition" if found[1] in ("&&", "||") else "arithmetic"
        if not _of_a_type(blank, found.start()):
            yield from ((*found.span(1), kind, other) for other in _BINARY[found[1]])
    for found in _NUMBER.finditer(blank):
        yield from ((*found.span(1), "constant", other) for other in _other_numbers(found[1]))
    for found in _STATEMENT.finditer(blank):
        yield (*found.span("call"), "statement", ";")
    for found in _CONDITION.finditer(blank):
        yield from ((*found.span("test"), "condition", value) for value in ("true", "false"))


def _of_a_type(blank: str, at: int) -> bool:
    """Whether an operator stands in a declaration, where `*` and `&` belong to a type: `float * x = …`."""
    line = blank[blank.rfind("\n", 0, at) + 1 : at]
    return blank[at] in "*&" and bool(re.search(r"(?:^\s*|\bconst\s+)\w+\s*$", line))


def _other_numbers(text: str) -> list[str]:
    if "." in text:
        value = float(text.rstrip("f"))
        other = 1.0 if value == 0 else 2 * value
        return [f"{other!r}f" if text.endswith("f") else repr(other)]
    suffix = text[len(text.rstrip("ul")) :] if not text.startswith("0x") else "u" * text.endswith("u")
    value = int(text[: len(text) - len(suffix)], 0)
    others = {0: [1], 1: [0, 2]}.get(value, [value + 1, value - 1])
    return [f"{other}{suffix}" for other in others]
