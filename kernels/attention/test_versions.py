"""The arguments of the versions in CUDA C++, with the portable kernels in their place. They are planned once for
tensors of given sizes and strides, and then called with addresses only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from . import attention, attention_delta, attention_partial, attention_partial_backward, op, op_partial, versions
from .portable.backward import separate_bwd
from .portable.delta import given_terms
from .portable.forward import portable_fwd
from .portable.key_gradients import key_gradients
from .portable.query_gradient import query_gradient
from .problem import Problem, Saved, head_stride

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPS = getattr(torch.ops, __package__.replace(".", "_"))


def alike(*tensors: torch.Tensor | None) -> list[Any]:
    """Returns the properties of tensors on which a launch plan may depend: all but addresses."""
    return [None if t is None else (t.shape, t.stride(), t.dtype) for t in tensors]


def portable_problem(problem: Problem, shift: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Problem:
    """Returns the problem for the portable kernels, which align the last query with the last key. In CUDA C++, under a
    mask, query i sees keys up to i + shift."""
    assert problem.left < 0 and problem.right in (-1, 0)
    right = shift - (problem.keys - q.shape[2]) if problem.right == 0 else -1
    return replace(problem, q=q, k=k, v=v, right=right)


def put_in_place(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the CUDA C++ versions by portable kernels. Returns a list of the names that are planned and called."""
    seen: list[str] = []

    def fwd_plan(problem: Problem, out: torch.Tensor):
        planned = alike(problem.q, problem.k, problem.v, out)
        seen.append("fwd planned")

        def write(q, k, v, out, lse):
            assert alike(q, k, v, out) == planned and lse.is_contiguous()
            portable_fwd(replace(problem, q=q, k=k, v=v), out, lse, None)
            seen.append("fwd")

        return write

    def bwd_plan(problem: Problem, saved: Saved, dq, dk, dv):
        planned = alike(problem.q, problem.k, problem.v, saved.out, saved.lse, saved.dout, saved.dlse, dq, dk, dv)
        seen.append("bwd planned")

        def write(q, k, v, out, lse, dout, dlse, dq, dk, dv):
            assert alike(q, k, v, out, lse, dout, dlse, dq, dk, dv) == planned
            assert dlse is None or dlse.is_contiguous()
            separate_bwd(replace(problem, q=q, k=k, v=v), Saved(out, lse, None, dout, dlse), dq, dk, dv)
            seen.append("bwd")

        return write

    def partial_fwd_plan(problem: Problem, shift: int, out, lse, result):
        planned = alike(problem.q, problem.k, problem.v, out, lse, result)
        seen.append("partial fwd planned")

        def write(q, k, v, out, lse, result):
            assert alike(q, k, v, out, lse, result) == planned
            portable_fwd(portable_problem(problem, shift, q, k, v), out if result is None else result, lse, None, out)
            seen.append("partial fwd")

        return write

    def partial_bwd_plan(problem: Problem, shift: int, dout, lse, dq, dk, dv, result, add_dq, add_dkdv):
        planned = alike(problem.q, problem.k, problem.v, dout, lse, dq, dk, dv, result)
        seen.append("partial bwd planned")

        def write(q, k, v, dout, lse, delta, dq, dk, dv, result):
            assert alike(q, k, v, dout, lse, dq, dk, dv, result) == planned and head_stride(lse) == head_stride(delta)
            terms, again = given_terms(lse, delta), portable_problem(problem, shift, q, k, v)
            key_gradients(again, dout, terms, dk, dv, add=add_dkdv)
            query_gradient(again, dout, terms, dq, add=add_dq)
            if result is not None:
                result.copy_(dq)
            seen.append("partial bwd")

        return write

    monkeypatch.setattr(versions, "cuda_fwd_plan", fwd_plan)
    monkeypatch.setattr(versions, "cuda_bwd_plan", bwd_plan)
    monkeypatch.setattr(op_partial, "cuda_partial_fwd_plan", partial_fwd_plan)
    monkeypatch.setattr(op_partial, "cuda_partial_bwd_plan", partial_bwd_plan)
    for module in (versions, op_partial):
        monkeypatch.setattr(module, "cuda_unsupported_reason", lambda *_: None)
    monkeypatch.setattr(versions, "cuda_bwd_is_deterministic", lambda _: False)
    return seen


