"""The optimizer AdamW: a drop-in replacement for torch.optim.AdamW."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from . import AdamW, PointerTables, plans
from .test_adamw import DEVICE, assert_close

SHAPES = ((5, 7), (300, 7), (), (1024,), (0, 3), (2048,), (33,))
# The interpreter rounds to bf16 wrongly, unless the kernel rounds by integer operations on the bits.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16


def parameters(shapes=SHAPES, dtype=torch.float32, copies=2) -> list[list[torch.nn.Parameter]]:
    values = [torch.randn(shape, device=DEVICE) for shape in shapes]
    return [[torch.nn.Parameter(v.to(dtype, copy=True)) for v in values] for _ in range(copies)]


def give_gradients(*lists: list[torch.nn.Parameter]) -> None:
    """Sets equal gradients for parameters with the same index in each list."""
    for group in zip(*lists, strict=True):
        grad = torch.randn_like(group[0])
        for param in group:
            param.grad = grad.clone()


# Like torch.optim.AdamW.


@pytest.mark.parametrize("options", [{}, dict(maximize=True, weight_decay=0.0), dict(betas=(0.0, 0.5), eps=1e-3)])
def test_steps_like_pytorch(options):
    ours, theirs = parameters()
    optimizers = AdamW(ours, lr=1e-2, **options), torch.optim.AdamW(theirs, lr=1e-2, **options)
    for _ in range(5):
        give_gradients(ours, theirs)
        for optimizer in optimizers:
            optimizer.step()
    assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    for name in ("exp_avg", "exp_avg_sq", "step"):
        mine = [optimizers[0].state[p][name] for p in ours]
        assert_close(mine, [optimizers[1].state[p][name].to(DEVICE) for p in theirs], rtol=1e-5, atol=1e-7)


@pytest.mark.gpu
def test_agrees_with_the_fused_one_to_the_last_bits():
    ours, theirs = parameters(((1000, 1000),))
    optimizers = AdamW(ours, lr=1e-3), torch.optim.AdamW(theirs, lr=1e-3, fused=True)
    for _ in range(10):
        give_gradients(ours, theirs)
        for optimizer in optimizers:
            optimizer.step()
    # Parameters are of order 1 and steps of order 1e-3: ten steps add up to an error of a few ulps.
    assert_close(ours, theirs, rtol=0, atol=5e-7)


def test_groups_schedulers_and_closures():
    ours, theirs = parameters()

    def make(cls, params):
        groups = [dict(params=params[:3], lr=0.1), dict(params=params[3:], weight_decay=0.5, betas=(0.8, 0.9))]
        optimizer = cls(groups, lr=1e-2)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def closure(params):
        def loss():
            assert torch.is_grad_enabled()
            for param in params:
                param.grad = None
            total = sum(p.square().sum() for p in params)
            total.backward()
            return total

        return loss

    pairs = [make(AdamW, ours), make(torch.optim.AdamW, theirs)]
    for _ in range(3):
        losses = [optimizer.step(closure(p)) for (optimizer, _), p in zip(pairs, (ours, theirs), strict=True)]
        torch.testing.assert_close(*losses)
        for _, scheduler in pairs:
            scheduler.step()
    assert pairs[0][0].param_groups[0]["lr"] == pytest.approx(0.0125)
    assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_learning_rate_in_a_tensor():
    ours, theirs = parameters()
    lr = torch.tensor(0.5, device=DEVICE)
    optimizer, other = AdamW(ours, lr=lr), torch.optim.AdamW(theirs, lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.1)
    assert optimizer.param_groups[0]["lr"] is not None
    give_gradients(ours, theirs)
    optimizer.step()
    other.step()
    scheduler.step()
    assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_parameters_without_a_gradient_keep_their_step():
    ours, theirs = parameters()
    optimizers = AdamW(ours), torch.optim.AdamW(theirs)
    for turn in range(3):
        give_gradients(ours, theirs)
        for params in (ours, theirs):
            params[turn].grad = None
        for optimizer in optimizers:
            optimizer.step()
    assert [float(optimizers[0].state[p]["step"]) for p in ours] == [2, 2, 2, 3, 3, 3, 3]
    assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    optimizers[0].zero_grad()
    assert all(p.grad is None for p in ours)
    before = [p.detach().clone() for p in ours]
    optimizers[0].step()
    assert_close(ours, before, rtol=0, atol=0)


def test_autograd_sees_the_change():
    param = torch.nn.Parameter(torch.randn(4, device=DEVICE))
    loss = (param * param).sum()
    param.grad = torch.ones_like(param)
    AdamW([param]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# State dicts.


@pytest.mark.parametrize("to_ours", [True, False])
def test_state_dicts_are_interchangeable(to_ours):
    first, second = parameters()
    give_gradients(first, second)
    source, target = (torch.optim.AdamW, AdamW) if to_ours else (AdamW, torch.optim.AdamW)
    old = source(first, lr=0.3, weight_decay=0.2)
    old.step()
    with torch.no_grad():
        for mine, other in zip(second, first, strict=True):
            mine.copy_(other)
    new = target(second)
    buffer = io.BytesIO()
    torch.save(old.state_dict(), buffer)
    new.load_state_dict(torch.load(io.BytesIO(buffer.getvalue())))
    assert new.param_groups[0]["lr"] == 0.3
    give_gradients(first, second)
    old.step()
    new.step()
    assert_close(second, first, rtol=1e-5, atol=1e-6)


def test_states_of_half_precision_parameters_stay_exact():
    params, others = parameters(dtype=HALF)
    optimizer = AdamW(params, master_weights=True)
    give_gradients(params)
    optimizer.step()
    restored = AdamW(others, master_weights=True)
    seen = []
    restored.register_load_state_dict_post_hook(lambda o: seen.append(o.state[others[0]]["exp_avg"].dtype))
    restored.load_state_dict(optimizer.state_dict())
    assert seen == [torch.float32]
    for param, other in zip(params, others, strict=True):
        for name in ("step", "exp_avg", "exp_avg_sq", "master_param"):
            mine, theirs = restored.state[other][name], optimizer.state[param][name]
            assert torch.equal(mine, theirs), name
            assert mine.dtype == torch.float32
            assert mine.numel() == 0 or mine.data_ptr() != theirs.data_ptr()
    # PyTorch rounds the states to the parameter's dtype; ours converts them back to fp32.
    theirs = torch.optim.AdamW(params)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert theirs.state[params[0]]["exp_avg"].dtype == HALF
    restored.load_state_dict(theirs.state_dict())
    assert restored.state[others[0]]["exp_avg"].dtype == torch.float32


def test_deep_copies_and_pickles_go_on_alike():
    (params,) = parameters(copies=1)
    optimizer = AdamW(params)
    give_gradients(params)
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    assert twin._tables is not optimizer._tables
    optimizer.step()
    for param, mine in zip(params, twin.param_groups[0]["params"], strict=True):
        mine.grad = param.grad
    twin.step()
    assert_close(twin.param_groups[0]["params"], params, rtol=0, atol=0)


def test_a_gradient_whose_sign_is_pending_is_read_with_its_sign():
    """Such as of the imaginary part of a conjugate: a view with the negative bit, contiguous if it has one element."""
    ours, theirs = parameters(((), (3,), (1,)))
    for params, cls in ((ours, AdamW), (theirs, torch.optim.AdamW)):
        optimizer = cls(params, lr=1e-2)
        for _ in range(2):
            for param in params:
                ones = torch.ones_like(param)
                param.grad = torch.complex(ones, 2 * ones).conj().imag
                assert param.grad.is_neg()
            optimizer.step()
    assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("what", ["param", "exp_avg", "exp_avg_sq", "step", "dtype", "exp_avg's dtype"])
def test_what_no_longer_fits_its_parameter_is_refused(what):
    """The kernel has addresses only: it would read and write past the end."""
    param = torch.nn.Parameter(torch.ones(8, device=DEVICE))
    optimizer = AdamW([param])
    for _ in range(2):
        param.grad = torch.ones_like(param)
        optimizer.step()
    state = optimizer.state[param]
    if what in ("param", "dtype"):
        param.grad = None
        param.data = torch.ones(2000, device=DEVICE) if what == "param" else param.detach().double()
        param.grad = torch.ones_like(param)
    elif what == "exp_avg's dtype":
        state["exp_avg"] = state["exp_avg"].half()
    else:
        state[what] = torch.zeros(4, device=DEVICE)
    before = param.detach().clone()
    with pytest.raises((TypeError, ValueError), match=r"params\[0\]"):
        optimizer.step()
    assert torch.equal(param, before)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "step"])
def test_a_state_that_stayed_on_another_device_is_refused(name):
    """As after `model.to(device)`, or after states were moved to the CPU to make room: its address is not the GPU's."""
    param = torch.nn.Parameter(torch.ones(8, device="cuda"))
    optimizer = AdamW([param])
    param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.state[param][name] = optimizer.state[param][name].cpu()
    with pytest.raises(ValueError, match=name):
        optimizer.step()
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_a_parameter_on_the_cpu_is_refused_and_gets_no_state():
    param = torch.nn.Parameter(torch.ones(8))
    param.grad = torch.ones_like(param)
    optimizer = AdamW([param])
    with pytest.raises(RuntimeError, match="on a GPU"):
        optimizer.step()
    assert not optimizer.state


