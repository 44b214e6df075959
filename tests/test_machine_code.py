"""Mutants of CUDA C++ of which something is known without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from harness import registry
from harness.compiling import launches, nvrtc
from harness.mutation import machine_code, mutants, results

needs_nvrtc = pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.MISSING)

HEADER = """\
__device__ inline float twice(float x) {
    return WIDE ? x + x : x * 2.0f;
}
"""
SOURCE = """\
#include "twice.cuh"
extern "C" __global__ void one(float *x) {
    if (threadIdx.x >= 32) return;
    x[threadIdx.x] = twice(x[threadIdx.x]);
}
"""


@pytest.fixture
def found(tmp_path, monkeypatch):
    """The mutants of a small kernel by file and text."""
    (tmp_path / "sm90").mkdir()
    (tmp_path / "sm90" / "one.cu").write_text(SOURCE)
    (tmp_path / "sm90" / "twice.cuh").write_text(HEADER)
    monkeypatch.setattr(registry, "folder", lambda name: tmp_path)
    return {(m.file.partition("/")[2], m.operator.partition(" in ")[0]): m for m in mutants.of_kernel("one")}


@needs_nvrtc
def test_what_the_compiler_says_of_a_mutant(found):
    """The condition of WIDE is one thing where WIDE is 1, and another where it is 0."""
    wide, both = {"sm90/one.cu": frozenset({("WIDE=1",)})}, {"sm90/one.cu": frozenset({("WIDE=1",), ("WIDE=0",)})}
    other = found["twice.cuh", "arithmetic: * → +"]
    same = machine_code.judge(other, wide)
    assert same is not None and same["status"] == results.SAME and "all 1 variants" in same["reason"]
    assert machine_code.judge(other, both) is None
    assert machine_code.judge(found["one.cu", "comparison: >= → >"], both) is None
    broken = mutants.Mutant(**{**vars(found["one.cu", "comparison: >= → >"]), "text": "is"})
    invalid = machine_code.judge(broken, both)
    assert invalid is not None and invalid["status"] == results.INVALID and "error" in invalid["reason"]


@needs_nvrtc
def test_nothing_is_said_of_what_no_case_compiles(found):
    assert machine_code.judge(found["one.cu", "comparison: >= → >"], {}) is None


@needs_nvrtc
def test_the_interpreter_launches_nothing_to_compile():
    with pytest.raises(launches.Interpreted):
        machine_code.variants(registry.load("heads_mlp"))


@needs_nvrtc
def test_the_variants_of_a_kernel():
    """Which sources its cases launch; in a process without the interpreter, where no GPU is needed."""
    program = (
        "import json; from harness import registry; from harness.mutation import machine_code;"
        "found = machine_code.variants(registry.load('heads_mlp'));"
        "print(json.dumps({source: sorted(defines) for source, defines in found.items()}))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=registry.ROOT, env=environment, capture_output=True, text=True, check=True
    )
    variants = json.loads(done.stdout)
    assert set(variants) == {"sm90/forward.cu", "sm90/heads_dhidden.cu", "sm90/heads_products.cu"}
    assert len(variants["sm90/forward.cu"]) > 1
