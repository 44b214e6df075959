"""When a tensor is right, and what watches a call: `harness.correctness`."""

from __future__ import annotations

import dataclasses
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from harness import execute
from harness.correctness import accuracy, guard, layouts, oracle
from harness.correctness.accuracy import compare, compare_all
from harness.correctness.oracle import Expected, expected, hold_against
from harness.correctness.verify import verify
from harness.sampling import Sample
from harness.spec import Case, Cost, KernelSpec, Rows, Tolerance
from tests.wrong import wrappers

EXACT = Tolerance(ratio=2.0, floor=0.0)
INF, NAN = float("inf"), float("nan")


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def f32(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def judge(result, oracle, eager, dtype=torch.float32, tolerance=EXACT, **kwargs):
    return compare(result, oracle, eager, dtype, tolerance, **kwargs)


def test_error_is_held_against_eagers():
    oracle, eager = f64(1, 2, 3, 4), f32(1, 2, 3, 4.001)
    assert judge(f32(1, 2, 3, 4.0019), oracle, eager).ok
    verdict = judge(f32(1, 2, 3, 4.0021), oracle, eager)
    assert (verdict.ok, verdict.cause) == (False, "error")
    assert verdict.numbers["eager_max"] == pytest.approx(0.001, rel=1e-3)
    assert verdict.numbers["max"] == pytest.approx(0.0021, rel=1e-3)


def test_rms_counts_where_the_maximum_does_not():
    oracle = torch.zeros(100, dtype=torch.float64)
    eager, result = torch.zeros(100), torch.full((100,), 0.0019)
    eager[7] = 0.001
    assert "rms" in judge(result, oracle, eager).reason


def test_floor_is_in_epsilons_of_the_scale():
    oracle, eager = f64(1, 8), f32(1, 8)
    step = 8 * torch.finfo(torch.float32).eps
    tolerance = Tolerance(ratio=2.0, floor=4.0)
    assert judge(f32(1, 8 + 3 * step), oracle, eager, tolerance=tolerance).ok
    assert not judge(f32(1, 8 + 5 * step), oracle, eager, tolerance=tolerance).ok


def test_small_values_are_held_against_one_another():
    oracle = torch.cat((torch.ones(100), torch.full((40,), 3e-3), torch.full((40,), 3e-5))).double()
    eager = (oracle * (1 + 1e-4)).float()
    for wrong in (slice(100, 140), slice(140, 180)):
        result = eager.clone()
        result[wrong] = oracle[wrong].float() * 1.01
        assert judge(eager, oracle, eager).ok
        assert "of the 40 elements" in judge(result, oracle, eager).reason


def test_every_element_of_fp8_is_within_one_step():
    fp8 = torch.float8_e4m3fn
    oracle = torch.linspace(-400, 400, 4001, dtype=torch.float64)
    eager = oracle.to(fp8)
    for steps, ok in ((1, True), (2, False)):
        result = eager.clone()
        result.view(torch.uint8)[-1] -= steps
        assert judge(result, oracle, eager).ok == ok


def test_rows_outside_the_sample_must_be_finite():
    rows = Sample(Rows(2, {"x": 0}, 0), torch.tensor([0, 3]), 4)
    case = Case("4x3", dict(rows=4), torch.float32)
    truth = Expected(("output 0",), (torch.zeros(2, 3).double(),), (torch.zeros(2, 3),), lambda seed: ())
    spec = SimpleNamespace(tolerance=EXACT)
    result = torch.zeros(4, 3)
    assert hold_against(truth, [result], case, spec, rows).ok
    result[2, 1] = NAN
    assert hold_against(truth, [result], case, spec, rows).cause == "nonfinite"


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_nonfinite_results_are_rejected(bad):
    verdict = judge(f32(1, bad), f64(1, 2), f32(1, 2))
    assert verdict.cause == "nonfinite" and "element 1" in verdict.reason


@pytest.mark.parametrize(("result", "ok"), [(NAN, True), (INF, False), (-INF, False), (0.0, False)])
def test_nan_must_stand_where_the_oracle_has_it(result, ok):
    assert judge(f32(1, result), f64(1, NAN), f32(1, NAN)).ok is ok


def test_the_sign_of_an_infinity_counts():
    assert judge(f32(INF, -INF), f64(INF, -INF), f32(INF, -INF)).ok
    assert not judge(f32(INF, INF), f64(INF, -INF), f32(INF, -INF)).ok


def test_overflow_at_the_last_rounding_is_expected():
    half = torch.tensor([1.0, INF], dtype=torch.float16)
    assert judge(half, f64(1, 1e5), half, torch.float16).ok
    finite = torch.tensor([1.0, 65504.0], dtype=torch.float16)
    assert judge(finite, f64(1, 1e5), half, torch.float16).cause == "nonfinite"


def test_overflow_may_come_a_little_early():
    """Where an error as large as is allowed makes the difference, and with the right sign."""
    oracle, eager = f64(60000, 65515, 100), torch.tensor([60000.0, 65504.0, 100.0]).half()
    for wrong, ok in (((60000, INF, 100), True), ((60000, -INF, 100), False), ((INF, 65504, 100), False)):
        assert judge(torch.tensor(wrong).half(), oracle, eager, torch.float16).ok is ok
    assert not judge(torch.tensor([60000.0, NAN, 100.0]).half(), oracle, eager, torch.float16).ok


def test_overflow_on_the_way_may_be_eagers_or_avoided():
    oracle, eager = f64(1, 2), f32(1, INF)
    assert judge(f32(1, INF), oracle, eager).ok
    assert judge(f32(1, 2), oracle, eager).ok
    assert not judge(f32(1, NAN), oracle, eager).ok
    assert not judge(f32(1, 3), oracle, eager).ok


def test_shape_dtype_and_count():
    oracle, eager = torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3)
    assert judge(torch.zeros(3, 2), oracle, eager).cause == "shape"
    assert judge(torch.zeros(2, 3).half(), oracle, eager).cause == "dtype"
    assert compare_all([eager, eager], [oracle], [eager], ["y"], torch.float32, EXACT).cause == "count"