# Half precision.


def test_a_parameter_that_became_fp32_leaves_its_master_weight():
    """The master weight of its old dtype would undo what has been assigned to the parameter since."""
    param = torch.nn.Parameter(torch.ones(8, device=DEVICE, dtype=HALF))
    optimizer = AdamW([param], lr=1e-2, weight_decay=0.0, master_weights=True)
    param.grad = torch.ones_like(param)
    optimizer.step()
    param.grad = None
    param.data = torch.full((8,), 5.0, device=DEVICE)
    param.grad = torch.ones_like(param)
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full((8,), 4.99, device=DEVICE))


def test_master_weights_are_what_is_updated():
    """Steps of a hundredth of the parameter's ulp: they are lost without master weights, and only then."""
    (params,) = parameters(((1000,), (64,)), HALF, copies=1)
    start = [p.detach().float() for p in params]
    optimizer = AdamW(params, lr=1e-5, weight_decay=0.0, master_weights=True)
    for _ in range(4):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    for param, before in zip(params, start, strict=True):
        master = optimizer.state[param]["master_param"]
        torch.testing.assert_close(master, before - 4e-5, rtol=0, atol=1e-6)
        assert torch.equal(param, master.to(HALF))


def test_fp32_parameters_have_no_master_weights():
    params = [torch.nn.Parameter(torch.randn(9, device=DEVICE).to(dtype)) for dtype in (torch.float32, HALF)]
    optimizer = AdamW(params, master_weights=True)
    give_gradients(params)
    optimizer.step()
    assert ["master_param" in optimizer.state[p] for p in params] == [False, True]


