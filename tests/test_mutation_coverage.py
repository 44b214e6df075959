"""Marks in CUDA C++, and near cases by execution."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from harness import registry
from harness.compiling import nvrtc
from harness.mutation import coverage, cuda_blocks, mutants, near
from harness.mutation.mutants import is_cuda

CUDA = [name for name in registry.names() if registry.package(name).startswith("kernels.") and coverage.places_of(name)]

SOURCE = """\
constexpr int SIZE = 4;
struct Pair {
    int a, b;
    DEVICE int sum() const { return a + b; }
};
template <int N>
DEVICE constexpr int twice() {
    int n = N;
    return 2 * n;
}
DEVICE void body(int& x, bool on) {
    Pair p = {1, 2};
#pragma unroll
    for (int i = 0; i < SIZE; i++) {
        x += i;  // a comment; with { a brace
    }
    if (on) x = p.sum();
    else
        x = 7;
    do {
        x--;
    } while (x > 3);
    do x++;
    while (x < 1);
    auto add = [&](int t) {
        x += t;
        x += 2 * t;
    };
    call(x, [&] { x = 1; }, 3);
#if SIZE == 4
    if (x == 2) {
#else
    if (x == 3) {
#endif
        asm volatile("{ mov.u32 %0, 1; }" : "=r"(x));
        x = 5;
    }
    switch (x) {
        case 1: x = 2; break;
        default: x = 3;
    }
}
"""

MARKED = """\
constexpr int SIZE = 4;
struct Pair {
    int a, b;
    DEVICE int sum() const { COVERED(0); return a + b; }
};
template <int N>
DEVICE constexpr int twice() {
    int n = N;
    return 2 * n;
}
DEVICE void body(int& x, bool on) { COVERED(1);
    Pair p = {1, 2}; COVERED(2);
#pragma unroll
    for (int i = 0; i < SIZE; i++) { COVERED(3);
        x += i;  // a comment; with { a brace
    } COVERED(4);
    if ((on) && COVERED(5)) x = p.sum();
    else
        x = 7; COVERED(6);
    do { COVERED(7);
        x--;
    } while (x > 3); COVERED(8);
    do x++;
    while (x < 1); COVERED(9);
    auto add = [&](int t) { COVERED(10);
        x += t; COVERED(11);
        x += 2 * t;
    }; COVERED(12);
    call(x, [&] { COVERED(13); x = 1; }, 3); COVERED(14);
#if SIZE == 4
    if (x == 2) { COVERED(15);
#else
    if (x == 3) { COVERED(16);
#endif
        asm volatile("{ mov.u32 %0, 1; }" : "=r"(x)); COVERED(17);
        x = 5;
    } COVERED(18);
    switch (x) {
        case 1: x = 2; COVERED(19); break;
        default: x = 3;
    }
}
"""


def test_marks_are_between_the_statements_of_functions():
    assert cuda_blocks.marked(SOURCE, cuda_blocks.marks(SOURCE), 0) == MARKED


@pytest.mark.parametrize(
    ("text", "mark"),
    [
        ("SIZE = 4", None),
        ("a + b", 0),
        ("2 * n", None),
        ("{1, 2}", 1),
        ("i < SIZE", 2),
        ("x += i", 3),
        ("on) x", 4),
        ("p.sum()", 5),
        ("x = 7", 4),
        ("x--", 7),
        ("x > 3", 6),
        ("2 * t", 11),
        ("x = 1;", 13),
        ("x = 5", 17),
        ("x = 2;", 18),
    ],
)
def test_the_mark_that_stands_for_a_position(text, mark):
    places = cuda_blocks.marks(SOURCE)
    assert cuda_blocks.mark_of(places, SOURCE.index(text)) == mark


def test_a_mutant_is_near_the_cases_that_execute_its_mark(tmp_path, monkeypatch):
    name = CUDA[0]
    places, every = coverage.places_of(name), mutants.of_kernel(name)
    found = coverage.near(places, every, {})
    in_cuda = [mutant for mutant in every if is_cuda(mutant.file)]
    assert 0 < len(found) < len(in_cuda) and all(launchers == [] for launchers in found.values())
    mutant = next(mutant for mutant in reversed(in_cuda) if mutant.key in found)
    file = list(places).index(mutant.file)
    number = sum(len(own) for own in list(places.values())[:file])
    number += cuda_blocks.mark_of(places[mutant.file], mutant.start)
    cases = [("auto", "small"), ("cuda", "small"), ("cuda", "middle"), ("cuda", "large"), ("cuda", "huge")]
    assert coverage.near(places, every, {number: cases})[mutant.key] == [
        ["cuda", "huge"],
        ["auto", "small"],
        ["cuda", "middle"],
    ]
    near.store(name, {mutant.key: []}, every, tmp_path)
    assert near.load(name, tmp_path) == {mutant.key: []}


def test_what_processes_find_is_added_up_and_what_fails_is_missing(monkeypatch):
    one, other = CUDA[:2]
    said: list[str] = []

    def process(self, kernel, share, shares, gpu, out):
        if kernel == other and share == 0:
            return "exit code 1"
        for name, case in coverage.launchers(registry.load(kernel))[share::shares]:
            line = {"implementation": name, "case": case, "mode": "fwd", "status": "pass", "marks": [3, 100 + share]}
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")
        return ""

    monkeypatch.setattr(coverage.Measurement, "_process", process)
    measurement = coverage.Measurement([one, other], time.monotonic() + 60, said.append)
    measurement.run(["0", "1"], 3)
    order = coverage.launchers(registry.load(one))
    shares = -(-len(order) // coverage.SHARE)
    assert measurement.by_mark(one) == {3: order, **{100 + share: order[share::shares] for share in range(shares)}}
    assert measurement.missing[one] == 0 and measurement.missing[other] == 1
    assert any("exit code 1" in text for text in said)


def test_marks_are_read_from_every_loaded_module(monkeypatch):
    """The driver is stood in for: two modules of three marks, and one without."""
    memory = {1: bytearray(b"\0\1\0"), 2: bytearray(b"\0\0\1"), 3: None}
    loaded: list[int] = []

    def call(name, *arguments):
        if name == "cuModuleLoadData":
            loaded.append(len(loaded) + 1)
            arguments[0]._obj.value = loaded[-1]
        elif name == "cuModuleGetGlobal_v2":
            address, length, module, array = arguments
            if memory[module.value] is None:
                raise RuntimeError("not found")
            assert array == cuda_blocks.ARRAY.encode()
            address._obj.value, length._obj.value = module.value, 3
        elif name == "cuMemcpyDtoH_v2":
            to, address, length = arguments
            to.raw = bytes(memory[address.value])
        elif name == "cuMemsetD8_v2":
            memory[arguments[0].value][:] = bytes(3)

    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    driver = SimpleNamespace(_call=call)
    read = coverage.reader(driver, 3)
    for _ in memory:
        driver._call("cuModuleLoadData", ctypes.byref(ctypes.c_void_p()), b"")
    assert read() == [1, 2] and read() == []


@pytest.mark.gpu(min_capability=(9, 0))
def test_a_process_measures_its_share(tmp_path):
    shares = len(coverage.launchers(registry.load("heads_mlp")))
    words = ["-m", "harness.mutation.coverage", "heads_mlp", "0", str(shares), str(tmp_path / "out.jsonl")]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment, cwd=registry.ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {line["status"] for line in lines} <= {"pass", "skip"} and any(line["marks"] for line in lines)


def test_nothing_is_begun_after_the_deadline():
    measurement = coverage.Measurement(CUDA[:1], time.monotonic() - 1, print)
    measurement.run(["0"], 1)
    assert measurement.missing[CUDA[0]] == -(-len(coverage.launchers(registry.load(CUDA[0]))) // coverage.SHARE)


COMPILE = """
import shutil, sys
from pathlib import Path
from harness import registry
from harness.compiling import nvrtc
from harness.mutation import coverage, machine_code

for name in sys.argv[2:]:
    found = machine_code.variants(registry.load(name))
    copy = Path(sys.argv[1], name)
    shutil.copytree(registry.folder(name), copy)
    coverage.write_marks(copy, coverage.places_of(name))
    for file, defines in found.items():
        code = nvrtc.compiled.__wrapped__(copy / file, "sm_90a", next(iter(defines)))
        print(name, file, coverage.cuda_blocks.ARRAY.encode() in code)
"""


@pytest.mark.slow
@pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.MISSING)
def test_sources_with_marks_compile(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = [sys.executable, "-c", COMPILE, str(tmp_path), *CUDA]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=registry.ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert {line.split()[0] for line in lines} == {*CUDA} and all(line.endswith("True") for line in lines)