def test_empty_and_scalar_tensors():
    assert judge(torch.zeros(0, 5), torch.zeros(0, 5, dtype=torch.float64), torch.zeros(0, 5)).ok
    assert judge(torch.tensor(1.0), torch.tensor(1.0).double(), torch.tensor(1.0)).ok
    assert not judge(torch.tensor(1.1), torch.tensor(1.0).double(), torch.tensor(1.0)).ok


def test_integers_are_equal_or_wrong():
    oracle = torch.tensor([1, 2, 3])
    assert judge(oracle.clone(), oracle, oracle).ok
    assert judge(oracle + 1, oracle, oracle).cause == "error"


def test_bfloat16_has_bounds_of_its_own():
    generator = torch.Generator().manual_seed(0)
    oracle = torch.randn(1000, dtype=torch.float64, generator=generator)
    eager = oracle.bfloat16()
    loose = Tolerance(ratio=100.0, floor=100.0)
    assert judge(eager, oracle, eager, torch.bfloat16, loose).ok
    verdict = judge((oracle * 1.01).bfloat16(), oracle, eager, torch.bfloat16, loose)
    assert not verdict.ok and "relative rms" in verdict.reason
    one_off = eager.clone()
    one_off[oracle.abs().argmax()] *= 1.04
    assert "relative max" in judge(one_off, oracle, eager, torch.bfloat16, loose).reason
    twice_rounded = (oracle + 2.5e-3 * torch.randn(1000, dtype=torch.float64, generator=generator)).bfloat16()
    assert judge((oracle * 1.0045).bfloat16(), oracle, twice_rounded, torch.bfloat16).ok


def test_fp8_cases_are_held_to_their_distance():
    generator = torch.Generator().manual_seed(0)
    oracle = torch.randn(1000, dtype=torch.float64, generator=generator)
    noise = torch.randn(1000, dtype=torch.float64, generator=generator)
    eager = oracle.bfloat16()
    near, far = (oracle + 0.02 * noise).bfloat16(), (oracle + 0.06 * noise).bfloat16()
    assert judge(near, oracle, eager, torch.float8_e4m3fn).ok
    assert "distance" in judge(far, oracle, eager, torch.float8_e4m3fn).reason
    assert judge(torch.zeros_like(eager), oracle * 0, eager * 0, torch.float8_e4m3fn).ok


