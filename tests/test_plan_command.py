"""`plan` prints what the model of a SPEC says, and says that it is a model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness import cli

RATES = ("--tflops", "700", "--link", "350")


def test_it_says_that_it_is_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--gpus", "8", "--gpus", "64", "--seq", "1048576", *RATES]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("A prediction, not a measurement: ring_attention fwd")
    rows = [line.split("|")[1:-1] for line in shown.splitlines() if line.startswith("| ")][1:]
    assert [int(row[0]) for row in rows] == [8, 64]
    assert float(rows[0][1]) > float(rows[1][1]) > 0


def test_rates_are_those_of_the_records_unless_they_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--gpus", "64", "--seq", "1048576"]
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    said = "A prediction, not a measurement: ring_attention fwd, heads and mask of x2-b1-h32-8-q1048576"
    assert shown.startswith(said)
    rates = re.findall(r"^([\d.]+) (TFLOP/s|GB/s) per (?:GPU|link): (.*)\.$", shown, re.MULTILINE)
    assert [unit for _, unit, _ in rates] == ["TFLOP/s", "GB/s"]
    assert 300 < float(rates[0][0]) < 1000 and 100 < float(rates[1][0]) < 450
    assert re.match(r"attention on one GPU, x\d+-b1-h32-8-q", rates[0][2])
    cards = [re.search(r"reports/(h\d+)-x\d+$", where)[1] for _, _, where in rates]
    assert cards[0] == cards[1], "of kernel and link of the same GPU"
    assert cli.main([*command, "--link", "25"]) == 0
    assert "25 GB/s per link: from --link." in capsys.readouterr().out


def test_without_records_the_rates_must_be_given(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["plan", "--reports", str(tmp_path), "--link", "300"]) == 2
    assert "has this rate: give --tflops" in capsys.readouterr().err


def test_a_kernel_without_a_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--kernel", "rmsnorm", *RATES]) == 2
    assert "rmsnorm has no performance model for several GPUs" in capsys.readouterr().err


@pytest.mark.parametrize("rate", ["0", "nan", "inf"])
def test_rates_must_be_positive(rate: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--tflops", rate, "--link", "1"]) == 2
    assert "--tflops and --link must be positive and finite" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--gpus", "--seq"])
@pytest.mark.parametrize("number", ["0", "-5"])
def test_counts_must_be_positive(option: str, number: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A length of 0 is not the same as none given."""
    assert cli.main(["plan", option, number, *RATES]) == 2
    shown = capsys.readouterr()
    assert f"{option}: at least 1, got " in shown.err and not shown.out
