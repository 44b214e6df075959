"""Unaligned rows in CUDA C++: dispatch and launch arguments on any machine, results on Hopper."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from harness.compiling import nvrtc, sass

from . import configs, cuda_driver, plans, swiglu, unaligned
from .activation import ACTIVATIONS
from .layout import Coalesced, coalesce
from .reference import swiglu_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HOPPER = (9, 0)
COMPILED = pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.MISSING)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("cols", [1, 8, 9, 247, 248, 249, 250, 256, 257, 1365, 11007])
def test_warps_cover_a_row_on_every_boundary(cols, slots, both):
    written = (31 if both else 32) * slots * configs.warps_per_row(cols, slots, both)
    for past in range(8):
        for other in range(8) if both else (past,):
            before = (past - other) % 8 > past  # a vector of dup before the row's first slot
            assert written >= before + -(-(past + cols) // 8)
    assert written - (31 if both else 32) * slots < -(-(7 + cols) // 8) + both  # no more warps than needed


def test_which_rows_it_is_picked_for():
    pick = configs.pick_unaligned_config
    assert pick(205000, 1365, BF16, 0, HOPPER) == configs.UnalignedConfig(128, 1, 16, "evict_last")
    assert pick(205000, 1365, BF16, 2, HOPPER) == configs.UnalignedConfig(128, 1, 10, "evict_last")
    assert pick(100, 1365, FP16, 1, HOPPER) == configs.UnalignedConfig(128, 1, 10, "")
    for gradients in (0, 1, 2):
        assert all(configs.fills_warps(cols, gradients) for cols in (538, 703, 1365, 2047, 11007, 2**20 + 1))
        assert not any(configs.fills_warps(cols, gradients) for cols in (1, 7, 127, 257, 300))


def test_why_it_is_not_supported(monkeypatch):
    monkeypatch.setattr(cuda_driver, "no_compiler", lambda: None)

    def reason(*tensors: torch.Tensor, capability: tuple[int, int] = HOPPER) -> str | None:
        return unaligned.unsupported_reason(coalesce(tensors[:1], tensors[1:]), tensors[0].dtype, capability)

    packed = torch.empty(6, 2 * 1365, dtype=BF16)
    y, (gate, up) = torch.empty(6, 1365, dtype=BF16), packed.chunk(2, dim=-1)
    assert reason(y, gate, up) is reason(y.half(), gate.half(), up[:1].half().expand(6, 1365)) is None
    assert reason(y, gate, up[:1].expand(6, 1365)) is None  # rows of stride 0
    assert reason(packed[1:5, 3:1000], gate[:4, :997], up[2:6, 368:]) is None
    assert reason(y, gate, up, capability=(8, 0)) == "it needs a GPU of compute capability 9.0 (Hopper)"
    assert reason(y.float(), gate.float(), up.float()) == "it supports bfloat16 and float16, not torch.float32"
    for t in (y, torch.empty(6, 64, dtype=BF16)[:, :32]):  # one row, and aligned rows
        assert "strides that are not multiples of 16" in reason(t, t, t)
    contiguous = "it requires rows whose elements are contiguous"
    assert reason(y, gate, up[:, :1].expand(6, 1365)) == contiguous
    assert reason(y, gate, torch.empty(1365, 6, dtype=BF16).t()) == contiguous
    assert reason(packed[:, ::2], gate, up) == contiguous
    layout = Coalesced(2, 2**30 + 1, ((2**31 + 1, 1),) * 3, (False, False))
    assert "rows of up to 1073741824 elements" in unaligned.unsupported_reason(layout, BF16, HOPPER)
    layout = Coalesced(2**29, 1365, ((2731, 1),) * 3, (False, False))
    assert "fewer than 2147483648 warps" in unaligned.unsupported_reason(layout, BF16, HOPPER)
    monkeypatch.setattr(cuda_driver, "no_compiler", lambda: "it is compiled by NVRTC through CuPy")
    assert reason(y, gate, up) == "it is compiled by NVRTC through CuPy"


def test_a_backend_that_cannot_run_says_why():
    """The error is raised before any launch: on a GPU because of the dtype, elsewhere because of the device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    packed = torch.randn(3, 2 * 1365, device=device)
    with pytest.raises(
        RuntimeError, match='swiglu: backend="cuda" cannot run here: it (needs|supports|requires|is only)'
    ):
        swiglu(packed, backend="cuda")
    assert torch.equal(swiglu(packed, backend="triton"), swiglu(packed))


