"""A training step as one CUDA graph: `from ridgeline.train import TrainStep`.

Forward, backward, clipping, optimizer and schedule are captured together, so that a step costs the host one launch.
Without a graph, a model whose kernels take microseconds is bound by its launches.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .adamw import PointerTables, clip_scale

__all__ = ["TrainStep", "total_norm"]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)  # the dtypes that clip_scale supports
_SYNCHRONISES = "called a synchronizing CUDA operation"
_WARM_UP = 2  # calls: the first creates optimizer states and compiles; the second shows what always synchronises


@dataclass(frozen=True)
class _Kind:
    """The kind of a micro-step between two updates: the first begins with zero gradients, the last updates."""

    first: bool
    last: bool


@dataclass
class _Shape:
    """The cached state for one kind of micro-step on batches of one signature."""

    calls: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    inputs: tuple[torch.Tensor, ...] = ()
    loss: torch.Tensor | None = None


class TrainStep:
    """Runs one training step, `loss = step(**batch)`, as one CUDA graph if possible.

        g = Σ over `accumulate` calls of ∂loss / accumulate,  g ← g · min(1, clip / ‖g‖₂),   optimizer(g, lr · schedule)

    model       a callable that takes the batch and returns the loss, a scalar tensor, or something with an attribute
                `loss` that is one, as Hugging Face's models do
    optimizer   `ridgeline.adamw.AdamW`, or one of torch.optim that is `capturable`. With a graph its lr becomes a
                tensor on the device, which may be changed in place
    capture     False: never capture a graph
    clip        the largest 2-norm of all gradients together, or None
    schedule    (updates so far) -> factor of each group's lr; the host writes it to the device before an update
    accumulate  calls between two updates; they may have different shapes
    scaler      a torch.amp.GradScaler: the loss is scaled, and an update with inf or NaN in its gradients is skipped
    graphs      number of cached graphs, one for each signature of a batch and, with `accumulate`, for each of up to
                three kinds of call; the least recently used is evicted. They share one memory pool
    history     number of losses kept on the device

    A call copies the batch into the graph's buffers. Tensors may be on the host; other arguments must be hashable and
    are part of the signature. The call returns the loss, detached, on the device, and never synchronises; `losses()`
    synchronises once. `grad_norm` is the norm before the last clipping, a tensor on the device that each update
    overwrites. Without accumulation there are no gradients after an update, as after `optimizer.zero_grad()`.

    The first two calls of a signature run without a graph, on a side stream, and are steps like the others. A step that
    cannot be captured always runs without a graph, with the same results, and `reason` says why. This is the case on
    the CPU, if the model or the optimizer synchronises (`.item()`, a mask as an index, the cache of a Hugging Face
    model with a sliding window that is neither patched nor given use_cache=False), and if the capture itself fails. A
    replay launches kernels but runs no Python code: a model that counts its calls or chooses a branch must not be
    captured. Call `reset()` after anything that replaces tensors of model, optimizer or scaler, such as
    `optimizer.load_state_dict`.

    Raises ValueError for an argument out of range or a loss that is not a scalar, TypeError for a loss that is no
    tensor.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        optimizer: torch.optim.Optimizer,
        capture: bool = True,
        *,
        clip: float | None = None,
        schedule: Callable[[int], float] | None = None,
        accumulate: int = 1,
        scaler: torch.amp.GradScaler | None = None,
        graphs: int = 8,
        history: int = 1024,
    ) -> None:
        for name, value in (("accumulate", accumulate), ("graphs", graphs), ("history", history)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"TrainStep: {name} must be an integer of at least 1, got {value!r}")
        for name, function in (("model", model), ("schedule", schedule)):
            if function is not None and not callable(function):
                raise TypeError(f"TrainStep: {name} must be callable, got {type(function).__name__}")
        if clip is not None and not clip > 0:
            raise ValueError(f"TrainStep: clip must be positive or None, got {clip}")
        self.model, self.optimizer, self.clip, self.schedule = model, optimizer, clip, schedule
        self.accumulate, self.graphs, self.history = accumulate, graphs, history
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.device = next(p.device for group in optimizer.param_groups for p in group["params"])
        self.reason: str | None = None
        self.calls = self.updates = 0
        self._loaded = 0  # calls at the last load_state_dict
        self.grad_norm = torch.zeros((), dtype=torch.float32, device=self.device)
        self._ring = torch.zeros(history, dtype=torch.float32, device=self.device)
        self._cursor = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._shapes: OrderedDict[Hashable, _Shape] = OrderedDict()
        self._tables = PointerTables()
        self._pool: Any = None
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.reason = self._unfit(capture)
        if self.reason is None:
            self._side = torch.cuda.Stream(self.device)
            self._make_capturable()

    def __call__(self, *args: Any, **batch: Any) -> torch.Tensor:
        """Calls the model and, every `accumulate`-th time, performs an update. Returns the loss."""
        position = self.calls % self.accumulate
        kind = _Kind(first=position == 0, last=position == self.accumulate - 1)
        if kind.last and self.schedule is not None:
            self._set_rates(self.schedule(self.updates))
        leaves, tree = pytree.tree_flatten((args, batch))
        loss = self._eager(kind, leaves, tree) if self.reason else self._captured(kind, leaves, tree)
        self.calls += 1
        self.updates += kind.last
        return loss

    def losses(self) -> torch.Tensor:
        """The losses of the last calls, at most `history`, oldest first: fp32, on the CPU. Synchronises."""
        kept = min(self.calls - self._loaded, self.history)
        start = (self.calls - kept) % self.history
        return torch.roll(self._ring.cpu(), -start)[:kept]

    @property
    def captured(self) -> int:
        """The number of captured graphs."""
        return sum(shape.graph is not None for shape in self._shapes.values())

    def reset(self) -> None:
        """Drops all graphs; later calls capture new ones. Synchronises, as the GPU may be replaying one."""
        if self._shapes and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._shapes.clear()
        self._pool, self._tables = None, PointerTables()
        if self.reason is None:
            self._make_capturable()  # the groups of a loaded state dict replace lr, capturable and steps

    def state_dict(self) -> dict[str, Any]:
        """The state of the schedule and the accumulation. Model, optimizer and scaler have their own state dicts; the
        optimizer's has each group's lr times the schedule's factor, so this one has the lr without it."""
        rates = {} if self.schedule is None else {"rates": list(self._rates)}
        return {"calls": self.calls, "updates": self.updates, **rates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from the update at which `state_dict` was taken. Earlier losses are dropped."""
        if state["calls"] % self.accumulate:
            raise ValueError(
                f"TrainStep: state must be that of an update, got one {state['calls'] % self.accumulate} calls later"
            )
        rates = list(state.get("rates", self._rates))
        if len(rates) != len(self._rates):
            raise ValueError(f"TrainStep: state must have {len(self._rates)} rates, one per group, got {len(rates)}")
        self.reset()
        self.calls, self.updates, self._rates = state["calls"], state["updates"], rates
        self._loaded = self.calls
        self._cursor.fill_(self.calls % self.history)

    def _unfit(self, capture: bool) -> str | None:
        if not capture:
            return "capture=False"
        if self.device.type != "cuda":
            return f"the parameters are on {self.device}: a CUDA graph needs a GPU"
        if self.scaler is not None and not getattr(self.optimizer, "_step_supports_amp_scaling", False):
            name = type(self.optimizer).__name__
            return f"GradScaler with {name} synchronises to decide whether to step: use ridgeline's AdamW or fused=True"
        return None

    def _make_capturable(self) -> None:
        """Makes lr a tensor on the device, and lets the optimizer count steps on the device."""
        # PyTorch's optimizers would warn of steps without a graph, such as the first ones.
        self.optimizer._warned_capturable_if_run_uncaptured = True
        for group in self.optimizer.param_groups:
            lr = group["lr"]
            if not isinstance(lr, torch.Tensor) or lr.device != self.device:
                group["lr"] = torch.tensor(float(lr), dtype=torch.float32, device=self.device)
            if "capturable" in group:
                group["capturable"] = True
            for param in group["params"]:
                state = self.optimizer.state.get(param, {})
                if isinstance(state.get("step"), torch.Tensor):
                    state["step"] = state["step"].to(self.device)

    def _set_rates(self, factor: float) -> None:
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate * factor)
            else:
                group["lr"] = rate * factor

    def _eager(self, kind: _Kind, leaves: list[Any], tree: Any) -> torch.Tensor:
        moved = [x.to(self.device, non_blocking=True) if isinstance(x, torch.Tensor) else x for x in leaves]
        return self._micro_step(kind, *pytree.tree_unflatten(moved, tree))

    def _micro_step(self, kind: _Kind, args: tuple[Any, ...], batch: dict[str, Any]) -> torch.Tensor:
        if kind.first:
            self.optimizer.zero_grad(set_to_none=self.accumulate == 1)
        with torch.enable_grad():
            loss = _scalar(self.model(*args, **batch))
            wanted = loss / self.accumulate if self.accumulate > 1 else loss
            (wanted if self.scaler is None else self.scaler.scale(wanted)).backward()
        result = loss.detach()
        if kind.last:
            self._update()
        # After the update: a call that raises is not counted, so its loss must not take a place.
        self._ring.index_copy_(0, self._cursor, result.to(torch.float32).view(1))
        self._cursor.add_(1).remainder_(self.history)
        return result

    def _update(self) -> None:
        if self.scaler is not None and self.clip is not None:
            self.scaler.unscale_(self.optimizer)
        if self.scaler is None:
            with self._clipped():
                self.optimizer.step()
        else:
            if self.clip is not None:
                self._clip()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.accumulate == 1:  # otherwise all graphs share the gradients' memory, and the next first call zeroes it
            self.optimizer.zero_grad(set_to_none=True)

    def _clip(self) -> None:
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(params, self.clip or 0.0)
        self.grad_norm.copy_(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)  # a DTensor with FSDP

    @contextlib.contextmanager
    def _clipped(self) -> Iterator[None]:
        """A context in which the optimizer sees clipped gradients. An optimizer that divides gradients by a scale, as
        GradScaler requests, clips them in its own pass over them."""
        grads = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        scales = getattr(self.optimizer, "_step_supports_amp_scaling", False)
        plain = grads and all(type(g) is torch.Tensor and not g.is_sparse and g.device == self.device for g in grads)
        if self.clip is None or not (scales and plain):
            if self.clip is not None:
                self._clip()
            yield
            return
        optimizer: Any = self.optimizer
        norm, optimizer.grad_scale = self._scale(grads, self.clip)
        self.grad_norm.copy_(norm)
        try:
            yield
        finally:
            del optimizer.grad_scale

    def _scale(self, grads: list[torch.Tensor], clip: float) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of all gradients in fp32, scale by which to divide them), by clip_grad_norm_'s formula."""
        if all(g.is_cuda and g.dtype in _FLOATS for g in grads):
            return clip_scale(grads, clip, tables=self._tables)
        norm = total_norm(grads)
        return norm, ((norm + 1e-6) / clip).clamp(min=1.0)

    def _captured(self, kind: _Kind, leaves: list[Any], tree: Any) -> torch.Tensor:
        key = (kind, tree, tuple(_signature(x) for x in leaves))
        with torch.cuda.device(self.device):
            shape = self._shapes.get(key)
            if shape is None:
                self._make_room()
                shape = self._shapes[key] = _Shape()
            self._shapes.move_to_end(key)
            if shape.graph is None and shape.calls < _WARM_UP:
                shape.calls += 1
                return self._warm_up(kind, leaves, tree, judge=shape.calls == _WARM_UP)
            if shape.graph is None:
                try:
                    self._capture(shape, kind, leaves, tree)
                except Exception as error:  # a model may raise anything
                    self._give_up(f"the capture failed: {type(error).__name__}: {error}")
                    return self._eager(kind, leaves, tree)
            given = (x for x in leaves if isinstance(x, torch.Tensor))
            for static, tensor in zip(shape.inputs, given, strict=True):
                static.copy_(tensor.detach(), non_blocking=True)
            assert shape.graph is not None and shape.loss is not None
            shape.graph.replay()
            return shape.loss.clone()  # the next replay overwrites the original

    def _make_room(self) -> None:
        while len(self._shapes) >= self.graphs:
            _, dropped = self._shapes.popitem(last=False)
            if dropped.graph is not None:
                torch.cuda.synchronize(self.device)  # it may be running

    def _warm_up(self, kind: _Kind, leaves: list[Any], tree: Any, judge: bool) -> torch.Tensor:
        """Runs a step without a graph, on the side stream, as PyTorch requires before a capture. The last one is
        watched for synchronisation; the first, which creates states, may synchronise."""
        current = torch.cuda.current_stream()
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side), _synchronisations(judge) as found:
            loss = self._eager(kind, leaves, tree)
        current.wait_stream(self._side)
        loss.record_stream(current)
        if found:
            self._give_up(f"the step synchronises with the GPU at {found[0]}")
        return loss

    def _capture(self, shape: _Shape, kind: _Kind, leaves: list[Any], tree: Any) -> None:
        statics = [
            torch.empty(x.shape, dtype=x.dtype, device=self.device) if isinstance(x, torch.Tensor) else x
            for x in leaves
        ]
        graph = torch.cuda.CUDAGraph()
        if not self.captured:  # once all of its graphs are destroyed, a memory pool cannot be used again
            self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(self.device)
        # Thread-local: another thread, such as one that pins memory for a data loader, may allocate meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"):
            loss = self._micro_step(kind, *pytree.tree_unflatten(statics, tree))
        shape.graph, shape.loss = graph, loss
        shape.inputs = tuple(x for x in statics if isinstance(x, torch.Tensor))

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        warnings.warn(f"TrainStep: steps run without a CUDA graph: {reason}", stacklevel=4)
        with contextlib.suppress(RuntimeError):  # the pending error of a failed capture is reported here, once
            torch.cuda.synchronize(self.device)
        # A generator that was used in the capture stays registered with it, and could not be used outside a graph.
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())
        # What the step had done on the host: unscaled gradients, and casts of weights, neither of them computed.
        if self.scaler is not None:
            self.scaler._per_optimizer_states.pop(id(self.optimizer), None)
        torch.clear_autocast_cache()
        self._shapes.clear()
        self._pool = None


