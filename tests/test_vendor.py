"""Copies of `parts/` in kernels' folders equal their parts, byte for byte."""

from __future__ import annotations

from difflib import SequenceMatcher
from pathlib import Path

import pytest

from harness import cli, registry
from harness.commands import vendor


def test_no_copy_differs_from_its_part() -> None:
    found = list(vendor.copies(registry.ROOT))
    assert found, "a rule over copies that are not recognised would always hold"
    stale = [path for path, text in found if path.read_text(encoding="utf-8") != text]
    assert not stale, "run `nox -s vendor`; a change belongs into parts/"


def test_no_folder_holds_an_unmarked_copy() -> None:
    """It would drift unseen. A file of a part's name that is half the part is one."""
    for name in vendor.names(registry.ROOT):
        part = (registry.ROOT / "parts" / name).read_text(encoding="utf-8").splitlines()
        for path in registry.ROOT.glob(f"kernels/*/**/{Path(name).name}"):
            if vendor.part_of(path) is None:
                lines = path.read_text(encoding="utf-8").splitlines()
                assert SequenceMatcher(None, part, lines, autojunk=False).ratio() < 0.5, path


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in {
        "parts/launch.py": "A = 1\n",
        "parts/sm90/tma.cuh": "int a;\n",
        "kernels/alpha/op.py": "B = 2\n",
        "kernels/alpha/checks.py": "# no copy\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(registry, "ROOT", tmp_path)
    return tmp_path


def test_a_check_adds_no_copy(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["vendor", "--check", "alpha", "launch.py"]) == 2
    assert "--check cannot be used with KERNEL PART" in capsys.readouterr().err
    assert not (tree / "kernels/alpha/launch.py").exists()


def test_a_copy_is_made_checked_and_rewritten(tree: Path) -> None:
    assert cli.main(["vendor", "alpha", "launch.py"]) == cli.main(["vendor", "alpha", "sm90/tma.cuh"]) == 0
    launch, tma = tree / "kernels/alpha/launch.py", tree / "kernels/alpha/sm90/tma.cuh"
    assert launch.read_text() == "# A copy of parts/launch.py, made by `nox -s vendor`: change it there.\nA = 1\n"
    assert tma.read_text().startswith("// A copy of parts/sm90/tma.cuh, ")
    assert cli.main(["vendor", "--check"]) == 0
    launch.write_text(launch.read_text() + "A = 3\n")
    assert cli.main(["vendor", "--check"]) == 1
    assert "A = 3" in launch.read_text()
    assert cli.main(["vendor"]) == 0
    assert "A = 3" not in launch.read_text()
    assert (tree / "kernels/alpha/checks.py").read_text() == "# no copy\n"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["beta", "launch.py"], "no kernel 'beta'"),
        (["alpha", "nothing.py"], "no parts/nothing.py; there are launch.py, sm90/tma.cuh"),
        (["alpha"], "PART is missing"),
    ],
)
def test_says_what_cannot_be_copied(tree: Path, arguments: list[str], reason: str, capsys) -> None:
    assert cli.main(["vendor", *arguments]) == 2
    assert reason in capsys.readouterr().err


def test_a_file_that_is_no_copy_is_left_alone(tree: Path, capsys) -> None:
    (tree / "parts/checks.py").write_text("C = 1\n")
    assert cli.main(["vendor", "alpha", "checks.py"]) == 2
    assert "is not a copy" in capsys.readouterr().err
