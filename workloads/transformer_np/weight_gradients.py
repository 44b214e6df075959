"""The gradients of many layers' weights, computed together and not in each layer's backward.

For few rows, a gradient dyᵀ x is a GEMM that takes no longer than a launch and fills few SMs. Here each layer's
backward passes x and dy to `Operands`, and one batched GEMM per kind of weight computes the gradients of all layers.
For autograd these are the result of one node, `_Gradients`, which runs after the nodes of all layers: each function of
`deferred` has that node's output, the `token`, as an input. So hooks, `.grad` and accumulation work as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

MODES = ("auto", "inline", "deferred", "overlapped")
PROJECTIONS = ("auto", "joint", "apart")
MOST_BYTES = 1 << 29  # limit of the operands that are kept until the end of the backward
MOST_ROWS = 1536  # limit of the rows for which unused keys and values are computed
LAYERS_AT_ONCE = 1  # layers whose gradients are launched together if they are overlapped

KINDS = ("q", "kv", "out", "up", "down", "before attention", "before mlp")  # of weights; the last two are of norms


def pick_weight_gradients(layers: int, rows: int, width: int, hidden: int, itemsize: int) -> str:
    """How the gradients of the weights of equal layers are computed: "inline" or "deferred". Pure.

    The gradients of q, k, v and of the MLP's hidden, the hidden, and copies of five tensors as wide as the residual
    stream are kept until the end. In an exploration on one H200 the step of (64, 500) took 1.64 ms deferred, 1.70
    overlapped and 1.84 inline with a batch of 1, and 18.7, 18.2 and 17.3 with a batch of 64 (EXPERIMENTS.md). The
    limit, a batch of 6, is reckoned: there the gradient of a weight takes 3 to 8 us, as long as a launch and the
    reduction of a split-K GEMM.
    """
    kept = layers * rows * (8 * width + 2 * hidden) * itemsize
    return "deferred" if layers > 1 and kept <= MOST_BYTES else "inline"


def pick_projections(batch: int, targets: int) -> str:
    """Whether q, k and v are one GEMM of all rows ("joint") or two ("apart"). Pure.

    The targets' keys and values are never read. Their three GEMMs, forward and backward, are 12 d² FLOP per row: 5
    GFLOP for 1536 rows and 512 columns, 8 us at 600 TFLOP/s, compared to two launches of 4 us that are saved. With 564
    rows the step took 1.582 ms joint and 1.644 apart in that exploration; the limit is reckoned.
    """
    return "joint" if batch * targets <= MOST_ROWS else "apart"


class Operands:
    """Collects the operands of the gradients of `layers` equal layers, and computes those gradients.

    overlapped: the GEMMs are launched during the backward, on a side stream, for LAYERS_AT_ONCE layers at a time;
    otherwise all are launched by `gradients`, which also joins the streams.
    """

    def __init__(self, layers: int, overlapped: bool = False) -> None:
        self.layers, self.overlapped = layers, overlapped
        self._rooms: dict[str, torch.Tensor] = {}
        self._waiting: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._multiplied: dict[tuple[str, int], torch.Tensor] = {}
        self._partial: dict[tuple[str, int], tuple[torch.Tensor, torch.dtype]] = {}
        self._read: list[object] = []  # tensors that the side stream reads, until the streams are joined
        self._joins: Callable[[], None] | None = None

    def room(self, name: str, layer: int, like: torch.Tensor, shape: Sequence[int], zero: bool = False) -> torch.Tensor:
        """Memory for one layer's operand, adjacent to that of the other layers, so that no copy has to stack them."""
        if name not in self._rooms:
            self._rooms[name] = (torch.zeros if zero else torch.empty)(
                (self.layers, *shape), dtype=like.dtype, device=like.device
            )
        return self._rooms[name][layer]

    def add(self, layer: int, **operands: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Adds the operands x and dy of each kind of weight, whose gradient is dyᵀ x."""
        for kind, pair in operands.items():
            self._waiting[kind, layer] = tuple(t.flatten(0, -2) for t in pair)  # type: ignore[assignment]

    def add_partial(self, layer: int, kind: str, sums: torch.Tensor, dtype: torch.dtype) -> None:
        """Adds partial sums [P, d] of the gradient of a norm's weight. The gradient has this dtype."""
        self._partial[kind, layer] = sums, dtype

    def end_of_layer(self) -> None:
        """Marks the end of a layer's backward: if overlapped, its gradients may be launched."""
        if self.overlapped and len({layer for _, layer in self._waiting}) >= LAYERS_AT_ONCE:
            self._launch()

    def gradients(self) -> dict[tuple[str, int], torch.Tensor]:
        """The gradients by (kind, layer). Operands are dropped: a second backward through the graph adds its own."""
        self._launch()
        if self._joins is not None:
            self._joins()
        found, self._multiplied = self._multiplied | _summed(self._partial), {}
        self._partial = {}
        self._rooms, self._read, self._joins = {}, [], None
        return found

    def _launch(self) -> None:
        kinds: dict[str, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
        for (kind, layer), pair in sorted(self._waiting.items(), key=lambda item: item[0]):
            kinds.setdefault(kind, {})[layer] = pair
        self._waiting = {}
        if not kinds:
            return None
        made = {kind: _room_of(list(pairs.values())) for kind, pairs in kinds.items()}
        for kind, pairs in kinds.items():
            self._multiplied |= {(kind, layer): made[kind][i] for i, layer in enumerate(pairs)}
        products = [(list(pairs.values()), made[kind]) for kind, pairs in kinds.items()]
        first = products[0][1]
        if not (self.overlapped and first.is_cuda):
            return _multiply(products)
        # The side stream allocates nothing that this one reads, and tensors that it reads live until the streams join.
        main, side = torch.cuda.current_stream(first.device), _side(first.device)
        self._read.append((products, self._rooms))
        side.wait_stream(main)
        with torch.cuda.stream(side):
            _multiply(products)
        self._joins = lambda: torch.cuda.current_stream(first.device).wait_stream(side)
        return None


@lru_cache(maxsize=16)
def _side(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _room_of(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    x, dy = pairs[0]
    return x.new_empty(len(pairs), dy.shape[1], x.shape[1])


def _multiply(products: list[tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]]) -> None:
    """Computes dyᵀ x of all pairs of each list into the tensor that belongs to the list."""
    columns = [list(column) for pairs, _ in products for column in zip(*pairs, strict=True)]
    stacks = _stacked(columns)
    for i, (_, out) in enumerate(products):
        x, dy = stacks[2 * i], stacks[2 * i + 1]
        if len(out) == 1:
            torch.mm(dy[0].t(), x[0], out=out[0])
        else:
            torch.bmm(dy.mT, x, out=out)


def _stacked(columns: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Stacks each list to one tensor: a view if its tensors are consecutive in memory. All other lists of the same
    shape are stacked by one copy."""
    found = [as_they_lie(column) for column in columns]
    loose = [column for column, stack in zip(columns, found, strict=True) if stack is None]
    for shape in dict.fromkeys(column[0].shape for column in loose):
        places = [i for i, stack in enumerate(found) if stack is None and columns[i][0].shape == shape]
        copies = torch.stack([tensor for i in places for tensor in columns[i]])
        for i, copy in zip(places, copies.split([len(columns[i]) for i in places]), strict=True):
            found[i] = copy
    return [stack for stack in found if stack is not None]


def _summed(partial: dict[tuple[str, int], tuple[torch.Tensor, torch.dtype]]) -> dict[tuple[str, int], torch.Tensor]:
    """The sum of each in its dtype. All of the same shape are summed in one launch, after one copy if they are not
    consecutive in memory."""
    found: dict[tuple[str, int], torch.Tensor] = {}
    for shape, dtype in dict.fromkeys((sums.shape, dtype) for sums, dtype in partial.values()):
        alike = {key: sums for key, (sums, other) in partial.items() if sums.shape == shape and other == dtype}
        together = as_they_lie(list(alike.values()))
        stack = torch.stack(list(alike.values())) if together is None else together
        found |= dict(zip(alike, stack.sum(1).to(dtype), strict=True))
    return found


def as_they_lie(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """The stack of tensors as a view if they are consecutive in one buffer, otherwise None."""
    first = tensors[0]
    step = first.numel() * first.element_size()
    memory = first.untyped_storage().data_ptr()
    for i, tensor in enumerate(tensors):
        if not tensor.is_contiguous() or tensor.untyped_storage().data_ptr() != memory:
            return None
        if tensor.data_ptr() != first.data_ptr() + i * step:
            return None
    return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))


class Place(NamedTuple):
    """A layer's place in `operands`, and the token that makes autograd compute the gradients after the layer."""

    operands: Operands
    token: torch.Tensor
    layer: int

    def gradient_of_token(self) -> torch.Tensor | None:
        """The gradient of the token. If it is not None, autograd runs `_Gradients` in the thread of its device."""
        return None if self.layer else self.token.detach()


def places(weights: Sequence[dict[str, torch.Tensor]], overlapped: bool = False) -> list[Place]:
    """The place of each layer. `weights` has the weights of KINDS of each. The functions of `deferred` then defer the
    gradients of these weights, all of them or none, to one node."""
    operands = Operands(len(weights), overlapped)
    token = _Gradients.apply(operands, *(layer[kind] for layer in weights for kind in KINDS))
    return [Place(operands, token, layer) for layer in range(len(weights))]


class _Gradients(torch.autograd.Function):
    """Its output is empty. Its backward runs after those of all functions that took it, and gives the weights'
    gradients."""

    @staticmethod
    def forward(ctx, operands, *weights):
        ctx.set_materialize_grads(False)
        ctx.operands, ctx.rows = operands, [weight.shape[0] for weight in weights]
        return weights[0].new_empty(0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, _):
        found, grads = ctx.operands.gradients(), []
        for layer, at in enumerate(range(0, len(ctx.rows), len(KINDS))):
            joint = found.pop(("qkv", layer), None)
            if joint is not None:
                found["q", layer], found["kv", layer] = joint.split(ctx.rows[at : at + 2])
            grads += [found.get((kind, layer)) for kind in KINDS]
        return None, *(grad if need else None for grad, need in zip(grads, ctx.needs_input_grad[1:], strict=True))
