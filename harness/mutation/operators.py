"""Faults of Python source, found in its syntax tree: one `Edit` replaces one expression or statement.

A class of faults is the first word or words of an edit's name:

arithmetic    another operator: + and −, * and +, / and *, // and *, % and //, shifts, & and |
operand       an operand dropped (a term, a factor, a scale, an offset, half of a mask) or the two swapped
comparison    its boundary (< and <=), its direction (< and >=), == and !=, `is`, `in`
condition     always true, always false; `and` and `or`; `not` dropped; one branch of a conditional expression
constant      an integer one more or one less, a float doubled, 0 and 1, True and False
sign          a unary minus dropped
mask          the mask of a load or store dropped, with its `other`
call          another function of the same family (minimum, maximum; sum, max; zeros, ones), cdiv that rounds down,
              the first two arguments swapped, the last two of three
cast          .to(…), .float(), .contiguous() dropped
statement     a call, a store, an assignment that overrides another, an addition in place, or a raise dropped

Excluded, because such a change is no fault or none that a numerical check could detect: docstrings, annotations,
decorators, imports, `__all__`, strings (messages among them), arguments of exceptions, hints to the compiler, and
options that only affect speed (TUNING).
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

TUNING = {
    "num_warps",
    "num_stages",
    "num_ctas",
    "maxnreg",
    "EVICTION",
    "STAGES",
    "eviction_policy",
    "cache_modifier",
    "is_pure",  # whether inline PTX may be omitted if its result is not used
}
HINTS = {"static_assert", "static_print", "device_print", "max_contiguous", "max_constancy", "multiple_of", "assume"}
ARITHMETIC: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
    ast.Pow: ast.Mult,
}
COMMUTATIVE = (ast.Add, ast.Mult, ast.BitAnd, ast.BitOr, ast.BitXor)
COMPARISONS: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
FAMILIES = {"minimum": "maximum", "maximum": "minimum", "min": "max", "max": "min", "any": "all", "all": "any"}
FAMILIES |= {"sum": "max", "zeros": "ones", "zeros_like": "ones_like", "sin": "cos", "cos": "sin", "exp2": "exp"}
CASTS = {"to", "float", "contiguous", "int", "half", "bfloat16"}
SHOWN = 70  # characters of an expression in a description
WIDE = "int64"  # only more than 2^31 elements reveal a missing cast to it


@dataclass(frozen=True)
class Edit:
    """`node` becomes `replacement`, or `pass` if that is None. `name` says what changes: class, before, after."""

    node: ast.AST
    name: str
    replacement: ast.expr | ast.stmt | None
    huge: bool = False


def edits(tree: ast.Module) -> Iterator[tuple[str, Edit]]:
    """Yields (qualified name of the function, edit) in the order of the source."""
    yield from _body(tree.body, "", set())


def _body(statements: list[ast.stmt], where: str, assigned: set[str]) -> Iterator[tuple[str, Edit]]:
    for statement in statements:
        yield from _statement(statement, where, assigned)


def _statement(node: ast.stmt, where: str, assigned: set[str]) -> Iterator[tuple[str, Edit]]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        inner = f"{where}.{node.name}" if where else node.name
        if isinstance(node, ast.FunctionDef):
            defaults = [*node.args.defaults, *(d for d in node.args.kw_defaults if d)]
            yield from ((inner, edit) for default in defaults for edit in _expression(default))
        yield from _body(node.body, inner, set())
        return
    if isinstance(node, ast.Import | ast.ImportFrom | ast.Assert | ast.Global | ast.Nonlocal | ast.Delete):
        return
    yield from ((where, edit) for edit in _of_statement(node, assigned))
    assigned |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    for field in ("body", "orelse", "finalbody"):
        yield from _body(getattr(node, field, []), where, assigned)
    for handler in getattr(node, "handlers", []):
        yield from _body(handler.body, where, assigned)


def _of_statement(node: ast.stmt, assigned: set[str]) -> Iterator[Edit]:
    """Yields the edits of a statement itself and of its expressions, not of the statements inside it."""
    if isinstance(node, ast.Raise):
        yield Edit(node, f"statement: drop {_short(node)}", None)
    elif isinstance(node, ast.Expr):
        if not isinstance(node.value, ast.Constant) and not _is_hint(node.value):
            yield Edit(node, f"statement: drop {_short(node)}", None)
            yield from _expression(node.value)
    elif isinstance(node, ast.If | ast.While):
        if isinstance(node, ast.If) and _text(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.If):
            yield from (
                Edit(node.test, f"condition: {_short(node.test)} → {v}", ast.Constant(v)) for v in (True, False)
            )
        yield from _expression(node.test)
    elif isinstance(node, ast.AugAssign):
        yield Edit(node, f"statement: drop {_short(node)}", None)
        if (other := ARITHMETIC.get(type(node.op))) is not None:
            changed = copy.deepcopy(node)
            changed.op = other()
            yield Edit(node, f"arithmetic: {_difference(_text(node), _text(changed))}", changed)
        yield from _expression(node.value)
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        yield from _of_assignment(node, assigned)
    elif isinstance(node, ast.For):
        yield from _expression(node.iter)
    elif isinstance(node, ast.With):
        for item in node.items:
            yield from _expression(item.context_expr)
    elif isinstance(node, ast.Return) and node.value is not None:
        yield from _expression(node.value)


def _of_assignment(node: ast.Assign | ast.AnnAssign, assigned: set[str]) -> Iterator[Edit]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    names = {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    if "__all__" in names or "__slots__" in names or node.value is None:
        return
    again = names <= assigned or not all(isinstance(t, ast.Name | ast.Tuple) for t in targets)
    if again:
        yield Edit(node, f"statement: drop {_short(node)}", None)
    yield from _expression(node.value)


def _expression(node: ast.AST) -> Iterator[Edit]:
    """Yields the edits of an expression and of its sub-expressions, in the order of the source."""
    if isinstance(node, ast.JoinedStr) or _is_hint(node) or _is_type(node):
        return
    if isinstance(node, ast.expr):
        yield from _of_expression(node)
    for field, value in ast.iter_fields(node):
        if isinstance(node, ast.Call) and field == "keywords":
            yield from (e for k in node.keywords if k.arg not in TUNING for e in _expression(k.value))
            continue
        if field in ("ctx", "annotation"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(
                child, ast.operator | ast.cmpop | ast.boolop | ast.unaryop
            ):
                yield from _expression(child)


def _of_expression(node: ast.expr) -> Iterator[Edit]:
    if isinstance(node, ast.BinOp):
        yield from _of_binary(node)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        for other in COMPARISONS.get(type(node.ops[0]), ()):
            yield _edit("comparison", node, ast.Compare(node.left, [other()], node.comparators))
    elif isinstance(node, ast.BoolOp):
        other_op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield _edit("condition", node, ast.BoolOp(other_op, node.values))
        for index in range(len(node.values)):
            rest = node.values[:index] + node.values[index + 1 :]
            yield _edit("condition", node, rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest))
    elif isinstance(node, ast.UnaryOp):
        kind = "sign" if isinstance(node.op, ast.USub) else "condition"
        yield _edit(kind, node, node.operand)
    elif isinstance(node, ast.IfExp):
        yield _edit("condition", node, node.body)
        yield _edit("condition", node, node.orelse)
    elif isinstance(node, ast.Constant):
        yield from (_edit("constant", node, ast.Constant(value)) for value in _other_constants(node.value))
    elif isinstance(node, ast.Call):
        yield from _of_call(node)


def _of_binary(node: ast.BinOp) -> Iterator[Edit]:
    if (other := ARITHMETIC.get(type(node.op))) is not None:
        yield _edit("arithmetic", node, ast.BinOp(node.left, other(), node.right))
    yield _edit("operand", node, node.left)
    if isinstance(node.op, COMMUTATIVE):
        yield _edit("operand", node, node.right)
    elif ast.dump(node.left) != ast.dump(node.right):
        yield _edit("operand", node, ast.BinOp(node.right, node.op, node.left))


def _of_call(node: ast.Call) -> Iterator[Edit]:
    name = _called(node)
    if isinstance(node.func, ast.Attribute) and name in CASTS and _text(node.func.value) not in ("tl", "torch"):
        yield _edit("cast", node, node.func.value, WIDE in map(_attribute, node.args))
    if name in FAMILIES:
        yield _edit("call", node, _with(node, func=_renamed(node.func, FAMILIES[name])))
    if name == "cdiv" and len(node.args) == 2:
        yield _edit("call", node, ast.BinOp(node.args[0], ast.FloorDiv(), node.args[1]))
    plain = not any(isinstance(a, ast.Starred) for a in node.args)
    if plain and len(node.args) >= 2 and ast.dump(node.args[0]) != ast.dump(node.args[1]) and name not in FAMILIES:
        yield _edit("call", node, _with(node, args=[node.args[1], node.args[0], *node.args[2:]]))
    if plain and len(node.args) >= 3 and ast.dump(node.args[-2]) != ast.dump(node.args[-1]):
        yield _edit("call", node, _with(node, args=[*node.args[:-2], node.args[-1], node.args[-2]]))
    if any(k.arg == "mask" and _text(k.value) != "None" for k in node.keywords):
        yield _edit("mask", node, _with(node, keywords=[k for k in node.keywords if k.arg not in ("mask", "other")]))


def _with(
    node: ast.Call,
    func: ast.expr | None = None,
    args: list[ast.expr] | None = None,
    keywords: list[ast.keyword] | None = None,
) -> ast.Call:
    return ast.Call(func or node.func, args or node.args, node.keywords if keywords is None else keywords)


def _renamed(func: ast.expr, name: str) -> ast.expr:
    return (
        ast.Attribute(func.value, name, ast.Load()) if isinstance(func, ast.Attribute) else ast.Name(name, ast.Load())
    )


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _other_constants(value: object) -> Sequence[float]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return {0: [1], 1: [0, 2]}.get(value, [value + 1, value - 1])
    if isinstance(value, float):
        return [1.0] if value == 0 else [0.0, 2.0] if value == 1 else [2 * value]
    return []


def _is_hint(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _called(node) in HINTS


def _is_type(node: ast.AST) -> bool:
    """Whether an expression is a type: `torch.Tensor | None`, `int | float`, `Callable[...]`."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        sides = {_text(node.left), _text(node.right)}
        return bool(sides & {"None", "int", "float", "str", "bool", "torch.Tensor"})
    return isinstance(node, ast.Subscript) and _text(node.value) in ("Callable", "tuple", "dict", "list")


def _edit(kind: str, before: ast.expr, after: ast.expr, huge: bool = False) -> Edit:
    return Edit(before, f"{kind}: {_difference(_text(before), _text(after))}", after, huge)


def _difference(before: str, after: str) -> str:
    """Both texts, truncated around their first difference if they are long."""
    same = next(
        (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after))
    )
    start = max(0, same - SHOWN // 2) if max(len(before), len(after)) > SHOWN else 0
    return " → ".join(("…" if start else "") + _cut(text[start:]) for text in (before, after))


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def _short(node: ast.AST) -> str:
    return _cut(_text(node))


def _text(node: ast.AST) -> str:
    return " ".join(ast.unparse(ast.fix_missing_locations(copy.copy(node))).split())


def _attribute(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else ""