def test_the_optimizers_random_rounding_is_the_parameters_own():
    """It does not change if another parameter has no gradient."""

    def result(skip: bool) -> torch.Tensor:
        params = [torch.nn.Parameter(torch.ones(999, device=DEVICE, dtype=torch.bfloat16)) for _ in range(2)]
        optimizer = AdamW(params, lr=1.0, weight_decay=2**-9, stochastic_rounding=True, seed=2**62)
        for param in params[skip:]:
            param.grad = torch.zeros_like(param)
        optimizer.step()
        return params[1].detach().float()

    assert torch.equal(result(False), result(True))


# Memory layouts.


def test_a_permuted_parameter_is_walked_in_its_own_order(monkeypatch):
    """Such as channels_last weights, whose state PyTorch allocates in the same memory order."""
    param = torch.nn.Parameter(torch.randn(4, 3, 5, 5, device=DEVICE).to(memory_format=torch.channels_last))
    param.grad = torch.randn_like(param)
    other = torch.nn.Parameter(param.detach().clone())
    other.grad = param.grad.clone()
    monkeypatch.setattr(torch, "empty_strided", None)  # no copies
    optimizer = AdamW([param])
    optimizer.step()
    torch.optim.AdamW([other]).step()
    assert optimizer.state[param]["exp_avg"].stride() == param.stride()
    torch.testing.assert_close(param, other)