def test_pieces_add_up(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    oracle = torch.randn(101, 3, dtype=torch.float64, generator=generator)
    eager, result = oracle.float(), oracle.float() + 1e-3
    whole = judge(result, oracle, eager)
    monkeypatch.setattr(accuracy, "PIECE", 7)
    pieces = judge(result, oracle, eager)
    assert pieces.numbers == pytest.approx(whole.numbers)
    result[100, 2] = NAN
    assert "element 302" in judge(result, oracle, eager).reason


def test_where_limits_the_comparison():
    oracle, eager, result = f64(1, 2, 3), f32(1, 2, 3), f32(1, 2, NAN)
    assert judge(result, oracle, eager, where=torch.tensor([True, True, False])).ok
    assert not judge(result, oracle, eager, where=torch.tensor([False, False, True])).ok


def cancel(x: torch.Tensor) -> torch.Tensor:
    """Zero in exact arithmetic but for the last term; eager is right by luck where x is a power of two."""
    return ((x * 3) / 3 - x) + x * 1e-6


def times(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * weight


def spec_of(reference, names=("x",), **changes) -> KernelSpec:
    def make_inputs(case, device, generator):
        shape, dtype = (case.dims["rows"], 8), case.dtype
        return {n: torch.randn(shape, dtype=dtype, device=device, generator=generator) for n in names}

    spec = KernelSpec(
        name="toy",
        implementations={"toy": reference},
        reference=reference,
        make_inputs=make_inputs,
        cost=lambda case, mode: Cost(1, 1),
        cases=(Case("5", dict(rows=5), torch.float32, bench=True),),
        grads=tuple(names),
        unit="rows",
        items=lambda case: case.dims["rows"],
        fuzz={},
    )
    return dataclasses.replace(spec, **changes)


def test_luck_of_eager_is_not_held_against_a_result():
    spec = spec_of(cancel)
    inputs = {"x": 2.0 ** torch.arange(16.0)}
    truth = expected(spec, inputs)
    lucky = float((truth.eager[0].double() - truth.oracle[0]).abs().max())
    assert lucky < 1e-5
    one_rounding = truth.eager[0] + inputs["x"] * torch.finfo(torch.float32).eps
    assert truth.verdict([one_rounding], spec.cases[0], spec).ok
    assert not truth.verdict([one_rounding + inputs["x"] * 1e-5], spec.cases[0], spec).ok


def test_luck_with_a_single_number_beside_many(monkeypatch):
    """Where outputs have so many elements that eager is not accurate by chance, the loss beside them may be."""
    monkeypatch.setattr(oracle, "NOISE_ELEMENTS", 1000)
    monkeypatch.setattr(oracle, "FEW_ELEMENTS", 10)
    exact = torch.ones((), dtype=torch.float64), torch.linspace(1, 2, 2000, dtype=torch.float64)
    eager = tuple(t.float() for t in exact)
    truth = Expected(("loss", "weights"), exact, eager, lambda seed: tuple(t * (1 + 1e-4) for t in exact))
    spec = spec_of(cancel)
    case = spec.cases[0]
    assert truth.verdict([eager[0] * (1 + 5e-5), eager[1]], case, spec).ok
    assert not truth.verdict([eager[0] * (1 + 5e-3), eager[1]], case, spec).ok
    assert truth.verdict([eager[0], eager[1] * (1 + 5e-5)], case, spec).reason.startswith("weights: ")


@pytest.mark.parametrize("many", [False, True])
def test_there_are_as_many_samples_as_acceptance_takes(many, monkeypatch):
    monkeypatch.setattr(oracle, "NOISE_ELEMENTS", 1000 if many else 10**8)
    monkeypatch.setattr(oracle, "FEW_ELEMENTS", 10)
    exact = torch.ones((), dtype=torch.float64), torch.linspace(1, 2, 2000, dtype=torch.float64)
    eager = tuple(t.float() for t in exact)
    seeds = []

    def perturbed(seed):
        seeds.append(seed)
        return tuple(t * (1 + 1e-5 * 2**seed) for t in exact)

    spec = spec_of(cancel)

    def samples(error: float) -> tuple[bool, int]:
        seeds.clear()
        accepted = Expected(("loss", "weights"), exact, eager, perturbed).verdict(
            [eager[0] * (1 + error), eager[1]], spec.cases[0], spec
        )
        assert seeds == list(range(len(seeds)))
        return accepted.ok, len(seeds)

    assert samples(0) == (True, 0) and samples(1e-5) == (True, 1) and samples(1e-2) == (False, oracle.NOISE_SAMPLES)
    assert samples(1e-4) == (True, 4)  # the limit is twice the largest error so far


def test_a_later_sample_may_explain_what_overflows_in_another_output():
    exact = torch.ones(40, dtype=torch.float64), torch.ones(40, dtype=torch.float64)
    exact[1][0] = torch.finfo(torch.float16).max + 400
    eager = tuple(t.half() for t in exact)
    results = [eager[0] * 1.03, eager[1].nan_to_num()]
    case, spec = dataclasses.replace(spec_of(cancel).cases[0], dtype=torch.float16), spec_of(cancel)
    spec = dataclasses.replace(spec, tolerance=Tolerance(ratio=2.0, floor=1.0))
    for explains, accepted in ((1, True), (oracle.NOISE_SAMPLES, False)):

        def perturbed(seed, explains=explains):
            return exact[0] * 1.02, exact[1] * (1 + 0.02 * (seed == explains))

        assert Expected(("a", "b"), exact, eager, perturbed).verdict(results, case, spec).ok is accepted


class Attend(torch.autograd.Function):
    """Attention of one head in 16 bits, which rounds p and ds for its GEMMs as FlashAttention does."""

    @staticmethod
    def forward(ctx, q, k, v):
        p = (q.float() @ k.float().t()).softmax(-1)
        ctx.save_for_backward(q, k, v, p)
        return (p.to(q.dtype).float() @ v.float()).to(q.dtype)

    @staticmethod
    def backward(ctx, dout):
        q, k, v, p = (t.float() for t in ctx.saved_tensors)
        dp = dout.float() @ v.t()
        ds = (p * (dp - (dp * p).sum(-1, keepdim=True))).to(dout.dtype).float()
        dv = p.to(dout.dtype).float().t() @ dout.float()
        return (ds @ k).to(dout.dtype), (ds.t() @ q).to(dout.dtype), dv.to(dout.dtype)


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("many", [False, True])
def test_what_is_rounded_for_a_product_has_its_error_in_small_values_too(many, fits, monkeypatch):
    """The reference computes in fp32, so that its error is that of the last rounding, in proportion to each value. All
    of that holds too where fp64 does not fit in memory."""
    monkeypatch.setattr(oracle, "NOISE_ELEMENTS", 1000 if many else 10**8)

    def exact(q, k, v):
        if q.dtype == torch.float64 and not fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        wide = torch.promote_types(q.dtype, torch.float32)
        return ((q.to(wide) @ k.to(wide).t()).softmax(-1) @ v.to(wide)).to(q.dtype)

    spec = spec_of(exact, ("q", "k", "v"))
    case = Case("b", dict(rows=2000), torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    inputs = {n: torch.randn(2000, 64, generator=generator).mul(0.3).bfloat16() for n in "qkv"}
    dout = [torch.randn(2000, 64, generator=generator).bfloat16()]
    truth = expected(spec, inputs, dout)
    outputs, gradients = oracle.call(spec, lambda q, k, v: Attend.apply(q, k, v), inputs, dout)
    results = [*outputs, *gradients]
    plain = oracle.compare_all(results, truth.oracle, truth.eager, truth.names, case.dtype, spec.tolerance)
    assert "of the largest exceeds" in plain.reason
    assert truth.verdict(results, case, spec).ok
    for index, name in enumerate(truth.names):
        small = results[index].abs() <= 1e-2 * results[index].abs().max()
        wrong = [*results[:index], torch.where(small, 0, results[index]), *results[index + 1 :]]
        assert truth.verdict(wrong, case, spec).reason.startswith(f"{name}: "), name


def test_memory_that_runs_out_in_the_comparison_is_no_wrong_result(monkeypatch):
    """A correct result that needs the second comparison, when memory for it is gone: the exception is passed on."""
    monkeypatch.setattr(oracle, "NOISE_ELEMENTS", 10)

    def gone(seed):
        raise torch.OutOfMemoryError("CUDA out of memory")

    spec = spec_of(cancel)
    exact = torch.linspace(1, 2, 2000, dtype=torch.float64)
    truth = Expected(("weights",), (exact,), (exact.float(),), gone)
    assert truth.verdict([exact.float()], spec.cases[0], spec).ok
    with pytest.raises(torch.OutOfMemoryError):
        truth.verdict([exact.float() * (1 + 5e-5)], spec.cases[0], spec)


def test_a_matrix_product_may_be_rounded_to_the_inputs_dtype():
    """A sum over its elements in fp32, of which eager's is right by luck."""

    def total(x, weight):
        product = x @ weight
        return product.float().sum() if x.dtype != torch.float64 else product.sum()

    spec = spec_of(total, ("x", "weight"), cases=(Case("5", dict(rows=8), torch.float16, bench=True),))
    inputs = {"x": torch.ones(8, 8).half(), "weight": torch.ones(8, 8).half()}
    truth = expected(spec, inputs)
    assert float(truth.eager[0]) == float(truth.oracle[0]) == 512
    assert truth.verdict([truth.eager[0] + 0.02], spec.cases[0], spec).ok
    assert not truth.verdict([truth.eager[0] + 2.0], spec.cases[0], spec).ok
    wide = {n: t.float() for n, t in inputs.items()}
    assert not expected(spec, wide).verdict([truth.eager[0] + 0.02], spec.cases[0], spec).ok


def test_each_term_of_a_product_may_have_an_error_that_the_spec_declares():
    """Also where the terms cancel, and only in products."""
    inputs = {"x": torch.tensor([[1.0, -1.0]]).repeat(40, 1)}
    result = torch.full((40, 1), 1e-4)

    def difference(x):
        return x @ torch.ones(2, 1, dtype=x.dtype)

    for error, ok in ((0.0, False), (2**-12, True)):
        spec = spec_of(difference, product_error=lambda _, error=error: error)
        assert expected(spec, inputs).verdict([result], spec.cases[0], spec).ok is ok
        spec = spec_of(lambda x: x.sum(-1, keepdim=True), product_error=lambda _, error=error: error)
        assert not expected(spec, inputs).verdict([result], spec.cases[0], spec).ok


def test_where_fp64_does_not_fit_the_error_of_products_is_the_yardstick(monkeypatch):
    """The oracle is then what eager computes, with products in bf16, whose error it would take for 0."""
    monkeypatch.setattr("harness.correctness.oracle._unless_out_of_memory", lambda compute: None)
    inputs = {"x": torch.ones(40, 64)}

    def mean(x):
        return (x.bfloat16() @ torch.ones(64, 1).bfloat16()).float().mean() / 64

    for error, ok in ((0.0, False), (2**-8, True)):
        spec = spec_of(mean, product_error=lambda _, error=error: error)
        truth = expected(spec, inputs)
        assert truth.verdict([truth.eager[0] + 2e-4], spec.cases[0], spec).ok is ok
        assert not truth.verdict([truth.eager[0] + 5e-2], spec.cases[0], spec).ok


def test_the_sum_in_a_log_softmax_has_one_error_for_the_whole_row():
    """Which does not average out over the row, as errors of its elements would. Equal logits: the answer is 0."""

    def excess(x):
        return torch.log_softmax(x, -1).exp().sum(-1) - 1

    spec = spec_of(excess)
    inputs = {"x": torch.ones(1, 64)}
    truth = expected(spec, inputs)
    log_sum = 4.16  # log 64
    assert truth.verdict([torch.full((1,), log_sum * torch.finfo(torch.float32).eps)], spec.cases[0], spec).ok
    assert not truth.verdict([torch.full((1,), 1e-5)], spec.cases[0], spec).ok


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
@pytest.mark.parametrize("shape", [(), (5,), (4, 3), (2, 3, 5), (0, 4), (4, 1)])
def test_layouts_hold_the_values_amid_poison(layout, shape):
    values = torch.randn(shape, dtype=torch.float16)
    placed = layouts.place(values, layout)
    assert placed.shape == values.shape
    if layout not in ("expanded", "scalar"):
        assert torch.equal(placed, values)
    buffer = torch.empty(0, dtype=torch.float16).set_(placed.untyped_storage())
    assert int(buffer.isnan().sum()) >= layouts.PAD  # two sides, two bytes an element
    assert placed.is_contiguous() or values.numel() < 2 or layout not in ("contiguous", "offset")


def test_layouts_are_what_they_say():
    values = torch.randn(4, 6)
    assert layouts.place(values, "transposed").stride() == (1, 4)
    assert layouts.place(values, "sliced").stride() == (6 + layouts.GAP, 1)
    assert layouts.place(values, "strided").stride() == (12, 2)
    assert layouts.place(values, "offset").data_ptr() % 16 == 4
    assert layouts.place(values, "contiguous").data_ptr() % 16 == 0
    assert layouts.place(values, "expanded").stride() == (0, 1)
    assert layouts.place(values, "scalar").stride() == (0, 0)


def test_rounds_give_each_tensor_each_layout():
    seen = [assignment.layouts for assignment in layouts.rounds(["x", "weight"])]
    for name in ("x", "weight"):
        assert {assignment[name] for assignment in seen} == set(layouts.LAYOUTS)
    assert all(assignment["x"] != assignment["weight"] for assignment in seen)


def test_poison_fills_fresh_memory_and_is_switched_off_again():
    before = torch.are_deterministic_algorithms_enabled()
    with guard.poisoned():
        assert torch.empty(1000).isnan().all()
        assert torch.empty_like(torch.zeros(3, 3, dtype=torch.float16)).isnan().all()
    assert torch.are_deterministic_algorithms_enabled() is before
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


def test_snapshot_tells_an_input_from_its_surroundings():
    inputs = {"x": layouts.place(torch.randn(4, 6), "sliced"), "eps": 1e-6, "y": torch.randn(3)}
    snapshot = guard.Snapshot(inputs)
    assert snapshot.verdict().ok
    inputs["y"].data[1] += 1
    assert (snapshot.verdict().cause, "y" in snapshot.verdict().reason) == ("inputs", True)
    snapshot = guard.Snapshot(inputs)
    torch.as_strided(inputs["x"], (1,), (1,), inputs["x"].storage_offset() + 6).zero_()
    assert (snapshot.verdict().cause, "around x" in snapshot.verdict().reason) == ("bounds", True)


def test_nan_inputs_count_as_unchanged():
    snapshot = guard.Snapshot({"x": torch.full((3,), NAN)})
    assert snapshot.verdict().ok


@pytest.mark.parametrize("index", [-1, 12])
def test_allocations_are_fenced(index):
    with guard.Allocations() as allocations:
        made = torch.empty(3, 4, dtype=torch.float16), torch.zeros(12), torch.ones(2, 6).new_empty(12)
        assert torch.equal(made[1], torch.zeros(12))
        assert allocations.verdict().ok
        for tensor in made:
            torch.as_strided(tensor, (1,), (1,), tensor.storage_offset() + 11).zero_()
        assert allocations.verdict().ok
        torch.as_strided(made[2], (1,), (1,), made[2].storage_offset() + index).zero_()
        assert allocations.verdict().cause == "bounds"


def test_the_fences_leave_torch_device_as_it_is():
    """A model that is made on the meta device at its first call, which is observed, is made there later too."""
    torch.utils._device._device_constructors.cache_clear()
    for surroundings in (guard.Allocations(), nullcontext()):
        with surroundings, torch.device("meta"):
            assert torch.empty(2).is_meta and torch.nn.Linear(2, 2).weight.is_meta


def test_observe_sees_results_that_change_later():
    gate = threading.Event()

    def run():
        result = torch.zeros(3)

        def fill() -> None:
            gate.wait()
            result.fill_(1)

        thread = threading.Thread(target=fill)
        thread.start()
        threads.append(thread)
        return (result,)

    threads: list[threading.Thread] = []
    observed = guard.observe(run)
    gate.set()
    threads[0].join()
    assert observed.verdict().cause == "late"


MODES = ("fwd", "bwd", "fwd+bwd")


def verified(fn, mode: str, spec: KernelSpec | None = None):
    spec = spec or spec_of(times, ("x", "weight"))
    case = spec.cases[0]
    inputs = spec.make_inputs(case, "cpu", torch.Generator().manual_seed(5))
    out_grads = None if mode == "fwd" else execute.random_like([inputs["x"]])
    run = execute.bind(spec, fn, inputs, mode, out_grads)
    return verify(spec, case, mode, inputs, run, out_grads, seed=7), inputs


@pytest.mark.parametrize("mode", MODES)
def test_verify_accepts_what_is_right(mode):
    verdict, _ = verified(times, mode)
    assert verdict.ok and verdict.numbers["max"] <= verdict.numbers["limit_max"]


@pytest.mark.parametrize(
    ("cheat", "cause"),
    [
        (wrappers.cached, "replay"),
        (wrappers.mutating, "inputs"),
        (wrappers.lazy, "lazy"),
        (wrappers.on_a_thread, "nonfinite"),
        (wrappers.constant(0.0), "error"),
        (wrappers.flattened, "shape"),
    ],
)
def test_verify_catches_cheats_in_the_forward(cheat, cause):
    if cheat is wrappers.on_a_thread and torch.cuda.is_available():
        torch.cuda.init()  # then the call is watched until all of its work has ended, and the thread is seen to go on
        cause = "late"
    # A lazy output is refused when it is bound only in the modes that call the forward then.
    assert verified(cheat(times), "fwd")[0].cause == cause


class _CachedBackward(torch.autograd.Function):
    """Keeps its first gradients for ever."""

    answer = None

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        if _CachedBackward.answer is None:
            _CachedBackward.answer = (grad * weight, grad * x)
        return _CachedBackward.answer


def test_verify_catches_a_cached_backward():
    _CachedBackward.answer = None
    assert verified(_CachedBackward.apply_named, "bwd")[0].cause == "replay"


_CachedBackward.apply_named = staticmethod(lambda x, weight: _CachedBackward.apply(x, weight))


def test_verify_refills_in_place_and_keeps_addresses():
    spec = spec_of(times, ("x", "weight"))
    inputs = spec.make_inputs(spec.cases[0], "cpu", torch.Generator().manual_seed(5))
    run = execute.bind(spec, times, inputs, "fwd")
    for _ in range(2):  # with the same seed: the contents left by the first time would let old answers pass for new
        before = {n: (t.data_ptr(), t._version, t.clone()) for n, t in inputs.items()}
        assert verify(spec, spec.cases[0], "fwd", inputs, run).ok
        for name, tensor in inputs.items():
            address, version, values = before[name]
            assert (tensor.data_ptr(), tensor._version) == (address, version)
            assert not torch.equal(tensor, values)


def test_verify_wants_the_gradients_that_run_was_bound_with():
    spec = spec_of(times, ("x", "weight"))
    inputs = spec.make_inputs(spec.cases[0], "cpu", None)
    with pytest.raises(ValueError, match="out_grads"):
        verify(spec, spec.cases[0], "bwd", inputs, lambda: ())


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_verify_on_a_gpu(mode):
    spec = spec_of(times, ("x", "weight"))
    case = Case("big", dict(rows=1 << 20), torch.float32)  # long enough that two kernels do not end together by chance
    inputs = spec.make_inputs(case, "cuda", None)
    for fn, cause in (
        (times, ""),
        (wrappers.on_a_side_stream(wait=True)(times), "late"),
        (wrappers.on_a_side_stream(wait=False)(times), "error or late or replay"),
    ):
        if cause and mode != "fwd":
            continue
        out_grads = None if mode == "fwd" else execute.random_like([inputs["x"]])
        run = execute.bind(spec, fn, inputs, mode, out_grads)
        assert verify(spec, case, mode, inputs, run, out_grads).cause in cause.split(" or ")
