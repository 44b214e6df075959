"""What a call leaves of the state of the process. Kernels that touch it are in tests/wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.correctness.global_state import GlobalState


@pytest.mark.parametrize(("left", "names"), [(1, "current device"), (0, "")])
def test_another_current_device_is_seen_and_put_back(monkeypatch, left, names):
    """On a machine that has none, two GPUs are made up."""
    current = [0]
    made_up = {
        "is_initialized": lambda: True,
        "current_device": lambda: current[0],
        "set_device": lambda device: current.__setitem__(0, device),
        "current_stream": lambda: None,
        "get_rng_state": lambda: torch.zeros(1, dtype=torch.uint8),
    }
    for name, function in made_up.items():
        monkeypatch.setattr(torch.cuda, name, function)
    with GlobalState() as state:
        torch.cuda.set_device(1)
        torch.cuda.set_device(left)
    assert current == [0]
    verdict = state.verdict()
    assert verdict.ok == (not names) and names in verdict.reason


@pytest.mark.parametrize(
    ("touch", "names"),
    [
        (lambda: torch.backends.cuda.enable_flash_sdp(False), "backends of attention"),
        (lambda: np.random.seed(0), "random number generators"),
        (lambda: np.random.rand(), "random number generators"),
        (lambda: np.random.default_rng(0).random(), ""),
    ],
)
def test_the_state_of_attention_and_of_numpy(touch, names):
    before, enabled = np.random.get_state(), torch.backends.cuda.flash_sdp_enabled()
    with GlobalState() as state:
        touch()
    np.random.set_state(before)
    assert torch.backends.cuda.flash_sdp_enabled() == enabled
    assert state.verdict().ok == (not names) and names in state.verdict().reason
