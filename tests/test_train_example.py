"""examples/train_transformer_np.py trains, on the CPU at its small size, draws its losses and writes them down."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from examples import train_transformer_np
from harness.reporting import training


def test_it_trains_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, record = tmp_path / "loss.svg", tmp_path / "training" / "transformer_np.json"
    words = ["train", "--size", "small", "--steps", "100", "--out", str(out), "--record", str(record)]

    def printed_by(*more: str) -> str:
        monkeypatch.setattr(sys, "argv", [*words, *more])
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # a pool makes matrices of this size slower
        try:
            train_transformer_np.main()
        finally:
            torch.set_num_threads(threads)
        return " ".join(capsys.readouterr().out.split())

    printed = printed_by()
    found = {kind: float(loss) for kind, loss in re.findall(r"(\w+): loss on held-out tasks (-?[\d.]+)", printed)}
    bound = re.search(r"the best constant Gaussian: (-?[\d.]+)", printed)
    assert bound and found["torch"] < found["pooling"] < float(bound[1]), printed
    assert ("no CUDA graph" in printed) == (not torch.cuda.is_available())
    assert ("ours" in found) == torch.cuda.is_available()
    assert out.read_text().count("<path") > 3 and "best constant" in out.read_text()
    document = json.loads(record.read_text())
    assert document["schema"] == training.SCHEMA and next(iter(document["results"])) == document["plain"] == "torch"
    again = printed_by()
    assert "held-out" in again and "graph" not in again, "the file is continued"
    document["results"].popitem()  # as if the last training had been interrupted
    record.write_text(json.dumps(document))
    last, others = list(found)[-1], list(document["results"])
    rest = printed_by()
    assert f"{last}: no CUDA graph" in rest or f"{last}: steps in" in rest
    assert not any(f"{kind}: no CUDA graph" in rest or f"{kind}: steps in" in rest for kind in others)
    assert json.loads(record.read_text())["results"]["torch"] == document["results"]["torch"]
    with pytest.raises(ValueError, match="is of other settings: {'model': .*rbf"):
        printed_by("--kernel", "periodic")
    lines = training.page("transformer_np", "a CPU", document)
    assert f"| torch | 1 | {document['results']['torch']['0']['loss']:.4f} | – |" in "\n".join(lines)


def test_all_kinds_begin_alike_and_see_the_same_tasks() -> None:
    """The weights of a model of PyTorch's parts and of one of kernels are drawn alike: only their dtype differs."""
    torch_model, _ = train_transformer_np.built("torch", "small", 3, torch.device("cpu"))
    ours, _ = train_transformer_np.built("ours", "small", 3, torch.device("cpu"))
    for a, b in zip(torch_model.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b)
    tasks = [train_transformer_np.tasks_of("small", "rbf", 2, 5, torch.device("cpu")) for _ in range(2)]
    assert all(torch.equal(a[n], b[n]) for a, b in zip(*tasks, strict=True) for n in a)
    assert not torch.equal(tasks[0][0]["x_context"], tasks[0][1]["x_context"])
