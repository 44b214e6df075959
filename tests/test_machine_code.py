"""Mutants of CUDA C++ of which something is known without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from unittest import mock

import pytest

from harness import registry
from harness.compiling import launches, nvrtc
from harness.mutation import machine_code, mutants, near, results
from harness.mutation.machine_code import Judged

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


ONE, TWO = ("cuda", "one"), ("auto", "two")


@needs_nvrtc
def test_what_the_compiler_says_of_a_mutant(found):
    """The condition of WIDE is one thing where WIDE is 1, and another where it is 0."""
    wide, both = ({"sm90/one.cu": {("WIDE=1",): [ONE]}}, {"sm90/one.cu": {("WIDE=1",): [ONE], ("WIDE=0",): [TWO]}})
    other = found["twice.cuh", "arithmetic: * → +"]
    same = machine_code.judge(other, wide).answer
    assert same is not None and same["status"] == results.SAME and "all 1 variants" in same["reason"]
    assert machine_code.judge(other, both) == Judged(None, (TWO,))
    assert machine_code.judge(found["one.cu", "comparison: >= → >"], both).answer is None
    broken = mutants.Mutant(**{**vars(found["one.cu", "comparison: >= → >"]), "text": "is"})
    invalid = machine_code.judge(broken, both).answer
    assert invalid is not None and invalid["status"] == results.INVALID and "error" in invalid["reason"]


@needs_nvrtc
def test_nothing_is_said_of_what_no_case_compiles(found):
    assert machine_code.judge(found["one.cu", "comparison: >= → >"], {}) == Judged(None)


@needs_nvrtc
def test_who_launches_what_a_mutant_changes(found):
    """Two variants are looked for, of those first that a checked case launches, and not for long."""
    mutant, compiled = found["one.cu", "comparison: >= → >"], []
    every = {(f"WIDE={n}",): [("cuda", "small"), ("cuda", "medium"), ("cuda", f"large {n}")] for n in (0, 1)}
    bench = {(f"WIDE={n}",): [] for n in range(2, 9)}
    with mock.patch.object(nvrtc, "compiled", wraps=nvrtc.compiled) as seen:
        seen.__wrapped__ = lambda source, architecture, defines: compiled.append(defines) or b"other"
        near = machine_code.judge(mutant, {"sm90/one.cu": {**bench, **every}}).near
    assert set(near[:2]) == {("cuda", "large 0"), ("cuda", "large 1")} and near[2:] == (("cuda", "small"),)
    assert set(compiled) == set(every)


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
        "print(json.dumps({source: sorted(defines) for source, defines in found.items()}));"
        "print(json.dumps([launcher for own in found.values() for known in own.values() for launcher in known]))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=registry.ROOT, env=environment, capture_output=True, text=True, check=True
    )
    variants, launchers = map(json.loads, done.stdout.splitlines())
    assert set(variants) == {"sm90/forward.cu", "sm90/heads_dhidden.cu", "sm90/heads_products.cu"}
    assert len(variants["sm90/forward.cu"]) > 1
    checked = {case.name for case in registry.load("heads_mlp").cases if not case.bench}
    assert launchers and all(name in ("auto", "cuda") and case in checked for name, case in launchers)


def test_what_is_near_is_kept_for_the_mutants_that_there_are(tmp_path, found):
    mutant = found["one.cu", "comparison: >= → >"]
    assert near.load("one", tmp_path) == {}
    near.store("one", {mutant.key: [["cuda", "case"]], "gone": []}, [mutant], tmp_path)
    assert near.load("one", tmp_path) == {mutant.key: [["cuda", "case"]]}
    near.store("one", {}, [mutant], tmp_path)
    assert near.load("one", tmp_path) == {}
