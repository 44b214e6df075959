"""Layers of few rows, whose weights' gradients are computed together and not by each layer's backward.

A gradient dyᵀ x of few rows is a product that takes the time of a launch and fills few SMs. Here each layer's backward
leaves x and dy with `Operands`, and one batched product for each kind of weight gives the gradients of all layers. For
autograd these are the result of one node, `_Gradients`, which runs when all layers' nodes have: each layer's function
takes that node's output, the `token`, as an input. So hooks, `.grad` and accumulation see gradients as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels.attention import attention, attention_backward

MODES = ("auto", "inline", "deferred", "overlapped")
PROJECTIONS = ("auto", "joint", "apart")
MOST_BYTES = 1 << 29  # that are kept until the end of the backward
MOST_ROWS = 1536  # that get keys and values which nobody reads
LAYERS_AT_ONCE = 1  # whose gradients are launched together where they are overlapped

Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # q, kv, out, up, down


def pick_weight_gradients(layers: int, rows: int, width: int, hidden: int, itemsize: int) -> str:
    """How the gradients of the weights of equal layers are computed: "inline" or "deferred". Pure.

    Kept until the end are the gradients of q, k, v and of the MLP's hidden, the hidden, and copies of five tensors as
    wide as the residual stream. Not measured yet: at (64, 500) the limit is a batch of 6, where the gradient of a
    weight takes 3 to 8 us at 600 TFLOP/s, as long as a launch and the sum of a split K.
    """
    kept = layers * rows * (8 * width + 2 * hidden) * itemsize
    return "deferred" if layers > 1 and kept <= MOST_BYTES else "inline"


def pick_projections(batch: int, context: int, targets: int) -> str:
    """Whether q, k and v are one product of all rows ("joint") or two ("apart"). Pure.

    The targets' keys and values are never read. Three products of them, forward and backward, are 12 d² FLOP a row: of
    1536 rows and 512 columns 5 GFLOP, at 600 TFLOP/s 8 us, for which two launches of 4 us are spared. Not measured yet.
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

    def end_of_layer(self) -> None:
        """What is overlapped may be launched."""
        if self.overlapped and len({layer for _, layer in self._waiting}) >= LAYERS_AT_ONCE:
            self._launch()

    def gradients(self) -> dict[tuple[str, int], torch.Tensor]:
        """Of (kind, layer). Operands are forgotten: another backward through the same graph brings its own."""
        self._launch()
        if self._joins is not None:
            self._joins()
        found, self._multiplied = self._multiplied, {}
        self._rooms, self._read, self._joins = {}, [], None
        return found

    def _launch(self) -> None:
        kinds: dict[str, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
        for (kind, layer), pair in sorted(self._waiting.items(), key=lambda item: item[0]):
            kinds.setdefault(kind, {})[layer] = pair
        self._waiting = {}
        if not kinds:
            return
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
    found = [_as_they_lie(column) for column in columns]
    shapes = {column[0].shape for column, stack in zip(columns, found, strict=True) if stack is None}
    for shape in shapes:
        places = [i for i, stack in enumerate(found) if stack is None and columns[i][0].shape == shape]
        copies = torch.stack([tensor for i in places for tensor in columns[i]])
        for i, copy in zip(places, copies.split([len(columns[i]) for i in places]), strict=True):
            found[i] = copy
    return [stack for stack in found if stack is not None]


def _as_they_lie(tensors: list[torch.Tensor]) -> torch.Tensor | None:
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


def places(weights: Sequence[Weights], overlapped: bool = False) -> list[Place]:
    """For each layer its place, whose functions below then leave the gradients of these weights to one node."""
    operands = Operands(len(weights), overlapped)
    token = _Gradients.apply(operands, *(weight for layer in weights for weight in layer))
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
        for layer, at in enumerate(range(0, len(ctx.rows), 5)):
            joint = found.get(("qkv", layer))
            if joint is None:
                grads += [found.get(("q", layer)), found.get(("kv", layer))]
            else:
                grads += joint.split(ctx.rows[at : at + 2])
            grads += [found.get((kind, layer)) for kind in ("out", "up", "down")]
        return None, *(grad if need else None for grad, need in zip(grads, ctx.needs_input_grad[1:], strict=True))


def stacked_weights(w_q: torch.Tensor, w_kv: torch.Tensor) -> torch.Tensor | None:
    """[3 d, d] where w_kv follows w_q in one memory, without a copy; else None."""
    halves = _as_they_lie([w_q, *w_kv.chunk(2)]) if w_kv.shape[0] == 2 * w_q.shape[0] else None
    return None if halves is None else halves.flatten(0, 1)


def projected_attention(
    x: torch.Tensor,
    w_q: torch.Tensor,
    w_kv: torch.Tensor,
    w_out: torch.Tensor,
    place: Place,
    context: int,
    heads: int,
    backward: str = "auto",
    projections: str = "auto",
) -> torch.Tensor:
    """softmax(q kᵀ / √D) v W_outᵀ of q = x W_qᵀ and k, v = x[:, :context] W_kvᵀ. As `context_attention`, with the
    output projection, and the gradients of the weights left to `place`.

    projections  "joint": one product gives q, k and v of all rows, where the weights lie one after the other in memory;
                 "apart": two products; "auto" as `pick_projections` says
    """
    wanted = projections if projections != "auto" else pick_projections(len(x), context, x.shape[1] - context)
    given = [weight.to(x.dtype).detach() for weight in (w_q, w_kv, w_out)]
    joint = stacked_weights(*given[:2]) if wanted == "joint" else None
    function = _ApartAttention if joint is None else _JointAttention
    weights = given if joint is None else (joint, given[2])
    return function.apply(x, place.token, place, context, heads, backward, *weights)


class _JointAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, token, place, context, heads, backward, w_qkv, w_out):
        ctx.place, ctx.context, ctx.heads, ctx.backward = place, context, heads, backward
        qkv = F.linear(x, w_qkv)
        out, lse = attention(*_heads_of(qkv, context, heads), return_lse=True, backward=backward)
        attended = out.transpose(1, 2).flatten(2)
        ctx.save_for_backward(x, qkv, out, lse, w_qkv, w_out)
        return F.linear(attended, w_out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, qkv, out, lse, w_qkv, w_out = ctx.saved_tensors
        operands, _, layer = ctx.place
        dy = dy.contiguous()
        # Keys and values of the targets have no gradient.
        dqkv = operands.room("dqkv", layer, qkv, qkv.shape, zero=True)
        into = dict(zip(("dq", "dk", "dv"), _heads_of(dqkv, ctx.context, ctx.heads), strict=True))
        _attention_backward(ctx, dy @ w_out, _heads_of(qkv, ctx.context, ctx.heads), out, lse, into)
        if ctx.needs_input_grad[1]:
            operands.add(layer, qkv=(x, dqkv), out=(out.transpose(1, 2).flatten(2), dy))
            operands.end_of_layer()
        dx = dqkv @ w_qkv if ctx.needs_input_grad[0] else None
        return dx, ctx.place.gradient_of_token(), *[None] * 6


class _ApartAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, token, place, context, heads, backward, w_q, w_kv, w_out):
        ctx.place, ctx.context, ctx.heads, ctx.backward = place, context, heads, backward
        asked = x[:, :context].contiguous()
        q, kv = F.linear(x, w_q), F.linear(asked, w_kv)
        out, lse = attention(*_by_heads(q, kv, heads), return_lse=True, backward=backward)
        ctx.save_for_backward(x, asked, q, kv, out, lse, w_q, w_kv, w_out)
        return F.linear(out.transpose(1, 2).flatten(2), w_out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, asked, q, kv, out, lse, w_q, w_kv, w_out = ctx.saved_tensors
        operands, _, layer = ctx.place
        dy = dy.contiguous()
        dq, dkv = operands.room("dq", layer, q, q.shape), operands.room("dkv", layer, kv, kv.shape)
        into = dict(zip(("dq", "dk", "dv"), _by_heads(dq, dkv, ctx.heads), strict=True))
        _attention_backward(ctx, dy @ w_out, _by_heads(q, kv, ctx.heads), out, lse, into)
        if ctx.needs_input_grad[1]:
            operands.add(layer, q=(x, dq), kv=(asked, dkv), out=(out.transpose(1, 2).flatten(2), dy))
            operands.end_of_layer()
        dx = None
        if ctx.needs_input_grad[0]:
            dx = dq @ w_q
            dx[:, : ctx.context].baddbmm_(dkv, w_kv.expand(len(dx), -1, -1))
        return dx, ctx.place.gradient_of_token(), *[None] * 7


def _attention_backward(ctx, dout, qkv, out, lse, into) -> None:
    dout = dout.unflatten(-1, (ctx.heads, -1)).transpose(1, 2)
    attention_backward(dout, *qkv, out, lse, backward=ctx.backward, **into)


def _heads_of(qkv: torch.Tensor, context: int, heads: int) -> tuple[torch.Tensor, ...]:
    """q [B, H, S, D], k and v [B, H, context, D] of [B, S, 3 d], without a copy."""
    q, k, v = (t.transpose(1, 2) for t in qkv.unflatten(-1, (3, heads, -1)).unbind(2))
    return q, k[:, :, :context], v[:, :, :context]


def _by_heads(q: torch.Tensor, kv: torch.Tensor, heads: int) -> tuple[torch.Tensor, ...]:
    """The same of q [B, S, d] and kv [B, context, 2 d]."""
    k, v = (t.transpose(1, 2) for t in kv.unflatten(-1, (2, heads, -1)).unbind(2))
    return q.unflatten(-1, (heads, -1)).transpose(1, 2), k, v


def feed_forward(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, place: Place) -> torch.Tensor:
    """down · silu(up · x), with the gradients of the weights left to `place`. Of few rows cuBLAS and a pass for the
    activation take no longer than a product with an epilogue."""
    return _FeedForward.apply(x, place.token, place, *(weight.to(x.dtype).detach() for weight in (up, down)))


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, token, place, up, down):
        pre = F.linear(x, up)
        # No saved tensor: other layers write beside it, which autograd would take for a change of it.
        ctx.place, ctx.hidden = place, place.operands.room("hidden", place.layer, pre, pre.shape)
        torch.ops.aten.silu.out(pre, out=ctx.hidden)
        ctx.save_for_backward(x, pre, up, down)
        return F.linear(ctx.hidden, down)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, pre, up, down = ctx.saved_tensors
        operands, _, layer = ctx.place
        dy = dy.contiguous()
        dpre = operands.room("dpre", layer, pre, pre.shape)
        torch.ops.aten.silu_backward.grad_input(dy @ down, pre, grad_input=dpre)
        if ctx.needs_input_grad[1]:
            operands.add(layer, up=(x, dpre), down=(ctx.hidden, dy))
        return dpre @ up if ctx.needs_input_grad[0] else None, *[None] * 4
