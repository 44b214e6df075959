"""The forward over a cluster of CTAs: on any machine when it runs, and its launch arguments; on Hopper its results."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest
import torch

from harness.commands.check import plan as checks_of
from harness.compiling import nvrtc, sass

from . import cluster, configs, cuda_driver, plans, rmsnorm
from .bench import SPEC
from .op import MAX_DIM
from .reference import rmsnorm_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)
# Widths for each number of CTAs and of vectors per thread, and one vector more or less than fills all threads.
WIDTHS = (16392, 20480, 24576, 24584, 32760, 32768, 40968, 49152, 49160, 65528, 65536)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_every_width_is_covered_once(dtype):
    for dim in range(16384 + 16 // dtype.itemsize, MAX_DIM + 1, 16 // dtype.itemsize):
        config, vectors = configs.pick_cluster_config(dim, dtype, True, False), dim * dtype.itemsize // 16
        assert config.ctas in (2, 4, 8, 16) and 4 <= config.vectors <= 6
        assert config.slice % 8 == 0 and config.slice <= config.threads * config.vectors
        assert config.slice * (config.ctas - 1) < vectors <= config.slice * config.ctas  # the last CTA is not empty
        if config.ctas * config.threads * config.vectors == vectors:
            assert config.slice == config.threads * config.vectors


def test_the_configurations_that_were_measured():
    def picked(dim: int, residual: bool = False) -> tuple[int, int, int]:
        config = configs.pick_cluster_config(dim, BF16, True, residual)
        return config.ctas, config.vectors, config.resident

    widths = (20480, 24576, 32768, 49152, 65536)
    assert [picked(dim) for dim in widths] == [(2, 5, 4), (2, 6, 4), (4, 4, 5), (4, 6, 4), (8, 4, 5)]
    assert picked(65536, residual=True) == (8, 4, 4)


def test_it_begins_where_one_cta_ends():
    assert (cluster.WIDTHS.start, cluster.WIDTHS.stop) == (configs.MAX_BLOCK + 1, MAX_DIM + 1)


def test_the_generic_checks_leave_it_to_auto():
    """The generic checks try layouts and sizes that "cuda" does not support; "auto" uses it for the supported ones."""
    implementations = {item.implementation for item in checks_of(SPEC, "cpu")}
    assert implementations == {"auto", "triton"}


def test_what_it_does_not_take(monkeypatch):
    monkeypatch.setattr(cuda_driver, "no_compiler", lambda: None)

    def refused(x, residual=None, weight=None, capability=(9, 0)) -> str | None:
        return cluster.unsupported_reason(x, residual, weight, capability)

    def rows(dim: int, stride: int | None = None, start: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
        room = torch.empty(3 * (stride or dim) + start, dtype=dtype)
        return room[start:].as_strided((3, dim), (stride or dim, 1), start)

    for dim, dtype in itertools.product((16392, 20480, 65528, 65536), DTYPES):
        x = rows(dim, dtype=dtype)
        assert refused(x) is refused(x, x, x[0]) is None
    assert refused(rows(20480, 20488, start=8)) is None
    assert refused(rows(20480).expand(3, 3, 20480)[0]) is None
    assert refused(rows(20480)[:1].expand(5, 20480)) is None  # a stride of 0
    assert refused(rows(20480, 20483)[:1]) is None  # the stride of a single row does not matter
    assert "16385 to 65536 elements, not 16384" in refused(rows(16384))
    assert "not 65544" in refused(rows(65544))
    assert "weight of x's dtype torch.bfloat16, not torch.float32" in refused(rows(20480), weight=torch.empty(20480))
    unaligned = "it requires rows on 16-byte boundaries"
    assert refused(rows(20481)) == unaligned  # the rows of y
    assert refused(rows(20481)[:1]) == unaligned
    assert refused(rows(20484)) == unaligned
    assert refused(rows(20484, dtype=FP32)) is None
    assert refused(rows(20480, 20484)) == unaligned
    assert refused(rows(20480, start=4)) == unaligned
    assert refused(rows(20480), residual=rows(20480, start=4)) == unaligned
    assert refused(rows(20480), residual=rows(20480, 20484)) == unaligned
    assert refused(rows(20480), weight=rows(20480, start=4)[0]) == unaligned
    for capability in ((8, 0), (10, 0)):
        assert refused(rows(20480), capability=capability) == "it needs a GPU of compute capability 9.0 (Hopper)"
    monkeypatch.setattr(cuda_driver, "no_compiler", lambda: "it is compiled by NVRTC through CuPy")
    assert refused(rows(20480)) == "it is compiled by NVRTC through CuPy"


@pytest.mark.parametrize(("weight", "residual", "save"), [(True, False, True), (False, True, False)])
def test_what_it_is_told(weight, residual, save, monkeypatch):
    """Without a GPU, checks which pointers are null, and that sizes and strides are in vectors."""
    compiled, launched = [], []
    monkeypatch.setattr(plans, "_device", lambda x: ((9, 0), 132))
    monkeypatch.setattr(cuda_driver, "no_compiler", lambda: None)
    monkeypatch.setattr(cuda_driver, "kernels", lambda *arguments: compiled.append(arguments) or (None,))
    monkeypatch.setattr(cuda_driver, "parameters", lambda function: ())
    monkeypatch.setattr(cuda_driver, "_packer", lambda layout, places: lambda *values: values)
    monkeypatch.setattr(cuda_driver, "_raw_stream", lambda device: 0)
    monkeypatch.setattr(cuda_driver, "_current_device", lambda: None)  # the device index of a CPU tensor is None
    monkeypatch.setattr(cuda_driver, "launch", lambda *arguments: launched.append(arguments))
    x = torch.empty(3, 40968 + 64, dtype=BF16, device="cpu")[:, 8:40976]
    r = torch.empty(3, 40968, dtype=BF16, device="cpu") if residual else None
    w = torch.empty(40968, dtype=BF16, device="cpu") if weight else None
    y, h, rstd = plans.fwd_plan(x, w, r, 0.5, 1.0, save, "auto")(x, w, r)
    ((_, source, names, defines, room),), ((_, grid, threads, shared, _, values),) = compiled, launched
    assert (source, names) == ("cluster.cu", ("rmsnorm_cluster_fwd",))
    assert {"CLUSTER=4", "THREADS=256", "VECTORS=6", "EVEN=0", "TYPE=0"} <= set(defines)
    assert {f"RESIDUAL={int(residual)}", f"WEIGHT={int(weight)}"} <= set(defines)
    assert (grid, threads, room, shared) == (12, 256, 4 * 32 + 8, 4 * 32 + 8)
    tensors = (x, r, w, y, h if residual else None, rstd)
    assert list(values[:6]) == [0 if t is None else t.data_ptr() for t in tensors]
    assert list(values[6:10]) == [5121, 1288, 41032 // 8, 5121 if residual else 0]
    assert list(values[10:]) == [pytest.approx(1 / 40968), 0.5, 1.0]


@pytest.mark.slow
@pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.MISSING)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("vectors", [4, 5, 6])
def test_nothing_spills(vectors, dtype, monkeypatch):
    """Compiled with the register limit that lets `resident` CTAs fit an SM."""
    found = []

    def kernels(device: int, source: str, names: tuple, defines: tuple, shared: int) -> tuple:
        code = nvrtc.compiled(Path(cluster.__file__).with_name(source), "sm_90a", defines)
        found.append((defines, sass.inspect(code, names[0])))
        return (None,)

    monkeypatch.setattr(cuda_driver, "kernels", kernels)
    monkeypatch.setattr(cuda_driver, "Launch", lambda *_: None)
    for less, weight, residual in ((0, True, False), (1, True, True), (1, False, True)):
        x = torch.empty(1, (8 * 256 * vectors - less) * 16 // dtype.itemsize, dtype=dtype)
        config = configs.pick_cluster_config(x.shape[1], dtype, weight, residual)
        given = x if residual else None, x[0] if weight else None
        cluster.cluster_launch(config, x, *given, False, 1e-6, 0.0)
        defines, usage = found[-1]
        assert f"VECTORS={vectors}" in defines and usage.spills == 0, (defines, usage)
        assert usage.registers * config.threads * config.resident <= 65536


@pytest.fixture
def launched(monkeypatch):
    """Records the cluster launches. Skips where the GPU does not support them."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0 (Hopper)")
    if reason := cuda_driver.no_compiler():
        pytest.skip(reason)
    launched, original = [], cuda_driver.launch
    monkeypatch.setattr(cuda_driver, "launch", lambda *a: launched.append(a) or original(*a))
    return launched