# Launches and tables.


def test_one_launch_whatever_the_mixture(monkeypatch):
    launched = []

    class Spy:
        def __init__(self, jit):
            self.jit = jit

        def __getitem__(self, grid):
            launched.append((self.jit.__name__, grid))
            return self.jit[grid]

        def __getattr__(self, name):
            return getattr(self.jit, name)

    monkeypatch.setattr(plans, "_adamw_kernel", Spy(plans._adamw_kernel))
    monkeypatch.setattr(plans, "_adamw_step_kernel", Spy(plans._adamw_step_kernel))
    dtypes = (torch.float32, HALF, torch.float32, HALF)
    params = [torch.nn.Parameter(torch.randn(1500, device=DEVICE).to(dtype)) for dtype in dtypes]
    give_gradients(params)
    AdamW(params, master_weights=True).step()
    assert launched == [("_adamw_step_kernel", (1,)), ("_adamw_kernel", (8,))]


def test_tables_are_built_once_and_again_when_an_address_changes():
    (params,) = parameters(copies=1)
    optimizer = AdamW(params)
    give_gradients(params)
    for _ in range(3):
        optimizer.step()
    assert optimizer._tables.built == 1
    old = params[0].grad
    params[0].grad = old.clone()
    optimizer.step()
    assert optimizer._tables.built == 2
    params[0].grad = old
    optimizer.step()
    assert optimizer._tables.built == 2  # the first table was still cached
    optimizer.state[params[1]]["exp_avg"] = torch.zeros_like(params[1])
    optimizer.step()
    assert optimizer._tables.built == 3


def test_what_changes_between_steps_is_seen():
    """A step looks up its launches by its inputs: after each of these changes, results must equal PyTorch's."""
    ours, theirs = parameters(((6, 10), (300, 7), (1024,)))
    optimizers = AdamW(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2)

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()
        assert_close(ours, theirs, rtol=1e-5, atol=1e-6)

    def change_strides_of_gradient() -> None:
        for params in (ours, theirs):
            params[0].grad = params[0].grad.clone().t().contiguous().t()

    def change_strides_at_the_same_address() -> None:
        """Changes one parameter of two: the other stays contiguous."""
        storage = torch.randn(36, device=DEVICE)
        square = [[torch.nn.Parameter(storage.clone().view(6, 6)) for _ in range(2)] for _ in range(2)]
        pair = AdamW(square[0], lr=1e-2), torch.optim.AdamW(square[1], lr=1e-2)
        grads = [[torch.arange(36.0, device=DEVICE).view(6, 6) for _ in range(2)] for _ in range(2)]
        for turn in range(3):
            for own, given in zip(square, grads, strict=True):
                own[0].grad, own[1].grad = given[0].t() if turn == 1 else given[0], given[1]
            for optimizer in pair:
                optimizer.step()
        assert_close(*square, rtol=1e-5, atol=1e-6)

    def move_parameter() -> None:
        for params in (ours, theirs):
            params[1].data = params[1].data.clone() * 2

    def change_options() -> None:
        for optimizer in optimizers:
            optimizer.param_groups[0].update(lr=0.5, weight_decay=0.0, betas=(0.5, 0.6), eps=1e-3)

    def restore_states() -> None:
        for optimizer in optimizers:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def add_group() -> None:
        for params, optimizer in zip((ours, theirs), optimizers, strict=True):
            params.append(torch.nn.Parameter(torch.ones(70, device=DEVICE)))
            params[-1].grad = torch.ones(70, device=DEVICE)
            optimizer.add_param_group({"params": params[-1:], "lr": 0.1})

    def drop_gradient() -> None:
        for params in (ours, theirs):
            params[0].grad = None

    give_gradients(ours, theirs)
    step()
    for change in (
        change_strides_of_gradient,
        change_strides_at_the_same_address,
        move_parameter,
        change_options,
        restore_states,
        add_group,
        drop_gradient,
    ):
        change()
        step()
        step()


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "master_param"])
def test_a_state_of_other_strides_at_its_address_is_read_right(name):
    """The state is the same object in the same memory; only its strides show that its elements have moved."""
    dtype = torch.float16 if name == "master_param" else torch.float32
    params, others = parameters(((6, 6),), dtype)
    optimizers = [AdamW(list_of_one, lr=1e-2, master_weights=True) for list_of_one in (params, others)]
    give_gradients(params, others)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.step()
    there, elsewhere = optimizers[0].state[params[0]], optimizers[1].state[others[0]]
    there[name].t_()
    elsewhere[name] = elsewhere[name].t().contiguous()
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(params[0], others[0])
    assert all(torch.equal(there[state], elsewhere[state]) for state in there)


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "master_param"])
def test_a_state_that_does_not_fit_its_parameter_is_an_error_that_names_it(name):
    (params,) = parameters(((4, 4), (6, 6)), HALF, copies=1)
    for wrong, error in (
        (torch.zeros(6, 5, device=DEVICE), "must be \\(6, 6\\) on .*, got \\(6, 5\\) on "),
        (torch.zeros(6, 6, device=DEVICE, dtype=torch.float64), "must be float32, got torch.float64"),
    ):
        optimizer = AdamW(params, master_weights=True)
        give_gradients(params)
        optimizer.step()
        optimizer.state[params[1]][name] = wrong
        with pytest.raises((TypeError, ValueError), match=f"params\\[1\\]'s {name} {error}"):
            optimizer.step()


