"""patch and unpatch: which layers of a model are known, and how they are replaced.

A layer is replaced by changing its class to a subclass of the same name with another `forward`. Parameters, buffers,
hooks, the names in a state dict and the results of isinstance do not change, nor do other models of the same kind,
except that models which share a configuration object share its attention implementation. To undo it, the original class
is restored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import partial

from torch import nn

from . import attention, layers, loss

# (layer) -> its new forward, or None if the layer is not of this kind. Equal layers get the same function.
_FORWARDS: dict[str, Callable[[nn.Module], Callable | None]] = {
    "norm": layers.norm,
    "rope": layers.rotation,
    "mlp": layers.gated,
}
OPS = ("norm", "rope", "mlp", "attention", "loss")

_CLASSES: dict[tuple[type, Callable], type] = {}


def patch(model: nn.Module, *, except_: Collection[str] = (), loss_scratch_bytes: int | None = None) -> nn.Module:
    """Replaces, in place, the parts of a Hugging Face model that these kernels can compute.

    "norm"       LlamaRMSNorm and equal classes, Gemma's with weight_offset 1: `rmsnorm`
    "rope"       the rotary embedding inside attention: `rope`, q and k in one launch
    "mlp"        gated feed-forward layers: `swiglu` for activation and multiplication; Phi's without a gate: `gelu`
    "attention"  `attention`, registered with transformers as the implementation "ridgeline", causal and with sliding
                 windows. Calls with padding, packed sequences or dropout still use SDPA; a model with capped scores
                 (Gemma 2) keeps its own.
    "loss"       in training with labels, `linear_cross_entropy`. The output then has no logits, which are never all in
                 memory, and no cache unless `use_cache=True` or position_ids are given. Not replaced if the head is
                 more than a linear layer or has hooks, or with a custom loss function.

    model    Llama, Mistral, Qwen2, Qwen3, Gemma, Gemma 2, Gemma 3 (text), Phi, Phi-3, or a module that contains such a
             model, like PEFT's wrappers. Linear layers are not changed, so LoRA's are not either.
    except_  the names of parts not to replace
    loss_scratch_bytes  upper bound of the memory for logits: `scratch_bytes` of `linear_cross_entropy`. By default it
             is small, and the logits of many tokens are computed twice. With 2 · tokens · vocabulary bytes in 16 bits
             none are.

    Returns the model. It works under torch.compile(fullgraph=True), with gradient checkpointing, and for generation.
    Nothing in a training step synchronises, so `ridgeline.train.TrainStep` can capture it in a CUDA graph, if the model
    is given neither attention_mask nor position_ids: transformers reads those on the host, for padding and for the
    borders of packed sequences. Padding after a sequence needs no mask; labels of -100 exclude it. Gemma 2 synchronises
    without a cache, as does any model whose rotary frequencies depend on the length ("dynamic", "longrope"). A second
    call patches again. A patched model can be copied, and saved as a state dict or by save_pretrained, but not pickled
    as a whole.

    Raises ValueError for an unknown name in `except_` and if no part of the model is known, ImportError without
    transformers.
    """
    if isinstance(except_, str):
        except_ = (except_,)
    if unknown := sorted(set(except_) - set(OPS)):
        raise ValueError(f"patch: except_ must name ops among {', '.join(OPS)}, got {', '.join(map(repr, unknown))}")
    unpatch(model)
    for op in OPS:
        if op in except_:
            continue
        if op == "attention":
            attention.use(model)
            _exchange(model, None, attention.unmasked)
        elif op == "loss":
            _exchange(model, op, partial(loss.fused, scratch_bytes=loss_scratch_bytes))
        else:
            _exchange(model, op, _FORWARDS[op])
    if not patched(model) and set(OPS) - set(except_):
        raise ValueError(
            f"patch: model must have a layer that patch can replace, got {type(model).__name__} without one"
        )
    return model


def unpatch(model: nn.Module) -> nn.Module:
    """Undoes `patch` in every layer and returns the model. A model that is not patched is not changed. A layer stays
    patched while its class is one that was derived from the patched one, as torch.nn.utils.parametrize does."""
    for module in model.modules():
        if original := vars(type(module)).get("_ridgeline_original"):
            module.__class__ = original
    attention.give_back(model)
    return model


def patched(model: nn.Module) -> dict[str, int]:
    """The number of layers of a model that use these kernels, by the names of `patch`."""
    found = Counter(dict(_patched(model)))
    return {op: found[op] for op in OPS if found[op]}


def _patched(model: nn.Module) -> Iterator[tuple[str, int]]:
    counts = Counter(getattr(type(module), "_ridgeline_op", None) for module in model.modules())
    yield from ((op, count) for op, count in counts.items() if op)
    if count := attention.used(model):
        yield "attention", count


def _exchange(model: nn.Module, op: str | None, forward_of: Callable[[nn.Module], Callable | None]) -> None:
    """Replaces the layers for which `forward_of` returns a forward. `patched` counts them under the name `op`, or not
    at all if that is None."""
    for module in list(model.modules()):
        if forward := forward_of(module):
            module.__class__ = _subclass(type(module), op, forward)


def _subclass(cls: type, op: str | None, forward: Callable) -> type:
    """A subclass with another forward. It has the same name, as transformers writes that to configurations."""
    if (cls, forward) not in _CLASSES:
        own = {"forward": forward, "_ridgeline_original": cls, "_ridgeline_op": op}
        own |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        _CLASSES[cls, forward] = type(cls.__name__, (cls,), own)
    return _CLASSES[cls, forward]
