"""tests/lean_interpreter.py: what it keeps is what Triton's interpreter finds anew each time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import triton.language as tl

from harness.registry import ROOT

from . import lean_interpreter

#: In a process of its own, so that nothing is replaced yet. Prints what is replaced, by the original and by ours.
REPLACED = """
import triton.language as tl
from triton.runtime import interpreter
from tests import lean_interpreter

def replaced(patch, times):
    scope, found = interpreter._LangPatchScope(), []
    for _ in range(times):
        for namespace in (*lean_interpreter.NAMESPACES, tl.extra):
            patch(namespace, interpreter.interpreter_builder, scope)
    found = [(getattr(o, "__name__", ""), name, member) for o, name, member in scope._changes]
    scope.restore()
    return found

original = interpreter._patch_builtin
expected = replaced(original, 2)
ours = replaced(lean_interpreter.patching(original), 2)
assert ours == expected and len(expected) > 100, (len(ours), len(expected))
assert replaced(original, 1) == expected  # what is replaced is not replaced again
print(len(expected))
"""

KERNEL = """
import os, torch, triton
import triton.language as tl
from triton.runtime import interpreter
from tests import lean_interpreter

if os.environ["LEAN"] == "yes":
    lean_interpreter.make_lean()

before = {n: dict(vars(s)) for n, s in (("tl", tl), ("tensor", tl.tensor), ("math", tl.math))}

@triton.jit
def _squared(x):
    return tl.sum(x.to(tl.float16) * x, 0)

@triton.jit
def _norm(x):
    for _ in tl.static_range(2):
        x = x / tl.sqrt(_squared(x) + 1)
    return tl.where(x < 0, tl.sigmoid(x), tl.cdiv(x.to(tl.int32), 3))

@triton.jit
def _kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    tl.store(out_ptr + at, tl.exp(_norm(x)) + _squared(x) + tl.maximum(x, 0.5).to(tl.int8), mask=at < n)

@triton.jit
def _fails(x_ptr):
    tl.static_assert(_squared(tl.load(x_ptr + tl.arange(0, 4))).to(tl.int1) == 5)

x, out = torch.randn(100, generator=torch.Generator().manual_seed(0)), torch.empty(100)
for _ in range(3):
    _kernel[(7,)](x, out, 100, BLOCK=16)
    print(out.tolist())
    try:
        _fails[(1,)](x)
    except Exception as error:
        print(type(error).__name__)
    # What a launch has replaced is there again, but for what device functions replace in triton.language.core.
    after = {n: dict(vars(s)) for n, s in (("tl", tl), ("math", tl.math))}
    print(sorted(f"{n}.{k}" for n, members in after.items() for k, v in members.items() if before[n].get(k) is not v))
"""


#: In a process of its own: what every operation makes of every two operands, before and after.
OPERATIONS = """
import itertools, warnings
import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from tests import lean_interpreter

warnings.simplefilter("ignore")
semantic, core = interpreter.interpreter_semantic, tl.core
NAMES = ("add", "mul", "truediv", "floordiv", "less_than", "and_", "fdiv", "maximum")
CHECKED = ("add", "sub", "mul")  # with `debug` of an overflow too
MORE = {"add": (True,), "sub": (True,), "mul": (True,), "fdiv": (False,), "maximum": (tl.PropagateNan.NONE,)}
DTYPES = (tl.int1, tl.int8, tl.int32, tl.uint32, tl.int64, tl.uint64, tl.float16, tl.float32, tl.float64, tl.bfloat16,
          tl.float8e5, tl.pointer_type(tl.float32))
NUMBERS = (True, 0, -1, 3, 1 << 31, -(1 << 33), 1 << 63, 1 << 64, 0.0, -0.0, -2.5, 1e-41, 1e300, float("inf"))

def tensor(dtype, *shape):
    wanted = interpreter._get_np_dtype(dtype)
    values = np.random.default_rng(len(shape)).integers(0, 1 << 62, shape or (1,)).astype(np.uint64)
    data = (values >> np.uint64(0 if wanted.kind in "iu" else 32)).astype(wanted)
    return core.tensor(interpreter.TensorHandle(data, dtype), core.block_type(dtype, list(shape)) if shape else dtype)

