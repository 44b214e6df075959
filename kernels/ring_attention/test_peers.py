"""The adapters of the peers. Stand-ins have the signatures of FlashAttention-4 4.0.0b36, and import and call the same
functions as ring-flash-attn 0.1.8 and yunchang 0.6.4."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from . import bench, peers
from .flash_attn_shim import installed, shim, two_results
from .reference import ring_attention_reference

# ring-flash-attn passes these by name, and the other parameters of the signature with their defaults.
FORWARD = ("q", "k", "v", "dropout_p", "softmax_scale", "causal", "alibi_slopes", "return_softmax")
BACKWARD = (
    *("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv"),
    *("dropout_p", "softmax_scale", "causal", "alibi_slopes", "deterministic"),
)
WINDOW = {"window_size_left": -1, "window_size_right": -1}

registry = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "activate_flash_attention_impl"), reason="this PyTorch has no such registry"
)


def _flash_attn_fwd(q, k, v, qv=None, *, softmax_scale=None, causal=False, return_lse=False, out=None):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    found, lse = ring_attention_reference(q, k, v, causal=causal, scale=softmax_scale, return_lse=True)
    return found.transpose(1, 2).to(q.dtype), lse if return_lse else None, None, None, None


def _flash_attn_bwd(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, *, deterministic=False, dq, dk, dv
):
    wide = [t.detach().requires_grad_() for t in (q, k, v)]
    with torch.enable_grad():
        found = _flash_attn_fwd(*wide, softmax_scale=softmax_scale, causal=causal)[0]
    for to, gradient in zip((dq, dk, dv), torch.autograd.grad(found, wide, dout), strict=True):
        to.copy_(gradient)
    return dq, dk, dv


def flash_attn_func(
    q, k, v, qv=None, *, softmax_scale=None, causal=False, window_size=(None, None), deterministic=False
):
    return _flash_attn_fwd(q, k, v, softmax_scale=softmax_scale, causal=causal, return_lse=True)[:2]


INTERFACE = SimpleNamespace(
    _flash_attn_fwd=_flash_attn_fwd, _flash_attn_bwd=_flash_attn_bwd, flash_attn_func=flash_attn_func
)


def _tensors() -> list[torch.Tensor]:
    """Returns q, k, v and dout [B, S, H, D]."""
    return [torch.randn(2, 9, heads, 8, dtype=torch.float64) for heads in (4, 2, 2, 4)]


def test_the_shim_is_what_ring_flash_attn_calls() -> None:
    made, (q, k, v, dout) = shim(INTERFACE), _tensors()
    names = inspect.getfullargspec(made._flash_attn_forward).args
    assert set(FORWARD) <= set(names) and set(WINDOW) <= set(names) and "softcap" in names
    given = dict(zip(FORWARD, (q, k, v, 0, 0.3, True, None, False), strict=True))
    out, lse, *rest = made._flash_attn_forward(**given, **WINDOW, softcap=0.0)
    assert rest == [None, None] and lse.shape == (2, 4, 9)
    leaves = [t.transpose(1, 2).requires_grad_() for t in (q, k, v)]
    want, want_lse = ring_attention_reference(*leaves, causal=True, scale=0.3, return_lse=True)
    torch.testing.assert_close((out.transpose(1, 2), lse), (want.detach(), want_lse.detach()), check_dtype=False)

    assert set(BACKWARD) <= set(inspect.getfullargspec(made._flash_attn_backward).args)
    into = [torch.full_like(t, math.nan) for t in (q, k, v)]
    arguments = (dout, q.detach(), k.detach(), v.detach(), out, lse, *into, 0, 0.3, True, None, False)
    made._flash_attn_backward(**dict(zip(BACKWARD, arguments, strict=True)), **WINDOW, softcap=0.0)
    for mine, right in zip(into, torch.autograd.grad(want, leaves, dout.transpose(1, 2)), strict=True):
        torch.testing.assert_close(mine.transpose(1, 2), right)
    with pytest.raises(NotImplementedError, match="dropout, windows"):
        made._flash_attn_forward(**given | dict(dropout_p=0.1), **WINDOW)


def test_yunchang_gives_its_attention_everything_by_name() -> None:
    q, k, v, _ = _tensors()
    options = dict(dropout_p=0.0, softmax_scale=0.3, causal=False, window_size=(-1, -1), softcap=0.0)
    options |= dict(alibi_slopes=None, deterministic=False, return_attn_probs=False)
    out = shim(INTERFACE).flash_attn_func(q, k, v, **options)
    want = ring_attention_reference(*(t.transpose(1, 2) for t in (q, k, v)), scale=0.3)
    torch.testing.assert_close(out.transpose(1, 2), want)


def test_the_shim_is_there_while_a_package_is_imported_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that imports the same names as the two packages, and has a module that cannot be imported."""
    package = tmp_path / "ring_flash_attn"
    (package / "adapters").mkdir(parents=True)
    (package / "adapters" / "__init__.py").write_text("import no_such_library\n")
    lines = (
        "import flash_attn",
        "from flash_attn import flash_attn_func",
        "from flash_attn.flash_attn_interface import _flash_attn_forward, _flash_attn_backward",
        "from flash_attn.flash_attn_interface import _flash_attn_varlen_forward, _flash_attn_varlen_backward",
        "from .adapters import substitute_hf_flash_attn, update_ring_flash_attn_params",
        "def zigzag_ring_flash_attn_func(q, k, v, softmax_scale, causal):",
        "    return flash_attn_func(q, k, v, softmax_scale=softmax_scale, causal=causal)",
    )
    (package / "__init__.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(bench, "_flash_attention_4", lambda: INTERFACE)
    before = {name for name in sys.modules if name.startswith(("flash_attn", "ring_flash_attn"))}
    try:
        attend = bench._ring_flash_attn()
        q, k, v = (t.transpose(1, 2) for t in _tensors()[:3])
        torch.testing.assert_close(attend(q, k, v, causal=True), ring_attention_reference(q, k, v, causal=True))
    finally:
        sys.modules.pop("ring_flash_attn", None)
    assert {name for name in sys.modules if name.startswith(("flash_attn", "ring_flash_attn"))} == before


def test_what_flash_attn_had_it_has_again(monkeypatch: pytest.MonkeyPatch) -> None:
    own = object()
    package = SimpleNamespace(flash_attn_func=own)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    with pytest.raises(RuntimeError, match="not today"), installed(INTERFACE, {"flash_attn.part": ("name",)}):
        from flash_attn.part import name

        assert name is None and package.flash_attn_func is not own
        raise RuntimeError("not today")
    assert vars(package) == {"flash_attn_func": own}
    assert not {"flash_attn.part", "flash_attn.flash_attn_interface"} & set(sys.modules)


def test_torch_takes_two_results_of_fa4() -> None:
    q, k, v, _ = _tensors()
    found = two_results(INTERFACE)._flash_attn_fwd(q, k, v, softmax_scale=None, causal=True, return_lse=True)
    assert len(found) == 2 and two_results(INTERFACE)._flash_attn_bwd is _flash_attn_bwd


def _kernels() -> str:
    return torch._C._dispatch_dump("aten::_scaled_dot_product_flash_attention")


@registry
@pytest.mark.parametrize("implementation", ("ridgeline", peers.FA4))
def test_an_implementation_is_active_inside_alone(implementation: str) -> None:
    if implementation == peers.FA4:
        peers._register_fa4(INTERFACE)
    current = torch.nn.attention.current_flash_attention_impl
    plain = _kernels()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not today"), peers.activated(implementation):
            assert current() == implementation
            assert _kernels() != plain
            with peers.activated(None):
                assert _kernels() == plain
            assert current() == implementation
            raise RuntimeError("not today")
        assert current() is None
        assert _kernels() == plain
    assert not [name for name in sys.modules if "flash_attention_4_" in name]


@registry
def test_a_pytorch_without_a_registry_has_its_own_flash_attention_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.tensor.experimental import _attention as torch_cp

    monkeypatch.setattr(torch_cp, "_enable_context_parallel_dispatcher", lambda: None)
    for backend in ("flash", "cudnn", "ridgeline"):
        assert callable(peers.context_parallel(backend, "allgather"))
    monkeypatch.delattr(torch.nn.attention, "activate_flash_attention_impl")
    for backend in ("flash", "cudnn"):
        assert callable(peers.context_parallel(backend, "alltoall"))
    for backend in ("fa4", "ridgeline"):
        with pytest.raises(ImportError, match="one implementation of flash attention"):
            peers.context_parallel(backend, "allgather", INTERFACE)


def test_forward_and_backward_run_inside_and_nothing_else() -> None:
    log: list[str] = []

    @contextmanager
    def within() -> Iterator[None]:
        log.append("in")
        try:
            yield
        finally:
            log.append("out")

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            log.append("forward")
            return 2 * x

        @staticmethod
        def backward(ctx, dy):
            log.append("backward")
            return 2 * dy

    x, y = torch.randn(3, requires_grad=True), torch.randn(3)
    out = peers.run_within(within, lambda x, y: Twice.apply(x) * y, x, y)
    assert log == ["in", "forward", "out"] and torch.equal(out, 2 * x * y)
    for _ in range(2):  # twice on a retained graph
        log.clear()
        (gradient,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
        assert log == ["in", "backward", "out"] and torch.equal(gradient, 2 * y)
    with torch.no_grad():
        assert not peers.run_within(within, lambda x: 2 * x, x).requires_grad


def test_what_peers_take() -> None:
    supports = {peer.name: peer.supports for peer in bench.SPEC.baselines}
    causal, full, rectangular = (next(c for c in bench.CASES if c.bench and t(c)) for t in (_causal, _full, _rect))
    for name in (*bench.TORCH, "torch-ridgeline"):
        assert supports[name](causal, "bwd") is supports[name](full, "bwd") is None
        assert "as many queries as keys" in supports[name](rectangular, "fwd")
    assert supports["ring-flash-attn"](causal, "bwd") is None and "causal" in supports["ring-flash-attn"](full, "fwd")
    assert supports["yunchang"](rectangular, "bwd") is None


def _causal(case) -> bool:
    return bool(case.params.get("causal"))


def _full(case) -> bool:
    return not _causal(case) and case.dims["queries"] == case.dims["keys"]


def _rect(case) -> bool:
    return case.dims["queries"] != case.dims["keys"]
