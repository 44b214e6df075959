"""patch and unpatch: which layers of a model are known, and how they are exchanged.

A layer is exchanged by giving it another class: a subclass of its own, of the same name, with another `forward`.
Parameters, buffers, hooks, the names in a state dict and what isinstance says stay as they are, other models of the
same kind too, and undoing it is giving the class back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator

from torch import nn

from . import attention, layers, loss

# (layer) -> its new forward, or None where the layer is not of this kind. Equal layers give the same function.
_FORWARDS: dict[str, Callable[[nn.Module], Callable | None]] = {
    "norm": layers.norm,
    "rope": layers.rotation,
    "mlp": layers.gated,
    "loss": loss.fused,
}
OPS = ("norm", "rope", "mlp", "attention", "loss")

_CLASSES: dict[tuple[type, Callable], type] = {}


def patch(model: nn.Module, *, except_: Collection[str] = ()) -> nn.Module:
    """Exchanges what these kernels can do in a Hugging Face model, in place.

    "norm"       LlamaRMSNorm and its equals, Gemma's with the weight's offset of 1: `rmsnorm`
    "rope"       the rotary embedding inside of attention: `rope`, q and k in one launch
    "mlp"        gated feed-forward layers: the activation and the product of `swiglu`; Phi's of two matrices: `gelu`
    "attention"  `attention`, registered with transformers as the implementation "ridgeline", causal and in sliding
                 windows. Calls with padding, packed sequences or dropout go to SDPA as before; a model with capped
                 scores (Gemma 2) keeps its own.
    "loss"       in training with labels, `linear_cross_entropy`: the output has no logits then, which are never in
                 memory, and unless `use_cache=True` is given no cache. Not where the head is more than a plain linear
                 layer, nor with a loss function of one's own.

    model    Llama, Mistral, Qwen2, Qwen3, Gemma, Gemma 2, Gemma 3 (text), Phi, Phi-3, or whatever contains such a one,
             as PEFT's wrappers do. Linear layers are left alone, so LoRA's are too.
    except_  which of these to leave as they are

    Returns the model. It works under torch.compile(fullgraph=True), with gradient checkpointing, and for generation.
    Nothing in a step of training waits for the GPU, so that `ridgeline.train.TrainStep` makes a CUDA graph of it, where
    the model is given neither attention_mask nor position_ids: transformers reads those on the host, for padding and
    for the borders of packed sequences. Padding behind a sequence needs no mask; labels of -100 leave it out. Gemma 2
    waits without a cache, and any model whose rotary frequencies depend on the length ("dynamic", "longrope").
    Called again it patches anew. A patched model can be copied and saved as a state dict or by save_pretrained, not
    pickled as a whole.

    Raises ValueError for an unknown name in `except_` and where nothing is known in the model, ImportError without
    transformers.
    """
    if isinstance(except_, str):
        except_ = (except_,)
    if unknown := sorted(set(except_) - set(OPS)):
        raise ValueError(f"patch: except_ must be of {', '.join(OPS)}, got {', '.join(map(repr, unknown))}")
    unpatch(model)
    for op in OPS:
        if op in except_:
            continue
        if op == "attention":
            attention.use(model)
            _exchange(model, None, attention.unmasked)
        else:
            _exchange(model, op, _FORWARDS[op])
    if not patched(model) and set(OPS) - set(except_):
        raise ValueError(f"patch: {type(model).__name__} has no layer of a known kind")
    return model


def unpatch(model: nn.Module) -> nn.Module:
    """Gives every layer back what `patch` took; returns the model. It does nothing to one that is not patched."""
    for module in model.modules():
        if original := getattr(type(module), "_ridgeline_original", None):
            module.__class__ = original
    attention.give_back(model)
    return model


def patched(model: nn.Module) -> dict[str, int]:
    """How many layers of a model run on these kernels, by the names of `patch`."""
    found = Counter(dict(_patched(model)))
    return {op: found[op] for op in OPS if found[op]}


def _patched(model: nn.Module) -> Iterator[tuple[str, int]]:
    counts = Counter(getattr(type(module), "_ridgeline_op", None) for module in model.modules())
    yield from ((op, count) for op, count in counts.items() if op)
    if count := attention.used(model):
        yield "attention", count


def _exchange(model: nn.Module, op: str | None, forward_of: Callable[[nn.Module], Callable | None]) -> None:
    """`op` is what `patched` counts these layers as, None for nothing."""
    for module in list(model.modules()):
        if forward := forward_of(module):
            module.__class__ = _subclass(type(module), op, forward)


def _subclass(cls: type, op: str | None, forward: Callable) -> type:
    """The same name, which transformers writes into configurations."""
    if (cls, forward) not in _CLASSES:
        own = {"forward": forward, "_ridgeline_original": cls, "_ridgeline_op": op}
        own |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        _CLASSES[cls, forward] = type(cls.__name__, (cls,), own)
    return _CLASSES[cls, forward]