def described(value):
    if isinstance(value, tuple):
        return tuple(map(described, value))
    if not isinstance(value, core.tensor):
        return repr(value)
    data, shape = value.handle.data, [type(size) is core.constexpr and size.value for size in value.shape]
    assert type(value.numel) is core.constexpr
    return str(value.type), str(value.dtype), str(value.handle.dtype), shape, data.dtype.str, data.shape, data.tobytes()

def outcome(run):
    try:
        return described(run())
    except Exception as error:
        return type(error).__name__, str(error)

def small():
    return [tensor(dtype, *shape) for dtype in DTYPES for shape in ((), (4,))] + [tensor(tl.int32, 2, 4)]

def found():
    scope = interpreter._patch_lang(found)  # as in a launch: in it integers keep their sign in all types
    try:
        return all_outcomes()
    finally:
        scope.restore()

def all_outcomes():
    made = {}
    shapes = [tensor(dtype, *shape) for dtype in DTYPES[2::3] for shape in ((4, 1), (1, 4), (2, 1), (1, 1, 2))]
    pairs = [*itertools.product(small(), small()), *itertools.product(shapes, shapes)]
    pairs += [pair for number in NUMBERS for t in small() for pair in ((number, t), (t, number))]
    for debug, names in ((False, NAMES), (True, CHECKED)):
        semantic.builder.options = interpreter.InterpreterOptions(debug=debug)
        for name, (number, pair) in itertools.product(names, enumerate(pairs)):
            made[name, debug, number] = outcome(lambda: getattr(semantic, name)(*pair, *MORE.get(name, ())))
    for number, (a, b) in enumerate(itertools.product(small(), small())):
        for wanted in (b.type, b.dtype):
            made["cast", number, str(wanted)] = outcome(lambda: semantic.cast(a, wanted))
        made["rounded", number] = outcome(lambda: semantic.cast(a, b.dtype, "rtz"))
        made["broadcast", number] = outcome(lambda: semantic.broadcast_impl_value(a, b))
    for number in NUMBERS[1:4]:
        made["to", number] = outcome(lambda: core._unwrap_if_constexpr(core.constexpr(number)))
    for shape in ([4], [4, 1], [core.constexpr(8)], [], [3], [4.0], [True], [1 << 21], core.tuple([2, 2])):
        for dtype in DTYPES[2::3]:
            made["type", str(shape), str(dtype)] = outcome(lambda: str(vars(core.block_type(dtype, shape))))
    return made

before = found()
lean_interpreter.make_lean()
after = found()
assert before.keys() == after.keys()
assert not (wrong := [(key, value, after[key]) for key, value in before.items() if after[key] != value]), wrong[:9]
errors = [value[1] for value in before.values() if isinstance(value[0], str) and len(value) == 2]
print(len(before), len(errors), sum("overflow detected" in error for error in errors))
"""


def printed(code: str, lean: str = "") -> str:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "LEAN": lean}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not hasattr(lean_interpreter.interpreter, "_patch_builtin"), reason="another version of Triton")
def test_the_same_members_are_replaced() -> None:
    assert int(printed(REPLACED)) > 100


def test_operations_are_the_same() -> None:
    count, errors, overflows = map(int, printed(OPERATIONS).split())
    assert count > 10_000 and errors > 100 and overflows > 100


def test_a_dtype_is_that_of_the_original() -> None:
    asked = []

    def original(dtype):
        asked.append(dtype)
        return lean_interpreter.interpreter.np.dtype("uint64") if "pointer" in str(dtype) else str(dtype)

    found = lean_interpreter.keeping(original)
    for dtype in (tl.float32, tl.int8, tl.bfloat16, tl.float8e5):
        assert found(dtype) == found(tl.block_type(dtype, [4])) == str(dtype)
    assert asked == [tl.float32, tl.int8, tl.bfloat16, tl.float8e5]
    pointer = tl.pointer_type(tl.float32)
    for other in (pointer, tl.block_type(pointer, [4])):
        found(other)
        assert asked[-1] is other


def test_a_kernel_has_the_same_result(tmp_path) -> None:
    files = {name: tmp_path / f"{name}.py" for name in ("yes", "no")}
    results = []
    for name, path in files.items():
        path.write_text(KERNEL)  # a JIT kernel needs a file
        results.append(printed(f"import runpy; runpy.run_path({str(path)!r})", name))
    assert results[0] == results[1] and results[0].count("InterpreterError") == 3
