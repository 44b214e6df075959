"""Rows on any boundary: when CUDA C++ takes them and what it is told, anywhere; what it computes, on Hopper."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from harness.compiling import nvrtc, sass

from . import cuda_driver, kernel, swiglu, unaligned
from .activation import ACTIVATIONS
from .layout import walk
from .reference import swiglu_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HOPPER = (9, 0)
COMPILED = pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.MISSING)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("cols", [1, 8, 9, 247, 248, 249, 250, 256, 257, 1365, 11007])
def test_pieces_cover_a_row_on_every_boundary(cols, slots, both):
    written = (31 if both else 32) * slots * unaligned.pieces(cols, slots, both)
    for past in range(8):
        for other in range(8) if both else (past,):
            before = (past - other) % 8 > past  # a vector of dup before the row's first slot
            assert written >= before + -(-(past + cols) // 8)
    assert written - (31 if both else 32) * slots < -(-(7 + cols) // 8) + both  # and no more than that


def test_which_rows_it_is_picked_for():
    pick = kernel.pick_unaligned_config
    assert pick(205000, 1365, BF16, 0, HOPPER) == kernel.UnalignedConfig(128, 1, 16, "evict_last")
    assert pick(205000, 1365, BF16, 2, HOPPER) == kernel.UnalignedConfig(128, 1, 10, "evict_last")
    assert pick(100, 1365, FP16, 1, HOPPER) == kernel.UnalignedConfig(128, 1, 10, "")
    for gradients in (0, 1, 2):
        assert all(pick(100, cols, BF16, gradients, HOPPER) for cols in (703, 1365, 2047, 11007, 2**20 + 1))
        assert not any(pick(100, cols, BF16, gradients, HOPPER) for cols in (1, 7, 127, 257, 300))
        assert pick(100, 1365, FP32, gradients, HOPPER) is None
        assert pick(1, 1365, BF16, gradients, HOPPER) is None
        assert pick(100, 1365, BF16, gradients, (8, 0)) is pick(100, 1365, BF16, gradients, (10, 0)) is None


def test_why_it_refuses(monkeypatch):
    monkeypatch.setattr(cuda_driver, "no_compiler", lambda: None)

    def refused(*tensors: torch.Tensor, capability: tuple[int, int] = HOPPER) -> str | None:
        return unaligned.unaligned_refuses(walk(tensors[:1], tensors[1:]), capability)

    packed = torch.empty(6, 2 * 1365, dtype=BF16)
    y, (gate, up) = torch.empty(6, 1365, dtype=BF16), packed.chunk(2, dim=-1)
    assert refused(y, gate, up) is refused(y.half(), gate.half(), up.half()) is None
    assert refused(y, gate, up[:1].expand(6, 1365)) is None  # rows of stride 0
    assert refused(packed[1:5, 3:1000], gate[:4, :997], up[2:6, 368:]) is None
    assert refused(y, gate, up, capability=(8, 0)) == "it needs a GPU of compute capability 9.0 (Hopper)"
    assert refused(y.float(), gate.float(), up.float()) == "it takes bfloat16 and float16, not torch.float32"
    side = "it wants elements of a row side by side"
    assert refused(y, gate, up[:, :1].expand(6, 1365)) == side
    assert refused(y, gate, torch.empty(1365, 6, dtype=BF16).t()) == side
    assert refused(packed[:, ::2], gate, up) == side
    long = torch.empty(1, dtype=BF16).expand(2, 2**30 + 1)
    steps = unaligned.Walk(2, 2**30 + 1, (long,) * 3, ((2**31 + 1, 1),) * 3)
    assert "rows of up to 1073741824 elements" in unaligned.unaligned_refuses(steps, HOPPER)
    steps = unaligned.Walk(2**29, 1365, (long,) * 3, ((2731, 1),) * 3)
    assert "fewer than 2147483648 pieces" in unaligned.unaligned_refuses(steps, HOPPER)
    monkeypatch.setattr(cuda_driver, "no_compiler", lambda: "it is compiled by NVRTC, which comes with CuPy")
    assert refused(y, gate, up) == "it is compiled by NVRTC, which comes with CuPy"


def test_what_it_is_told(monkeypatch):
    """Launched on nothing: pointers or none, sizes, and strides in elements."""
    compiled, launched = [], []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: HOPPER)
    monkeypatch.setattr(cuda_driver, "no_compiler", lambda: None)
    monkeypatch.setattr(cuda_driver, "kernels", lambda *arguments: compiled.append(arguments) or (None,))
    monkeypatch.setattr(unaligned, "launch", lambda *arguments: launched.append(arguments))
    packed, out = torch.empty(100, 2730, dtype=FP16), torch.empty(100, 1365, dtype=FP16)
    gate, up = packed.chunk(2, dim=-1)
    config = kernel.UnalignedConfig(256, 1, 5, "")

    unaligned.unaligned_launch(config, walk((out,), (gate, up)), (1, 2, 0), "gelu_tanh")
    (_, source, names, defines, _), (_, grid, threads, shared, arguments) = compiled.pop(), launched.pop()
    assert (source, names) == ("unaligned.cu", ("swiglu_unaligned_fwd",))
    assert {"THREADS=256", "SLOTS=1", "RESIDENT=5", "TYPE=1", "ACTIVATION=2", "EVICT_LAST=0"} <= set(defines)
    assert {"NEED_DGATE=0", "NEED_DUP=0"} <= set(defines)
    assert (grid, threads, shared) == (75, 256, 0)  # 6 pieces of 32 slots, 8 of them to a CTA
    assert [a.value for a in arguments[:3]] == [t.data_ptr() for t in (gate, up, out)]
    assert [a.value for a in arguments[3:]] == [100, 1365, 6, 2730, 2730, 1365]

    steps = walk((packed.clone()[:, 1365:],), (out, gate))
    unaligned.unaligned_launch(config, steps, (1, 2, None, None, 0), "relu", False, True)
    (_, _, names, defines, _), (*_, arguments) = compiled.pop(), launched.pop()
    assert names == ("swiglu_unaligned_bwd",)
    assert {"ACTIVATION=3", "NEED_DGATE=0", "NEED_DUP=1"} <= set(defines)
    pointers = out.data_ptr(), gate.data_ptr(), None, None, steps.tensors[0].data_ptr()
    assert [a.value for a in arguments] == [*pointers, 100, 1365, 6, 1365, 2730, 0, 0, 2730]


@COMPILED
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nothing_spills(activation, dtype, monkeypatch):
    """At the number of CTAs that registers are limited for. Every vector is loaded as one."""
    found = []

    def kernels(device: int, source: str, names: tuple, defines: tuple, shared: int) -> tuple:
        code = nvrtc.compiled(Path(unaligned.__file__).with_name(source), "sm_90a", defines)
        found.append(sass.inspect(code, names[0]))
        return (None,)

    monkeypatch.setattr(cuda_driver, "kernels", kernels)
    monkeypatch.setattr(unaligned, "launch", lambda *_: None)
    t = torch.empty(2, 1365, dtype=dtype)
    for needs, places in (
        ((False, False), (1, 2, 0)),
        ((True, True), (2, 3, 4, 0, 1)),
        ((True, False), (2, 3, 4, 0, None)),
        ((False, True), (2, 3, None, None, 0)),
    ):
        config = kernel.pick_unaligned_config(2, 1365, dtype, sum(needs), HOPPER)
        unaligned.unaligned_launch(config, walk((t, t), (t, t, t)), places, activation, *needs)
        usage = found[-1]
        assert usage.spills == usage.stack == 0, usage
        assert usage.registers * config.threads * config.resident <= 65536
        assert usage.loads["LDG.128"] >= 4 and usage.stores["STG.128"] == max(1, sum(needs))


@pytest.fixture
def launched(monkeypatch):
    """The launches of the kernels. Skips where they do not run."""
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("needs a GPU of compute capability 9.0 (Hopper)")
    if reason := cuda_driver.no_compiler():
        pytest.skip(reason)
    calls, original = [], unaligned.unaligned_launch
    monkeypatch.setattr(unaligned, "unaligned_launch", lambda *a: calls.append(a) or original(*a))
    return calls


def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * 2).to(dtype)


def both_ways(run, monkeypatch) -> list[tuple[torch.Tensor, ...]]:
    """What `run` gives by CUDA C++ and by Triton."""
    mine = run()
    with monkeypatch.context() as patch:
        patch.setattr(unaligned, "unaligned_refuses", lambda *_: "not now")
        return [mine, run()]


def agree(mine: tuple[torch.Tensor, ...], triton: tuple[torch.Tensor, ...]) -> None:
    """To one rounding: products may be fused with sums in other places."""
    for a, b in zip(mine, triton, strict=True):
        rounding = {BF16: 2.0**-7, FP16: 2.0**-10}[a.dtype]
        torch.testing.assert_close(a, b, rtol=rounding, atol=1e-5, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_agrees_with_triton(activation, dtype, launched, monkeypatch):
    """Packed and halves, every gradient, special values among the others."""
    packed = normal(67, 2 * 1365, dtype=dtype)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 3e2, -3e2, 1e-7], dtype=dtype, device="cuda")
    packed[::5, ::11] = special[torch.arange(packed[::5, ::11].numel(), device="cuda") % 8].view_as(packed[::5, ::11])
    gate, up = packed.chunk(2, dim=-1)
    dy = normal(67, 1365, dtype=dtype)

    def run() -> tuple[torch.Tensor, ...]:
        y, halves = kernel.swiglu_fwd(packed, None, activation), kernel.swiglu_fwd(gate, up, activation)
        whole, _ = kernel.swiglu_bwd(dy, packed, None, activation, True, True)
        pair = kernel.swiglu_bwd(dy, gate, up, activation, True, True)
        alone = (
            kernel.swiglu_bwd(dy, gate, up, activation, True, False)[0],
            kernel.swiglu_bwd(dy, gate, up, activation, False, True)[1],
        )
        return y, halves, whole, *pair, *alone

    mine, triton = both_ways(run, monkeypatch)
    assert len(launched) == 6
    agree(mine, triton)
    y, halves, whole, dgate, dup, *alone = mine
    for a, b in ((y, halves), (dgate, alone[0]), (dup, alone[1]), (whole, torch.cat((dgate, dup), -1))):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [*range(1, 40), 247, 248, 249, 257, 1365])
def test_every_boundary_and_nothing_beyond_the_rows(cols, launched):
    """Launched on views between guards, at widths of which Triton takes some."""
    config = kernel.UnalignedConfig(128, 2, 2, "")
    for past in range(8):
        rooms = [torch.full((5 * (cols + 9) + 32,), 77.0, dtype=BF16, device="cuda") for _ in range(5)]
        firsts = [16 + (past * factor + shift) % 8 for factor, shift in ((1, 0), (3, 1), (5, 2), (1, 5), (7, 3))]
        strides = (cols, cols + 1, cols + 8, cols + 3, cols + 9)
        parts = zip(rooms, firsts, strides, strict=True)
        dgate, dup, dy, gate, up = views = [r.as_strided((5, cols), (s, 1), f) for r, f, s in parts]
        for t in (dy, gate, up):
            t.copy_(normal(5, cols))
        before = [room.clone() for room in rooms]
        steps = kernel.Walk(5, cols, tuple(views), tuple((s, 1) for s in strides))
        unaligned.unaligned_launch(config, steps, (2, 3, 4, 0, 1), "silu", True, True)
        leaves = [t.double().requires_grad_() for t in (gate, up)]
        wanted = torch.autograd.grad(swiglu_reference(*leaves), leaves, dy.double())
        for mine, want in zip((dgate, dup), wanted, strict=True):
            torch.testing.assert_close(mine.double(), want.double(), rtol=2.0**-7, atol=1e-5)
        for t, old in zip(views[:2], before, strict=False):
            old.as_strided(t.shape, t.stride(), t.storage_offset()).copy_(t)
        assert all(torch.equal(room, old) for room, old in zip(rooms, before, strict=True))
        unaligned.unaligned_launch(config, kernel.Walk(5, cols, tuple(views), steps.strides), (3, 4, 0), "silu")
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
    """A new thread has no context before something makes one current."""
    packed, dy, results = normal(300, 2 * 1365), normal(300, 1365), []

    def run() -> None:
        results.append((swiglu(packed), kernel.swiglu_bwd(dy, packed, None, "silu", True, True)[0]))

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
    """Offsets are 64 bits wide: the last rows lie past what 32 reach."""
    packed = torch.randn(2**31 // 2730 + 3, 2730, device="cuda", dtype=BF16)
    y = swiglu(packed)
    grad, _ = kernel.swiglu_bwd(y, packed, None, "silu", True, True)
    assert len(launched) == 2
    for part in (slice(0, 2), slice(-3, None)):
        few = packed[part].clone().requires_grad_()
        expected = swiglu_reference(few)
        torch.testing.assert_close(y[part], expected.detach())
        torch.testing.assert_close(grad[part], torch.autograd.grad(expected, few, y[part])[0])
