"""Triton's interpreter without what it does over and over, which is most of the time of the tests that use it.

Of a small operation NumPy's part takes a microsecond, and the rest around it a hundred: looking through all members of
triton.language at every launch and at every call of a device function, making types that were made before, converting
what is of the right dtype, and computing every sum of int32 once more in int64 for an assertion that is then dropped.
What is replaced here finds the same in a table or by a comparison, and leaves whatever is not the common case to the
original. Where a version of Triton has no such functions nothing is changed.
`tests/test_lean_interpreter.py` holds all of it against the originals.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

#: What is looked through: triton.language, its tensors and so on.
NAMESPACES = (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base)

#: The parts that may be missing in another version of Triton.
LANGUAGE = (
    *("_patch_builtin", "_patch_attr", "_patch_lang", "_patch_lang_core", "_patch_lang_tensor"),
    *("_LangPatchScope", "interpreter_builder"),
)
SEMANTIC = ("cast", "binary_op_type_checking_impl", "binary_op_sanitize_overflow_impl", "broadcast_impl_value")

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")  # int1 is another matter
LIMITS = {name: (int(np.iinfo(name).min), int(np.iinfo(name).max)) for name in INTEGERS}
#: NumPy's dtype of those that it converts as a GPU does.
NUMBERS = {name: np.dtype(name) for name in INTEGERS} | {"fp16": np.dtype("float16"), "fp32": np.dtype("float32")}


def make_lean() -> None:
    """Changes the interpreter. To be called once, before anything runs in it."""
    if all(hasattr(interpreter, name) for name in LANGUAGE):
        interpreter._patch_builtin = patching(interpreter._patch_builtin)
        once_a_launch()
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = keeping(interpreter._get_np_dtype)
    if hasattr(core, "_unwrap_if_constexpr"):
        core._unwrap_if_constexpr = unwrapping(core._unwrap_if_constexpr)
    core.block_type.__init__ = known_types(core.block_type.__init__)
    core.tensor.__init__ = known_shapes(core.tensor.__init__)
    semantic = getattr(interpreter, "interpreter_semantic", None)  # its own: the compiler has another
    if all(hasattr(semantic, name) for name in SEMANTIC):
        semantic.cast = converting(semantic.cast, semantic.builder)
        semantic.broadcast_impl_value = broadcasting(semantic.broadcast_impl_value, semantic.builder)
        semantic.binary_op_type_checking_impl = checking(semantic.binary_op_type_checking_impl, semantic)
        semantic.binary_op_sanitize_overflow_impl = sanitizing(
            semantic.binary_op_sanitize_overflow_impl, semantic.builder
        )


def builtins_of(namespace: Any) -> list[str]:
    """The names that are replaced in a namespace, as long as none is."""
    return [name for name, member in inspect.getmembers(namespace) if tl.core.is_builtin(member)]


def patching(original: Callable[..., None]) -> Callable[..., None]:
    """In place of `_patch_builtin`. What stands in for a builtin is made once. It may be there already, where a kernel
    has called a device function."""
    known = {space: [(name, getattr(space, name)) for name in builtins_of(space)] for space in NAMESPACES}
    standing = {space: [(*both, standing_in(both[1])) for both in members] for space, members in known.items()}

    def patch_builtin(namespace: Any, builder: Any, scope: Any) -> None:
        if namespace not in standing or builder is not interpreter.interpreter_builder:
            original(namespace, builder, scope)
            return
        for name, member, replacement in standing[namespace]:
            found = getattr(namespace, name)
            if found is member:
                scope.set_attr(namespace, name, replacement)
            elif found is not replacement and tl.core.is_builtin(found):  # a test has put it there
                interpreter._patch_attr(namespace, name, found, builder, scope)

    return patch_builtin


def standing_in(member: Any) -> Callable[..., Any]:
    """What the interpreter has in place of a builtin, which it gives its semantics. All that `tl.core.builtin` puts
    around a function is to look for them: so the function itself is called."""
    inner = member.__wrapped__ if getattr(member, "__code__", None) is core.builtin(len).__code__ else member
    semantic = interpreter.interpreter_semantic

    def called(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return inner(*args, **kwargs)

    return called


def once_a_launch() -> None:
    """In place of `_patch_lang`: a launch calls it for its kernel, and restores at its end; a device function calls it
    for itself."""
    scope_class, builder = interpreter._LangPatchScope, interpreter.interpreter_builder
    languages: dict[Callable[..., Any], list[Any]] = {}  # the namespaces that a function sees
    replaced: set[int] = set()  # of them those that are, since the last end of a launch

    class Scope(scope_class):
        def restore(self) -> None:
            replaced.clear()
            super().restore()
            replaced.clear()  # another thread may have been at it

    def patch(fn: Callable[..., Any]) -> Any:
        if fn not in languages:
            seen = set(map(id, fn.__globals__.values()))
            languages[fn] = [language for language in (tl, tl.core) if id(language) in seen]
            assert languages[fn], "triton.language must be visible from within jit'd function"
        scope = Scope()
        for language in languages[fn]:
            if id(language) not in replaced:
                replace(language, scope)
        replaced.update(map(id, languages[fn]))
        return scope

    def replace(language: Any, scope: Any) -> None:
        for namespace in (language, language.tensor, *([language.math] if language is tl else [])):
            interpreter._patch_builtin(namespace, builder, scope)
        interpreter._patch_lang_tensor(language.tensor, scope)
        interpreter._patch_lang_core(language, scope)
        interpreter._patch_builtin(tl.core.tensor_descriptor_base, builder, scope)

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


def unwrapping(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """In place of `_unwrap_if_constexpr`, which asks a tensor first whether it is a list."""
    plain = frozenset((core.tensor, core.dtype, int, float, bool))

    def unwrap_if_constexpr(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is core.constexpr else original(value)

    return unwrap_if_constexpr


def known_types(original: Callable[..., None]) -> Callable[..., None]:
    """In place of `block_type.__init__`. Types that are equal share their attributes, which nothing changes."""
    known: dict[Any, dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        kind = type(element_ty) if type(self) is core.block_type else None  # Gluon's types have more attributes
        if kind is core.dtype:
            key: tuple[Any, ...] = (element_ty.name,)
        elif kind is core.pointer_type:
            key = (element_ty.name, element_ty.address_space, element_ty.const)
        else:
            return original(self, element_ty, shape)
        for size in shape:
            size = size.value if type(size) is core.constexpr else size
            if type(size) is not int:
                return original(self, element_ty, shape)
            key += (size,)
        if key not in known:
            original(self, element_ty, shape)  # refuses what is no shape
            known[key] = self.__dict__
        self.__dict__ = known[key]
        return None

    return init


def known_shapes(original: Callable[..., None]) -> Callable[..., None]:
    """In place of `tensor.__init__`: tensors of one shape share the tuple that says so, which nothing changes."""
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}
    scalars = frozenset((core.dtype, core.pointer_type))

    def init(self: Any, handle: Any, type: Any) -> None:
        kind = type.__class__
        sizes = tuple(type.shape.values) if kind is core.block_type else ()
        if sizes not in known or (kind is not core.block_type and kind not in scalars):
            original(self, handle, type)
            if kind is core.block_type or kind in scalars:
                known[sizes] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[sizes]

    return init


def converting(original: Callable[..., Any], builder: Any) -> Callable[..., Any]:
    """In place of `cast`: what has that dtype is what it is, and numbers that NumPy has are converted by NumPy, of
    fp16 to all but fp32 by way of it."""

    def cast(input: Any, dst_ty: Any, fp_downcast_rounding: str | None = None) -> Any:
        wanted, found = dst_ty.element_ty if type(dst_ty) is core.block_type else dst_ty, input.dtype
        if type(wanted) is core.dtype is type(found):
            if wanted.name == found.name:
                return input
            block = type(input.type) is core.block_type
            known = wanted.name in NUMBERS and found.name in NUMBERS and (block or wanted is dst_ty)
            if known and fp_downcast_rounding is None and (found.name != "fp16" or wanted.name == "fp32"):
                kind = core.block_type(wanted, input.type.shape) if block else wanted
                return core.tensor(builder.cast_impl(input.handle, kind), kind)
        return original(input, dst_ty, fp_downcast_rounding)

    return cast


def broadcasting(original: Callable[..., Any], builder: Any) -> Callable[..., Any]:
    """In place of `broadcast_impl_value`: which of two must be made larger follows from their shapes."""

    def splat(scalar: Any, like: Any) -> Any:
        kind = core.block_type(scalar.dtype, like.shape)
        return core.tensor(builder.create_splat(kind, scalar.handle), kind)

    def enlarged(block: Any, sizes: list[int]) -> Any:
        if block.type.shape.values == sizes:
            return block
        return core.tensor(builder.create_broadcast(block.handle, sizes), core.block_type(block.dtype, sizes))

    def broadcast_impl_value(lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if type(left) is not core.block_type:
            return (lhs, rhs) if type(right) is not core.block_type else (splat(lhs, right), rhs)
        if type(right) is not core.block_type:
            return lhs, splat(rhs, left)
        mine, theirs = left.shape.values, right.shape.values
        if mine == theirs:
            return lhs, rhs
        if len(mine) != len(theirs) or any(a != b and 1 not in (a, b) for a, b in zip(mine, theirs, strict=True)):
            return original(lhs, rhs)
        sizes = [b if a == 1 else a for a, b in zip(mine, theirs, strict=True)]
        return enlarged(lhs, sizes), enlarged(rhs, sizes)

    return broadcast_impl_value


def checking(original: Callable[..., Any], semantic: Any) -> Callable[..., Any]:
    """In place of `binary_op_type_checking_impl`: pointers and integers need no conversion, nor do two tensors of one
    dtype, but for a division in 16 bits, which is one in 32; and of a tensor and a number the number alone does, where
    it fits into the tensor's dtype."""
    divided = frozenset(("fp16", "bf16"))
    one_number = {kinds for n in (int, float) for kinds in ((core.tensor, n), (n, core.tensor))}
    results: dict[tuple[str, str, bool], str] = {}  # the dtype for that of a tensor and that of a number

    def constant(like: Any, value: float, div_or_mod: bool) -> Any:
        """The number as a tensor like the other operand, or None where that needs more than to be filled in."""
        dtype = like.dtype
        if type(dtype) is not core.dtype or dtype.name not in NUMBERS:
            return None
        scalar = semantic.to_tensor_type(value)
        key = dtype.name, scalar.name, div_or_mod
        if key not in results:
            results[key] = semantic.computation_type_impl(dtype, False, scalar, True, div_or_mod).name
        limits = LIMITS.get(dtype.name)
        if results[key] != dtype.name or (limits is not None and not limits[0] <= value <= limits[1]):
            return None
        if type(like.type) is not core.block_type:
            return semantic.scalar_constant(value, dtype)
        data = np.full(like.type.shape.values, value or 0, dtype=NUMBERS[dtype.name])
        return core.tensor(interpreter.TensorHandle(data, dtype), core.block_type(dtype, like.type.shape))

    def checked(
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        kinds = type(lhs), type(rhs)
        if kinds == (core.tensor, core.tensor):
            scalar = lhs.dtype
            alike = type(scalar) is core.dtype is type(rhs.dtype) and scalar.name == rhs.dtype.name
            moved = allow_lhs_ptr and type(scalar) is core.pointer_type and rhs.dtype.name in INTEGERS
            if moved or (alike and not (div_or_mod and scalar.name in divided)):
                return semantic.broadcast_impl_value(lhs, rhs)
        elif arithmetic_check and kinds in one_number:
            number_first = kinds[1] is core.tensor
            tensor, number = (rhs, lhs) if number_first else (lhs, rhs)
            if (made := constant(tensor, number, div_or_mod)) is not None:
                return (made, tensor) if number_first else (tensor, made)
        return original(lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    return checked


def sanitizing(original: Callable[..., Any], builder: Any) -> Callable[..., Any]:
    """In place of `binary_op_sanitize_overflow_impl`, which computes a sum, a difference or a product of integers once
    more in int64, for an assertion that is dropped where `debug` is not set."""

    def sanitize(lhs: Any, rhs: Any, binary_op: Callable[..., Any]) -> Any:
        return original(lhs, rhs, binary_op) if builder.options.debug else None

    return sanitize