def _scalar(result: Any) -> torch.Tensor:
    loss = result if isinstance(result, torch.Tensor) else getattr(result, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"TrainStep: model must return a tensor or an object with a tensor `loss`, got {type(result).__name__}"
        )
    if loss.numel() != 1:
        raise ValueError(f"TrainStep: the loss must be a scalar, got shape {tuple(loss.shape)}")
    return loss


def total_norm(grads: list[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of all gradients together, in fp32; that of clip_grad_norm_ is rounded to the gradients' dtype."""
    alike: dict[torch.dtype, list[torch.Tensor]] = {}
    for grad in grads:
        alike.setdefault(grad.dtype, []).append(grad)
    norms: list[torch.Tensor] = []
    for dtype, some in alike.items():
        norms += torch._foreach_norm(some, 2, dtype=torch.promote_types(dtype, torch.float32))
    return torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms]))


def _signature(leaf: Any) -> Hashable:
    # With the type, as 1, 1.0 and True are equal.
    return (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf)


@contextlib.contextmanager
def _synchronisations(watch: bool) -> Iterator[list[str]]:
    """A context that lists where PyTorch synchronises within it, as file:line. Without `watch` it does nothing."""
    found: list[str] = []
    if not watch:
        yield found
        return
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    for warning in caught:
        if _SYNCHRONISES in str(warning.message):
            found.append(f"{warning.filename}:{warning.lineno}")
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