def test_a_step_over_known_tensors_builds_nothing(monkeypatch):
    (params,) = parameters(copies=1)
    optimizer = AdamW([dict(params=params[:3]), dict(params=params[3:], lr=0.1)])
    give_gradients(params)
    optimizer.step()
    monkeypatch.setattr(AdamW, "_first_run", None)
    for lr in (0.1, 0.2):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()


@pytest.mark.parametrize(
    "options",
    [dict(amsgrad=True), dict(betas=(torch.tensor(0.8), torch.tensor(0.9)), foreach=False)],
    ids=["amsgrad", "betas"],
)
def test_a_state_that_is_refused_changes_nothing(options):
    ours, theirs = parameters()
    optimizer, other = AdamW(ours), torch.optim.AdamW(theirs, **options)
    give_gradients(ours, theirs)
    optimizer.step()
    other.step()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["amsgrad"] is False
    assert optimizer.param_groups[0]["betas"] == before["param_groups"][0]["betas"]
    for number, state in before["state"].items():
        for name, value in state.items():
            assert torch.equal(optimizer.state_dict()["state"][number][name], value), name
    give_gradients(ours)
    optimizer.step()


def test_states_of_others_are_loaded_as_they_were():
    """Entries that are no state of AdamW are loaded as PyTorch loads them."""
    param = torch.nn.Parameter(torch.zeros(4, device=DEVICE))
    optimizer, restored = AdamW([param]), AdamW([param])
    param.grad = torch.ones(4, device=DEVICE)
    optimizer.step()
    optimizer.state[param]["mine"] = torch.arange(4.0, device=DEVICE)
    restored.load_state_dict(optimizer.state_dict())
    assert restored.state[param]["mine"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dense", [0, 1])
def test_a_sparse_gradient_leaves_no_state(dense):
    """Also if other gradients are dense."""
    params = [torch.nn.Parameter(torch.zeros(4, device=DEVICE)) for _ in range(dense + 1)]
    optimizer = AdamW(params)
    for param in params:
        param.grad = torch.zeros(4, device=DEVICE)
    params[-1].grad = params[-1].grad.to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert not optimizer.state


def test_an_infinity_found_changes_nothing_and_counts_no_step():
    (params,) = parameters(copies=1)
    optimizer = AdamW(params)
    before = [p.detach().clone() for p in params]
    for found in (1.0, 0.0):
        give_gradients(params)
        optimizer.found_inf = torch.tensor(found, device=DEVICE)
        optimizer.step()
        steps = {float(optimizer.state[p]["step"]) for p in params}
        assert steps == {1.0 - found}
        assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True) if a.numel()) == bool(found)


