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


def printed(code: str, lean: str = "") -> str:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "LEAN": lean}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not hasattr(lean_interpreter.interpreter, "_patch_builtin"), reason="another version of Triton")
def test_the_same_members_are_replaced() -> None:
    assert int(printed(REPLACED)) > 100


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
