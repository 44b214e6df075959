"""kernels/train.py: a step is what a loop written by hand does, with a CUDA graph and without."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from kernels.adamw import AdamW
from kernels.nn import RotaryEmbedding
from kernels.train import TrainStep, _signature

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLIP = 0.05


def made(device: str = "cpu", dropout: float = 0.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 1)).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=device != "cpu")


def loss_of(model: nn.Module):
    return lambda x, y: (model(x) - y).square().mean()


def batches(count: int, device: str = "cpu", rows: tuple[int, ...] = (8,)) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shapes = [rows[i % len(rows)] for i in range(count)]
    made = [(torch.randn(n, 5, generator=generator), torch.randn(n, 1, generator=generator)) for n in shapes]
    return [{"x": x.to(device), "y": y.to(device)} for x, y in made]


def by_hand(model, optimizer, data, clip=None, schedule=None, accumulate=1, scaler=None) -> list[float]:
    losses, loss_fn, rate = [], loss_of(model), float(optimizer.param_groups[0]["lr"])
    for number, batch in enumerate(data):
        loss = loss_fn(**batch)
        losses.append(float(loss.detach()))
        loss = loss / accumulate
        (loss if scaler is None else scaler.scale(loss)).backward()
        if number % accumulate == accumulate - 1:
            if schedule is not None:
                optimizer.param_groups[0]["lr"] = rate * schedule(number // accumulate)
            if scaler is not None and clip is not None:
                scaler.unscale_(optimizer)
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step() if scaler is None else scaler.step(optimizer)
            if scaler is not None:
                scaler.update()
            optimizer.zero_grad()
    return losses


OPTIONS = {
    "plain": {},
    "clip": dict(clip=CLIP),
    "schedule": dict(schedule=lambda step: 1 / (1 + step)),
    "accumulate": dict(accumulate=3),
    "all": dict(clip=CLIP, schedule=lambda step: 0.5**step, accumulate=2),
    "scaler": dict(scaler=True),
    "scaler-all": dict(scaler=True, clip=CLIP, accumulate=2),
}


def both(options: dict, device: str, data: list, dropout: float = 0.0) -> tuple[TrainStep, list[float]]:
    """Trains with TrainStep and by hand; the models must end in the same place."""
    scalers = [None, None]
    if options.get("scaler"):
        scalers = [torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=2) for _ in range(2)]
    options = {name: value for name, value in options.items() if name != "scaler"}
    (model, optimizer), (other, other_optimizer) = made(device, dropout), made(device, dropout)
    step = TrainStep(loss_of(model), optimizer, scaler=scalers[0], **options)
    returned = [step(**batch) for batch in data]
    by_hand_losses = by_hand(other, other_optimizer, data, scaler=scalers[1], **options)
    same = torch.equal if device == "cpu" else torch.allclose
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert same(a, b)
    assert torch.allclose(torch.stack(returned).cpu(), torch.tensor(by_hand_losses))
    assert same(step.losses(), torch.stack(returned).cpu())
    if scalers[0] is not None:
        assert scalers[0].get_scale() == scalers[1].get_scale() > 2.0**10
    return step, by_hand_losses


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_without_a_graph_it_is_the_loop_to_the_bit(options: dict) -> None:
    step, _ = both(options, "cpu", batches(6, rows=(8, 3)))
    assert "cpu" in step.reason and step.captured == 0 and step.calls == 6
    assert step.updates == 6 // options.get("accumulate", 1)


def test_with_our_adamw() -> None:
    model, _ = made(DEVICE)
    other = copy.deepcopy(model)
    step = TrainStep(loss_of(model), AdamW(model.parameters(), lr=1e-2), clip=CLIP)
    optimizer = AdamW(other.parameters(), lr=1e-2)
    data = batches(3, DEVICE)
    losses = [step(**batch) for batch in data]
    expected = by_hand(other, optimizer, data, clip=CLIP)
    assert torch.allclose(torch.stack(losses).cpu(), torch.tensor(expected))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_the_norm_is_that_before_clipping() -> None:
    model, optimizer = made()
    (batch,) = batches(1)
    loss_of(model)(**batch).backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    step = TrainStep(loss_of(model), optimizer, clip=CLIP)
    step(**batch)
    assert float(step.grad_norm) == float(norm) > CLIP


@pytest.mark.skipif(torch.cuda.is_available(), reason="a group of one process over gloo has no GPU")
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_of_shards_are_clipped(fused: bool, tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        steps = []
        for shard in (False, True):
            model, _ = made()
            if shard:
                fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
            steps.append(TrainStep(loss_of(model), optimizer, clip=CLIP))
            for batch in batches(3):
                steps[-1](**batch)
        assert steps[0].grad_norm > CLIP
        torch.testing.assert_close(steps[1].grad_norm, steps[0].grad_norm)
        torch.testing.assert_close(steps[1].losses(), steps[0].losses())
    finally:
        dist.destroy_process_group()


def test_an_update_with_infinite_gradients_is_left_out() -> None:
    model, optimizer = made()
    before = copy.deepcopy(model.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    step = TrainStep(loss_of(model), optimizer, scaler=scaler, clip=1.0)
    (batch,) = batches(1)
    step(x=batch["x"], y=batch["y"] * torch.inf)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert scaler.get_scale() == 2.0


def test_only_the_last_losses_are_kept_and_in_order() -> None:
    model, optimizer = made()
    step = TrainStep(loss_of(model), optimizer, history=4)
    assert step.losses().numel() == 0
    returned = [step(**batch) for batch in batches(6)]
    assert torch.equal(step.losses(), torch.stack(returned[-4:]))


def test_the_loss_of_an_update_that_fails_is_not_kept() -> None:
    model, optimizer = made()
    step = TrainStep(loss_of(model), optimizer, history=4)
    first, second, third = batches(3)
    returned = [step(**first)]
    with pytest.MonkeyPatch.context() as broken, pytest.raises(ArithmeticError):
        broken.setattr(optimizer, "step", lambda: 1 / 0)
        step(**second)
    returned += [step(**second), step(**third)]
    assert torch.equal(step.losses(), torch.stack(returned))


def test_models_that_return_an_object_with_a_loss() -> None:
    model, optimizer = made()

    class Output:
        def __init__(self, loss: torch.Tensor) -> None:
            self.loss = loss

    step = TrainStep(lambda **batch: Output(loss_of(model)(**batch)), optimizer)
    assert step(**batches(1)[0]).shape == ()


def test_state_is_taken_up_again() -> None:
    data, factor = batches(4), lambda step: 0.5**step
    model, optimizer = made()
    step = TrainStep(loss_of(model), optimizer, schedule=factor)
    for batch in data:
        step(**batch)
    other, other_optimizer = made()
    first = TrainStep(loss_of(other), other_optimizer, schedule=factor)
    for batch in data[:2]:
        first(**batch)
    # Its lr, as that in the state of an optimizer, has the factor of the last update.
    second = TrainStep(loss_of(other), other_optimizer, schedule=factor)
    second.load_state_dict(first.state_dict())
    assert second.losses().numel() == 0
    returned = [second(**batch) for batch in data[2:]]
    assert torch.equal(second.losses(), torch.stack(returned))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert second.state_dict() == {"calls": 4, "updates": 4, "rates": [1e-2]}
    with pytest.raises(ValueError, match="state must have 1 rates, one per group, got 2"):
        second.load_state_dict({**first.state_dict(), "rates": [1e-2, 1e-3]})
    second.load_state_dict({"calls": 2, "updates": 2})  # as of a step without a schedule
    assert second.updates == 2


@pytest.mark.parametrize("other", [1.0, True])
def test_equal_arguments_of_other_types_have_other_signatures(other: object) -> None:
    assert _signature(1) != _signature(other) and _signature(1) == _signature(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(accumulate=0), "accumulate must be an integer of at least 1"),
        (dict(graphs=0), "graphs must be an integer of at least 1"),
        (dict(history=0), "history must be an integer of at least 1"),
        (dict(clip=0.0), "clip must be positive"),
    ],
)
def test_arguments_out_of_range(options: dict, message: str) -> None:
    model, optimizer = made()
    with pytest.raises(ValueError, match=message):
        TrainStep(loss_of(model), optimizer, **options)


def test_what_is_no_loss() -> None:
    model, optimizer = made()
    with pytest.raises(ValueError, match="the loss must be a scalar"):
        TrainStep(model, optimizer)(torch.randn(2, 5))
    with pytest.raises(TypeError, match="must return a tensor"):
        TrainStep(lambda: 1.0, optimizer)()


def test_capture_can_be_declined() -> None:
    model, optimizer = made(DEVICE)
    assert TrainStep(loss_of(model), optimizer, capture=False).reason == "capture=False"


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_graph_is_the_loop(options: dict) -> None:
    step, _ = both(options, "cuda", batches(24, "cuda", rows=(8, 8, 3, 3, 8, 8)))
    assert step.reason is None and step.captured


@pytest.mark.gpu
def test_memory_does_not_grow_over_replays() -> None:
    model, optimizer = made("cuda")
    step = TrainStep(loss_of(model), optimizer, clip=1.0)
    (batch,) = batches(1, "cuda")
    for _ in range(4):
        step(**batch)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(200):
        step(**batch)
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
    losses = step.losses()
    assert len(losses) == 204 and losses[-1] < losses[0]


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [1, 2])
def test_graphs_are_bounded(graphs: int) -> None:
    """Shapes come back after their graph was dropped, the only one of its pool too."""
    model, optimizer = made("cuda")
    other, other_optimizer = made("cuda")
    step = TrainStep(loss_of(model), optimizer, graphs=graphs)
    data = [batch for rows in (3, 4, 5, 3, 4) for batch in batches(4, "cuda", rows=(rows,))]
    for batch in data:
        step(**batch)
        assert step.captured <= graphs
    by_hand(other, other_optimizer, data)
    assert step.reason is None and step.captured == graphs
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
def test_dropout_differs_from_replay_to_replay() -> None:
    model, optimizer = made("cuda", dropout=0.5)
    optimizer.param_groups[0]["lr"] = 0.0
    step = TrainStep(loss_of(model), optimizer)
    (batch,) = batches(1, "cuda")
    for _ in range(12):
        step(**batch)
    assert step.captured == 1 and len(set(step.losses().tolist())) == 12


@pytest.mark.gpu
def test_a_model_that_waits_for_the_gpu_runs_without_a_graph() -> None:
    model, optimizer = made("cuda")

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss_of(model)(x, y) * (1 if float(x.sum()) else 2)

    step = TrainStep(loss, optimizer)
    with pytest.warns(UserWarning, match="without a CUDA graph"):
        for batch in batches(5, "cuda"):
            step(**batch)
    assert "synchronises with the GPU at" in step.reason and "test_train.py" in step.reason
    assert step.captured == 0 and step.calls == 5


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_the_step_usable() -> None:
    """A model that begins to synchronise only when it is captured; it has dropout, whose generator must recover."""
    model, optimizer = made("cuda", dropout=0.5)

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        value = loss_of(model)(x, y)
        if torch.cuda.is_current_stream_capturing():
            value.item()
        return value

    step = TrainStep(loss, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in batches(6, "cuda"):
            step(**batch)
    assert sum("without a CUDA graph" in str(w.message) for w in caught) == 1
    assert "the capture failed" in step.reason and step.losses().isfinite().all()


@pytest.mark.gpu
def test_a_capture_that_fails_in_the_optimizer_leaves_the_scaler_and_autocast_usable() -> None:
    """Gradients that were only captured do not count as unscaled, nor are casts of weights read that were."""
    (model, optimizer), (other, other_optimizer) = made("cuda"), made("cuda")
    scalers = [torch.amp.GradScaler("cuda", init_scale=2.0**10) for _ in range(2)]
    step = TrainStep(loss_of(model), optimizer, scaler=scalers[0], clip=CLIP)

    def wait(*_) -> None:
        if torch.cuda.is_current_stream_capturing():
            step.grad_norm.item()

    optimizer.register_step_pre_hook(wait)
    with pytest.warns(UserWarning, match="without a CUDA graph"):
        for batch in batches(5, "cuda"):
            with torch.autocast("cuda", torch.float16):
                step(**batch)
            with torch.autocast("cuda", torch.float16):
                by_hand(other, other_optimizer, [batch], clip=CLIP, scaler=scalers[1])
    assert "the capture failed" in step.reason and step.updates == 5
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_a_scaler_needs_an_optimizer_that_takes_it() -> None:
    model, _ = made("cuda")
    step = TrainStep(loss_of(model), torch.optim.AdamW(model.parameters()), scaler=torch.amp.GradScaler("cuda"))
    assert "synchronises to decide whether to step" in step.reason


@pytest.mark.gpu
def test_batches_may_come_from_the_host() -> None:
    model, optimizer = made("cuda")
    step = TrainStep(loss_of(model), optimizer)
    losses = [step(**batch) for batch in batches(5)]
    assert all(loss.is_cuda for loss in losses) and step.captured == 1


@pytest.mark.gpu
@pytest.mark.parametrize("ours", [False, True], ids=["torch", "ours"])
def test_a_loaded_optimizer_keeps_its_schedule_in_a_graph(ours: bool) -> None:
    """Its groups have lr as a number, which would be a constant of the graph."""
    data, factor = batches(12, "cuda"), lambda step: 0.5**step
    (model, optimizer), (other, other_optimizer) = made("cuda"), made("cuda")
    if ours:
        optimizer = AdamW(model.parameters(), lr=1e-2)
    step = TrainStep(loss_of(model), optimizer, schedule=factor)
    optimizer.load_state_dict(made("cuda")[1].state_dict())
    step.reset()
    for batch in data:
        step(**batch)
    by_hand(other, other_optimizer, data, schedule=factor)
    assert step.reason is None and step.captured == 1
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_a_graph_reads_the_rotary_table_with_which_it_was_captured() -> None:
    """Though a longer batch has replaced the table, and other tensors have taken memory since."""
    torch.manual_seed(0)
    rotary = RotaryEmbedding(8, max_positions=4)
    weight = nn.Parameter(torch.randn(8, device="cuda"))
    optimizer = torch.optim.AdamW([weight], lr=0.0, weight_decay=0.0, fused=True)
    step = TrainStep(lambda x: (rotary(x) * weight).square().sum() + (rotary(x) * weight).sum(), optimizer)
    short, long = (torch.randn(1, rows, 2, 8, device="cuda") for rows in (4, 64))
    expected, *_ = (step(x=short) for _ in range(4))
    assert step.captured == 1
    step(x=long)
    with torch.cuda.stream(step._side):  # on which the table was allocated
        fillers = [torch.full((4, 4), torch.nan, device="cuda") for _ in range(256)]
    torch.cuda.synchronize()
    torch.testing.assert_close(step(x=short), expected)
    assert len(fillers) == 256
