"""The logits for Hopper (sm90/): which problems are supported, that it compiles, and on a GPU that it is correct."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from harness.compiling import nvrtc, sass

from . import configs, launch
from .layout import Stats
from .loss import Loss
from .op import linear_cross_entropy
from .problem import Problem
from .reference import linear_cross_entropy_reference
from .sm90 import cuda_driver, logits

SOURCE = Path(logits.__file__).with_name("logits.cu")
PLAIN = Loss(-100, 0.0, None, 0.0, "mean", None, "cuda")
CONFIGS = [configs.pick_logits_config(rows, more) for rows, more in itertools.product((128, 129), (False, True))]
HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture
def compiler() -> None:
    if reason := cuda_driver.no_compiler():
        pytest.skip(reason)


def on_hopper(hidden: torch.Tensor, weight: torch.Tensor) -> str | None:
    """`unsupported_reason` of these operands, as if they were on a Hopper GPU."""
    target = torch.zeros(hidden.shape[:-1], dtype=torch.int64)
    p = Problem.of(hidden, weight, target, None, PLAIN)
    return logits.unsupported_reason(dataclasses.replace(p, device=torch.device("cuda:0"), capability=(9, 0)))


def test_what_it_takes() -> None:
    """No GPU is needed: capability, dtype and layout decide, and then whether there is a compiler."""
    hidden, weight = torch.randn(4, 9, 64).half(), torch.randn(70, 64).half()
    missing = cuda_driver.no_compiler()
    p = Problem.of(hidden, weight, torch.zeros(4, 9, dtype=torch.int32), None, PLAIN)
    assert "compute capability 9.0" in str(logits.unsupported_reason(p)) and not p.wide
    assert on_hopper(hidden, weight) == missing
    assert on_hopper(torch.randn(36, 72).half()[:, :64], torch.randn(70, 80).half()[:, 8:72]) == missing
    assert "float16 and bfloat16" in str(on_hopper(hidden.float(), weight.float()))
    room = torch.randn(36, 72).half()
    for a, b in (
        (hidden[..., :60], weight[:, :60]),
        (room[:, 1:65], weight),
        (hidden, torch.randn(70, 65).half()[:, :64]),
        (hidden, weight.t().contiguous().t()),
    ):
        assert "contiguous rows on 16-byte boundaries" in str(on_hopper(a, b))


def test_backend_is_checked() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden, weight = torch.randn(4, 8, device=device), torch.randn(9, 8, device=device)
    target = torch.tensor([0, 1, 2, -100], device=device)
    with pytest.raises(ValueError, match="backend must be one of auto, triton, cuda, got 'ptx'"):
        linear_cross_entropy(hidden, weight, target, backend="ptx")
    # float32 is never supported
    reason = "float16 and bfloat16" if device == "cuda" else "a GPU of compute capability"
    with pytest.raises(RuntimeError, match=f'backend="cuda" cannot run here: it (needs|supports) {reason}'):
        linear_cross_entropy(hidden, weight, target, backend="cuda")


def defines(config: configs.LogitsConfig, epilogue: int, fp16: int, softcap: int, smoothing: int) -> tuple[str, ...]:
    tile = (f"BLOCK_N={config.block_n}", f"STAGES={config.stages}", f"RASTER={config.raster}")
    numbers = (f"SOFTCAP={softcap}", f"SMOOTHING={smoothing}", f"CLUSTER={config.cluster}", "WIDE=1")
    return (f"EPILOGUE={epilogue}", f"FP16={fp16}", *numbers, *tile)


@pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.MISSING)
@pytest.mark.parametrize("fp16", [0, 1])
@pytest.mark.parametrize(("softcap", "smoothing"), [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("epilogue", [logits.STATS, logits.LOGITS, logits.GRADIENT])
@pytest.mark.parametrize("rows", [128, 129])
def test_it_compiles_and_does_not_spill(rows: int, epilogue: int, softcap: int, smoothing: int, fp16: int) -> None:
    config = configs.pick_logits_config(rows, bool(softcap or smoothing))
    code = nvrtc.compiled(SOURCE, "sm_90a", defines(config, epilogue, fp16, softcap, smoothing))
    usage = sass.inspect(code, "linear_cross_entropy_logits")
    assert usage.spills == 0 and usage.stack == 0
    assert usage.early_arrivals == 0 and usage.early_own_reads == {}
    # The wgmmas of a K-block, for both halves of a tile; one wait per K-block, and a last one. So ptxas did not
    # serialise them.
    assert usage.mma == {"HGMMA": 8} and usage.wgmma_waits == 2
    assert ("STG.64" in usage.stores) == (epilogue != logits.STATS)


def test_host_and_device_agree_on_the_tile() -> None:
    text = SOURCE.read_text(encoding="utf-8")
    found = re.search(r"BLOCK_M = (\d+), BLOCK_K = (\d+), .*\nconstexpr int CONSUMERS = (\d+)", text)
    assert found is not None
    *tile, consumers = map(int, found.groups())
    assert tile == [logits.BLOCK_M, logits.BLOCK_K] and 128 * (consumers + 1) == logits.THREADS


def test_the_ring_fits_into_shared_memory() -> None:
    for config in CONFIGS:
        assert config.stages >= 4 and logits.shared_bytes(config) <= 227 << 10


def test_a_part_of_the_statistics_is_a_tile() -> None:
    hidden, weight = torch.randn(200, 64).half(), torch.randn(400, 64).half()
    p = Problem.of(hidden, weight, torch.zeros(200, dtype=torch.int64), None, PLAIN)
    chunk = configs.Chunk(8, 200, spare=True, kept=True)
    assert logits.stats_of(p, chunk) == Stats(3, 192, False)
    smooth = dataclasses.replace(p, loss=PLAIN._replace(label_smoothing=0.1))
    assert logits.stats_of(smooth, chunk) == Stats(3, 192, True)
    assert logits.stats_of(dataclasses.replace(smooth, vocab=321), chunk).parts == 3  # tiles of 160 columns


def numbers(address: int, shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor that is a view of this process's memory at `address`."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * (reach * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


class OnTheCPU:
    """Emulates logits.cu on the memory of this process, given the same arguments."""

    made: ClassVar[list[dict[str, int]]] = []

    def __init__(self, device: int, defines: dict[str, int], grid: int, threads: int, shared: int, layout: str) -> None:
        self.defines = defines
        self.made.append(defines)

    def __call__(self, hidden, weight, z, bias, target, stats, highest, scale, factor, dloss, *numbers_) -> None:
        sum_at, total_at, hit_at, pitch, dloss_stride, ignore, first, rows, cols, steps, *options = numbers_
        softcap, z_loss, hit, rest = options
        kind, epilogue, block_n = torch.float16, self.defines["EPILOGUE"], self.defines["BLOCK_N"]
        a, b = (matrix.view(*matrix.shape).float() for matrix in (hidden, weight))
        assert a.shape[0] == rows and b.shape[0] == cols and -(-a.shape[1] // logits.BLOCK_K) == steps
        sums = a @ b.t() + (numbers(bias, (cols,), kind, (1,)).float() if bias else 0)
        logit = sums.to(kind).float()
        capped = (logit / softcap).tanh() if softcap else None
        logit = logit if capped is None else softcap * capped
        ints = torch.int64 if self.defines["WIDE"] else torch.int32
        targets = numbers(target, (rows,), ints, (1,))
        counts, column = targets != ignore, targets - first
        here = counts & (column >= 0) & (column < cols)
        places = here.nonzero()[:, 0]
        if epilogue != logits.GRADIENT:
            for part in range(-(-cols // block_n)):
                tile = logit[:, part * block_n : (part + 1) * block_n]
                for at, values in (
                    (0, tile.amax(1)),
                    (sum_at, (tile - tile.amax(1, keepdim=True)).exp().sum(1)),
                    *([(total_at, tile.sum(1))] if self.defines["SMOOTHING"] else []),
                ):
                    numbers(stats + 4 * (at + part * rows), (rows,), torch.float32, (1,)).copy_(values)
            numbers(stats + 4 * hit_at, (rows,), torch.float32, (1,))[places] = logit[places, column[places]]
            values = sums
        else:
            top, inverse = (numbers(at, (rows, 1), torch.float32, (1, 1)) for at in (highest, scale))
            softmax = (logit - top).exp() * inverse
            values = softmax * (1 + 2 * z_loss * (top - inverse.log())) - rest
            values[places, column[places]] -= hit
            values *= 1 if capped is None else 1 - capped.square()
            values *= numbers(factor, (1,), torch.float32, (1,)) * counts[:, None]
            if dloss:
                values *= numbers(dloss, (rows, 1), torch.float32, (dloss_stride, 1))
        if epilogue != logits.STATS:
            numbers(z, (cols, rows), kind, (pitch, 1)).copy_(values.t())


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[OnTheCPU]]:
    """backend="cuda" for float16 on the CPU."""

    def kernels(device, source, names, defines, shared) -> tuple[dict[str, int]]:
        return ({name: int(value) for name, _, value in (define.partition("=") for define in defines)},)

    def tensor_map(x: torch.Tensor, rows: int, block_rows: int):
        assert rows == x.shape[2] and block_rows in (80, 96, 128, 160, 192)
        return lambda address: numbers(address, tuple(x.shape[2:]), x.dtype, x.stride()[2:])

    monkeypatch.setattr(logits, "unsupported_reason", lambda p: None if p.dtype == torch.float16 else "it is fp16 here")
    monkeypatch.setattr(logits, "tensor_map", tensor_map)
    monkeypatch.setattr(cuda_driver, "kernels", kernels)
    monkeypatch.setattr(cuda_driver, "Launch", OnTheCPU)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Namespace(multi_processor_count=132))
    monkeypatch.setattr(OnTheCPU, "made", [])
    yield OnTheCPU
    for kept in launch._EVERY:  # otherwise calls with the same key would reuse plans made without the emulation
        kept.clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the kernel itself runs")
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("scratch", "epilogues"), [(None, {0, 1}), (0, {0, 1, 2}), (64 * 410 * 2 + 99_000, {0, 1, 2})])
@pytest.mark.parametrize("options", ["plain", "all", "none"])
def test_what_the_plans_ask_for(
    emulated, options: str, scratch: int | None, epilogues: set[int], biased: bool, index: torch.dtype
) -> None:
    """Checks addresses, strides, offsets and scalars of every launch: chunks and slices, kept and recomputed."""
    generator = torch.Generator().manual_seed(3)
    room = torch.randn(200, 72, generator=generator).half()
    hidden, weight = room[:, :64], torch.randn(410, 64, generator=generator).mul(0.25).half()
    target = torch.randint(0, 410, (200,), generator=generator).to(index)
    target[::6] = OPTIONS[options].get("ignore_index", -100)
    bias = torch.randn(410, generator=generator).half() if biased else None
    given = dict(scratch_bytes=scratch, **OPTIONS[options])
    ours = results(linear_cross_entropy, hidden, weight, target, bias, backend="cuda", **given)
    assert {made["EPILOGUE"] for made in emulated.made} == epilogues
    emulated.made.clear()
    others = results(linear_cross_entropy, hidden, weight, target, bias, backend="triton", **given)
    assert not emulated.made
    for mine, theirs in zip(ours, others, strict=True):
        scale = theirs.abs().max().item()
        torch.testing.assert_close(mine.float() / scale, theirs.float() / scale, rtol=0, atol=2e-3)


OPTIONS = {
    "plain": {},
    "smooth": dict(label_smoothing=0.1),
    "smooth1": dict(label_smoothing=1.0, reduction="sum"),
    "softcap": dict(softcap=5.0),
    "z": dict(z_loss=1e-2),
    "all": dict(label_smoothing=0.1, softcap=5.0, z_loss=1e-2, ignore_index=3),
    "none": dict(reduction="none", z_loss=1e-3),
}


def problem(
    rows: int, dim: int, vocab: int, dtype: torch.dtype = torch.bfloat16, index: torch.dtype = torch.int64
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(rows + dim + vocab)
    hidden = torch.randn(rows, dim, generator=generator, device="cuda").to(dtype)
    weight = torch.randn(vocab, dim, generator=generator, device="cuda").mul(2 * dim**-0.5).to(dtype)
    target = torch.randint(0, vocab, (rows,), generator=generator, device="cuda")
    bias = torch.randn(vocab, generator=generator, device="cuda").to(dtype)
    return hidden, weight, target.to(index), bias


def results(op, hidden, weight, target, bias=None, **options) -> list[torch.Tensor]:
    """The loss without gradients, then the loss and the gradients for an incoming gradient that differs between
    rows."""
    leaves = [t.detach().requires_grad_() for t in (hidden, weight, bias) if t is not None]
    given = dict(bias=None if bias is None else leaves[2], **options)
    with torch.no_grad():
        alone = op(*leaves[:2], target, **given)
    loss = op(*leaves[:2], target, **given)
    dloss = torch.linspace(0.5, 1.5, loss.numel(), device=loss.device, dtype=loss.dtype).view(loss.shape)
    return [alone, loss.detach(), *torch.autograd.grad(loss, leaves, dloss)]


def agrees(hidden, weight, target, bias=None, **options) -> None:
    """Checks that the errors against fp64 are at most twice those of cuBLAS and Triton, plus an ulp. The two round
    z + bias differently, and how much of that cancels in a sum over rows is chance. A loss over all rows may therefore
    differ by one rounding of the largest logit per row, added up as random errors are."""
    ours = results(linear_cross_entropy, hidden, weight, target, bias, backend="cuda", **options)
    other = results(linear_cross_entropy, hidden, weight, target, bias, backend="triton", **options)
    wide = [None if t is None else t.double() for t in (hidden, weight, bias)]
    known = {name: value for name, value in options.items() if name != "scratch_bytes"}
    exact = results(linear_cross_entropy_reference, wide[0], wide[1], target.long(), wide[2], **known)
    z = torch.nn.functional.linear(*wide).abs().max().item()
    rounding = (
        torch.finfo(hidden.dtype).eps / 2 * z * target.numel() ** (0.5 if options.get("reduction") == "sum" else -0.5)
    )
    for mine, theirs, want in zip(ours, other, exact, strict=True):
        assert mine.dtype == theirs.dtype and mine.stride() == theirs.stride()
        ulp = torch.finfo(mine.dtype).eps * want.abs().max().item()
        bound = 2 * (theirs.double() - want).abs().max().item() + ulp + (rounding if mine.ndim == 0 else 0)
        torch.testing.assert_close(mine.double(), want, rtol=0, atol=bound)


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("scratch", [None, 0])
@pytest.mark.parametrize(
    ("rows", "dim", "vocab"),
    [(1, 8, 1), (7, 64, 191), (129, 72, 192), (300, 128, 522), (257, 1000, 385), (600, 256, 3000), (1100, 512, 50257)],
)
def test_it_is_right(compiler, rows: int, dim: int, vocab: int, scratch: int | None, dtype: torch.dtype) -> None:
    hidden, weight, target, _ = problem(rows, dim, vocab, dtype)
    target[::7] = -100
    target[1 % rows] = vocab - 1
    agrees(hidden, weight, target, scratch_bytes=scratch)


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("scratch", [None, 0])
def test_options(compiler, scratch: int | None, options: str, biased: bool, index: torch.dtype) -> None:
    hidden, weight, target, bias = problem(500, 128, 1030, index=index)
    chosen = OPTIONS[options]
    target[::5] = chosen.get("ignore_index", -100)
    agrees(hidden, weight, target, bias if biased else None, scratch_bytes=scratch, **chosen)


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("options", ["softcap", "all"])
def test_clusters_compute_logits_again_in_tiles_of_160_columns(compiler, options: str) -> None:
    """Chunks of 256 rows, recomputed in slices of 512 entries with more in the epilogue."""
    scratch = 512 * 640 * 2
    config = configs.pick_config(600, 256, 1030, torch.bfloat16, True, scratch)
    assert (config.chunk, config.slice, config.in_gradient) == (256, 512, True)
    hidden, weight, target, bias = problem(600, 256, 1030)
    target[::5] = OPTIONS[options].get("ignore_index", -100)
    agrees(hidden, weight, target, bias, scratch_bytes=scratch, **OPTIONS[options])


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("scratch", [None, 0])
def test_many_rounds(compiler, scratch: int | None) -> None:
    """Many more tiles than CTAs, with fewer K-blocks than pipeline stages, as many, and more."""
    for dim in (64, 320, 448):
        hidden, weight, target, _ = problem(3000, dim, 8200)
        agrees(hidden, weight, target, scratch_bytes=scratch)


@pytest.mark.gpu(min_capability=(9, 0))
def test_layouts(compiler) -> None:
    """Any row stride is read in place; a column-major weight uses Triton, or raises."""
    hidden, weight, target, _ = problem(300, 128, 522)
    wide = torch.randn(522, 256, device="cuda").bfloat16()
    wide[:, 16:144] = weight
    room = torch.randn(300, 3, 136, device="cuda").bfloat16()
    room[:, 1, 8:] = hidden
    agrees(room[:, 1, 8:], wide[:, 16:144], target)
    agrees(hidden.view(3, 100, 128), weight, target.view(3, 100))
    columns = weight.t().contiguous().t()
    with pytest.raises(RuntimeError, match="contiguous rows on 16-byte boundaries"):
        linear_cross_entropy(hidden, columns, target, backend="cuda")
    linear_cross_entropy(hidden, columns, target)


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("scratch", [None, 0])
def test_a_certain_row_has_no_loss_and_no_gradient(compiler, scratch: int | None) -> None:
    """Recomputed logits equal those from which the lse was computed, so that 1 - 1 is 0."""
    hidden, weight, _, _ = problem(700, 128, 1030)
    hidden *= 50
    target = (hidden @ weight.t()).float().argmax(1)
    loss = linear_cross_entropy(hidden, weight, target, reduction="none", backend="cuda")
    certain = loss == 0
    assert certain.any()
    target[~certain] = -100
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    total = linear_cross_entropy(*leaves, target, reduction="sum", scratch_bytes=scratch, backend="cuda")
    dhidden, dweight = torch.autograd.grad(total, leaves)
    assert total == 0
    # The remaining gradient is that of the other entries' probabilities, which are below the rounding of 1.
    assert dhidden.abs().max() < 1e-5 and dweight.abs().max() < 1e-3


@pytest.mark.gpu(min_capability=(9, 0))
def test_what_is_not_finite(compiler) -> None:
    """A row of NaN or inf does not affect other rows' losses and, if it is ignored, not the gradients either."""
    hidden, weight, target, _ = problem(300, 128, 522)
    want = linear_cross_entropy(hidden, weight, target, reduction="none", backend="cuda")
    spoiled = hidden.clone()
    spoiled[5], spoiled[200, 3] = torch.nan, torch.inf
    loss = linear_cross_entropy(spoiled, weight, target, reduction="none", backend="cuda")
    rest = torch.ones(300, dtype=torch.bool, device="cuda")
    rest[5] = rest[200] = False
    assert torch.equal(loss[rest], want[rest]) and loss[5].isnan() and not loss[200].isfinite()
    # Logits that overflow, of a finite row of hidden. With 0 bytes their gradient is computed in CUDA C++, too.
    target[5] = -100
    weight.requires_grad_()
    for scratch, reduction in ((None, "mean"), (0, "mean"), (0, "none")):
        grads = []
        for value in (0.0, 3e38):
            leaf = hidden.detach().clone()
            leaf[5] = value
            leaf.requires_grad_()
            dloss = torch.ones(300, device="cuda")
            dloss[5] = torch.inf
            loss = linear_cross_entropy(
                leaf, weight, target, reduction=reduction, scratch_bytes=scratch, backend="cuda"
            )
            grads.append(torch.autograd.grad(loss, (leaf, weight), dloss if reduction == "none" else None))
        assert not grads[1][0][5].any()
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("scratch", [None, 0])
def test_logits_as_low_as_they_can_be(compiler, scratch: int | None) -> None:
    """Rows whose logits are all equal and as low as can be: 1.5 times as much, the largest term of the sums that are
    hidden's gradient, is finite in fp32."""
    hidden, weight = (torch.zeros(n, 8, dtype=torch.bfloat16, device="cuda") for n in (300, 522))
    hidden[:, 0], weight[:, 0] = 1, -2e38
    target = torch.arange(300, device="cuda")
    alone, loss, dhidden, _ = results(
        linear_cross_entropy, hidden, weight, target, reduction="none", scratch_bytes=scratch, backend="cuda"
    )
    want = torch.full((300,), 522.0, device="cuda").log()
    torch.testing.assert_close(alone, want)
    torch.testing.assert_close(loss, want)
    assert dhidden.isfinite().all()


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("scratch", [None, 0])
def test_repeats_agree_bit_for_bit(compiler, scratch: int | None) -> None:
    given = problem(3000, 512, 5000)
    first, *others = [
        results(linear_cross_entropy, *given, backend="cuda", scratch_bytes=scratch, label_smoothing=0.1)
        for _ in range(4)
    ]
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.gpu(min_capability=(9, 0))
def test_the_loss_alone_has_no_logits_in_memory(compiler) -> None:
    """It stores two values per row and tile instead."""
    hidden, weight, target, _ = problem(2048, 512, 32000)
    linear_cross_entropy(hidden, weight, target, backend="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, weight, target, backend="cuda")
    assert torch.cuda.max_memory_allocated() - before < 4 << 20
