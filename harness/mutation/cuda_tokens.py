"""Faults of CUDA C++, found in its text: one expression or statement is replaced.

A class of faults is the first word of a change's name:

arithmetic       another operator: + and -, * and +, / and *, % and /, shifts, &, | and ^, += and -=
comparison       its boundary (< and <=), its direction (< and >=), == and !=
condition        an `if` and the condition of `?:` always true, always false; && and ||
constant         an integer one more or one less, a float doubled, 0 and 1
sign             a unary minus dropped
call             another function of the same family: min and max, any and all
statement        a call or an assignment dropped
synchronisation  a fence, a wait, an arrival, a commit, a barrier dropped, also in inline PTX; a wait that leaves one
                 group more or less pending

Comments, strings, other inline PTX, preprocessor lines, template parameter lists, `static_assert` and hints
(`prefetch`, `no_hoist`) are left alone, and so are `&`, `*` and `<` where they may be a reference, a pointer or a
template's bracket. There is no C++ parser: some changes do not compile, and those are not counted.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator

SYNCHRONISATION = "synchronisation"

Change = tuple[str, str, int, int, str]
Found = tuple[int, int, str, str]

_ASM = r'\basm\b(?:\s*volatile)?\s*\((?:"(?:\\.|[^"\\])*"|[^()"]|\((?:[^()"]|"(?:\\.|[^"\\])*"|\([^()]*\))*\))*\)'
# Text that is blanked before the search.
SKIPPED = re.compile(
    r"//[^\n]*|/\*.*?\*/|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*|" + _ASM + r"|"
    r'"(?:\\.|[^"\\])*"|\bstatic_assert\s*\([^;]*;|\btemplate\s*<[^>]*>',
    re.DOTALL | re.MULTILINE,
)
# The same, but inline PTX is kept, and therefore all strings.
_SKIPPED_BUT_PTX = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_TEMPLATE = re.compile(r"(?m)^template\s*<[^>]*>")
DIRECTIVE = re.compile(r"(?m)^[ \t]*#[ \t]*(?P<directive>ifdef|ifndef|if|elif|else|endif)\b")
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
_FAMILIES = {"min": "max", "max": "min", "fminf": "fmaxf", "fmaxf": "fminf", "__any_sync": "__all_sync"}
_FAMILIES |= {"__all_sync": "__any_sync"}
# With a space on both sides, as clang-format writes binary operators; a pointer or a reference has none.
_OPERATOR = re.compile(r"(?<= )(\+=|-=|\*=|<=|>=|==|!=|&&|\|\||<<|>>|[-+*/%<>|&^])(?= )")
_NUMBER = re.compile(r"(?<![\w.])(\d+\.\d*(?:[eE][-+]?\d+)?f?|0x[0-9a-fA-F]+u?|\d+u?(?:ll)?)(?![\w.])")
_SIGN = re.compile(r"(?:[(\[?:=,]|\breturn)\s*(-)(?=[\w(])")
_NAME = re.compile(r"\b(" + "|".join(sorted(_FAMILIES)) + r")(?=\()")
# Beginning of a statement: at the start of a line, or after a condition.
_BEGIN = r"(?:(?<=\n)|(?<=\) )|(?<=\belse )|(?<=\{ ))[ \t]*"
_CALL = re.compile(
    _BEGIN + r"(?P<all>(?!(?:return|else|case|if|for|while|prefetch|no_hoist)\b)[\w:]+(?:<[^;{}()]*>)?\([^;{}]*\);)"
)
_ASSIGNMENT = re.compile(
    _BEGIN + r"(?P<all>[A-Za-z_]\w*(?:\[[^\[\];{}=]*\]|\.\w+|->\w+)* (?:[-+*/%|&^]|<<|>>)?= [^;{}]*;)"
)
_PTX = re.compile(_ASM + r"\s*;")
CONDITION = re.compile(r"\bif(?: constexpr)? \((?P<test>[^;{}]*?)\)(?= [\w{*])")
_SYNCHRONISES = re.compile(r"fence|wait|sync|arrive|barrier|commit|^bar_|release|expect|^pin$")
_PTX_SYNCHRONISES = re.compile(r'[^"]*"(?:fence|bar\.|barrier\.|membar|mbarrier\.arrive|\S*\.(?:commit|wait)_group)')
_PENDING = re.compile(r"\b\w*wait\w*<(\d+)>\(")


def changes(source: str) -> Iterator[Change]:
    """Yields (function, what changes, start, end, text) of every fault of a source file."""
    blank = _blanked(source)
    spans = list(_spans(source, blank))
    begins = [start for start, _, _ in spans]
    for start, end, kind, text in sorted(_found(source, blank)):
        at = start - source.rfind("\n", 0, start) - 1
        line = source[start - at :].partition("\n")[0]
        around = " ".join(line[max(0, at - 20) : at + 30].split())
        shown = "nothing" if text.strip() in ("", ";") else text
        change = f"{kind}: {' '.join(source[start:end].split())[:60]} → {shown} in {around}"
        index = bisect.bisect_right(begins, start) - 1
        inside = index >= 0 and start < spans[index][1]
        yield spans[index][2] if inside else "", change[:140], start, end, text


def functions(source: str) -> dict[str, str]:
    """The text of each function and struct; if several share a name, the texts of all of them."""
    found: dict[str, str] = {}
    for start, end, name in _spans(source, _blanked(source)):
        found[name] = found.get(name, "") + source[start:end]
    return found


def _blanked(source: str) -> str:
    return SKIPPED.sub(_as_spaces, source)


def _as_spaces(found: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", found[0])


def _spans(source: str, blank: str) -> Iterator[tuple[int, int, str]]:
    """Yields (start, end, name) of each function and struct that is not inside another one."""
    text = list(blank)
    for found in _TEMPLATE.finditer(source):  # belongs to the declaration that follows
        text[found.start() : found.end()] = "_" * (found.end() - found.start())
    marked = "".join(text)
    tokens = sorted((*re.finditer(r"[{};]", marked), *DIRECTIVE.finditer(source)), key=lambda found: found.start())
    depth, before, begin, head, name = 0, [0], 0, 0, ""
    for token in tokens:
        if directive := token.groupdict().get("directive"):
            # Each branch of a preprocessor conditional starts at the brace depth of the first, as it may open its own.
            if directive.startswith("if"):
                before.append(depth)
            elif directive == "endif":
                before.pop()
            else:
                depth = before[-1]
            continue
        if token[0] == "{":
            if depth == 0 and not name:
                name, begin = _declared(marked[head : token.start()]), head
            depth += 1
        elif token[0] == "}":
            depth -= 1
        if depth == 0:
            if token[0] == "}" and name:
                yield begin + len(marked[begin:]) - len(marked[begin:].lstrip()), token.end(), name
            name, head = "", token.end()


def _declared(head: str) -> str:
    """The name of the function or struct whose text before the brace is `head`; "" for anything else."""
    head = head.rstrip()
    if found := re.search(r"\b(?:struct|union|class|namespace)\b[^()=]*?(\w+)\s*$", head):
        return found[1]
    if not head.endswith(")"):
        return ""
    depth = 0
    for at in range(len(head) - 1, -1, -1):
        depth += (head[at] == ")") - (head[at] == "(")
        if depth == 0:
            found = re.search(r"(\w+)\s*$", head[:at])
            return found[1] if found else ""
    return ""


def _found(source: str, blank: str) -> Iterator[Found]:
    for found in _OPERATOR.finditer(blank):
        kind = "comparison" if found[1] in _COMPARISONS else "condition" if found[1] in ("&&", "||") else "arithmetic"
        if not _of_a_type(blank, found.start()):
            yield from ((*found.span(1), kind, other) for other in _BINARY[found[1]])
    pending = {found.start(1) for found in _PENDING.finditer(blank)}
    for found in _NUMBER.finditer(blank):
        kind = SYNCHRONISATION if found.start() in pending else "constant"
        yield from ((*found.span(1), kind, other) for other in _other_numbers(found[1]))
    yield from ((*found.span(1), "sign", "") for found in _SIGN.finditer(blank))
    yield from ((*found.span(1), "call", _FAMILIES[found[1]]) for found in _NAME.finditer(blank))
    for found in _CALL.finditer(blank):
        synchronises = _SYNCHRONISES.search(re.match(r"[\w:]+", found["all"])[0])  # type: ignore[index]
        yield (*found.span("all"), SYNCHRONISATION if synchronises else "statement", _nothing(found["all"]))
    yield from ((*f.span("all"), "statement", _nothing(f["all"])) for f in _ASSIGNMENT.finditer(blank))
    for found in _PTX.finditer(_SKIPPED_BUT_PTX.sub(_as_spaces, source)):
        if _PTX_SYNCHRONISES.match(found[0]):
            yield (*found.span(), SYNCHRONISATION, _nothing(found[0]))
    for found in CONDITION.finditer(blank):
        yield from ((*found.span("test"), "condition", value) for value in ("true", "false"))
    yield from _ternaries(blank)


def _nothing(statement: str) -> str:
    """An empty statement with as many lines, so that the following code keeps its line numbers."""
    return ";" + "\n" * statement.count("\n")


def _ternaries(blank: str) -> Iterator[Found]:
    """Yields the condition of each `a ? b : c`."""
    for mark in re.finditer(r"(?<=\s)\?(?=\s)", blank):
        depth, at = 0, mark.start()
        while at > 0:
            before = blank[at - 1]
            depth += (before in ")]") - (before in "([")
            if depth < 0 or (depth == 0 and _ends_a_condition(blank, at - 1)):
                break
            at -= 1
        text = blank[at : mark.start()]
        start = at + len(text) - len(text.lstrip())
        if text.strip().startswith("return "):
            start += len("return ")
        if test := blank[start : mark.start()].rstrip():
            yield from ((start, start + len(test), "condition", value) for value in ("true", "false"))


def _ends_a_condition(blank: str, at: int) -> bool:
    """Whether the character here precedes a condition without being part of it."""
    if blank[at] in ",;{}?":
        return True
    if blank[at] == ":":
        return blank[at - 1] != ":" and blank[at + 1] != ":"
    return blank[at] == "=" and blank[at - 1] not in "=<>!" and blank[at + 1] != "="


def _of_a_type(blank: str, at: int) -> bool:
    """Whether an operator is in a declaration, where `*` and `&` belong to a type: `float * x = …`."""
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
