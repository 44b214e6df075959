"""The bench without a GPU: what it decides before it measures."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from harness import execute, options, registry
from harness.bench import Group


def test_a_case_that_the_device_cannot_run_is_skipped_with_the_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    spec = registry.load("rmsnorm")
    case = dataclasses.replace(spec.cases[0], min_capability=(9, 0))
    selection = options.Selection(spec, (case,), ("fwd",), ("triton", "eager"))
    rows = Group(SimpleNamespace(device=torch.device("cuda", 0)), selection, case, "fwd").rows()
    assert [(row["implementation"], row["status"]) for row in rows] == [("triton", "skipped"), ("eager", "skipped")]
    assert {row["reason"] for row in rows} == {"needs compute capability 9.0"}


def test_incoming_gradients_are_those_of_the_outputs_that_autograd_reaches():
    spec = registry.load("rmsnorm")
    inputs = spec.make_inputs(spec.case("33x257-fp16-residual"), "cpu", torch.Generator().manual_seed(0))
    grads = execute.out_grads(spec, spec.reference, inputs, "bwd", None)
    assert [g.shape for g in grads] == [inputs["x"].shape] * 2
    assert execute.out_grads(spec, spec.reference, inputs, "fwd", None) is None


@pytest.mark.parametrize(("message", "line"), [("one\ntwo", "one"), ("", "ValueError"), ("\n  ", "ValueError")])
def test_the_first_line_of_an_exception_is_never_missing(message, line):
    assert execute.first_line(ValueError(message)) == line
