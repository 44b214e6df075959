"""Which ptxas assembles while Inductor compiles, and otherwise."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from triton import knobs
from triton.backends.nvidia.compiler import get_ptxas_version

from harness.measure import assembler
from harness.measure.assembler import PTXAS, inductors_ptxas


@pytest.fixture
def torchs(monkeypatch, tmp_path) -> Iterator[str]:
    """The path of a ptxas that PyTorch's wheel has."""
    monkeypatch.setenv(PTXAS, "")  # so that it is restored
    monkeypatch.delenv(PTXAS)
    path = tmp_path / "ptxas"
    path.write_text("#!/bin/sh\necho release 99.9\n")
    path.chmod(0o755)
    monkeypatch.setattr(assembler, "OF_PYTORCH", path)
    torch._dynamo.reset()
    yield str(path)
    get_ptxas_version.cache_clear()


def compiled(seen: list[tuple[str, bool]]) -> None:
    """Compiles a function and its backward, and notes the ptxas of each: its path, and whether its version is 99.9."""

    def backend(module, inputs):
        seen.append((knobs.nvidia.ptxas.path, "99.9" in get_ptxas_version(90)))
        os.environ.setdefault(PTXAS, "left")  # as Inductor does where it compiles in this process
        return module

    x = torch.zeros(2, requires_grad=True)
    torch.compile(lambda x: x * 2, backend=aot_autograd(fw_compiler=backend))(x).sum().backward()


def test_inductor_takes_pytorchs_and_all_else_tritons(torchs):
    tritons, seen = (knobs.nvidia.ptxas.path, get_ptxas_version(90)), []
    with inductors_ptxas():
        assert (knobs.nvidia.ptxas.path, get_ptxas_version(90)) == tritons
        compiled(seen)
        assert (knobs.nvidia.ptxas.path, get_ptxas_version(90)) == tritons and PTXAS not in os.environ
    assert len(seen) == 2 and set(seen) == {(torchs, True)}
    assert (knobs.nvidia.ptxas.path, get_ptxas_version(90)) == tritons


def test_after_a_compilation_that_fails_it_is_tritons_again(torchs):
    def backend(module, inputs):
        raise ValueError("no kernel")

    with inductors_ptxas(), pytest.raises(Exception, match="no kernel"):
        torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(2))
    assert PTXAS not in os.environ


def test_one_that_the_user_names_is_everybodys(torchs, monkeypatch):
    monkeypatch.setenv(PTXAS, torchs)
    seen: list[tuple[str, bool]] = []
    with inductors_ptxas():
        compiled(seen)
    assert seen and os.environ[PTXAS] == torchs


def test_without_one_in_pytorch_nothing_changes(torchs):
    os.remove(torchs)
    seen: list[tuple[str, bool]] = []
    with inductors_ptxas():
        compiled(seen)
    assert len(seen) == 2 and not any(new for _, new in seen)