@pytest.fixture
def pretended(monkeypatch):
    """Pretends a Hopper GPU that launches nothing. Returns the lists of compilations and of launches."""
    compiled, launched = [], []
    monkeypatch.setattr(cuda_driver, "no_compiler", lambda: None)
    monkeypatch.setattr(cuda_driver, "kernels", lambda *arguments: compiled.append(arguments) or (None,))
    monkeypatch.setattr(cuda_driver, "_current_device", lambda: None)  # a CPU tensor has device index None
    monkeypatch.setattr(cuda_driver, "_raw_stream", lambda device: 0)
    monkeypatch.setattr(cuda_driver, "parameters", lambda function: ())
    monkeypatch.setattr(cuda_driver, "_packer", lambda layout, places: lambda *values: values)
    monkeypatch.setattr(cuda_driver, "launch", lambda *arguments: launched.append(arguments))
    return compiled, launched


def test_what_it_is_told(pretended, monkeypatch):
    """The kernel gets pointers (null if unused), sizes, and strides in elements."""
    compiled, launched = pretended
    packed, out = torch.empty(100, 2730, dtype=FP16), torch.empty(100, 1365, dtype=FP16)
    gate, up = packed.chunk(2, dim=-1)
    config = configs.UnalignedConfig(256, 1, 5, "")

    layout = coalesce((out,), (gate, up))
    unaligned.unaligned_launch(config, layout, (2730, 2730, 1365), gate, "gelu_tanh")(gate, up, out)
    (_, source, names, defines, _), (_, grid, threads, shared, _, values) = compiled.pop(), launched.pop()
    assert (source, names) == ("unaligned.cu", ("swiglu_unaligned_fwd",))
    assert {"THREADS=256", "SLOTS=1", "RESIDENT=5", "TYPE=1", "ACTIVATION=2", "EVICT_LAST=0"} <= set(defines)
    assert {"NEED_DGATE=0", "NEED_DUP=0"} <= set(defines)
    assert (grid, threads, shared) == (75, 256, 0)  # 6 warps of 32 slots per row, 8 warps per CTA
    assert list(values) == [*(t.data_ptr() for t in (gate, up, out)), 100, 1365, 6, 2730, 2730, 1365]

    dup, strides = packed.clone()[:, 1365:], (1365, 2730, 0, 0, 2730)
    launch = unaligned.unaligned_launch(config, coalesce((dup,), (out, gate)), strides, gate, "relu", False, True)
    launch(out, gate, None, None, dup)
    (_, _, names, defines, _), (*_, values) = compiled.pop(), launched.pop()
    assert names == ("swiglu_unaligned_bwd",)
    assert {"ACTIVATION=3", "NEED_DGATE=0", "NEED_DUP=1"} <= set(defines)
    assert list(values) == [out.data_ptr(), gate.data_ptr(), 0, 0, dup.data_ptr(), 100, 1365, 6, *strides]


def test_what_a_plan_tells_it(pretended, monkeypatch):
    """For a packed tensor the kernel gets the addresses of both halves, and of both halves of the gradient."""
    compiled, launched = pretended
    monkeypatch.setattr(plans, "_capability", lambda tensor: HOPPER)
    packed, dy = torch.empty(100, 2730, dtype=BF16), torch.empty(100, 1365, dtype=BF16)
    y = plans.fwd_plan(packed, None, "silu", "auto")(packed, None)
    start = packed.data_ptr()
    (*_, values) = launched.pop()
    assert list(values) == [start, start + 2 * 1365, y.data_ptr(), 100, 1365, 6, 2730, 2730, 1365]
    grad, _ = plans.bwd_plan(dy, packed, None, "silu", "auto", True, True)(dy, packed, None)
    (*_, values) = launched.pop()
    halves = start, start + 2 * 1365, grad.data_ptr(), grad.data_ptr() + 2 * 1365
    assert list(values) == [dy.data_ptr(), *halves, 100, 1365, 6, 1365, *(2730,) * 4]
    assert grad.shape == packed.shape and len(compiled) == 2
    # An incoming gradient of stride 0 runs in Triton, whatever the backend.
    expanded = dy[:1, :1].expand(100, 1365)
    monkeypatch.setattr(plans, "Launch", lambda kernel, *_, **__: lambda *tensors: launched.append(kernel))
    plans.bwd_plan(expanded, packed, None, "silu", "cuda", True, True)(expanded, packed, None)
    plans.fwd_plan(packed, None, "silu", "triton")(packed, None)
    assert launched == [plans._swiglu_bwd_kernel, plans._swiglu_fwd_kernel]


