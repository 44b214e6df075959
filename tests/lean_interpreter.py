"""Triton's interpreter without what it does over and over, which is a good part of the time of the tests that use it.

At every launch, and at every call of a device function inside it, it looks through all members of triton.language and
replaces the builtins among them; for every value it makes a table of dtypes. Which members these are and what the table
holds is always the same, and what a launch has replaced stays replaced until it ends. So the names and the table are
kept, and a namespace is replaced once a launch. Where a version of Triton has no such functions nothing is changed.
`tests/test_lean_interpreter.py` holds all of it against the originals.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

#: What is looked through: triton.language, its tensors and so on.
NAMESPACES = (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base)


def make_lean() -> None:
    """Changes the interpreter. To be called once, before anything runs in it."""
    if all(hasattr(interpreter, name) for name in ("_patch_builtin", "_patch_attr", "_patch_lang", "_LangPatchScope")):
        interpreter._patch_builtin = patching(interpreter._patch_builtin)
        once_a_launch()
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = keeping(interpreter._get_np_dtype)


def builtins_of(namespace: Any) -> list[str]:
    """The names that are replaced in a namespace, as long as none is."""
    return [name for name, member in inspect.getmembers(namespace) if tl.core.is_builtin(member)]


def patching(original: Callable[..., None]) -> Callable[..., None]:
    """In place of `_patch_builtin`."""
    known = {namespace: builtins_of(namespace) for namespace in NAMESPACES}

    def patch_builtin(namespace: Any, builder: Any, scope: Any) -> None:
        if namespace not in known:
            original(namespace, builder, scope)
            return
        for name in known[namespace]:
            member = getattr(namespace, name)
            if tl.core.is_builtin(member):  # else it is replaced already: a device function was called by a kernel
                interpreter._patch_attr(namespace, name, member, builder, scope)

    return patch_builtin


def once_a_launch() -> None:
    """In place of `_patch_lang`: a launch calls it for its kernel, and restores at its end; a device function calls it
    for itself."""
    patch_lang, scope_class = interpreter._patch_lang, interpreter._LangPatchScope
    languages: dict[Callable[..., Any], frozenset[int]] = {}  # the namespaces that a function sees
    replaced: set[int] = set()  # of them those that are, since the last end of a launch

    class Scope(scope_class):
        def restore(self) -> None:
            replaced.clear()
            super().restore()
            replaced.clear()  # another thread may have been at it

    def patch(fn: Callable[..., Any]) -> Any:
        if fn not in languages:
            seen = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
            languages[fn] = frozenset(map(id, seen))
        seen_here = languages[fn]
        if seen_here and seen_here <= replaced:
            return Scope()
        scope = patch_lang(fn)
        replaced.update(seen_here)
        return scope

    interpreter._LangPatchScope = Scope
    interpreter._patch_lang = patch


def keeping(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """In place of `_get_np_dtype`. Scalars are told apart by their names."""
    known: dict[str, Any] = {}

    def get_np_dtype(dtype: Any) -> Any:
        scalar = dtype.element_ty if type(dtype) is tl.block_type else dtype
        if type(scalar) is not tl.dtype:
            return original(dtype)
        if scalar.name not in known:
            known[scalar.name] = original(scalar)
        return known[scalar.name]

    return get_np_dtype