def rows_of(rows: int, dim: int, dtype: torch.dtype, padding: int = 0) -> torch.Tensor:
    """Rows of very different magnitudes."""
    sizes = torch.rand(rows, 1, device="cuda") * 3 + 0.01
    return (torch.randn(rows, dim + padding, device="cuda") * sizes).to(dtype)[:, padding // 2 :][:, :dim]


def check(x, weight=None, residual=None, offset: float = 0.0, save: bool = True) -> None:
    """Compares with fp64, computed from h as stored; h bit for bit. Repeated calls agree bit for bit."""
    plan = plans.fwd_plan(x, weight, residual, 1e-6, offset, save, "auto")
    y, h, rstd = plan(x, weight, residual)
    if residual is not None:
        assert torch.equal(h, x + residual)
    want_rstd = torch.rsqrt(h.double().square().mean(-1) + 1e-6)
    want = h.double() * want_rstd[:, None]
    if weight is not None:
        want *= (weight.float() + offset).double()
    # Half an ulp, plus the fp32 rounding errors of the sum, its root and two products.
    rtol = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 0.0}[x.dtype] + 4e-6
    torch.testing.assert_close(y.double(), want, rtol=rtol, atol=1e-6)
    if save:
        torch.testing.assert_close(rstd.double(), want_rstd, rtol=4e-6, atol=0)
    else:
        assert rstd is None
    again = plan(x, weight, residual)
    assert all(torch.equal(a, b) for a, b in zip(again, (y, h, rstd), strict=True) if a is not None)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", WIDTHS)