@pytest.mark.slow
@COMPILED
@pytest.mark.parametrize(("activation", "dtype"), [*((name, BF16) for name in ACTIVATIONS), ("silu", FP16)], ids=str)
def test_nothing_spills(activation, dtype, monkeypatch):
    """The register limit for the resident CTAs causes no spills, and each vector is one load or store instruction."""
    found = []

    def kernels(device: int, source: str, names: tuple, defines: tuple, shared: int) -> tuple:
        code = nvrtc.compiled(Path(unaligned.__file__).with_name(source), "sm_90a", defines)
        found.append(sass.inspect(code, names[0]))
        return (None,)

    monkeypatch.setattr(cuda_driver, "kernels", kernels)
    monkeypatch.setattr(cuda_driver, "parameters", lambda function: ())
    monkeypatch.setattr(cuda_driver, "_packer", lambda layout, places: None)
    layout, like = Coalesced(2, 1365, ((1365, 1),) * 5, (False,) * 3), torch.empty(0, dtype=dtype)
    for needs in ((False, False), (True, True), (True, False), (False, True)):
        config = configs.pick_unaligned_config(2, 1365, dtype, sum(needs), HOPPER)
        count = 5 if any(needs) else 3
        unaligned.unaligned_launch(config, layout, (1365,) * count, like, activation, *needs)
        usage = found[-1]
        assert usage.spills == usage.stack == 0, usage
        assert usage.registers * config.threads * config.resident <= 65536
        assert usage.loads["LDG.128"] >= 4 and usage.stores["STG.128"] == max(1, sum(needs))


@pytest.fixture
def launched(monkeypatch):
    """Records the launches of the kernels. Skips where they cannot run."""
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("needs a GPU of compute capability 9.0 (Hopper)")
    if reason := cuda_driver.no_compiler():
        pytest.skip(reason)
    calls, original = [], cuda_driver.launch
    monkeypatch.setattr(cuda_driver, "launch", lambda *a: calls.append(a) or original(*a))
    return calls


def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * 2).to(dtype)


def agree(mine: tuple[torch.Tensor, ...], triton: tuple[torch.Tensor, ...]) -> None:
    """Equal up to one rounding, because the compilers may contract other operations to fused multiply-adds."""
    for a, b in zip(mine, triton, strict=True):
        rounding = {BF16: 2.0**-7, FP16: 2.0**-10}[a.dtype]
        torch.testing.assert_close(a, b, rtol=rounding, atol=1e-5, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_agrees_with_triton(activation, dtype, launched):
    """Packed tensors and halves, every gradient, with some special values."""
    packed = normal(67, 2 * 1365, dtype=dtype)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 3e2, -3e2, 1e-7], dtype=dtype, device="cuda")
    packed[::5, ::11] = special[torch.arange(packed[::5, ::11].numel(), device="cuda") % 8].view_as(packed[::5, ::11])
    gate, up = packed.chunk(2, dim=-1)
    dy = normal(67, 1365, dtype=dtype)

    def backward(backend: str, gate: torch.Tensor, up: torch.Tensor | None, *needs: bool) -> tuple:
        return plans.bwd_plan(dy, gate, up, activation, backend, *needs)(dy, gate, up)

    def run(backend: str) -> tuple[torch.Tensor, ...]:
        y = plans.fwd_plan(packed, None, activation, backend)(packed, None)
        halves = plans.fwd_plan(gate, up, activation, backend)(gate, up)
        whole, _ = backward(backend, packed, None, True, True)
        pair = backward(backend, gate, up, True, True)
        alone = backward(backend, gate, up, True, False)[0], backward(backend, gate, up, False, True)[1]
        return y, halves, whole, *pair, *alone

    mine = run("cuda")
    assert len(launched) == 6
    agree(mine, run("triton"))
    assert len(launched) == 6
    y, halves, whole, dgate, dup, *alone = mine
    for a, b in ((y, halves), (dgate, alone[0]), (dup, alone[1]), (whole, torch.cat((dgate, dup), -1))):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [*range(1, 40), 247, 248, 249, 257, 1365])
