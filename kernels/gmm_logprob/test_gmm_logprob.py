"""Tests specific to gmm_logprob; `tests/test_specs.py` checks the rest from SPEC."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton

from . import arrival, checks, configs, gmm_logprob, kernel, op, plans
from .bench import SPEC, _candidates
from .reference import gmm_logprob_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("logits", "mu", "log_sigma", "y")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def launches(monkeypatch):
    """Records every Triton launch as (name of the kernel, arguments by name), in order."""
    seen = []
    kind = type(kernel._gmm_logprob_fwd_kernel)
    run = kind.run

    def spy(self, *args, grid, warmup, **options):
        seen.append((self.__name__, {**dict(zip(self.arg_names, args, strict=False)), **options, "grid": grid}))
        return run(self, *args, grid=grid, warmup=warmup, **options)

    monkeypatch.setattr(kind, "run", spy)
    return seen


def inputs(rows: int, k: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> list[torch.Tensor]:
    tensors = [torch.randn(rows, k, device=DEVICE) for _ in range(3)] + [torch.randn(rows, device=DEVICE)]
    return [t.to(dtype).requires_grad_(grad) for t in tensors]


def with_grads(fn, tensors, reduction="none", grad=None, dtype=None):
    """The output and the four gradients, in fp64 if `dtype` says so."""
    leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]
    out = fn(*leaves, reduction)
    grad = torch.ones_like(out) if grad is None else grad.to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def assert_right(results, oracle, ulps=16.0, least=0.0):
    """Asserts errors of at most `ulps` fp32 ulps of each result's largest value. `least` is the smallest scale for
    d_logits, which is a difference."""
    for name, result, truth in zip(("output", *NAMES), results, oracle, strict=True):
        error, scale = (result - truth).abs().max().item(), truth.abs().max().item()
        scale = max(scale, least) if name == "logits" else scale
        assert error <= ulps * torch.finfo(torch.float32).eps * scale, f"{name}: {error:.3g} of {scale:.3g}"


def test_equals_torch_distributions():
    """torch.distributions equals the oracle in fp64, and the kernel is within fp32 rounding of the oracle."""
    logits, mu, log_sigma, y = tensors = inputs(50, 10)
    mixture = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(logits=logits.double()),
        torch.distributions.Normal(mu.double(), log_sigma.double().exp()),
    )
    truth = mixture.log_prob(y.double())
    wide = [t.double() for t in tensors]
    torch.testing.assert_close(gmm_logprob_reference(*wide, "none"), truth, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gmm_logprob(*tensors, "none").double(), truth, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(gmm_logprob(*tensors).double(), truth.mean(), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(gmm_logprob(*tensors, "sum").double(), truth.sum(), rtol=2e-6, atol=2e-6)


def test_one_component_is_a_normal_distribution():
    logits, mu, log_sigma, y = inputs(33, 1)
    truth = torch.distributions.Normal(mu[:, 0], log_sigma[:, 0].exp()).log_prob(y)
    torch.testing.assert_close(gmm_logprob(logits, mu, log_sigma, y, "none"), truth, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("k", [1, 3, 10, 17, 64])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_gradients_against_fp64_autograd(k, reduction):
    tensors = inputs(41, k)
    grad = torch.randn(41 if reduction == "none" else (), device=DEVICE)
    truth = with_grads(gmm_logprob_reference, tensors, reduction, grad, torch.float64)
    assert_right(with_grads(gmm_logprob, tensors, reduction, grad), truth)


@pytest.mark.parametrize("log_sigma", [-30.0, 30.0, (-30.0, 30.0), (-30.0, -29.0)])
def test_extremes(log_sigma):
    """|log_sigma| = 30 with |y − mu| = 1e4: z up to 1e17, z² up to 1e34."""
    tensors = inputs(64, 10)
    low, high = log_sigma if isinstance(log_sigma, tuple) else (log_sigma, log_sigma)
    tensors[2] = torch.where(torch.rand_like(tensors[2]) < 0.5, low, high)
    tensors[1], tensors[3] = 5e3 * tensors[1].sign(), -5e3 * tensors[3].sign()
    results = with_grads(gmm_logprob, tensors)
    assert all(t.isfinite().all() for t in results)
    assert_right(results, with_grads(gmm_logprob_reference, tensors, dtype=torch.float64), least=1.0)


def test_huge_logits_do_not_swallow_the_density():
    """Only differences of logits matter, and these are exact."""
    tensors = inputs(20, 10)
    tensors[0] = tensors[0].round()
    shifted = [tensors[0] + 2.0**20, *tensors[1:]]
    for a, b in zip(with_grads(gmm_logprob, tensors), with_grads(gmm_logprob, shifted), strict=True):
        assert torch.equal(a, b)


def test_a_component_with_logit_minus_infinity_is_off():
    tensors = inputs(20, 10)
    off = [torch.cat([x, x[:, :3] * 7], dim=1) if x.dim() == 2 else x for x in tensors]
    off[0][:, 10:] = -torch.inf
    results = with_grads(gmm_logprob, off)
    assert all(not g[:, 10:].any() for g in results[1:4])
    results[1:4] = [g[:, :10] for g in results[1:4]]
    assert_right(results, with_grads(gmm_logprob_reference, tensors, dtype=torch.float64))


def test_rows_without_a_distribution_are_nan_and_touch_no_other_row():
    tensors = inputs(30, 10)
    clean = with_grads(gmm_logprob, tensors)
    tensors[0][7] = -torch.inf
    tensors[0][11, 4] = torch.inf
    results = with_grads(gmm_logprob, tensors)
    truth = with_grads(gmm_logprob_reference, tensors)
    for result, expected, before in zip(results, truth, clean, strict=True):
        assert torch.equal(result.isnan(), expected.isnan())
        keep = [i for i in range(30) if i not in (7, 11)]
        assert torch.equal(result[keep], before[keep])
    assert results[0][[7, 11]].isnan().all()


def test_density_zero_is_minus_infinity():
    tensors = inputs(3, 10)
    tensors[3][1] = 1e30
    out = gmm_logprob(*tensors, "none")
    assert out[1] == -torch.inf
    assert out[[0, 2]].isfinite().all()


def test_a_component_too_far_off_for_fp32_has_no_gradient():
    """z² is inf, but the posterior of that component is 0 and that of the others is not: 0 · inf must not occur."""
    tensors = inputs(6, 10)
    tensors[1][2, 3] = 1e25
    results = with_grads(gmm_logprob, tensors)
    assert all(t.isfinite().all() for t in results)
    assert results[2][2, 3] == results[3][2, 3] == 0
    assert_right(results, with_grads(gmm_logprob_reference, tensors, dtype=torch.float64))


def test_without_rows():
    tensors = inputs(0, 10)
    assert gmm_logprob(*tensors).isnan()
    assert gmm_logprob(*tensors, "sum") == 0
    assert gmm_logprob(*tensors, "none").shape == (0,)
    assert [g.shape for g in with_grads(gmm_logprob, tensors, "sum")[1:]] == [t.shape for t in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_result_and_gradients_have_the_dtype_of_the_inputs(dtype, reduction):
    assert {t.dtype for t in with_grads(gmm_logprob, inputs(5, 3, dtype), reduction)} == {dtype}


@pytest.mark.parametrize("k", [1, 3, 10, 16])
def test_chunks_of_one_tensor_are_read_in_place(k, launches):
    packed = torch.randn(40, 3 * k, device=DEVICE)
    y = torch.randn(40, device=DEVICE)
    leaves = [t.requires_grad_() for t in packed.detach().chunk(3, dim=-1)] + [y.requires_grad_()]
    out = gmm_logprob(*leaves, "none")
    grads = torch.autograd.grad(out.sum(), leaves)
    copies = [t.detach().contiguous() for t in leaves]
    assert_right([out, *grads], with_grads(gmm_logprob_reference, copies, dtype=torch.float64))
    assert len(launches) == 2
    for _, arguments in launches:
        for name in ("logits", "mu", "log_sigma"):
            pointed = arguments[f"{name}_ptr"]
            assert pointed.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()
            assert arguments[f"STRIDE_{name.upper()}"] == 3 * k
            assert pointed.storage_offset() * 4 % 16 == 0  # so that the compiler may load several elements at once
            skipped = pointed.storage_offset() + arguments[f"SKIP_{name.upper()}"]
            assert skipped == ("logits", "mu", "log_sigma").index(name) * k


def test_rows_that_do_not_flatten_and_strides_within_them_are_copied():
    tensors = inputs(24, 5)
    odd = [t.view(4, 6, 5).transpose(0, 1) for t in tensors[:2]]  # leading dimensions that do not flatten to one stride
    odd += [torch.stack([tensors[2], tensors[2]], -1)[..., 0].view(4, 6, 5).transpose(0, 1)]  # inner stride 2
    odd += [tensors[3].view(4, 6).t()]
    truth = with_grads(gmm_logprob_reference, [t.contiguous() for t in odd], dtype=torch.float64)
    assert_right(with_grads(gmm_logprob, odd), truth)


def test_expanded_parameters_and_gradients(launches):
    """One mixture for all rows: the kernels support a row stride of 0, also in the incoming gradient of a sum."""
    tensors = inputs(1, 10)
    shared = [t.requires_grad_() for t in tensors[:3]]
    y = torch.randn(50, device=DEVICE)
    gmm_logprob(*(t.expand(50, 10) for t in shared), y, "none").sum().backward()
    (_, forward), (_, backward) = launches
    assert [forward[f"STRIDE_{n}"] for n in ("LOGITS", "MU", "LOG_SIGMA")] == [0, 0, 0]
    assert backward["STRIDE_GRAD"] == 0
    wide = [t.detach().double().requires_grad_() for t in shared]
    gmm_logprob_reference(*(t.expand(50, 10) for t in wide), y.double(), "none").sum().backward()
    for ours, theirs in zip(shared, wide, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_one_launch_forward_and_one_backward(reduction, launches):
    tensors = inputs(300, 10, grad=True)
    out = gmm_logprob(*tensors, reduction)
    assert [name for name, _ in launches] == ["_gmm_logprob_fwd_kernel"]
    assert launches[0][1]["grid"][0] > 2 or reduction == "none"  # several programs, so the sum spans programs
    out.backward(torch.ones_like(out))
    assert [name for name, _ in launches] == ["_gmm_logprob_fwd_kernel", "_gmm_logprob_bwd_kernel"]


@pytest.mark.parametrize("rows", [97, 300])
def test_the_unit_of_a_sum_is_for_the_rows_of_the_largest_program(rows, launches, monkeypatch):
    """Up to an average |log p| of 512, the sum needs only the first word, which all programs add to anyway."""
    monkeypatch.setattr(plans, "MAX_PROGRAMS", 3)  # for 4 tiles, and for 10
    gmm_logprob(*inputs(rows, 10), "sum")
    ((_, arguments),) = launches
    assert arguments["grid"] == (3,)
    largest = triton.cdiv(triton.cdiv(rows, arguments["BLOCK_M"]), 3) * arguments["BLOCK_M"]
    assert arrival.MAX_MEAN_LOG_P * largest * arguments["scale"] <= arrival.MAX_PARTIAL.value


def test_nothing_but_the_inputs_is_saved():
    tensors = inputs(12, 10, grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        gmm_logprob(*tensors)
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in tensors}
    assert len(saved) == 4


@pytest.mark.parametrize("needed", [n for r in (1, 2, 3) for n in itertools.combinations(NAMES, r)], ids="-".join)
def test_a_gradient_that_nobody_needs_is_not_written(needed, launches):
    tensors = inputs(9, 10)
    for name, tensor in zip(NAMES, tensors, strict=True):
        tensor.requires_grad_(name in needed)
    gmm_logprob(*tensors, "sum").backward()
    arguments = launches[-1][1]
    for name in NAMES:
        assert arguments[f"NEED_{name.upper()}"] == (name in needed)
        assert (arguments[f"d_{name}_ptr"] is not None) == (name in needed)
    truth = with_grads(gmm_logprob_reference, tensors, "sum", dtype=torch.float64)[1:]
    for name, tensor, expected in zip(NAMES, tensors, truth, strict=True):
        if name in needed:
            torch.testing.assert_close(tensor.grad.double(), expected, rtol=1e-5, atol=1e-5)
        else:
            assert tensor.grad is None


def _widths() -> list[tuple[int, configs.Config]]:
    cases = [(k, SPEC.case("8400000x10-fp32")) for k in (1, 3, 10, 16, 33)]
    distinct: dict[tuple, tuple[int, configs.Config]] = {}
    for k, case in cases:
        case = type(case)(case.name, {**case.dims, "k": k}, case.dtype)
        for config in _candidates(case, backward=True):
            key = (k, config.load_n, config.hold_n, config.store_n)
            distinct.setdefault(key, (k, config))
    return list(distinct.values())


@pytest.mark.parametrize(
    ("k", "config"),
    _widths(),
    ids=lambda v: str(v) if isinstance(v, int) else f"load{v.load_n}-hold{v.hold_n}-store{v.store_n}",
)
def test_every_way_to_move_a_row_gives_the_same(k, config, monkeypatch):
    monkeypatch.setattr(configs, "pick_fwd_config", lambda *_: config)
    monkeypatch.setattr(configs, "pick_bwd_config", lambda *_: config)
    tensors = inputs(config.block_m + 5, k)
    grad = torch.randn(config.block_m + 5, device=DEVICE)
    truth = with_grads(gmm_logprob_reference, tensors, "none", grad, torch.float64)
    assert_right(with_grads(gmm_logprob, tensors, "none", grad), truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_configurations_for_every_k_are_sound(dtype):
    for k, rows in itertools.product(range(1, configs.MAX_K + 1), (1, 5_000, 205_000, 8_400_000)):
        for pick in (configs.pick_fwd_config, configs.pick_bwd_config):
            config = pick(rows, k, dtype, (9, 0))
            assert config == pick(rows, k, dtype, (9, 0))
            for width in (config.block_m, config.load_n, config.hold_n, config.store_n, config.num_warps):
                assert width >= 1
                assert width & (width - 1) == 0
            assert config.load_n % config.hold_n == config.store_n % config.hold_n == 0
            assert -(-k // config.load_n) <= 5
            assert k % configs.vector(k, dtype.itemsize) == 0
            assert config.block_m <= 1024


def test_cost_counts_each_input_and_output_once():
    case = SPEC.case("8400000x10-fp32")
    assert SPEC.cost(case, "fwd").bytes == 8_400_000 * 31 * 4 + 4
    assert SPEC.cost(case, "bwd").bytes == 8_400_000 * 62 * 4 + 4
    assert SPEC.cost(case, "fwd+bwd").bytes == 8_400_000 * 62 * 4 + 8
    assert SPEC.cost(SPEC.case("67x10-fp32-none"), "fwd").bytes == 67 * 32 * 4


GOOD = dict(zip(NAMES, (torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2)), strict=True))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": [0.0]}, TypeError, "logits must be a tensor of float32, float16 or bfloat16, got list"),
        ({"logits": torch.zeros(2, 3, dtype=torch.int64)}, TypeError, "logits must be .* got torch.int64"),
        ({"logits": torch.zeros(2, 3, dtype=torch.float64)}, TypeError, "logits must be .* got torch.float64"),
        ({"mu": torch.zeros(2, 3, dtype=torch.float16)}, TypeError, "mu must be .*float32, got torch.float16"),
        ({"y": None}, TypeError, "y must be a tensor .* got NoneType"),
        ({"logits": torch.tensor(0.0)}, ValueError, r"logits must be \[..., K\] with 1 <= K <= 128, got shape \(\)"),
        ({"logits": torch.zeros(2, 0)}, ValueError, r"logits must be .* got shape \(2, 0\)"),
        ({"logits": torch.zeros(2, 129)}, ValueError, r"logits must be .* got shape \(2, 129\)"),
        ({"log_sigma": torch.zeros(2, 1)}, ValueError, r"log_sigma must have logits' shape \(2, 3\), got \(2, 1\)"),
        ({"y": torch.zeros(2, 1)}, ValueError, r"y must have logits' leading dimensions \(2,\), got \(2, 1\)"),
        ({"mu": torch.zeros(2, 3, device="meta")}, ValueError, "mu must be on logits' device .*, got meta"),
        ({"reduction": "max"}, ValueError, "reduction must be one of none, sum, mean, got 'max'"),
        ({n: t.to("meta") for n, t in GOOD.items()}, RuntimeError, "logits must be on a GPU, .*, got meta"),
    ],
    ids=lambda v: None if not isinstance(v, dict) else "-".join(v),
)
def test_bad_input_is_refused_before_any_launch(change, error, message, launches):
    moved = {n: t.to(DEVICE) if isinstance(t, torch.Tensor) and not t.is_meta else t for n, t in change.items()}
    with pytest.raises(error, match=f"gmm_logprob: {message}"):
        gmm_logprob(**{**{n: t.to(DEVICE) for n, t in GOOD.items()}, **moved})
    assert not launches


def test_cpu_tensors_need_the_interpreter(monkeypatch):
    monkeypatch.setattr(checks, "INTERPRETED", False)
    with pytest.raises(RuntimeError, match=r"on the CPU in Triton's interpreter \(TRITON_INTERPRET=1\), got cpu"):
        gmm_logprob(**GOOD)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_under_torch_compile(reduction):
    """As the loss of a network whose single output holds all three parameters, in one graph."""
    packed, y = torch.randn(20, 30, device=DEVICE), torch.randn(20, device=DEVICE)

    def loss(fn, packed, y):
        logits, mu, log_sigma = packed.sin().chunk(3, dim=-1)
        return -fn(logits, mu, 0.5 * log_sigma, y, reduction=reduction).cos().sum()

    ours = packed.clone().requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(lambda p, t: loss(gmm_logprob, p, t), fullgraph=True, backend="aot_eager")
    value = compiled(ours, y)
    value.backward()
    theirs = packed.clone().requires_grad_()
    expected = loss(gmm_logprob_reference, theirs, y)
    expected.backward()
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)


def needs_memory(gigabytes: float) -> None:
    free = torch.cuda.mem_get_info()[0] / 1e9
    if free < gigabytes:
        pytest.skip(f"needs {gigabytes} GB of GPU memory, {free:.0f} are free")


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    """Rows before, at and after element 2^31, where a 32-bit offset would wrap, forward and backward."""
    k, rows = 10, (1 << 31) // 10 + 100_003
    needs_memory(6 * 2e-9 * rows * k + 8)
    tensors = [torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    tensors += [torch.randn(rows, device="cuda", dtype=torch.bfloat16)]
    out = gmm_logprob(*tensors, "none")
    op_args = (torch.ones((), device="cuda", dtype=torch.bfloat16).expand(rows), *tensors, "none", [True] * 4)
    grads = op._bwd_op(*op_args)
    edge = (1 << 31) // k
    for part in (slice(0, 1000), slice(edge - 1000, edge + 1000), slice(rows - 1000, rows)):
        truth = with_grads(gmm_logprob_reference, [t[part] for t in tensors], dtype=torch.float64)
        for result, expected in zip((out, *grads), truth, strict=True):
            torch.testing.assert_close(result[part].double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
def test_rows_just_below_2_to_the_31():
    """Rounding up the number of tiles in 32 bits gave a negative number: no row was read, and no result written."""
    rows, dtype = (1 << 31) - 5, torch.float16
    needs_memory(2e-9 * rows * 4)
    whole = [torch.zeros(1, 1, device="cuda", dtype=dtype).expand(rows, 1) for _ in range(3)]
    whole += [torch.ones(1, device="cuda", dtype=dtype).expand(rows)]
    expected = -0.5 - 0.9189385332
    torch.testing.assert_close(gmm_logprob(*whole).item(), expected, rtol=1e-2, atol=0)
    out = gmm_logprob(*whole, "none")
    assert (out == out[0]).all() and abs(out[0].item() - expected) < 1e-2
    del out
    grad = torch.ones((), device="cuda", dtype=dtype).expand(rows)
    d_y = op._bwd_op(grad, *whole, "none", [False, False, False, True])[3]
    assert (d_y == -1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("k", [10, 32])
def test_loads_are_as_wide_as_the_rows_allow(k):
    """K = 10 in fp32: loads of 8 bytes, in the chunks of a packed tensor too. K = 32: loads of 16 bytes."""
    for packed in (False, True):
        if packed:
            tensors = [*torch.randn(5_000, 3 * k, device="cuda").chunk(3, dim=-1), torch.randn(5_000, device="cuda")]
        else:
            tensors = inputs(5_000, k)
        compiled = _compiled(tensors)
        assert f"ld.global.v{2 if k == 10 else 4}.b32" in compiled.asm["ptx"]
        assert compiled.n_spills == 0


def _compiled(tensors):
    """The compiled forward kernel of these inputs."""
    found = []
    launcher = kernel._gmm_logprob_fwd_kernel
    original = triton.runtime.jit.JITFunction.run
    with pytest.MonkeyPatch.context() as patch:

        def run(self, *args, **options):
            result = original(self, *args, **options)
            if self is launcher:
                found.append(result)
            return result

        patch.setattr(triton.runtime.jit.JITFunction, "run", run)
        gmm_logprob(*tensors)
    return found[-1]
