"""examples/gradient_compression.py trains with every kind, on two processes of a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from examples import gradient_compression
from harness import registry
from harness.reporting import training

EXAMPLE = registry.ROOT / "examples" / "gradient_compression.py"
KINDS = ["none", "int8", "fp8", "int4", "topk", "powersgd"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a group of one process over gloo has no GPU")
@pytest.mark.parametrize(("kind", "untimed"), [("none", 20), ("topk", 23)])
def test_the_first_steps_are_not_timed(
    kind: str, untimed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nor are those before a kind begins to compress, a tenth of all for topk."""
    seconds = iter([100.0] * untimed + [1.0] * (30 - untimed))
    clock = [0.0]

    def forward(model: torch.nn.Module, text: torch.Tensor) -> torch.Tensor:
        clock[0] += next(seconds, 0.0)
        return plain(model, text)

    plain = gradient_compression.GPT.forward
    monkeypatch.setattr(gradient_compression.GPT, "forward", forward)
    monkeypatch.setattr(gradient_compression, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        rows = gradient_compression.Text(0, torch.device("cpu")).rows(1, 30)
        found = gradient_compression.train(kind, rows.split(1), rows[:1], 0)
    finally:
        dist.destroy_process_group()
    assert found["ms_a_step"] == 1000.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="a group of one process over gloo has no GPU")
def test_without_a_gpu_the_defaults_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter a step with int4 takes two seconds."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    steps: list[int] = []
    monkeypatch.setattr(gradient_compression, "run_seed", lambda seed, kinds, record, o, device: steps.append(o.steps))
    monkeypatch.setattr(sys, "argv", ["gradient_compression"])
    gradient_compression.main()
    assert len(steps) == 1 and steps[0] <= 10


@pytest.mark.slow
def test_every_kind_trains_for_three_steps(tmp_path: Path) -> None:
    if torch.cuda.device_count() == 1:
        pytest.skip("needs two GPUs, or none")
    out = tmp_path / "losses.json"
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    environment = {**os.environ, "PYTHONPATH": str(registry.ROOT), "OMP_NUM_THREADS": "1"}

    def run(*kinds: str) -> str:
        options = ["--steps", "3", "--seeds", "0", "--out", str(out), *kinds]
        done = subprocess.run(
            [sys.executable, "-m", *command, *options],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    first = run("--kind", "int8")
    rest = run()
    assert "none" in first and "int8" in first and "int8" not in rest and "none" not in rest, "the file is gone on with"
    record = json.loads(out.read_text())
    record["results"] = {kind: record["results"][kind] for kind in KINDS}
    assert all(len(seeds["0"]["curve"]) == 3 for seeds in record["results"].values())
    assert record["ranks"] == 2 and record["steps"] == 3 and list(record["results"]) == KINDS
    losses = {kind: seeds["0"]["loss"] for kind, seeds in record["results"].items()}
    assert all(abs(loss - losses["none"]) < 0.05 * losses["none"] for loss in losses.values()), losses
    assert all(f"seed 0  {kind}" in first + rest for kind in KINDS)
    lines = training.page("gradient_compression", "two CPUs", record)
    assert sum(line.startswith("| none |") for line in lines) == 1
