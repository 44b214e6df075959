"""`new` makes a kernel that passes its tests at once, and changes nothing else. Tried in a copy of the checkout."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness import registry
from harness.commands import new

from .architecture import violations

PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
COPIED = ("harness", "parts", "tests", "conftest.py", "noxfile.py", "pyproject.toml")


def run(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=tree, capture_output=True, text=True)


def contents(tree: Path) -> dict[str, bytes]:
    files = (path for path in tree.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(tree)): path.read_bytes() for path in files}


@pytest.fixture(scope="module", params=["triton", "cuda"])
def tree(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout without its kernels, and `scale` made in it: in Triton alone, and with CUDA C++ beside it."""
    root = tmp_path_factory.mktemp("checkout")
    for name in COPIED:
        source = registry.ROOT / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, root / name)
    (root / "kernels").mkdir()
    shutil.copy(registry.ROOT / "kernels" / "__init__.py", root / "kernels")
    before = contents(root)
    flags = ["--cuda"] if request.param == "cuda" else []
    done = run(root, "-m", "harness", "new", "scale", *flags)
    assert done.returncode == 0, done.stderr
    after = contents(root)
    assert {name: text for name, text in after.items() if not name.startswith("kernels/scale/")} == before
    return root


def test_holds_what_a_folder_must(tree: Path) -> None:
    assert violations(tree) == []
    assert not [
        name for name, text in contents(tree / "kernels").items() if new.PLACEHOLDER in f"{name} {text.decode()}"
    ]


def test_passes_its_tests_and_those_of_every_spec(tree: Path) -> None:
    done = run(tree, *PYTEST, "kernels/scale", "tests/test_specs.py", "--kernel", "scale")
    assert done.returncode == 0, done.stdout[-4000:]


def test_passes_the_tests_of_calls_and_of_bytes(tree: Path, tmp_path: Path) -> None:
    """They import other kernels, which `tree` lacks."""
    root = tmp_path / "checkout"
    shutil.copytree(tree, root)
    for kind in registry.COLLECTIONS:
        shutil.copytree(
            registry.ROOT / kind, root / kind, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
        )
    done = run(root, *PYTEST, "tests/test_call.py", "tests/test_cost.py", "--kernel", "scale")
    assert done.returncode == 0, done.stdout[-4000:]


def test_is_found_by_the_command_line(tree: Path) -> None:
    done = run(tree, "-m", "harness", "list")
    assert done.stdout.startswith("scale\n"), done.stderr


def test_a_changed_sign_fails_its_tests(tree: Path, tmp_path: Path) -> None:
    broken = tmp_path / "checkout"
    shutil.copytree(tree, broken)
    kernel = broken / "kernels" / "scale" / "kernel.py"
    kernel.write_text(kernel.read_text().replace("dy * alpha", "-dy * alpha"))
    done = run(broken, *PYTEST, "kernels/scale")
    assert done.returncode == 1
    assert "test_gradient_is_alpha" in done.stdout


@pytest.mark.parametrize("cuda", [False, True], ids=["triton", "cuda"])
@pytest.mark.parametrize("name", ["a", "scale", "x" * new.LONGEST])
def test_is_clean_under_ruff(name: str, cuda: bool, tmp_path: Path) -> None:
    if importlib.util.find_spec("ruff") is None:
        pytest.skip("ruff is not installed")
    new.write(name, tmp_path / "kernels" / name, cuda)
    shutil.copy(registry.ROOT / "pyproject.toml", tmp_path)
    for check in (("check",), ("format", "--check")):
        done = run(tmp_path, "-m", "ruff", *check, "--no-cache", ".")
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Scale", "lower-case"),
        ("layer-norm", "lower-case"),
        ("2d", "lower-case"),
        ("_private", "lower-case"),
        ("../escape", "lower-case"),
        ("", "lower-case"),
        ("x" * (new.LONGEST + 1), "at most"),
        ("lambda", "keyword"),
        ("match", "keyword"),
        ("json", "module has that name"),
        ("triton", "module has that name"),
        ("sum", "builtin"),
        ("op", "module of that name"),
        ("lean", "the template has"),
        ("cost", "the template has"),
        ("pytest", "the template has"),
        ("x", "the template has"),
        ("rmsnorm", "kernels/rmsnorm exists"),
    ],
)
def test_refuses_a_bad_name(name: str, reason: str) -> None:
    before = sorted(registry.ROOT.glob("kernels/*"))
    with pytest.raises(ValueError, match=reason):
        new.scaffold(name)
    assert sorted(registry.ROOT.glob("kernels/*")) == before


def test_conftest_chooses_kernels_and_skips_what_needs_a_gpu(tree: Path, tmp_path: Path) -> None:
    root = tmp_path / "checkout"
    shutil.copytree(tree, root)
    (root / "tests" / "test_sample.py").write_text(SAMPLE)
    flags = ("-m", "pytest", "-p", "no:cacheprovider", "-rs", "-v", "tests/test_sample.py", "--kernel")
    done = run(root, *flags, "scale")
    assert done.returncode == 0, done.stdout
    for chosen in (
        "test_by_name[scale]",
        "test_by_spec[scale]",
        "test_by_object[spec0]",
        "test_by_item[item0]",
        "test_of_no_kernel",
    ):
        assert f"{chosen} PASSED" in done.stdout
    assert "5 passed" in done.stdout
    assert "other" not in done.stdout
    assert "needs an NVIDIA GPU" in done.stdout
    done = run(root, *flags, "slcae")
    assert done.returncode == 4
    assert "unknown kernel 'slcae'; known: scale" in done.stderr


SAMPLE = """
import types, pytest
@pytest.mark.parametrize("kernel_name", ["scale", "other"])
def test_by_name(kernel_name): assert kernel_name == "scale"
@pytest.mark.parametrize("spec", ["scale", "other"])
def test_by_spec(spec): assert spec == "scale"
@pytest.mark.parametrize("spec", [types.SimpleNamespace(name="scale"), types.SimpleNamespace(name="x")])
def test_by_object(spec): assert spec.name == "scale"
@pytest.mark.parametrize("item", [types.SimpleNamespace(spec=types.SimpleNamespace(name=n)) for n in ("scale", "x")])
def test_by_item(item): assert item.spec.name == "scale"
def test_of_no_kernel(): assert 1 + 1 == 2
@pytest.mark.gpu(min_capability=(99, 0))
def test_on_a_gpu(): raise AssertionError("ran")
"""