def test_every_boundary_and_nothing_beyond_the_rows(cols, launched):
    """Launched on views between guard elements, also at widths for which "auto" selects Triton."""
    config = configs.UnalignedConfig(128, 2, 2, "")
    for past in range(8):
        rooms = [torch.full((5 * (cols + 9) + 32,), 77.0, dtype=BF16, device="cuda") for _ in range(5)]
        firsts = [16 + (past * factor + shift) % 8 for factor, shift in ((1, 0), (3, 1), (5, 2), (1, 5), (7, 3))]
        strides = (cols, cols + 1, cols + 8, cols + 3, cols + 9)
        parts = zip(rooms, firsts, strides, strict=True)
        dgate, dup, dy, gate, up = views = [r.as_strided((5, cols), (s, 1), f) for r, f, s in parts]
        for t in (dy, gate, up):
            t.copy_(normal(5, cols))
        before = [room.clone() for room in rooms]
        layout = Coalesced(5, cols, tuple((s, 1) for s in strides), (False,) * 3)
        of_dgate, of_dup, of_dy, of_gate, of_up = strides
        ordered = of_dy, of_gate, of_up, of_dgate, of_dup
        launch = unaligned.unaligned_launch(config, layout, ordered, gate, "silu", True, True)
        launch(dy, gate, up, dgate, dup)
        leaves = [t.double().requires_grad_() for t in (gate, up)]
        wanted = torch.autograd.grad(swiglu_reference(*leaves), leaves, dy.double())
        for mine, want in zip((dgate, dup), wanted, strict=True):
            torch.testing.assert_close(mine.double(), want.double(), rtol=2.0**-7, atol=1e-5)
        for t, old in zip(views[:2], before, strict=False):
            old.as_strided(t.shape, t.stride(), t.storage_offset()).copy_(t)
        assert all(torch.equal(room, old) for room, old in zip(rooms, before, strict=True))
        launch = unaligned.unaligned_launch(config, layout, (of_gate, of_up, of_dgate), gate, "silu")
        launch(gate, up, dgate)
        want = swiglu_reference(gate.double(), up.double())
        torch.testing.assert_close(dgate.double(), want.double(), rtol=2.0**-7, atol=1e-5)


@pytest.mark.gpu
def test_what_does_not_fit_runs_in_triton(launched):
    for gate, up in (
        (normal(64, 1376), normal(64, 1376)),
        (normal(64, 2 * 257).chunk(2, dim=-1)),
        (normal(64, 2 * 1365, dtype=FP32).chunk(2, dim=-1)),
    ):
        swiglu(gate, up)
    assert not launched


@pytest.mark.gpu
def test_in_a_graph_on_a_stream_and_in_a_thread(launched):
    """A new thread has no current CUDA context."""
    packed, dy, results = normal(300, 2 * 1365), normal(300, 1365), []

    def run() -> None:
        leaf = packed.detach().requires_grad_()
        y = swiglu(leaf)
        results.append((y.detach(), torch.autograd.grad(y, leaf, dy)[0]))

    run()
    torch.cuda.synchronize()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for t in results[-1]:
        t.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert len(launched) == 8
    assert all(torch.equal(a, b) for result in results[1:] for a, b in zip(result, results[0], strict=True))


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(launched):
    """Offsets have 64 bits: those of the last rows exceed 32."""
    packed = torch.randn(2**31 // 2730 + 3, 2730, device="cuda", dtype=BF16)
    y = swiglu(packed)
    grad, _ = plans.bwd_plan(y, packed, None, "silu", "cuda", True, True)(y, packed, None)
    assert len(launched) == 2
    for part in (slice(0, 2), slice(-3, None)):
        few = packed[part].clone().requires_grad_()
        expected = swiglu_reference(few)
        torch.testing.assert_close(y[part], expected.detach())
        torch.testing.assert_close(grad[part], torch.autograd.grad(expected, few, y[part])[0])
