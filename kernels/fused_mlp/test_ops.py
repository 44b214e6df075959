"""Behaviour other than results: custom ops, cached plans, and autograd."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import configs, launches, op, versions
from .op import fused_mlp
from .plans import Needs
from .sm90 import products
from .test_fused_mlp import DEVICE, operands

OPS = getattr(torch.ops, __package__.replace(".", "_"))


class Results(TorchDispatchMode):
    """Records the numbers of elements of the tensors that the forward's custom op returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is OPS.fused_mlp_fwd.default:
            self.elements.append(tuple(t.numel() for t in out))
        return out


def backward_of(tensors: dict[str, torch.Tensor], needs: Needs) -> tuple[Any, ...]:
    """Arguments of the backward's custom op, with activations that it must recompute."""
    weights = (tensors.get(name) for name in ("w1", "w2", "b1", "w_gate"))
    dy = torch.randn(tensors["x"].shape[0], tensors["w2"].shape[0], device=DEVICE)
    return dy, tensors["x"], *weights, None, None, "silu", *needs, "auto"


@pytest.mark.parametrize("names", ["x w1 w2", "x w1 w2 b1 b2 w_gate"], ids=["plain", "gated"])
def test_the_ops_keep_the_rules_of_torch_library(names: str) -> None:
    """Fake tensors have the shapes of the real ones, for each gradient alone and if no activations are saved."""
    tensors = operands(9, 7, 18, 5, names)
    args = (tensors.get(name) for name in ("x", "w1", "w2", "b1", "b2", "w_gate"))
    torch.library.opcheck(OPS.fused_mlp_fwd, (*args, "silu", False, "auto"))
    for name in names.split():
        needs = Needs(*(field == name for field in Needs._fields))
        torch.library.opcheck(OPS.fused_mlp_bwd, backward_of(tensors, needs), test_utils=("test_faketensor",))


def test_nothing_is_kept_without_gradients() -> None:
    """If no gradient is needed, the custom op returns y alone. pre and gate, each as large as the hidden, are neither
    written nor saved."""
    tensors = operands(9, 7, 18, 5)
    leaves = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    with Results() as seen:
        fused_mlp(**tensors)
        fused_mlp(**leaves, save="input")
        with torch.no_grad():
            fused_mlp(**leaves)
        fused_mlp(**leaves)
    assert seen.elements == [(45, 0, 0)] * 3 + [(45, 9 * 32, 9 * 32)]


def test_the_ops_use_the_plans_of_earlier_calls() -> None:
    """A call through torch.library, as under torch.compile, also reuses cached plans."""
    tensors = operands(3, 7, 18, 5)
    backward = backward_of(tensors, Needs(*[True] * 6))
    with (
        mock.patch.object(op, "fwd_plan", wraps=op.fwd_plan) as fwd,
        mock.patch.object(op, "bwd_plan", wraps=op.bwd_plan) as bwd,
    ):
        for _ in range(3):
            OPS.fused_mlp_fwd(*tensors.values(), "silu", True, "auto")
            OPS.fused_mlp_bwd(*backward)
    assert fwd.call_count <= 1 and bwd.call_count <= 1


class _Stops(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, _):
        return None


def test_no_gradient_gives_none() -> None:
    """If y receives no gradient, the tensors get none, in an eager call and through the custom op."""
    leaves = {name: t.requires_grad_() for name, t in operands(3, 7, 18, 5).items()}
    for y in (fused_mlp(**leaves), OPS.fused_mlp_fwd(*leaves.values(), "silu", True, "auto")[0]):
        _Stops.apply(y).sum().backward()
        assert all(t.grad is None for t in leaves.values())


@pytest.mark.parametrize("odd", [None, "x", "w1", "w2", "w_gate"])
def test_whole_vectors_are_known_as_such(odd: str | None) -> None:
    """The single kernel uses its larger tiles if and only if all matrices consist of whole vectors."""
    tensors = operands(32, 16, 32, 16, "x w1 w2 w_gate", torch.float16)
    if odd is not None:
        wide = torch.zeros(tensors[odd].shape[0], 65, dtype=torch.float16, device=DEVICE)
        tensors[odd] = wide[:, : tensors[odd].shape[1]].copy_(tensors[odd])
    with mock.patch.object(configs, "pick_fused_config", wraps=configs.pick_fused_config) as pick:
        launches.single_launch(**tensors, b1=None, b2=None, activation="silu")
    assert pick.call_args.args[5] is (odd is None)


def test_which_products_go_to_cuda() -> None:
    """GEMMs whose y has a width of whole vectors. Both weights of a gated layer must have the same layout."""
    use = configs.Versions(cuda=True, library=False, passes=False, narrow=False)
    a, b = torch.zeros(40, 64, dtype=torch.float16), torch.zeros(24, 64, dtype=torch.float16)
    other = torch.zeros(64, 24, dtype=torch.float16).mT
    with mock.patch.object(products, "rows_launch") as cuda, mock.patch.object(launches, "rows_launch") as triton:
        for weights in ((b, None), (b, b), (other, other), (other, None)):
            versions.rows_launch(a, *weights, None, use)
        assert (cuda.call_count, triton.call_count) == (4, 0)
        for weights in ((b[:23], None), (b, other), (other, b)):
            versions.rows_launch(a, *weights, None, use)
        assert (cuda.call_count, triton.call_count) == (4, 3)


@pytest.mark.parametrize("launch", ["rows_launch", "weights_launch"])
def test_products_without_an_activation_by_cuda_in_place_of_the_library(launch: str) -> None:
    """If `plain` is chosen and the operands consist of whole vectors."""
    a, b = torch.zeros(40, 64, dtype=torch.float16), torch.zeros(24, 64, dtype=torch.float16)
    with mock.patch.object(products, launch) as cuda, mock.patch.object(versions.library, launch) as library:
        for plain in (False, True):
            use = configs.Versions(cuda=True, library=True, passes=False, narrow=False, plain=plain)
            assert not use.triton
            for columns in (24, 23):
                if launch == "rows_launch":
                    versions.rows_launch(a, b[:columns], None, None, use)
                else:
                    versions.weights_launch(a, a, 64, columns, use)
    assert (cuda.call_count, library.call_count) == (1, 3)