def test_computes_what_it_should(dim, dtype, launched):
    """Covers more rows than are resident at once, and one row; all optional inputs, and none."""
    weight = torch.randn(dim, device="cuda").to(dtype)
    check(rows_of(301, dim, dtype), weight, rows_of(301, dim, dtype), offset=1.0)
    check(rows_of(301, dim, dtype), weight, save=False)
    check(rows_of(7, dim, dtype), residual=rows_of(7, dim, dtype))
    check(rows_of(1, dim, dtype))
    assert len(launched) == 8


@pytest.mark.gpu
def test_rows_are_read_where_they_lie(launched):
    weight = torch.randn(20480, device="cuda").to(BF16)
    padded = rows_of(133, 20480, BF16, padding=32)
    check(padded, weight, rows_of(133, 20480, BF16, padding=64))
    check(rows_of(1, 20480, BF16).expand(50, 20480), weight)
    check(padded[::2], weight, padded[1::2][:1].expand(67, 20480))
    assert len(launched) == 6 and padded.stride(0) == 20512


@pytest.mark.gpu
def test_what_is_not_aligned_runs_in_triton(launched):
    for x in (rows_of(3, 20480, BF16, padding=8), rows_of(3, 20481, BF16)):
        check(x, torch.randn(x.shape[1], device="cuda").to(BF16))
    check(rows_of(3, 20480, BF16), torch.randn(20480, device="cuda"))  # a weight of another dtype
    assert not launched


@pytest.mark.gpu
def test_what_is_not_finite_stays_in_its_row(launched):
    x = rows_of(9, 49152, BF16)
    x[2, 40000], x[5, 3], x[7] = torch.inf, torch.nan, 0
    y = rmsnorm(x)
    torch.testing.assert_close(y, rmsnorm_reference(x), rtol=2e-2, atol=1e-3, equal_nan=True)
    assert launched and not y[7].any()
    assert y.isfinite().all(dim=1).tolist() == [row not in (2, 5) for row in range(9)]


@pytest.mark.gpu
def test_gradients(launched):
    """The backward takes h and rstd from either version."""
    leaves = [rows_of(17, 32768, FP32), torch.randn(32768, device="cuda"), rows_of(17, 32768, FP32)]

    def grads(op, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        x, weight, residual = (t.to(dtype).detach().requires_grad_() for t in leaves)
        y, h = op(x, weight, residual=residual)
        return torch.autograd.grad((y * y + h).sum(), (x, weight, residual))

    for mine, other in zip(grads(rmsnorm, FP32), grads(rmsnorm_reference, torch.float64), strict=True):
        assert (mine.double() - other).norm() <= 1e-5 * other.norm()
    assert launched


@pytest.mark.gpu
def test_in_a_graph_on_a_stream_and_in_a_thread(launched):
    """A new thread has no current CUDA context until some call makes one current."""
    x, weight = rows_of(40, 65536, BF16), torch.randn(65536, device="cuda").to(BF16)
    expected, results = rmsnorm(x, weight), []
    torch.cuda.synchronize()

    thread = threading.Thread(target=lambda: results.append(rmsnorm(x, weight)))
    thread.start()
    thread.join()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        results.append(rmsnorm(x, weight))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results.append(rmsnorm(x, weight))
    results[-1].fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert len(launched) == 4 and len(results) == 3
    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(launched):
    """Offsets are 64 bits wide: the last rows are out of reach of 32-bit offsets, in elements and in bytes."""
    x = torch.randn(2**31 // 65536 + 3, 65536, device="cuda", dtype=BF16)
    y = rmsnorm(x)
    for part in (slice(0, 2), slice(-3, None)):
        torch.testing.assert_close(y[part], rmsnorm_reference(x[part]))
    assert launched
