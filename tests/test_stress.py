"""`stress`: which calls are repeated, what counts as a wrong one, and the exit code."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from harness import cli, options
from harness.commands import stress
from harness.on_gpu import Place
from harness.spec import Case, Cost, KernelSpec

CPU = torch.device("cpu")


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Forgetful:
    """Right, but of each third call one element."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = x * 2
        if self.calls % 3 == 0:
            y.view(-1)[5] += 1
        return y


def add_one(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1)


def spec_of(fn, **changes) -> KernelSpec:
    spec = KernelSpec(
        name="toy",
        implementations={"toy": fn},
        reference=double,
        make_inputs=lambda case, device, generator: {"x": torch.randn(case.dims["rows"], 4, generator=generator)},
        cost=lambda case, mode: Cost(1, 32 * case.dims["rows"]),
        cases=(Case("3", dict(rows=3), torch.float32), Case("many", dict(rows=10**6), torch.float32, bench=True)),
        grads=("x",),
        unit="rows",
        items=lambda case: case.dims["rows"],
        fuzz={},
    )
    return dataclasses.replace(spec, **changes)


def tally_of(fn, mode: str = "fwd", seconds: float = 0.0, **changes) -> stress.Tally:
    spec = spec_of(fn, **changes)
    return stress.repeat((spec, spec.cases[0], mode, "toy"), CPU, seconds, stress.SEED + 4)


@pytest.mark.parametrize("mode", ["fwd", "bwd"])
def test_equal_repeats_are_right(mode: str) -> None:
    assert dataclasses.astuple(tally_of(double, mode)) == ("toy", "3", mode, "toy", stress.FEWEST_CALLS, 0, None)
    assert tally_of(double, mode, seconds=0.05).calls > stress.FEWEST_CALLS


def test_a_repeat_that_differs_is_counted_and_described() -> None:
    forgetful = Forgetful()
    tally = tally_of(forgetful, seconds=0.02)
    assert tally.calls // 4 <= tally.wrong <= tally.calls // 2
    assert tally.what is not None and tally.what.startswith("call ") and "of process 4: result 0" in tally.what
    assert "differs in 1 of 12 elements from (1, 1) on" in tally.what


def test_what_is_updated_in_place_is_restored() -> None:
    case = Case("3", dict(rows=3), torch.float32, bench=True, mutates=("x",))
    assert tally_of(add_one, cases=(case,), grads=()).wrong == 0
    assert tally_of(add_one, grads=()).wrong == stress.FEWEST_CALLS - 1


def test_which_calls_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small cases and benched ones that fit, in modes in which equal repeats are promised, of ours alone."""
    spec = spec_of(double, determinism={"fwd": "run-to-run", "bwd": "on request"})
    gpu = Namespace(total_memory=8 * 32 * 10**6 * 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))

    def found(processes: int, case: list[str] | None = None) -> list[tuple[str, str, str]]:
        selection = options.Selection(spec, spec.cases, spec.modes, ("toy", "eager"))
        chosen = stress.groups([selection], Namespace(processes=processes, case=case), CPU)
        return [(case.name, mode, name) for _, case, mode, name in chosen]

    assert found(4) == [("3", "fwd", "toy"), ("many", "fwd", "toy")]
    assert found(5) == [("3", "fwd", "toy")] == found(4, ["3"])


@pytest.fixture
def stressed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Runs `stress` with processes that say what is given: of the first, then of each of the others."""

    def run(first: str, others: str) -> tuple[int, list[dict]]:
        programs = iter([first, others, others])

        def start(arguments: Namespace, number: int, seconds: float) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", next(programs)]
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

        monkeypatch.setattr(stress, "_start", start)
        monkeypatch.setattr(stress, "place", lambda *_: Place(CPU, "toy", tmp_path))
        monkeypatch.setattr(stress, "groups", lambda *_: [object()])
        monkeypatch.setattr(stress.options, "select", lambda arguments: [])
        monkeypatch.setattr(stress.environment, "capture", lambda device: {"torch": "2"})
        code = stress.main(Namespace(processes=2, seconds=1.0, worker=None))
        return code, json.loads((tmp_path / "stress.json").read_text())["rows"]

    return run


def says(calls: int, wrong: int, code: int = 0) -> str:
    line = json.dumps(
        dataclasses.asdict(stress.Tally("toy", "3", "fwd", "toy", calls, wrong, "call 7" if wrong else None))
    )
    return f"import sys; print({line!r}); print('last words', file=sys.stderr); sys.exit({code})"


def test_processes_are_added_up(stressed, capsys: pytest.CaptureFixture) -> None:
    code, (row,) = stressed(says(3, 0), says(500, 0))
    assert (code, row["calls"], row["wrong"]) == (0, 1003, 0)
    code, (row,) = stressed(says(3, 0), says(500, 2))
    assert (code, row["calls"], row["wrong"]) == (1, 1003, 4)
    assert "toy 3 fwd toy: 4 of 1003 calls; call 7" in capsys.readouterr().out


def test_a_process_that_fails_is_a_failure(stressed, capsys: pytest.CaptureFixture) -> None:
    assert stressed(says(3, 0), says(500, 0, code=1))[0] == 1
    assert "a process failed: last words" in capsys.readouterr().err


def test_a_kernel_that_exits_fails_and_the_others_are_repeated(capsys: pytest.CaptureFixture) -> None:
    specs = [spec_of(lambda **_: sys.exit(0)), spec_of(double)]
    chosen = [(spec, spec.cases[0], "fwd", "toy") for spec in specs]
    assert stress._work(chosen, Namespace(worker=1, seconds=0.0), CPU) == 1
    printed = capsys.readouterr()
    assert "SystemExit: 0" in printed.err and json.loads(printed.out)["calls"] == stress.FEWEST_CALLS


def test_what_was_never_called_is_not_right(stressed, capsys: pytest.CaptureFixture) -> None:
    assert stressed("pass", "pass") == (1, [])
    assert "no implementation is available: nothing was repeated" in capsys.readouterr().err


def test_misuse(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["stress", "--processes", "0"]) == 2
    assert "--processes must be at least 1" in capsys.readouterr().err


@pytest.mark.gpu
def test_two_processes(tmp_path: Path) -> None:
    chosen = ["--kernel", "rmsnorm", "--case", "33x257-fp16-residual", "--mode", "fwd"]
    assert cli.main(["stress", *chosen, "--processes", "2", "--seconds", "1", "--out", str(tmp_path)]) == 0
    assert all(row["calls"] >= 9 for row in json.loads((tmp_path / "stress.json").read_text())["rows"])
