"""The functions of flash-attn 2 that other packages import, implemented by those of FlashAttention-4.

ring-flash-attn 0.1.8 and yunchang 0.6.4 import `flash_attn.flash_attn_interface` and `flash_attn.flash_attn_func`,
which FlashAttention-4 does not have. `installed` provides them while a package is imported. Here `interface` is
`flash_attn.cute.interface` of FlashAttention-4. Layouts are [B, S, H, D].
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

PACKAGE = "flash_attn"
NAMES = ("_flash_attn_forward", "_flash_attn_backward", "_flash_attn_varlen_forward", "_flash_attn_varlen_backward")
_ABSENT = object()


def shim(interface: Any) -> ModuleType:
    """Returns `flash_attn.flash_attn_interface` of flash-attn 2.7 and later, for equal lengths without dropout.
    Parameters are positional with the original names: ring-flash-attn reads them from the signature."""
    made = ModuleType(f"{PACKAGE}.flash_attn_interface")

    def _flash_attn_forward(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
        return_softmax=False,
    ):
        _plain(dropout_p, (window_size_left, window_size_right), softcap, alibi_slopes)
        out, lse, *_ = interface._flash_attn_fwd(
            q, k, v, softmax_scale=softmax_scale, causal=bool(causal), return_lse=True
        )
        return out, lse, None, None

    def _flash_attn_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq,
        dk,
        dv,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        rng_state=None,
    ):
        _plain(dropout_p, (window_size_left, window_size_right), softcap, alibi_slopes)
        options = dict(softmax_scale=softmax_scale, causal=bool(causal), deterministic=bool(deterministic))
        interface._flash_attn_bwd(q, k, v, out, dout, softmax_lse, dq=dq, dk=dk, dv=dv, **options)

    def flash_attn_func(
        q,
        k,
        v,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
    ):
        _plain(dropout_p, window_size, softcap, alibi_slopes)
        if return_attn_probs:
            raise NotImplementedError(
                "flash_attn_shim: return_attn_probs must be False, as FlashAttention-4 returns none"
            )
        options = dict(softmax_scale=softmax_scale, causal=bool(causal), deterministic=bool(deterministic))
        found = interface.flash_attn_func(q, k, v, **options)
        return found[0] if isinstance(found, tuple) else found

    def of_unequal_lengths(*_, **__):
        raise NotImplementedError("flash_attn_shim: sequences of unequal lengths are not supported")

    functions = (_flash_attn_forward, _flash_attn_backward, of_unequal_lengths, of_unequal_lengths)
    for name, function in (*zip(NAMES, functions, strict=True), ("flash_attn_func", flash_attn_func)):
        setattr(made, name, function)
    return made


def _plain(dropout_p: float, window: Sequence[int], softcap: float, alibi_slopes: object) -> None:
    if dropout_p or tuple(window) != (-1, -1) or softcap or alibi_slopes is not None:
        raise NotImplementedError("flash_attn_shim: dropout, windows, softcap and ALiBi are not supported")


def two_results(interface: Any) -> SimpleNamespace:
    """Returns the functions that PyTorch 2.11 to 2.13 register as "FA4". PyTorch expects two results of the forward;
    later versions of FlashAttention-4 return five."""

    def _flash_attn_fwd(*args, **kwargs):
        return tuple(interface._flash_attn_fwd(*args, **kwargs)[:2])

    return SimpleNamespace(_flash_attn_fwd=_flash_attn_fwd, _flash_attn_bwd=interface._flash_attn_bwd)


@contextmanager
def installed(interface: Any, stubs: Mapping[str, Sequence[str]] | None = None) -> Iterator[None]:
    """A context in which `flash_attn` has the shim's functions; it then restores the previous ones. `stubs`: further
    modules, with the names imported from them. They replace parts of a package that are not needed and may not
    import."""
    functions = shim(interface)
    package = sys.modules.get(PACKAGE)
    modules: dict[str, Any] = {functions.__name__: functions}
    if package is None:
        package = modules[PACKAGE] = ModuleType(PACKAGE)
        package.__path__ = []
    for name, attributes in (stubs or {}).items():
        modules[name] = ModuleType(name)
        vars(modules[name]).update(dict.fromkeys(attributes))
    offered = {"flash_attn_func": functions.flash_attn_func, "flash_attn_interface": functions}
    before = {name: sys.modules.get(name, _ABSENT) for name in modules}
    had = {name: vars(package).get(name, _ABSENT) for name in offered}
    sys.modules.update(modules)
    vars(package).update(offered)
    try:
        yield
    finally:
        _put_back(sys.modules, before)
        _put_back(vars(package), had)


def _put_back(into: dict[str, Any], before: dict[str, Any]) -> None:
    for name, value in before.items():
        if value is _ABSENT:
            into.pop(name, None)
        else:
            into[name] = value