# Refusals.


def test_unsupported_options_raise_an_error():
    param = torch.nn.Parameter(torch.zeros(4, device=DEVICE))
    for options, words in (
        (dict(amsgrad=True), "amsgrad"),
        (dict(differentiable=True), "differentiable"),
        (dict(lr=-1.0), "lr"),
        (dict(master_weights=True, stochastic_rounding=True), "master_weights"),
    ):
        with pytest.raises(ValueError, match=words):
            AdamW([param], **options)
    with pytest.raises(TypeError, match=r"params\[0\]"):
        AdamW([param.detach().double().requires_grad_()])
    half = torch.nn.Parameter(param.detach().half())
    with pytest.raises(ValueError, match="stochastic"):
        AdamW([half], stochastic_rounding=True)
    theirs = torch.optim.AdamW([param], amsgrad=True)
    with pytest.raises(ValueError, match="amsgrad"):
        AdamW([param]).load_state_dict(theirs.state_dict())
    embedding = torch.nn.Embedding(5, 3, sparse=True, device=DEVICE)
    embedding(torch.tensor([1], device=DEVICE)).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        AdamW(embedding.parameters()).step()


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("warm", [True, False])
def test_a_training_step_in_a_cuda_graph(warm):
    """Also if the table is built during the capture, because the gradients have other addresses there."""
    ours, theirs = parameters(((64, 64), (64,)))
    lr = torch.tensor(1e-2, device="cuda")
    optimizer = AdamW(ours, lr=lr, capturable=True)
    other = torch.optim.AdamW(theirs, lr=1e-2)
    x = torch.randn(8, 64, device="cuda")

    def train(params, opt):
        opt.zero_grad()
        ((x @ params[0] + params[1]).square().mean()).backward()
        opt.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            train(ours, optimizer)
    torch.cuda.current_stream().wait_stream(stream)
    for _ in range(3):
        train(theirs, other)
    if not warm:
        optimizer._tables = PointerTables()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train(ours, optimizer)
    for value in (1e-2, 1e-3, 5e-2):
        lr.fill_(value)
        other.param_groups[0]["lr"] = value
        x.normal_()
        graph.replay()
        train(theirs, other)
    assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    # And again without the graph, with tables that were filled outside the graph.
    for params, opt in ((ours, optimizer), (theirs, other)):
        train(params, opt)
    assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_never_waits_for_the_gpu():
    (params,) = parameters(copies=1)
    optimizer = AdamW(params, lr=torch.tensor(1e-2, device="cuda"))
    give_gradients(params)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_grad_scaler():
    ours, theirs = parameters()
    optimizers = AdamW(ours), torch.optim.AdamW(theirs)
    scalers = [torch.amp.GradScaler("cuda", init_scale=2.0**10) for _ in optimizers]
    for turn in range(4):
        x = torch.randn((), device="cuda") * (torch.inf if turn == 1 else 1)
        for params, optimizer, scaler in zip((ours, theirs), optimizers, scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(sum((p * x).sin().sum() for p in params)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0**9
    assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_two_devices():
    if torch.cuda.device_count() < 2:
        pytest.skip("there is only one GPU")
    params = [torch.nn.Parameter(torch.ones(100, device=f"cuda:{i % 2}")) for i in range(4)]
    for param in params:
        param.grad = torch.ones_like(param)
    AdamW(params, lr=0.5, weight_decay=0.0).step()
    (value,) = {float(v) for p in params for v in p.detach().cpu()}  # bit for bit the same on both
    assert value == pytest.approx(0.5, rel=5e-7)
