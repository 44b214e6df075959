"""CUDA C++ in the build: what launchers compile and launch is recorded, and nothing runs."""

from __future__ import annotations

import importlib
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from harness import registry
from harness.compiling import ahead, launches, nvrtc, sass
from harness.spec import Case, Cost, KernelSpec

needs_nvrtc = pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.MISSING)

DRIVER = """\
def no_compiler():
    return "the true one"
def kernels(device, source, names, defines, shared):
    raise AssertionError("compiled for a GPU that is not there")
def tensor_map(*arguments):
    raise AssertionError("made a tensor map")
def launch(handle, grid, threads, shared, arguments):
    raise AssertionError("launched")
"""
LAUNCHER = """\
import torch
from . import cuda_driver
from .cuda_driver import launch
def op(x):
    if cuda_driver.no_compiler():
        return x
    grow, shrink = cuda_driver.kernels(0, "two.cu", ("toy_grow", "toy_shrink"), ("FACTOR=3",), 4096)
    launch(grow, 1, 128, 4096, [cuda_driver.tensor_map(x)])
    launch(shrink, 1, 64, 0, [])
    return x
def reference(x):
    return x
"""
SOURCE = """\
#include "factor.cuh"
extern "C" __global__ void toy_grow(float* x) { x[threadIdx.x] *= FACTOR; }
extern "C" __global__ void toy_shrink(float* x) {
    float y[2048];
    for (int i = 0; i < 2048; i++) y[(i * (int)x[3]) & 2047] = x[i];
    x[0] = y[(int)x[1] & 2047] + y[(int)x[2] & 2047];
}
"""
#: A consumer of a ring in a cluster: it reads a row of a slot and gives the slot back to all CTAs.
RELEASE = """\
#include "cluster.cuh"
extern "C" __global__ void toy_release(u32* out, int slots) {
    extern __shared__ u32 rows[];
    const u32 bars = (u32)__cvta_generic_to_shared(rows + 1024);
    u32 row[4];
#pragma unroll 1
    for (int slot = 0; slot < slots; slot++) {
        bar_wait(bars + 16 * slot, 0);
        asm volatile(READ : "=r"(row[0]), "=r"(row[1]), "=r"(row[2]), "=r"(row[3])
                     : "r"((u32)__cvta_generic_to_shared(rows + 4 * threadIdx.x)) : "memory");
        FENCE();
        arrive_at_all(bars + 16 * slot + 8);
        for (int i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = row[i];
    }
}
"""
READS = {
    "LDSM": "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];",
    "LDS": "ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];",
    "LD": "{ .reg .u64 at; cvt.u64.u32 at, %4; ld.v4.u32 {%0, %1, %2, %3}, [at]; }",
}


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A kernel folder with CUDA C++, imported."""
    folder = tmp_path / "toy_with_cuda"
    folder.mkdir()
    for name, text in {
        "__init__.py": "",
        "cuda_driver.py": DRIVER,
        "launcher.py": LAUNCHER,
        "two.cu": SOURCE,
        "factor.cuh": "#ifndef FACTOR\n#define FACTOR 2\n#endif\n",
    }.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("toy_with_cuda.launcher")
    for name in [name for name in sys.modules if name.startswith("toy_with_cuda")]:
        del sys.modules[name]


def test_only_a_package_with_a_driver_has_one(toy):
    assert nvrtc.driver_of("toy_with_cuda").__name__ == "toy_with_cuda.cuda_driver"
    assert nvrtc.driver_of("kernels.gelu") is None
    assert nvrtc.driver_of(registry.package("attention")) is not None


@needs_nvrtc
def test_launches_are_compiled_and_noted(toy):
    driver, seen = nvrtc.driver_of("toy_with_cuda"), []
    before = dict(vars(driver)), toy.launch
    with nvrtc.recording("toy_with_cuda", (9, 0), seen.append):
        toy.op(torch.ones(4))
    assert [(launch.name, launch.threads, launch.shared, launch.defines) for launch in seen] == [
        ("toy_grow", 128, 4096, ("FACTOR=3",)),
        ("toy_shrink", 64, 0, ("FACTOR=3",)),
    ]
    assert (dict(vars(driver)), toy.launch) == before
    grow, shrink = (sass.inspect(launch.cubin, launch.name) for launch in seen)
    assert grow.spills == 0 and shrink.spills > 0  # an array that is indexed by data lies in local memory
    assert sass.inspect(seen[0].cubin, "toy_shrink") == shrink


@needs_nvrtc
def test_a_driver_may_do_without_tensor_maps(toy, monkeypatch):
    driver, seen = nvrtc.driver_of("toy_with_cuda"), []
    monkeypatch.delattr(driver, "tensor_map")
    with nvrtc.recording("toy_with_cuda", (9, 0), seen.append):
        (grow,) = driver.kernels(0, "two.cu", ("toy_grow",), ("FACTOR=3",), 0)
        driver.launch(grow, 1, 128, 0, [])
    assert [launch.name for launch in seen] == ["toy_grow"]
    assert not hasattr(driver, "tensor_map")


def test_without_nvrtc_launchers_are_told(toy, monkeypatch):
    monkeypatch.setattr(nvrtc, "library", lambda: None)
    seen = []
    with nvrtc.recording("toy_with_cuda", (9, 0), seen.append):
        toy.op(torch.ones(4))
    assert seen == []
    with pytest.raises(RuntimeError, match="pip install nvidia-cuda-nvrtc"):
        nvrtc.compiled.__wrapped__(SimpleNamespace(), "sm_90a", ())


@needs_nvrtc
def test_what_nvrtc_refuses_says_why(tmp_path):
    (tmp_path / "bad.cu").write_text("__global__ void f() { undeclared(); }")
    with pytest.raises(RuntimeError, match=r"NVRTC does not compile bad.cu: (?s:.*)undeclared"):
        nvrtc.compiled(tmp_path / "bad.cu", "sm_90a", ())


def spec_of(toy, op) -> KernelSpec:
    return KernelSpec(
        name="toy",
        implementations={"cuda": op},
        reference=toy.reference,
        make_inputs=lambda case, device, generator: {"x": torch.ones(4)},
        cost=lambda case, mode: Cost(1, 1),
        cases=(Case("a", {}, torch.float32, bench=True),),
        grads=(),
        unit="elements",
        items=lambda case: 1,
        fuzz={},
    )


@pytest.mark.parametrize("reason", [nvrtc.MISSING, "another"])
def test_what_only_cuda_computes_is_skipped_without_nvrtc(toy, reason, monkeypatch):
    """And nothing else is."""

    def refused(x):
        raise RuntimeError(f"toy cannot run here: {reason}")

    monkeypatch.setattr(nvrtc, "library", lambda: None)
    spec, outcome = spec_of(toy, refused), ahead.Outcome("toy", "sm_90")
    # Instead of what refuses to work where Triton's interpreter is on.
    monkeypatch.setattr(launches, "record", lambda capability: nullcontext([]))
    ahead._trace(spec, "cuda", spec.cases[0], "fwd", (9, 0), {}, outcome)
    said, other = outcome.skipped[1:], outcome.failures
    if reason != nvrtc.MISSING:
        said, other = other, said
    assert len(said) == 1 and reason in said[0] and "toy.fwd.a.cuda" in said[0]
    assert other == []


@needs_nvrtc
def test_rows_of_the_build(toy):
    spec = spec_of(toy, toy.op)
    rows = [
        ahead.describe(spec, nvrtc.Launch(name, "two.cu", ("FACTOR=3",), 128, 4096, cubin), (9, 0))
        for name in ("toy_grow", "toy_shrink")
        for cubin in [nvrtc.compiled(registry.ROOT.joinpath(toy.__file__).with_name("two.cu"), "sm_90a", ("FACTOR=3",))]
    ]
    assert [(row["jit"], row["constexprs"], row["num_warps"], row["spill_bytes"]) for row in rows] == [
        ("toy_grow", {"FACTOR": 3}, 4, 0),
        ("toy_shrink", {"FACTOR": 3}, 4, rows[1]["spill_bytes"]),
    ]
    rows[1]["uses"] = [["a", "fwd"]]
    assert rows[1]["spill_bytes"] > 0 and " spills " in ahead.faults(rows[1], (9, 0))[0]


@needs_nvrtc
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("read", READS)
def test_a_slot_given_back_before_it_is_read_fails(toy, tmp_path, read, cluster):
    """Such as without the fence; with a barrier of the warp in its place it is issued just as early. In the own CTA it
    is a fault of ldmatrix alone: what others read may be what threads write next."""
    for part in (registry.ROOT / "parts" / "sm90").glob("*.cuh"):
        (tmp_path / part.name).write_bytes(part.read_bytes())
    source, early, faults = tmp_path / "release.cu", {}, {}
    source.write_text(RELEASE)
    for fence in ("fence_reads", "__syncwarp"):
        defines = f'READ="{READS[read]}"', f"FENCE={fence}", f"CLUSTER={cluster}"
        launch = nvrtc.Launch("toy_release", source.name, (), 32, 4352, nvrtc.compiled(source, "sm_90a", defines))
        row = ahead.describe(spec_of(toy, toy.op), launch, (9, 0)) | {"uses": [["a", "fwd"]]}
        early[fence] = row["early_arrivals"], row["early_own_reads"]
        faults[fence] = ahead.faults(row, (9, 0))
    assert early["fence_reads"] == (0, {}) and faults["fence_reads"] == []
    if cluster == 2:
        assert early["__syncwarp"] == (1, {})
        (fault,) = faults["__syncwarp"]
        assert fault.startswith("sm_90 toy_release (a fwd): arrivals at another CTA's mbarrier")
    else:
        assert early["__syncwarp"] == (0, {read if read == "LDSM" else f"{read}.128": 1})
        said = "sm_90 toy_release (a fwd): arrivals at an mbarrier that do not wait for ldmatrix"
        assert [f.partition(", whose")[0] for f in faults["__syncwarp"]] == [said] * (read == "LDSM")
