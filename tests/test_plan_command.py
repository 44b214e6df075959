"""`plan` prints what the model of a SPEC says, and says that it is a model."""

from __future__ import annotations

import pytest

from harness import cli

RATES = ("--tflops", "700", "--link", "350")


def test_it_says_that_it_is_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--gpus", "8", "--gpus", "64", "--seq", "1048576", *RATES]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("A model, not a measurement: ring_attention fwd")
    rows = [line.split("|")[1:-1] for line in shown.splitlines() if line.startswith("| ")][1:]
    assert [int(row[0]) for row in rows] == [8, 64]
    assert float(rows[0][1]) > float(rows[1][1]) > 0


def test_a_kernel_without_a_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--kernel", "rmsnorm", *RATES]) == 2
    assert "rmsnorm has no model of several GPUs" in capsys.readouterr().err


def test_rates_must_be_positive(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--tflops", "0", "--link", "1"]) == 2
    assert "--tflops and --link must be positive" in capsys.readouterr().err
