"""A capture that fails leaves the process as it was."""

from __future__ import annotations

import contextlib

import pytest
import torch

from harness.capture import capture


class Generator:
    """What a capture needs of one on a GPU; the CPU's has no states that can be exchanged."""

    def __init__(self) -> None:
        self.state = "waiting for the end of a capture"

    def clone_state(self) -> str:
        return f"{self.state}, copied"

    def graphsafe_set_state(self, state: str) -> None:
        self.state = state


def test_a_failed_capture_gives_the_generator_a_copy_of_its_state(monkeypatch):
    """Only a failed one: replays of a graph draw from the state that was there when it was captured."""
    generators, given = (Generator(), Generator()), []
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **options: contextlib.nullcontext(given.append(options)))
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with capture(None, pool=7):
        pass
    assert generators[1].state == "waiting for the end of a capture" and given == [{"pool": 7}]
    with pytest.raises(KeyError), capture(None):
        raise KeyError
    assert generators[1].state.endswith("copied") and not generators[0].state.endswith("copied")


@pytest.mark.gpu
def test_random_numbers_are_drawn_after_a_failed_capture():
    x = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError), capture(torch.cuda.CUDAGraph()):
        torch.rand(4, device="cuda")
        x.sum().item()  # waits, which no capture can
    with contextlib.suppress(RuntimeError):  # what the capture has left
        torch.cuda.synchronize()
    assert torch.rand(1000, device="cuda").unique().numel() > 900
