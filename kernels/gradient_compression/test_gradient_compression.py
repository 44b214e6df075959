"""Tests specific to gradient_compression in one process; test_ranks.py has those with several."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from . import CompressState, break_even_bandwidth, configs, gradient_compression, topk
from .bench import SPEC, cost
from .chunks import BITS, KINDS, Chunks
from .configs import BLOCK
from .plans import Stages
from .powersgd import as_matrix, orthonormal, power_sgd, worth_it
from .reference import exchange_reference, gradient_compression_reference, roundtrip
from .residuals import Numbers, Residuals
from .topk import top_k

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ONE_RANK = ("auto", "collectives")  # one fused kernel, and the kernels of several ranks
LARGEST = {"int8": 127, "int4": 7, "fp8": 448}


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether all bits are equal, where any NaN equals any other."""
    if a is None or b is None:
        return a is b
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def simulated(
    tensors: list[torch.Tensor], residuals: list[torch.Tensor | None], kind: str, average: bool, in_place: bool
) -> list[torch.Tensor]:
    """Runs the kernels of several ranks, all in this process. Residuals are updated."""
    world, device = len(tensors), tensors[0].device
    chunks = Chunks.whole_blocks(tensors[0].numel(), world, kind)
    stages = [Stages(chunks, rank, device, average, peers=in_place) for rank in range(world)]
    # Two areas per rank, each with a slot for every rank.
    quantized, reduced = torch.empty(2, world, world, chunks.bytes, dtype=torch.uint8, device=device)
    results = [torch.full_like(tensor, torch.nan) for tensor in tensors]
    if in_place:
        tables = [torch.tensor([rank.data_ptr() for rank in area], device=device) for area in (quantized, reduced)]
        for rank, stage in enumerate(stages):
            stage.quantize(tensors[rank], residuals[rank], quantized[rank], tables[0])
        for rank, stage in enumerate(stages):
            stage.reduce(quantized[rank], residuals[rank], reduced[rank], tables[1], results[rank])
    else:
        for rank, stage in enumerate(stages):
            stage.quantize(tensors[rank], residuals[rank], quantized[rank])
        for rank, stage in enumerate(stages):
            stage.reduce(quantized[:, rank].contiguous(), residuals[rank], reduced[0, rank])
        reduced[1:] = reduced[0]
    for rank, stage in enumerate(stages):
        stage.dequantize(reduced[rank], results[rank])
    return results


@pytest.mark.parametrize(("world", "in_place"), [*((n, False) for n in (1, 2, 3, 5)), *((n, True) for n in (2, 3, 5))])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_of_several_ranks_equal_the_reference_to_the_bit(kind, world, in_place):
    for numel, average, dtype in ((1, True, torch.float32), (700, True, torch.bfloat16), (4099, False, torch.float32)):
        tensors = [torch.randn(numel, device=DEVICE).to(dtype) for _ in range(world)]
        residuals = [(0.01 * torch.randn(numel, device=DEVICE)).bfloat16() for _ in range(world)]
        want, kept = exchange_reference(tensors, residuals, kind, average)
        got = simulated(tensors, residuals, kind, average, in_place)
        assert all(same(result, want) for result in got)
        assert all(same(a, b) for a, b in zip(residuals, kept, strict=True))


