"""The gradients of many layers' weights, computed together and not by each layer's backward.

A gradient dyᵀ x of few rows is a product that takes the time of a launch and fills few SMs. Here each layer's backward
leaves x and dy with `Operands`, and one batched product for each kind of weight gives the gradients of all layers. For
autograd these are the result of one node, `_Gradients`, which runs when all layers' nodes have: each function of
`deferred` takes that node's output, the `token`, as an input. So hooks, `.grad` and accumulation see gradients as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

MODES = ("auto", "inline", "deferred", "overlapped")
PROJECTIONS = ("auto", "joint", "apart")
MOST_BYTES = 1 << 29  # that are kept until the end of the backward
MOST_ROWS = 1536  # that get keys and values which nobody reads
LAYERS_AT_ONCE = 1  # whose gradients are launched together where they are overlapped

KINDS = ("q", "kv", "out", "up", "down", "before attention", "before mlp")  # of weights; the last two are norms'


def pick_weight_gradients(layers: int, rows: int, width: int, hidden: int, itemsize: int) -> str:
    """How the gradients of the weights of equal layers are computed: "inline" or "deferred". Pure.

    Kept until the end are the gradients of q, k, v and of the MLP's hidden, the hidden, and copies of five tensors as
    wide as the residual stream. In an exploration on one H200 the step of (64, 500) took 1.64 ms deferred, 1.70
    overlapped and 1.84 inline with a batch of 1, and 18.7, 18.2 and 17.3 with one of 64 (EXPERIMENTS.md). The limit, a
    batch of 6, is reckoned: there the gradient of a weight takes 3 to 8 us, as long as a launch and the sum of a
    split K.
    """
    kept = layers * rows * (8 * width + 2 * hidden) * itemsize
    return "deferred" if layers > 1 and kept <= MOST_BYTES else "inline"


def pick_projections(batch: int, targets: int) -> str:
    """Whether q, k and v are one product of all rows ("joint") or two ("apart"). Pure.

    The targets' keys and values are never read. Three products of them, forward and backward, are 12 d² FLOP a row: of
    1536 rows and 512 columns 5 GFLOP, at 600 TFLOP/s 8 us, for which two launches of 4 us are spared. With 564 rows the
    step took 1.582 ms joint and 1.644 apart in that exploration; the limit is reckoned.
    """
    return "joint" if batch * targets <= MOST_ROWS else "apart"


class Operands:
    """The operands of the gradients of `layers` equal layers, and in the end those gradients.

    overlapped: the products are launched as the backward goes on, on a stream of their own, for LAYERS_AT_ONCE layers
    at a time; else all of them when they are asked for. `gradients` joins the streams.
    """

    def __init__(self, layers: int, overlapped: bool = False) -> None:
        self.layers, self.overlapped = layers, overlapped
        self._rooms: dict[str, torch.Tensor] = {}
        self._waiting: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._multiplied: dict[tuple[str, int], torch.Tensor] = {}
        self._partial: dict[tuple[str, int], tuple[torch.Tensor, torch.dtype]] = {}
        self._read: list[object] = []  # by the other stream, until the streams are joined
        self._joins: Callable[[], None] | None = None

    def room(self, name: str, layer: int, like: torch.Tensor, shape: Sequence[int], zero: bool = False) -> torch.Tensor:
        """Memory of one layer's operand beside that of all layers, so that no copy joins them."""
        if name not in self._rooms:
            self._rooms[name] = (torch.zeros if zero else torch.empty)(
                (self.layers, *shape), dtype=like.dtype, device=like.device
            )
        return self._rooms[name][layer]

    def add(self, layer: int, **operands: tuple[torch.Tensor, torch.Tensor]) -> None:
        """The rows x and dy of each kind of weight, whose gradient is dyᵀ x."""
        for kind, pair in operands.items():
            self._waiting[kind, layer] = tuple(t.flatten(0, -2) for t in pair)  # type: ignore[assignment]

    def add_partial(self, layer: int, kind: str, sums: torch.Tensor, dtype: torch.dtype) -> None:
        """Partial sums [P, d] of the gradient of a norm's weight, which has this dtype."""
        self._partial[kind, layer] = sums, dtype

    def end_of_layer(self) -> None:
        """What is overlapped may be launched."""
        if self.overlapped and len({layer for _, layer in self._waiting}) >= LAYERS_AT_ONCE:
            self._launch()

    def gradients(self) -> dict[tuple[str, int], torch.Tensor]:
        """Of (kind, layer). Operands are forgotten: another backward through the same graph brings its own."""
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
        # The other stream allocates nothing that this one reads, and what it reads stays until they are joined.
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
    """dyᵀ x of all pairs of each list, into the tensor beside it."""
    columns = [list(column) for pairs, _ in products for column in zip(*pairs, strict=True)]
    stacks = _stacked(columns)
    for i, (_, out) in enumerate(products):
        x, dy = stacks[2 * i], stacks[2 * i + 1]
        if len(out) == 1:
            torch.mm(dy[0].t(), x[0], out=out[0])
        else:
            torch.bmm(dy.mT, x, out=out)


def _stacked(columns: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Each list as one tensor: where its tensors lie one after the other without a copy, and all other lists of a shape
    by one copy together."""
    found = [as_they_lie(column) for column in columns]
    loose = [column for column, stack in zip(columns, found, strict=True) if stack is None]
    for shape in dict.fromkeys(column[0].shape for column in loose):
        places = [i for i, stack in enumerate(found) if stack is None and columns[i][0].shape == shape]
        copies = torch.stack([tensor for i in places for tensor in columns[i]])
        for i, copy in zip(places, copies.split([len(columns[i]) for i in places]), strict=True):
            found[i] = copy
    return [stack for stack in found if stack is not None]


def _summed(partial: dict[tuple[str, int], tuple[torch.Tensor, torch.dtype]]) -> dict[tuple[str, int], torch.Tensor]:
    """The sum of each in its dtype, by one sum for all that are alike, after one copy if they do not lie together."""
    found: dict[tuple[str, int], torch.Tensor] = {}
    for shape, dtype in dict.fromkeys((sums.shape, dtype) for sums, dtype in partial.values()):
        alike = {key: sums for key, (sums, other) in partial.items() if sums.shape == shape and other == dtype}
        together = as_they_lie(list(alike.values()))
        stack = torch.stack(list(alike.values())) if together is None else together
        found |= dict(zip(alike, stack.sum(1).to(dtype), strict=True))
    return found


def as_they_lie(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """A stack of tensors that follow each other in one memory, without a copy; else None."""
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
    """Of a layer in `operands`, and the token that makes autograd compute the gradients after it."""

    operands: Operands
    token: torch.Tensor
    layer: int

    def gradient_of_token(self) -> torch.Tensor | None:
        """One that is not None makes autograd run `_Gradients` in the thread of the token's device."""
        return None if self.layer else self.token.detach()


def places(weights: Sequence[dict[str, torch.Tensor]], overlapped: bool = False) -> list[Place]:
    """For each layer, of which there are the weights of KINDS, its place. The functions of `deferred` then leave the
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
