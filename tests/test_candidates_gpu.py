"""Code of one's own on a GPU: device time by the same clock as that of the kernels, and the allocator's memory."""

from __future__ import annotations

import pytest
import torch

import harness
from harness.candidates import hugging_face

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def draw(device: torch.device, generator: torch.Generator | None) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(4096, 4096, device=device, generator=generator)}


def test_functions_have_device_times_and_exact_memory() -> None:
    missing = hugging_face(lambda transformers: transformers.NoSuchModel)
    candidates = {"power": lambda x: x.pow(2), "cube": lambda x: x**3}
    found = harness.bench(candidates, draw, reference=lambda x: x * x, baselines=("eager", missing), quick=True)
    size = 4 * 4096**2
    for mode, peak in (("inference", size), ("training", 2 * size)):
        row = found.get("power", mode=mode)
        assert row.status == "ok" and row.statistics is not None, row.reason
        assert row.statistics.timer in ("events", "graph")
        assert row.faster_than["eager"].median == pytest.approx(1, abs=0.5)
        assert row.growth_bytes == 0 and row.peak_bytes is not None and row.peak_bytes >= peak
        assert found.get("cube", mode=mode).status == "wrong"
    assert found.get("power", mode="training").saved_bytes == 0  # its input


def test_modules_are_put_on_the_gpu_and_trained_on_it() -> None:
    def mlp() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512))

    baselines = ("eager", "compile")
    found = harness.bench(
        {"mlp": mlp()}, (torch.randn(4096, 512),), reference=mlp(), baselines=baselines, quick=True, samples=7, warmup=2
    )
    assert found.ok, [row.reason for row in found]
    row = found.get("mlp", mode="training")
    assert row.saved_bytes == 2 * 4 * 4096 * 2048  # before and behind GELU
    assert row.statistics is not None and row.statistics.n == 7