def inputs(layout: str = "contiguous") -> list[torch.Tensor]:
    """q [2, 2, 37, 16], k and v [2, 1, 50, 16]."""
    made = [torch.randn(2, n, length, 16, device=DEVICE).half() for n, length in ((2, 37), (1, 50), (1, 50))]
    if layout == "in columns":  # rows of D that are not contiguous are copied
        return [t.mT.contiguous().mT for t in made]
    if layout == "heads inside":
        return [t.transpose(1, 2).contiguous().transpose(1, 2) for t in made]
    return made


def everything(leaves: list[torch.Tensor], incoming: tuple[torch.Tensor | None, ...], **options) -> list[torch.Tensor]:
    """Returns out, lse, and the gradients for those incoming gradients that are not None."""
    leaves = [t.detach().requires_grad_() for t in leaves]
    results = attention(*leaves, return_lse=True, **options)
    used = [(result, grad) for result, grad in zip(results, incoming, strict=True) if grad is not None]
    gradients = torch.autograd.grad([result for result, _ in used], leaves, [grad for _, grad in used])
    return [t.detach() for t in (*results, *gradients)]


def same(mine: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(num_context=20)], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "heads inside", "in columns"])
def test_cuda_is_given_what_it_was_planned_for(layout: str, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls of one plan agree bitwise with the portable versions. Incoming gradients have any strides."""
    leaves = inputs(layout)
    dout = torch.randn(2, 2, 16, 37, device=DEVICE).half().mT
    dlse = torch.randn(37, 2, 2, device=DEVICE).permute(1, 2, 0)
    given = ((dout, dlse), (dout.contiguous(), dlse), (dout, None), (None, dlse))
    wanted = [everything(leaves, incoming, forward="portable", backward="separate", **options) for incoming in given]
    seen = put_in_place(monkeypatch)
    for incoming, want in zip(given, wanted, strict=True):
        for _ in range(2):
            assert same(everything(leaves, incoming, forward="cuda", backward="cuda", **options), want)
    assert seen.count("fwd planned") == 1 and seen.count("bwd planned") in (3, 4)
    assert seen.count("fwd") == seen.count("bwd") == 8


@pytest.mark.parametrize(
    ("mode", "backward", "runs"),
    [("default", "auto", 1), ("warn", "auto", 1), ("error", "auto", 0), ("error", "cuda", 1)],
)
def test_a_deterministic_backward_is_not_cuda(
    mode: str, backward: str, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it is requested by name. The mode that only warns changes nothing."""
    seen = put_in_place(monkeypatch)
    number = ["default", "warn", "error"].index(mode)
    monkeypatch.setattr(torch, "get_deterministic_debug_mode", lambda: number)
    q, k, v = inputs()
    everything([q, k, v], (torch.ones_like(q), None), backward=backward)
    assert seen.count("bwd") == runs
    out, lse = torch.empty(q.shape, device=DEVICE), torch.full(q.shape[:3], -torch.inf, device=DEVICE)
    attention_partial(q, k, v, out, lse)
    sums = [torch.zeros(t.shape, device=DEVICE) for t in (q, k, v)]
    attention_partial_backward(q, q, k, v, out.half(), lse, *sums, version=backward)
    assert seen.count("partial bwd") == runs and seen.count("partial fwd") == 1


@pytest.mark.parametrize("needed", ["qkv", "qk", "q", "kv"])
def test_cuda_computes_all_gradients_or_none(needed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = put_in_place(monkeypatch)
    leaves = dict(zip("qkv", inputs(), strict=True))
    for name in needed:
        leaves[name].requires_grad_()
    attention(**leaves).sum().backward()
    assert ("bwd" in seen) == (needed in ("qkv", "qk"))
    assert all((leaves[name].grad is not None) == (name in needed) for name in "qkv")


@torch.no_grad()
def partial(layout: str, offset: int | None, apart: bool, **options) -> list[torch.Tensor]:
    """Returns out, lse and the gradients over two blocks of keys, the last of which writes results. `apart`: lse and
    delta have different head strides."""
    torch.manual_seed(0)
    q, k, v = inputs(layout)
    dout = torch.randn_like(q)
    mask = dict(causal=True, q_offset=offset) if offset is not None else {}
    out, lse = torch.zeros(q.shape, device=DEVICE), torch.full((2, 2, 40), -torch.inf, device=DEVICE)[:, :, :37]
    result, rounded = (torch.zeros(q.shape, dtype=q.dtype, device=DEVICE) for _ in range(2))
    spans = (slice(0, 23), slice(23, 50))
    for span in spans:
        to = result if span.start else None
        attention_partial(q, k[:, :, span], v[:, :, span], out, lse, k_offset=span.start, result=to, **mask, **options)
    delta = attention_delta(dout, result)
    if not apart:
        delta = torch.nn.functional.pad(delta, (0, 3))[:, :, :37]
    dq, dk, dv = (torch.zeros(t.shape, device=DEVICE) for t in (q, k, v))
    for span in spans:
        parts = (t[:, :, span] for t in (k, v, dk, dv))
        keys, values, dkeys, dvalues = parts
        rest = dict(delta=delta, add_dkdv=False, result=rounded if span.start else None, k_offset=span.start)
        attention_partial_backward(dout, q, keys, values, None, lse, dq, dkeys, dvalues, **rest, **mask, **options)
    return [result, lse, rounded, dk, dv]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("offset", [None, 0, 13, -9])
@pytest.mark.parametrize("layout", ["contiguous", "in columns"])
def test_blocks_of_keys_in_cuda(layout: str, offset: int | None, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls of the same plans; with a mask under which some queries see no key, and no query sees some keys."""
    want = partial(layout, offset, apart, version="portable")
    seen = put_in_place(monkeypatch)
    for _ in range(2):
        assert same(partial(layout, offset, apart, version="cuda"), want)
    assert seen.count("partial fwd planned") == seen.count("partial bwd planned") == 2
    assert seen.count("partial fwd") == seen.count("partial bwd") == 4


def test_gradients_of_a_block_that_nobody_wants_are_not_needed_by_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel writes all three: those that are None into temporary memory."""
    q, k, v = inputs()
    out, lse = torch.empty(q.shape, device=DEVICE), torch.full(q.shape[:3], -torch.inf, device=DEVICE)
    attention_partial(q, k, v, out, lse)
    found = {}
    for version in ("portable", "cuda"):
        if version == "cuda":
            put_in_place(monkeypatch)
        for wanted in range(3):
            sums = [torch.zeros(t.shape, device=DEVICE) if i == wanted else None for i, t in enumerate((q, k, v))]
            attention_partial_backward(q, q, k, v, out.half(), lse, *sums, version=version)
            found[version, wanted] = sums[wanted]
    assert all(torch.equal(found["portable", i], found["cuda", i]) for i in range(3))


def test_plans_are_kept() -> None:
    """In eager calls, and in calls through torch.library."""
    q, k, v = (t.requires_grad_() for t in inputs())

    def calls() -> None:
        attention(q, k, v).sum().backward()
        OPS.attention_fwd(q, k, v, 0.25, -1, -1, 50, "auto", "auto")[0].sum().backward()

    calls()
    again = dict.fromkeys(("fwd_plan", "bwd_plan"), mock.Mock(side_effect=AssertionError("planned again")))
    with mock.patch.multiple(op, **again):
        calls()
