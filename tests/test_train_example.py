"""examples/train_transformer_np.py trains, on the CPU at its small size, and draws its losses."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from examples import train_transformer_np


def test_it_trains_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "loss.svg"
    monkeypatch.setattr(sys, "argv", ["train", "--size", "small", "--steps", "100", "--out", str(out)])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a pool makes matrices of this size slower
    try:
        train_transformer_np.main()
    finally:
        torch.set_num_threads(threads)
    printed = " ".join(capsys.readouterr().out.split())
    found = re.search(r"loss of the last 10 steps (-?[\d.]+), of the best constant (-?[\d.]+)", printed)
    pooled = re.search(r"with mean pooling for attention (-?[\d.]+)", printed)
    assert found and pooled and float(found[1]) < float(pooled[1]) < float(found[2]), printed
    assert ("no CUDA graph" in printed) == (not torch.cuda.is_available())
    assert out.read_text().count("<path") > 3 and "best constant" in out.read_text()
