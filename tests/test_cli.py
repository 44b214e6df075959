"""The command line: help for every command, unknown names answered with the known ones, and `list`."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import re
import subprocess
import sys

import pytest

from harness import cli, options, registry
from harness.commands import listing


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: python -m harness {command}" in shown
    assert " ".join(cli.COMMANDS[command].split()) in " ".join(shown.split())


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert [command for command in cli.COMMANDS if not re.search(rf"^    {command}\s", shown, re.MULTILINE)] == []


def test_unknown_command_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["bnech"])
    assert stop.value.code == 2
    shown = capsys.readouterr().err
    assert "bnech" in shown
    assert [command for command in cli.COMMANDS if command not in shown] == []


@pytest.mark.parametrize("command", ["list", "check", "bench", "build"])
def test_unknown_kernel_lists_the_known(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--kernel", "rmsnrom"]) == 2
    shown = capsys.readouterr().err
    assert "'rmsnrom'" in shown
    assert [name for name in registry.names() if name not in shown] == []


@pytest.mark.parametrize("option", ["--case", "--mode", "--impl"])
def test_unknown_choice_lists_the_known(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = registry.names()[0]
    spec = registry.load(name)
    known = {"--case": spec.cases[0].name, "--mode": spec.modes[0], "--impl": next(iter(spec.implementations))}[option]
    assert cli.main(["list", "--kernel", name, option, "nonesuch"]) == 2
    shown = capsys.readouterr().err
    assert "'nonesuch'" in shown
    assert known in shown


def test_unknown_gpu_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--gpu", "h300", "--device", "cpu"]) == 2
    shown = capsys.readouterr().err
    assert "'h300'" in shown
    assert [gpu for gpu in ("h200", "h100", "a100-80", "b200", "rtx4090", "t4") if gpu not in shown] == []


def test_list_shows_every_kernel_and_its_bench_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    shown = capsys.readouterr().out
    for name in registry.names():
        spec = registry.load(name)
        assert name in shown.splitlines()
        for case in spec.cases:
            assert (f"    {case.name} " in shown) == (case.bench or any(_benched(case.name)))


def _benched(case: str) -> list[bool]:
    """Whether another kernel times a case of the same name."""
    return [c.bench for name in registry.names() for c in registry.load(name).cases if c.name == case]


def test_list_narrows(capsys: pytest.CaptureFixture[str]) -> None:
    name = registry.names()[0]
    spec = registry.load(name)
    assert cli.main(["list", "--kernel", name, "--mode", spec.modes[0], "--impl", "eager", "--all"]) == 0
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if line and not line.startswith(" ")] == [name]
    assert f"  modes            {spec.modes[0]}\n" in shown
    assert "  compared with    eager\n" in shown
    assert [case.name for case in spec.cases if f"    {case.name} " not in shown] == []


def test_list_says_what_an_implementation_and_a_case_need() -> None:
    spec = registry.load("rmsnorm")
    case = dataclasses.replace(spec.cases[0], name="ring", world_size=2)
    spec = dataclasses.replace(spec, cases=(case,))
    shown = listing.describe(options.Selection(spec, (case,), ("fwd",), tuple(spec.implementations)))
    assert "  implementations  auto, triton, cuda (sm_90)\n" in shown
    assert shown.splitlines()[-1].endswith(", GPUs 2")


@pytest.mark.parametrize("command", ["report", "compare", "new"])
def test_works_where_torch_is_not_installed(command: str) -> None:
    code = "import sys; sys.modules['torch'] = None; from harness.cli import main; main([sys.argv[1], '--help'])"
    done = subprocess.run([sys.executable, "-c", code, command], cwd=registry.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"harness {command}" in done.stdout


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_a_command_is_a_module_with_two_functions(command: str) -> None:
    module = importlib.import_module(f"harness.commands.{'listing' if command == 'list' else command}")
    assert callable(module.configure)
    assert callable(module.main)


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("bench --gpus 2 --suite trainscale --timer graph", "--suite and --timer cannot be used with --gpus"),
        ("bench --rank-timeout 5", "--rank-timeout cannot be used with a bench without --gpus"),
        ("bench --host no --host-compiled", "--host-compiled cannot be used with --host no"),
        ("bench --host only --samples 9", "--samples cannot be used with --host only"),
        ("mutate --report --kernel gelu --minutes 5", "--kernel and --minutes cannot be used with --report"),
        ("mutate --report --list", "--list cannot be used with --report"),
        ("bench --device cpu --kernel rmsnorm --timer cupti", "--timer cannot be used with a bench without a GPU"),
        ("bench --device cpu --kernel rmsnorm --resume", "--resume cannot be used with a bench without a GPU"),
        ("bench --device cpu --kernel rmsnorm --resume --out x", "--resume and --out cannot be used with a bench"),
    ],
)
def test_options_that_would_be_ignored_are_refused(words: str, refused: str, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(words.split()) == 2
    assert refused in capsys.readouterr().err


def test_an_unknown_option_shows_the_options_of_the_command(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["list", "--bogus"])
    said = capsys.readouterr().err
    assert "usage: python -m harness list" in said and "--impl" in said and "arguments: --bogus" in said


def test_a_reader_that_ends_early_is_no_error() -> None:
    """As in `python -m harness list | head`."""
    command = [sys.executable, "-m", "harness", "list", "--kernel", "gelu", "--all"]
    with subprocess.Popen(command, cwd=registry.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as started:
        started.stdout.close()
        assert started.stderr.read() == b""
    assert started.returncode == 1


def test_a_gpu_may_be_named_in_any_case() -> None:
    parser = argparse.ArgumentParser()
    options.add_target(parser)
    assert parser.parse_args(["--gpu", "H200"]).gpu == "h200"


def test_an_error_in_a_kernels_file_names_it(tmp_path, capsys: pytest.CaptureFixture, monkeypatch) -> None:
    """As it is imported; and one of its functions, as it is called."""
    # Files of one size that are written within a second are the same to what is kept of a compiled one.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / "bench.py"
    for line, text in ((2, "import torch\nraise ValueError('seventeen')\n"), (1, "SPEC = int('eleven')\n")):
        file.write_text(text)
        assert cli.main(["list", "--kernel", str(file)]) == 2
        assert f"{file}:{line}: " in capsys.readouterr().err
    other = tmp_path / "other.py"
    for text, error in (
        ("SPEC = undefined\n", "NameError: name 'undefined'"),
        ("import nowhere\n", "ModuleNotFoundError"),
        ("SPEC = (1,)[3]\n", "IndexError"),
        ("SPEC = (\n", "SyntaxError"),
    ):
        for path, name in ((file, str(file)), (other, f"{other}:SPEC")):
            path.write_text(text)
            assert cli.main(["list", "--kernel", name]) == 2
            shown = capsys.readouterr().err
            assert f"error: {path}:1: {error}" in shown and "Traceback" in shown


def test_an_error_of_the_harness_is_no_misuse(monkeypatch) -> None:
    def broken(arguments: argparse.Namespace) -> int:
        raise KeyError("ours")

    monkeypatch.setattr("harness.commands.listing.main", broken)
    with pytest.raises(KeyError, match="ours"):
        cli.main(["list", "--kernel", "rmsnorm"])


@pytest.mark.parametrize("command", ["check", "sanitize", "build", "bench", "list"])
def test_help_says_the_default_of_each_option(command: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    cases = {
        "check": "default: all)",
        "sanitize": "default: the small ones, which are not benched)",
        "build": "default: all, with --quick all bench cases)",
        "bench": "default: all bench cases; with --gpus those of N GPUs)",
        "list": "default: all bench cases, with --all all)",
    }
    assert f"only this case ({cases[command]}" in shown
