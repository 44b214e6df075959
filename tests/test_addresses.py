"""In the interpreter no kernel touches memory outside its tensors, not even by a load whose value it drops."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from harness import registry
from harness.commands import check
from harness.correctness import addresses, battery
from harness.spec import KernelSpec

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="compute-sanitizer does this on a GPU")

KERNELS = [name for name in registry.names() if registry.package(name).startswith("kernels.")]
ITEMS = 2


def items(spec: KernelSpec) -> list[check.Item]:
    """The accuracy of the smallest cases that are more than one row and column, one for each set of parameters."""
    every = [i for i in check.plan(spec, "cpu", modes=None) if i.check == "accuracy" and not i.skip and size(i)]
    # Of a batch, or of heads, there may be one in all cases.
    large = [i for i in every if min(i.case.dims.values()) > 1] or [i for i in every if dims_beyond_one(i) > 1]
    found: dict[tuple, check.Item] = {}
    for item in large or every:
        key = (item.mode, item.case.dtype, tuple(sorted(item.case.params.items())))
        if key not in found or size(item) < size(found[key]):
            found[key] = item
    backward = [item for item in found.values() if item.mode != "fwd"]
    return sorted(backward or found.values(), key=size)[:ITEMS]


def dims_beyond_one(item: check.Item) -> int:
    return sum(dim > 1 for dim in item.case.dims.values())


def size(item: check.Item) -> int:
    return math.prod(item.case.dims.values())


@pytest.fixture
def _addresses_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    call = battery.guarded_call

    def checked(subject, inputs, out_grads, *rest, **options):
        if not subject.case.mutates:
            with addresses.checked(*inputs.values(), *(out_grads or ())):
                return call(subject, inputs, out_grads, *rest, **options)

        def on_copies(**given):
            """Of what is updated in place the function is given copies."""
            with addresses.checked(*given.values()):
                return subject.fn(**given)

        return call(replace(subject, fn=on_copies), inputs, out_grads, *rest, **options)

    monkeypatch.setattr(battery, "guarded_call", checked)


@pytest.mark.parametrize("kernel_name", KERNELS)
def test_every_address_is_in_a_tensor(kernel_name: str, _addresses_are_checked: None) -> None:
    chosen = items(registry.load(kernel_name))
    assert chosen
    for item in chosen:
        outcome = check.run(item, "cpu")
        assert outcome.status != "fail", outcome.reason


@triton.jit
def _copy_kernel(x_ptr, y_ptr, n, LOADS: tl.constexpr, STORES: tl.constexpr):
    at = tl.arange(0, 8)
    x = tl.load(x_ptr + at, mask=at < LOADS, other=0.0)
    tl.store(y_ptr + at, x, mask=at < tl.minimum(n, STORES))


@pytest.mark.parametrize(
    ("loads", "stores", "what"), [(5, 5, None), (6, 5, "1 of 6 addresses of a load"), (5, 6, "a store")]
)
def test_one_element_too_many_is_found(loads: int, stores: int, what: str | None) -> None:
    x, y = torch.randn(16)[:5], torch.empty(16)[:5]
    with addresses.checked(), nullcontext() if what is None else pytest.raises(Exception, match=what):
        _copy_kernel[(1,)](x, y, 8, loads, stores)


@triton.jit
def _far_before_kernel(x_ptr, y_ptr):
    at = tl.arange(0, 8)
    tl.store(y_ptr + at, tl.load(x_ptr + at - (1 << 60)))


def test_what_lies_before_the_address_0_is_found() -> None:
    """The interpreter would end the process."""
    with addresses.checked(), pytest.raises(Exception, match="8 of 8 addresses of a load"):
        _far_before_kernel[(1,)](torch.randn(8), torch.empty(8))


def test_a_neighbour_that_is_named_may_be_read() -> None:
    whole = torch.randn(16)
    with addresses.checked([whole]):
        _copy_kernel[(1,)](whole[:5], torch.empty(8), 8, 8, 8)