@pytest.mark.parametrize("kept_in", [None, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_has_the_same_bits_by_one_kernel(kind, dtype, kept_in):
    """Also signs of zeros, what is not finite, and residuals that fp16 cannot hold. Blocks differ in their scales."""
    for numel in (1, 255, 4099):
        powers = torch.linspace(-40, 37, -(-numel // BLOCK), device=DEVICE).repeat_interleave(BLOCK)[:numel]
        x = (torch.randn(numel, device=DEVICE) * 10.0**powers).to(dtype)
        x[::7], x[5::100], x[17::1000], x[18::1000] = -0.0, 1e30, math.nan, -math.inf
        residual = None if kept_in is None else (x.float() / 100).nan_to_num(0, 0, 0).to(kept_in).clamp(-6e4, 6e4)
        found = []
        for transport in ONE_RANK:
            kept = None if residual is None else residual.clone()
            found.append((gradient_compression(x.clone(), kept, kind=kind, transport=transport), kept))
        (one, one_kept), (several, several_kept) = found
        assert same(one, several) and same(one_kept, several_kept)
        assert torch.equal(one.nan_to_num().signbit(), several.nan_to_num().signbit())


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_of_a_reduce_scatter_equal_the_reference_to_the_bit(kind, world):
    """Each rank's chunk, of any number of elements, is quantised once, in separate blocks."""
    for numel, average in ((300, True), (256, False), (3, True), (1031, False)):
        chunks = Chunks.even(numel * world, world, kind)
        tensors = [torch.randn(numel * world, device=DEVICE) for _ in range(world)]
        stages = [Stages(chunks, rank, torch.device(DEVICE), average, scatter=True) for rank in range(world)]
        quantized = torch.empty(world, world, chunks.bytes, dtype=torch.uint8, device=DEVICE)
        for rank, stage in enumerate(stages):
            stage.quantize(tensors[rank], None, quantized[rank])
        for rank, stage in enumerate(stages):
            out = torch.full((numel + 1,), torch.nan, device=DEVICE)
            stage.reduce(quantized[:, rank].contiguous(), None, out[:numel])
            want = sum(roundtrip(tensor.split(numel)[rank], kind) for tensor in tensors)
            assert torch.equal(out[:numel], want * (1 / world) if average else want) and out[numel].isnan()


@pytest.mark.parametrize("transport", ONE_RANK)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_lost_is_at_most_half_a_step(kind, transport):
    x = torch.randn(1000, device=DEVICE)
    y = gradient_compression(x.clone(), kind=kind, transport=transport)
    for block in range(0, 1000, BLOCK):
        part, kept = x[block : block + BLOCK], y[block : block + BLOCK]
        # The spacing of e4m3 at its largest values is 32. Both quantisations agree except for the scale's rounding.
        step = part.abs().max() / LARGEST[kind] * (32 if kind == "fp8" else 1)
        assert (part - kept).abs().max() <= 0.501 * step


@pytest.mark.parametrize("transport", ONE_RANK)
@pytest.mark.parametrize("kind", KINDS)
def test_every_code_comes_back(kind, transport):
    """Values that a code represents are exact, including zeros and the largest value."""
    if kind == "fp8":
        numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        numbers = numbers[numbers.isfinite()]
    else:
        numbers = torch.arange(-LARGEST[kind], LARGEST[kind] + 1).float()
    x = torch.zeros(2 * BLOCK)
    x[: len(numbers)] = numbers
    x[BLOCK:] = x[:BLOCK] * 2.0**-20
    x = x.to(DEVICE)
    found = gradient_compression(x.clone(), kind=kind, transport=transport)
    torch.testing.assert_close(found, x, rtol=3e-7, atol=0)


@pytest.mark.parametrize("transport", ONE_RANK)
def test_halfway_between_two_codes_of_e4m3_the_even_one_is_taken(transport):
    values = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halfway = torch.zeros(2 * BLOCK)
    halfway[:126], halfway[BLOCK : BLOCK + 126] = (values[:-1] + values[1:]) / 2, -(values[:-1] + values[1:]) / 2
    halfway[BLOCK - 1 :: BLOCK] = 448  # so that the scale is 1
    found = gradient_compression(halfway.clone().to(DEVICE), kind="fp8", transport=transport)
    assert torch.equal(found.cpu(), halfway.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("transport", ONE_RANK)
def test_the_smallest_normal_numbers_are_kept(transport):
    """A scale may be as small as 2^-126: multiples of that are exact, not rounded to multiples of a larger scale."""
    x = torch.arange(-127.0, 128.0, device=DEVICE) * 2.0**-126
    for kind, largest in (("int8", 127), ("int4", 7), ("int8", 5)):
        given = x[127 - largest : 128 + largest].clone()
        assert torch.equal(gradient_compression(given.clone(), kind=kind, transport=transport), given)


@pytest.mark.parametrize("transport", ONE_RANK)
@pytest.mark.parametrize("kind", KINDS)
def test_values_that_are_not_finite_reach_the_result_and_not_the_residual(kind, transport):
    x, residual = torch.randn(600, device=DEVICE), torch.zeros(600, device=DEVICE)
    clean = gradient_compression(x.clone(), kind=kind, transport=transport)
    bad = x.clone()
    bad[3], bad[301], bad[599] = math.nan, math.inf, -math.inf
    y = gradient_compression(bad, residual, kind=kind, transport=transport)
    assert y.isnan().nonzero().flatten().tolist() == [3, 301, 599]
    assert residual.isfinite().all() and (residual[[3, 301, 599]] == 0).all()
    # They do not affect a block's scale, so the other elements are the same as without them.
    kept = ~y.isnan()
    assert (y[kept] == clean[kept]).float().mean() > 0.5


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_residual_in_fp16_stays_finite(kind, in_place):
    """Half a step of large gradients in fp32 is more than fp16 holds, in either quantisation."""
    tensors = [1e8 * torch.randn(700, device=DEVICE) for _ in range(2)]
    residuals = [torch.zeros(700, dtype=torch.float16, device=DEVICE) for _ in range(2)]
    want, kept = exchange_reference(tensors, residuals, kind, True)
    assert all(same(result, want) for result in simulated(tensors, residuals, kind, True, in_place))
    assert all(same(a, b) and a.isfinite().all() for a, b in zip(residuals, kept, strict=True))
    assert max(float(r.abs().max()) for r in residuals) == 65504


def test_error_feedback_makes_up_for_what_was_lost():
    """The sum of the outputs plus the residual equals the sum of the inputs, except for the residual's rounding."""
    x, residual, total = torch.randn(512, device=DEVICE), torch.zeros(512, device=DEVICE), 0
    plain = 0
    for _ in range(20):
        total = total + gradient_compression(x.clone(), residual, kind="int4")
        plain = plain + gradient_compression(x.clone(), kind="int4")
    torch.testing.assert_close(total + residual, 20 * x, rtol=1e-5, atol=1e-4)
    step = x.abs().max() / 7
    assert (total - 20 * x).abs().max() < 2 * step < (plain - 20 * x).abs().max()


def test_views_and_matrices_are_updated_in_place():
    base = torch.randn(40, 30, device=DEVICE)
    want = base.clone()
    want[:, ::2] = gradient_compression_reference(base[:, ::2])
    view = base[:, ::2]
    assert gradient_compression(view) is view and torch.equal(base, want)
    version = base._version
    gradient_compression(base)
    assert base._version > version


def test_the_reference_rounds_as_quantisation_is_defined():
    x = torch.tensor([127.0, 0.5, 1.5, -2.5, 0.49])
    assert roundtrip(x, "int8").tolist() == pytest.approx([127.0, 0.0, 2.0, -2.0, 0.0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 1 << 20])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_chunks_cover_the_tensor(kind, numel, world):
    chunks = Chunks.whole_blocks(numel, world, kind)
    assert chunks.elements % BLOCK == 0 and chunks.elements * world >= numel > chunks.elements * world - BLOCK * world
    assert chunks.bytes % 16 == 0 and chunks.scales_at % 16 == 0
    assert 0 <= chunks.bytes - (chunks.elements * BITS[kind] // 8 + 4 * chunks.blocks) < 16


def test_it_compiles_for_hopper():
    """The interpreter behaves as a GPU without conversions to fp8, and covers none of the instructions of sm_90."""
    script = """
from harness.compiling import ahead
from kernels.gradient_compression.bench import SPEC
cases = [case for case in SPEC.cases if case.dims == {"numel": 1021} and case.dtype.itemsize == 4]
assert len(cases) == 3, cases
outcome = ahead.compile_spec(SPEC, (9, 0), cases, ("fwd",))
assert not outcome.failures, outcome.failures
assert len(outcome.rows) == 12 and sum(row["to_fp8"][0] > 0 for row in outcome.rows) == 3
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(configs.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_configurations_are_pure_and_valid():
    for blocks in (1, 100, 10**6):
        config = configs.pick_config(blocks, (9, 0))
        assert config == configs.pick_config(blocks, (9, 0))
        assert config.rows & (config.rows - 1) == 0 and config.rows * BLOCK >= 32 * config.num_warps


@pytest.mark.parametrize(("kind", "ratio"), [("int8", 1.96), ("int4", 3.87)])
def test_what_the_link_carries(kind, ratio):
    """For two GPUs, compared with an all-reduce in bf16, which sends the tensor once."""
    case = SPEC.case(f"64MiB-bf16-{kind}-x2")
    found = cost(case, "fwd")
    assert (64 << 20) / found.link_bytes == pytest.approx(ratio, abs=0.02)
    assert found.bytes == 2 * (64 << 20) and cost(SPEC.case("16MiB-bf16-int8"), "fwd").link_bytes == 0


def test_break_even():
    # 2 GB saved per second of kernels.
    assert break_even_bandwidth(4e9, 2e9, 1.0) == 2e9
    assert break_even_bandwidth(4e9, 2e9, 1.0, overlapped_fraction=0.5) == 4e9
    assert break_even_bandwidth(4e9, 2e9, 0.0) == math.inf
    assert break_even_bandwidth(2e9, 2e9, 1.0) == 0
    bandwidth = break_even_bandwidth(3e9, 1e9, 0.01)
    assert 3e9 / bandwidth == pytest.approx(1e9 / bandwidth + 0.01)
    with pytest.raises(ValueError, match="baseline_bytes"):
        break_even_bandwidth(-1, 0, 0)
    with pytest.raises(ValueError, match="overlapped_fraction"):
        break_even_bandwidth(1, 0, 0, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(kind="int3"), "kind must be one of"),
        (dict(transport="pigeon"), "transport must be one of"),
        (dict(residual=torch.zeros(3, device=DEVICE)), "residual must have tensor.s shape"),
        (dict(residual="none"), "residual must be a tensor"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        gradient_compression(torch.zeros(4, device=DEVICE), **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(bits=3), "bits must be 8 or 4"),
        (dict(kind="zip"), "kind must be one of"),
        (dict(ratio=0.0), "ratio must be"),
        (dict(rank=0), "rank must be"),
        (dict(transport="mail"), "transport must be"),
    ],
)
def test_a_state_names_what_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=message):
        CompressState(**arguments)


def test_bits_choose_the_kind():
    assert CompressState().kind == "int8" and CompressState(bits=4).kind == "int4"
    assert CompressState(bits=4, kind="fp8").kind == "fp8"


def test_residuals_move_with_their_parameters():
    a, b, c = (torch.zeros(n) for n in (4, 6, 2))
    numbers = Numbers()
    assert numbers.of([b, a]) == [1, 0] and numbers.of([c]) == [2] and numbers.of([a, c, b]) == [0, 2, 1]
    residuals = Residuals(torch.float32)
    first = residuals.of(0, [(0, 0, 4), (1, 4, 6)], torch.zeros(10))
    first.copy_(torch.arange(10.0))
    assert residuals.of(0, [(0, 0, 4), (1, 4, 6)], torch.zeros(10)) is first
    # DDP rebuilds the buckets.
    second = residuals.of(0, [(2, 0, 2), (1, 2, 6)], torch.zeros(8))
    third = residuals.of(1, [(0, 0, 4)], torch.zeros(4))
    assert second.tolist() == [0, 0, 4, 5, 6, 7, 8, 9] and third.tolist() == [0, 1, 2, 3]
    loaded = Residuals(torch.float32)
    loaded.load_state_dict(residuals.state_dict())
    assert loaded.of(5, [(1, 0, 6)], torch.zeros(6)).tolist() == [4, 5, 6, 7, 8, 9]
    with pytest.raises(ValueError, match="residual 0 must have 4 elements"):
        residuals.load_state_dict({1: torch.zeros(6), 0: torch.zeros(3)})
    assert second.tolist() == [0, 0, 4, 5, 6, 7, 8, 9]
    # A state from before the first compressed step, as of the warm-up, has none for a parameter.
    residuals.load_state_dict({1: torch.ones(6)})
    assert second.tolist() == [0, 0, *[1] * 6] and not third.any()


def test_buckets_that_come_back_have_the_present_residuals():
    """Two initial buckets become one, and a second DistributedDataParallel of the model begins with two again."""
    residuals, whole, two = Residuals(torch.float32), [(0, 0, 4), (1, 4, 6)], ([(0, 0, 4)], [(1, 0, 6)])
    for bucket, places in enumerate(two):
        residuals.of(bucket, places, torch.zeros(places[0][2]))
    residuals.of(0, whole, torch.zeros(10)).copy_(torch.arange(10.0))
    back = [residuals.of(bucket, places, torch.zeros(places[0][2])) for bucket, places in enumerate(two)]
    assert torch.cat(back).tolist() == list(range(10))
    back[1].fill_(1)
    assert residuals.state_dict()[1].tolist() == [1] * 6


def test_top_k_keeps_the_largest_and_leaves_the_others():
    x, residual = torch.randn(200, device=DEVICE), torch.zeros(200, dtype=torch.bfloat16, device=DEVICE)
    y = x.clone()
    top_k(y, residual, None, 0.1, 200)
    largest = x.abs().topk(20).indices
    assert (y != 0).sum() == 20 and torch.equal(y[largest], x[largest])
    assert (residual[largest] == 0).all()
    torch.testing.assert_close(y + residual.float(), x, rtol=1e-2, atol=1e-2)
    left, again = residual.clone(), torch.zeros_like(x)
    top_k(again, residual, None, 0.1, 200)  # what was left is sent later
    largest = left.abs().topk(20).indices
    assert torch.equal(again[largest], left[largest].float()) and again.count_nonzero() == 20
    x[7] = math.nan
    top_k(x, residual, None, 0.1, 200)
    assert x[7].isnan() and residual.isfinite().all()


@pytest.mark.parametrize("residual", [None, torch.bfloat16])
def test_top_k_sends_indices_that_int32_does_not_hold(residual, monkeypatch):
    """As of more than 2^31 elements: 21 indices, an odd number, after which 8 bytes are not aligned."""
    x, found = torch.randn(200, device=DEVICE), []
    for most in (topk.INT32, 199):
        monkeypatch.setattr(topk, "INT32", most)
        kept = None if residual is None else torch.zeros(200, dtype=residual, device=DEVICE)
        found.append((x.clone(), kept))
        top_k(*found[-1], None, 0.105, 200)
    (a, kept), (b, again) = found
    assert torch.equal(a, b) and same(kept, again) and (a != 0).sum() == 21


def matrix_of_rank(rank: int, rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, rank, device=DEVICE) @ torch.randn(rank, columns, device=DEVICE)


def test_power_sgd_finds_a_matrix_of_low_rank():
    matrices = {0: matrix_of_rank(2, 40, 24), 3: matrix_of_rank(4, 40, 24), 5: matrix_of_rank(3, 8, 60)}
    factors: dict[int, torch.Tensor] = {}
    for _ in range(3):
        result = power_sgd(matrices, factors, None, 4)
    assert sorted(factors) == [0, 3, 5]
    for number, matrix in matrices.items():
        torch.testing.assert_close(result[number], matrix, rtol=1e-4, atol=1e-4)


def test_power_sgd_inside_of_autocast_multiplies_in_fp32():
    """Values this small would be 0 in fp16."""
    matrix = 1e-9 * matrix_of_rank(2, 40, 24)
    plain = power_sgd({0: matrix}, {}, None, 4)[0]
    with torch.autocast(DEVICE, torch.float16 if DEVICE == "cuda" else torch.bfloat16):
        inside = power_sgd({0: matrix}, {}, None, 4)[0]
    assert torch.equal(inside, plain) and plain.any()


@pytest.mark.parametrize("rows", [0, 1])
def test_power_sgd_recovers_after_matrices_of_lower_rank(rows):
    """Zeros, as of the first gradient below a layer that begins with zeros; one row, as of a rare token."""
    factors: dict[int, torch.Tensor] = {}
    lower = torch.zeros(40, 24, device=DEVICE)
    for _ in range(6):
        lower[:rows] = 1e-3 * torch.randn(rows, 24, device=DEVICE)
        torch.testing.assert_close(power_sgd({0: lower}, factors, None, 4)[0], lower)
    matrix = 1e-3 * matrix_of_rank(3, 40, 24)
    for _ in range(3):
        result = power_sgd({0: matrix}, factors, None, 4)[0]
    torch.testing.assert_close(result, matrix, rtol=1e-3, atol=1e-6)


@pytest.mark.gpu
def test_power_sgd_takes_factors_that_were_loaded_to_another_device():
    """A checkpoint is often loaded to the CPU."""
    matrices = {0: matrix_of_rank(2, 40, 24)}
    factors: dict[int, torch.Tensor] = {}
    power_sgd(matrices, factors, None, 2)
    loaded = {number: factor.cpu() for number, factor in factors.items()}
    want, got = (power_sgd(matrices, of_it, None, 2)[0] for of_it in (factors, loaded))
    torch.testing.assert_close(got, want)
    assert loaded[0].device == matrices[0].device


def test_power_sgd_passes_on_what_is_not_finite_and_keeps_its_factors():
    matrices = {0: matrix_of_rank(2, 40, 24), 1: matrix_of_rank(2, 40, 24)}
    factors: dict[int, torch.Tensor] = {}
    power_sgd(matrices, factors, None, 2)
    before = factors[0].clone()
    matrices[0][3, 4] = math.inf
    result = power_sgd(matrices, factors, None, 2)
    assert result[0].isnan().all() and result[1].isfinite().all()
    assert torch.equal(factors[0], before)


@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
def test_cholesky_qr_is_orthonormal_also_of_nearly_dependent_columns(scale):
    p = scale * torch.randn(3, 50, 4, device=DEVICE)
    p[1, :, 3] = p[1, :, 0] + 1e-3 * p[1, :, 3]
    q = orthonormal(p)
    torch.testing.assert_close(q.mT @ q, torch.eye(4, device=DEVICE).expand(3, 4, 4), rtol=0, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_cholesky_qr_of_dependent_columns_is_never_long(scale):
    p = scale * torch.randn(20, 50, 1, device=DEVICE).expand(20, 50, 3).clone()
    p[19] = 0
    q = orthonormal(p)
    assert q.isfinite().all() and (q[19] == 0).all()
    assert torch.linalg.matrix_norm(q, 2).max() < 1.001
    torch.testing.assert_close(q @ (q.mT @ p), p, rtol=1e-3, atol=1e-3 * scale)


def test_what_power_sgd_is_worth():
    assert worth_it(torch.Size((64, 64)), 4) and not worth_it(torch.Size((4, 4)), 4)
    assert as_matrix(torch.Size((8, 3, 5))) == (8, 15)
