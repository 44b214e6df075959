"""The arguments of the versions in CUDA C++, with the portable kernels in their place. They are planned once for
tensors of given sizes and strides, and then called with addresses only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from . import block_sparse_attention, versions
from .portable.backward import portable_bwd
from .portable.forward import portable_fwd
from .problem import Problem, Saved
from .test_block_sparse_attention import SMALL, everything, normal, random_mask


def alike(tensor: torch.Tensor | None) -> Any:
    """Returns the properties of a tensor on which a launch plan may depend: all but the address."""
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype)


def put_in_place(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the CUDA C++ versions by portable kernels. Returns a list of the names that are planned and called."""
    seen: list[str] = []

    def fwd_plan(problem: Problem, out: torch.Tensor):
        planned = [*map(alike, (problem.q, problem.k, problem.v, problem.table, problem.bias, out))]
        seen.append("fwd planned")

        def write(q, k, v, table, bias, out, lse):
            assert [*map(alike, (q, k, v, table, bias, out))] == planned and lse.is_contiguous()
            portable_fwd(Problem(q, k, v, table, bias, problem.scale, problem.block, problem.causal), out, lse, None)
            seen.append("fwd")

        return write

    def bwd_plan(problem: Problem, saved: Saved, dq, dk, dv):
        given = problem.q, problem.k, problem.v, problem.table, saved.out, saved.lse, saved.dout, saved.dlse, dq, dk, dv
        planned = [*map(alike, given)]
        seen.append("bwd planned")

        def write(q, k, v, table, out, lse, dout, dlse, dq, dk, dv):
            assert [*map(alike, (q, k, v, table, out, lse, dout, dlse, dq, dk, dv))] == planned
            assert dlse is None or dlse.is_contiguous()
            again = Problem(q, k, v, table, None, problem.scale, problem.block, problem.causal)
            portable_bwd(again, Saved(out, lse, None, dout, dlse), dq, dk, dv, False)
            seen.append("bwd")

        return write

    monkeypatch.setattr(versions, "cuda_fwd_plan", fwd_plan)
    monkeypatch.setattr(versions, "cuda_bwd_plan", bwd_plan)
    monkeypatch.setattr(versions, "cuda_unsupported_reason", lambda *_: None)
    monkeypatch.setattr(versions, "cuda_bwd_unsupported_reason", lambda problem, *_: problem.bias and "no bias")
    return seen


def inputs(layout: str) -> list[torch.Tensor]:
    """q [2, 2, 70, 16], k and v [2, 1, 130, 16]."""
    made = [normal(2, heads, length, 16).half() for heads, length in ((2, 70), (1, 130), (1, 130))]
    if layout == "in columns":  # rows of D that are not contiguous are copied
        return [t.mT.contiguous().mT for t in made]
    if layout == "heads inside":
        return [t.transpose(1, 2).contiguous().transpose(1, 2) for t in made]
    return made


@pytest.mark.parametrize("layout", ["contiguous", "heads inside", "in columns"])
@pytest.mark.parametrize("causal", [False, True])
def test_cuda_is_given_what_it_was_planned_for(layout: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls of one plan agree bitwise with the portable versions."""
    mask = random_mask(2, 2, 3)
    leaves = inputs(layout)
    options = dict(causal=causal, **SMALL)
    want = everything(block_sparse_attention, leaves, mask, **options)
    seen = put_in_place(monkeypatch)
    for _ in range(2):
        mine = everything(block_sparse_attention, leaves, mask, forward="cuda", backward="cuda", **options)
        assert all(torch.equal(a, b) for a, b in zip(mine, want, strict=True))
    assert seen == ["fwd planned", "fwd", "bwd planned", "bwd", "fwd", "bwd"]


def test_cuda_takes_incoming_gradients_of_any_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    mask, leaves = random_mask(2, 3), [t.requires_grad_() for t in inputs("contiguous")]
    dout, dlse = normal(2, 2, 16, 70).half().mT, normal(70, 2, 2).permute(1, 2, 0)

    def gradients(backward: str, *incoming: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        results = block_sparse_attention(*leaves, mask, return_lse=True, backward=backward, **SMALL)
        used = [(result, grad) for result, grad in zip(results, incoming, strict=True) if grad is not None]
        return torch.autograd.grad([result for result, _ in used], leaves, [grad for _, grad in used])

    wanted = [gradients("portable", *incoming) for incoming in ((dout, dlse), (dout, None), (None, dlse))]
    seen = put_in_place(monkeypatch)
    for want, incoming in zip(wanted, ((dout, dlse), (dout, None), (None, dlse)), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(gradients("cuda", *incoming), want, strict=True))
    assert seen.count("bwd") == 3


@pytest.mark.parametrize(
    ("needed", "backward", "runs"),
    [
        ("qkv", "auto", True),
        ("qkv", "portable", False),
        ("qk", "auto", True),  # k and v have one kernel
        ("q", "auto", False),
        ("kv", "auto", False),
        ("kv", "cuda", False),
    ],
)
def test_when_the_backward_is_cuda(needed: str, backward: str, runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = put_in_place(monkeypatch)
    leaves = dict(zip("qkv", inputs("contiguous"), strict=True))
    for name in needed:
        leaves[name].requires_grad_()
    block_sparse_attention(**leaves, block_mask=random_mask(2, 3), backward=backward, **SMALL).sum().backward()
    assert ("bwd" in seen) == runs and "fwd" in seen
    assert all((leaves[name].grad is not None) == (name in needed) for name in "qkv")


def test_a_deterministic_backward_is_not_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is requested by name. The mode that only warns changes nothing."""
    seen = put_in_place(monkeypatch)
    leaves, mask = [t.requires_grad_() for t in inputs("contiguous")], random_mask(2, 3)
    default, warn, error = range(3)
    for mode, backward, runs in ((error, "auto", 0), (warn, "auto", 1), (error, "cuda", 1), (default, "auto", 1)):
        seen.clear()
        monkeypatch.setattr(torch, "get_deterministic_debug_mode", lambda mode=mode: mode)
        block_sparse_attention(*leaves, mask, backward=backward, **SMALL).sum().backward()
        assert seen.count("bwd") == runs, (mode, backward)
