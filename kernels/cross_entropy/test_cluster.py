"""The forward that also writes the gradient, over a cluster of CTAs. On any machine: when it runs, and its launch
arguments. On Hopper: its results."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.commands.check import plan as checks_of
from harness.compiling import nvrtc, sass

from . import cluster, configs, cross_entropy, cross_entropy_and_grad, cuda_driver, layout, plans
from .bench import SPEC
from .loss import Loss
from .reference import cross_entropy_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)
# Vocabularies for each number of CTAs and of vectors per thread, and one vector more or less than fills all threads.
WIDTHS = (8200, 12288, 16384, 16392, 20480, 32000, 32760, 50304, 65528, 98304, 128256, 131072, 131080, 200000, 262144)
ALL: dict[str, Any] = dict(label_smoothing=0.1, z_loss=1e-2, return_z_loss=True, return_lse=True)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("terms", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_every_width_is_covered_once(dtype, terms):
    per_vector = 16 // dtype.itemsize
    for vectors in range(cluster.NARROWEST, cluster.WIDEST + 1):
        config = configs.pick_cluster_config(vectors * per_vector, dtype, terms)
        assert config.ctas in (2, 4, 8, 16) and 5 <= config.vectors <= 8
        assert config.slice % 8 == 0 and config.slice <= config.threads * config.vectors
        assert config.slice * (config.ctas - 1) < vectors <= config.slice * config.ctas  # the last CTA is not empty
        assert 3 <= config.resident <= 6


def test_the_configurations_of_the_benched_cases():
    def picked(vocab: int, dtype: torch.dtype = BF16, terms: bool = False) -> tuple[int, int, int]:
        config = configs.pick_cluster_config(vocab, dtype, terms)
        return config.ctas, config.vectors, config.resident

    assert [picked(vocab) for vocab in (32000, 50304, 128256, 262144)] == [(2, 8, 4), (4, 7, 5), (8, 8, 4), (16, 8, 4)]
    assert picked(32000, FP32) == (4, 8, 4) and picked(32000, FP32, terms=True) == (4, 8, 3)


def test_the_generic_checks_leave_it_to_auto():
    """The generic checks try layouts and sizes that "cuda" does not support; "auto" uses it for the supported ones."""
    implementations = {item.implementation for item in checks_of(SPEC, "cpu")}
    assert implementations == {"auto", "triton"}


def test_what_it_does_not_take(monkeypatch):
    monkeypatch.setattr(cuda_driver, "no_compiler", lambda: None)

    def refused(vocab, dtype=BF16, layout="aligned", weighted=False, softcap=False, capability=(9, 0)) -> str | None:
        return cluster.unsupported_reason(vocab, dtype, layout, weighted, softcap, capability)

    for vocab, dtype in itertools.product((16392, 32000, 131072), DTYPES):
        assert refused(vocab, dtype) is None
    assert refused(262144) is None and refused(8196, FP32) is None
    assert "16392 to 262144 columns, not 16384" in refused(16384)
    assert "not 262152" in refused(262152)
    assert "8196 to 131072 columns, not 8192" in refused(8192, FP32)
    assert "not 131076" in refused(131076, FP32)
    for unaligned in ("fringed", "any"):
        assert "16-byte boundaries" in refused(32000, layout=unaligned)
    assert "class weights" in refused(32000, weighted=True)
    assert "softcap" in refused(32000, softcap=True)
    for capability in ((8, 0), (10, 0)):
        assert refused(32000, capability=capability) == "it needs a GPU of compute capability 9.0 (Hopper)"
    monkeypatch.setattr(cuda_driver, "no_compiler", lambda: "it is compiled by NVRTC through CuPy")
    assert refused(32000) == "it is compiled by NVRTC through CuPy"


@pytest.fixture
def told(monkeypatch):
    """Records the options of the compilation and the arguments of the launch, without a GPU."""
    compiled, launched = [], []
    monkeypatch.setattr(plans, "_device", lambda tensor: ((9, 0), 132))
    monkeypatch.setattr(cuda_driver, "no_compiler", lambda: None)
    monkeypatch.setattr(cuda_driver, "kernels", lambda *arguments: compiled.append(arguments) or (None,))
    monkeypatch.setattr(cuda_driver, "_current_device", lambda: torch.empty(0, device=DEVICE).device.index)
    monkeypatch.setattr(cuda_driver, "_raw_stream", lambda device: 0)
    monkeypatch.setattr(cuda_driver, "parameters", lambda function: ())
    monkeypatch.setattr(cuda_driver, "_packer", lambda layout, places: lambda *values: values)
    monkeypatch.setattr(cuda_driver, "launch", lambda *arguments: launched.append(arguments))
    return compiled, launched


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("smoothing", "has_z"), [(0.0, False), (0.5, True)])
def test_what_it_is_told(smoothing, has_z, in_place, told):
    """Checks which pointers are null, and that sizes and strides are in vectors. Without a reduction there is no other
    launch."""
    compiled, launched = told
    logits = torch.empty(3, 40968 + 64, dtype=BF16, device=DEVICE)[:, 8:40976]
    target = torch.zeros(3, 2, dtype=torch.int32, device=DEVICE)[:, 1]
    loss = Loss(7, smoothing, "none", 0.25 if has_z else 0.0, None, FP32, has_z, has_z)
    given = logits, target, None
    plan = plans.fwd_plan(*given, loss, False, "inplace" if in_place else "new", "auto")
    out, z, lse, scratch, grad = plan(*given)
    ((_, source, names, defines, room),), ((_, grid, threads, shared, _, values),) = compiled, launched
    assert scratch is None and (grad is logits) == in_place
    assert (source, names, room, shared) == ("cluster.cu", ("cross_entropy_cluster_fwd_grad",), 0, 0)
    config = configs.pick_cluster_config(40968, BF16, has_z)
    assert {f"CLUSTER={config.ctas}", "THREADS=256", f"VECTORS={config.vectors}"} <= set(defines)
    assert {"TYPE=0", "LOSS=2", "TARGET=32", f"SMOOTH={int(has_z)}", f"Z={int(has_z)}"} <= set(defines)
    assert all(define.partition("=")[2].isdecimal() for define in defines)
    assert (grid, threads) == (3 * config.ctas, 256)
    tensors = (logits, target, None, out, z, lse, None, grad)
    assert list(values[:8]) == [0 if t is None else t.data_ptr() for t in tensors]
    stride_grad = 41032 // 8 if in_place else 5121
    assert list(values[8:16]) == [3, 40968, config.slice, 0, 41032 // 8, 2, stride_grad, 7]
    assert list(values[16:]) == [smoothing, pytest.approx(smoothing / 40968), loss.z_loss]


def test_where_the_mean_and_its_sums_lie(told):
    _, launched = told
    logits, target = torch.empty(5, 16392, dtype=BF16, device=DEVICE), torch.zeros(5, dtype=torch.int64, device=DEVICE)
    loss = Loss(-100, 0.0, "mean", 0.0, None, BF16, False, False)
    _, _, _, scratch, _ = plans.fwd_plan(logits, target, None, loss, False, "new", "cuda")(logits, target, None)
    pointers = launched[0][-1][:8]
    assert (pointers[2], pointers[6]) == (scratch.data_ptr(), scratch.data_ptr() + 4 * 16)
    assert scratch.numel() == 16 + 4 * 5


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_its_backend_runs_or_says_why_not(reduction, told):
    logits, target = torch.randn(3, 8200, device=DEVICE), torch.tensor([0, 1, 2], device=DEVICE)
    options = dict(backend="cuda", reduction=reduction)
    cross_entropy_and_grad(logits, target, **options)
    assert len(told[1]) == 1
    cross_entropy_and_grad(logits, target, **{**options, "backend": "triton"})
    assert len(told[1]) == 1
    with pytest.raises(RuntimeError, match="cannot run here: it does not support softcap"):
        cross_entropy_and_grad(logits, target, softcap=5.0, **options)
    with pytest.raises(RuntimeError, match="cannot run here: it requires grad_in_forward=True"):
        cross_entropy(logits, target, **options)


def test_the_forward_alone_is_not_for_it(told):
    compiled, _ = told
    logits, target = torch.randn(3, 8200, device=DEVICE), torch.tensor([0, 1, 2], device=DEVICE)
    cross_entropy(logits, target)
    for options in (dict(softcap=5.0), dict(weight=torch.ones(8200, device=DEVICE))):
        cross_entropy_and_grad(logits, target, **options)
    cross_entropy_and_grad(logits[:, 1:], target)
    assert not compiled
    cross_entropy_and_grad(logits, target)
    assert len(compiled) == 1


@pytest.mark.slow
@pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.MISSING)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("vectors", [5, 6, 7, 8])
def test_nothing_spills(vectors, dtype, monkeypatch):
    """Compiled with the register limit that lets `resident` CTAs fit an SM."""
    found = []

    def kernels(device: int, source: str, names: tuple, defines: tuple, shared: int) -> tuple:
        code = nvrtc.compiled(Path(cluster.__file__).with_name(source), "sm_90a", defines)
        found.append((defines, sass.inspect(code, names[0])))
        return (None,)

    monkeypatch.setattr(cuda_driver, "kernels", kernels)
    monkeypatch.setattr(cuda_driver, "parameters", lambda function: ())
    monkeypatch.setattr(cuda_driver, "_packer", lambda layout, places: None)
    for smoothing, z_loss in ((0.0, 0.0), (0.1, 0.0), (0.1, 0.1)):
        logits, target = torch.empty(1, 16 * 256 * vectors * 16 // dtype.itemsize, dtype=dtype), torch.zeros(1).long()
        config = configs.pick_cluster_config(logits.shape[1], dtype, smoothing + z_loss > 0)
        loss = Loss(-100, smoothing, "none", z_loss, None, dtype, False, False)
        at, scratch = layout.rows_of(logits), layout.Scratch(0, 0, 0)
        cluster.cluster_launch(config, logits, target, layout.vector_of(target), at, at, loss, scratch)
        defines, usage = found[-1]
        assert f"VECTORS={vectors}" in defines and usage.spills == 0, (defines, usage)
        assert usage.registers * config.threads * config.resident <= 65536
        assert usage.loads["LDG.128"] == vectors and usage.stores["STG.128"] == 2 * vectors  # gradients, or zeros


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


def batch(rows: int, vocab: int, dtype: torch.dtype, padding: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of very different magnitudes. Every fourth row is ignored and NaN."""
    sizes = torch.rand(rows, 1, device="cuda") * 4 + 0.01
    logits = (torch.randn(rows, vocab + padding, device="cuda") * sizes).to(dtype)[:, padding // 2 :][:, :vocab]
    target = torch.randint(0, vocab, (rows,), device="cuda")
    target[1::4], logits[1::4] = -100, torch.nan
    return logits, target


def check(logits: torch.Tensor, target: torch.Tensor, inplace: bool = False, **options) -> None:
    """Compares with fp64. Repeated calls agree bit for bit, in place or not, in memory that held NaN before."""
    options = {"reduction": "mean", **options}
    known = torch.where(target[:, None] == options.get("ignore_index", -100), 0.0, logits.double())
    wanted = cross_entropy_reference(known, target, with_grad=True, **options)
    if options.get("return_lse"):
        wanted = *wanted[:-1], torch.logsumexp(logits.double(), -1)
    runs = []
    for given in (logits.clone(), logits):
        poison = torch.full_like(logits, torch.nan)
        del poison  # the gradient is then allocated in its memory
        runs.append(cross_entropy_and_grad(given, target, inplace=inplace, **options))
        assert not inplace or runs[-1][1] is given
    rounding = {BF16: 2.0**-8, FP16: 2.0**-10, FP32: 0.0}[logits.dtype]
    for mine, other in zip(runs[0], wanted, strict=True):
        tolerance = 0.0 if mine.dtype == FP32 else rounding
        finite = other[other.isfinite()]
        size = finite.abs().max().item() if finite.numel() else 0.0
        least = 6e-8 if mine.dtype == FP16 else 0.0
        torch.testing.assert_close(
            mine.double(), other, rtol=tolerance + 2e-5, atol=2e-7 * size + least, equal_nan=True
        )
    for mine, other in zip(*runs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", WIDTHS)
def test_computes_what_it_should(vocab, dtype, launched):
    """Covers more rows than are resident at once, and one row; all options, and none; every reduction."""
    if not cluster.NARROWEST <= vocab * dtype.itemsize // 16 <= cluster.WIDEST:
        pytest.skip("not for a cluster in this dtype")
    check(*batch(max(5, 2**22 // vocab), vocab, dtype), **ALL)
    check(*batch(9, vocab, dtype), inplace=True, reduction="sum")
    check(*batch(7, vocab, dtype), inplace=True, reduction="none", **ALL)
    check(*batch(5, vocab, dtype), label_smoothing=0.2, reduction="none")
    check(*batch(5, vocab, dtype), z_loss=1e-3)
    check(*batch(1, vocab, dtype))
    assert len(launched) == 12


@pytest.mark.gpu
def test_rows_are_read_and_written_where_they_lie(launched):
    for inplace in (False, True):
        logits, target = batch(133, 32000, BF16, padding=64)
        around = logits._base[:, :32].clone()
        check(logits, target, inplace)
        assert torch.equal(logits._base[:, :32], around)
    logits, target = batch(66, 32000, BF16)
    check(logits[:1].expand(40, 32000), target[:1].expand(40))
    target[target == -100] = int(target[0])
    check(logits, target.int(), ignore_index=int(target[0]))
    check(logits[::2], target[::2], inplace=True)
    assert len(launched) == 10


@pytest.mark.gpu
def test_what_is_not_aligned_runs_in_triton(launched):
    for vocab, padding in ((32001, 0), (32000, 8), (32000, 2)):
        cross_entropy_and_grad(*batch(4, vocab, BF16, padding))
    assert not launched


@pytest.mark.gpu
def test_masked_and_huge_logits(launched):
    """Agrees with the Triton version, with NaN and inf in the same places."""
    for dtype, smoothing in itertools.product((FP32, BF16), (0.0, 0.1)):
        logits, target = batch(9, 50304, dtype)
        logits[1::4], target[1::4] = 1, 5
        logits[0, :40000], target[0] = -torch.inf, 50303
        logits[2] *= 1e4
        logits[3, 77] = torch.finfo(dtype).max
        logits[4] = torch.finfo(dtype).min
        logits[6], logits[7, 3], logits[8, 9] = -torch.inf, torch.inf, torch.nan
        options = dict(reduction="none", label_smoothing=smoothing, z_loss=smoothing / 100, return_lse=True)
        mine = cross_entropy_and_grad(logits, target, **options)
        other = cross_entropy_and_grad(logits, target, backend="triton", **options)
        for a, b in zip(mine, other, strict=True):
            rtol = 1e-4 if a.dtype == FP32 else 1e-2
            torch.testing.assert_close(a, b, rtol=rtol, atol=1e-6, equal_nan=True)
    assert len(launched) == 4


@pytest.mark.gpu
def test_through_autograd_and_autocast(launched):
    logits, target = batch(33, 32000, FP16)
    target[target == -100], logits[logits.isnan()] = 3, 0
    leaf, other = logits.detach().requires_grad_(), logits.float().detach().requires_grad_()
    with torch.autocast("cuda", dtype=torch.float16):
        value = cross_entropy(leaf, target, grad_in_forward=True, reduction="none")
    wanted = cross_entropy_reference(other, target, reduction="none")
    incoming = torch.rand_like(wanted)
    value.backward(incoming)
    wanted.backward(incoming)
    assert value.dtype == FP32
    torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(leaf.grad.float(), other.grad, rtol=2e-3, atol=1e-6)
    assert len(launched) == 1


@pytest.mark.gpu
def test_in_a_graph_on_a_stream_and_in_a_thread(launched):
    """A new thread has no current CUDA context until some call makes one current."""
    logits, target = batch(40, 128256, BF16)
    expected, results = cross_entropy_and_grad(logits, target), []
    torch.cuda.synchronize()

    thread = threading.Thread(target=lambda: results.append(cross_entropy_and_grad(logits, target)))
    thread.start()
    thread.join()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        results.append(cross_entropy_and_grad(logits, target))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results.append(cross_entropy_and_grad(logits, target))
    for result in results[-1]:
        result.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert len(launched) == 4 and len(results) == 3
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, expected, strict=True))


@pytest.mark.gpu
def test_on_another_device_than_the_current_one(launched):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    logits, target = batch(20, 32000, BF16)
    there = cross_entropy_and_grad(logits.to("cuda:1"), target.to("cuda:1"))
    assert all(
        torch.equal(a.cpu(), b.cpu()) for a, b in zip(there, cross_entropy_and_grad(logits, target), strict=True)
    )


PROGRAM = """
import torch
from {package} import cross_entropy_and_grad
logits, target = torch.randn(64, 32000, device="cuda"), torch.randint(0, 32000, (64,), device="cuda")
cross_entropy_and_grad(logits, target)
torch.cuda.synchronize()
print("right targets pass", flush=True)
target[7] = {target}
cross_entropy_and_grad(logits, target)
torch.cuda.synchronize()
print("a wrong target passes too", flush=True)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("target", [-1, 32000, 2**32 + 5])
def test_a_target_out_of_range_is_a_device_side_assertion(target, launched):
    """Runs in a separate process, because the assertion destroys the CUDA context."""
    program = PROGRAM.format(package=__package__, target=target)
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "right targets pass" in found.stdout, found.stderr
    assert "passes too" not in found.stdout
    assert "cross_entropy: target must be" in found.stderr
    assert "device-side assert" in found.stderr
