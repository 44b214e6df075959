"""A kernel's folder copied out under another name works with torch and triton alone, and beside the original."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness import registry
from harness.commands import new

from . import standalone

TESTS = Path(__file__).parent
KERNELS = standalone.kernels()

# Registering an op under a name that is taken replaces it without a word: the original would then run the copy's code.
# So the copy's launchers are broken in the end, and the original must not notice.
BESIDE = """
import importlib, inspect, os, sys, torch
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
original_root, site, inputs, tests = sys.argv[1:]
sys.path[:0] = [site, original_root, tests]
from standalone import results
from torch.utils._python_dispatch import TorchDispatchMode
class Library(TorchDispatchMode):  # under it calls go through the ops of torch.library
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))
def broken(*args, **kwargs):
    raise RuntimeError("the original runs the code of the copy")
def check(name, case):
    original = getattr(importlib.import_module(f"kernels.{name}"), name)
    copy = getattr(importlib.import_module(f"elsewhere.{name}"), name)
    expected = results(original, case)
    for mine, theirs in zip(results(copy, case), expected, strict=True):
        assert torch.equal(mine, theirs), name
    op = sys.modules[f"elsewhere.{name}.op"]
    whole = dict(vars(op))
    for attribute, value in whole.items():
        if inspect.isfunction(value) and value.__module__ != op.__name__ and value.__module__.startswith("elsewhere."):
            setattr(op, attribute, broken)
    with Library():
        again = results(original, case)
    for mine, theirs in zip(again, expected, strict=True):
        assert torch.equal(mine, theirs), name
    try:
        results(copy, case)
    except RuntimeError:
        print(f"{name}: two separate kernels")
    vars(op).update(whole)  # a composed kernel calls it
for name, case in torch.load(inputs).items():
    try:
        check(name, case)
    except Exception as error:
        print(f"{name}: {error!r}", file=sys.stderr)
"""


@pytest.fixture(scope="module", params=KERNELS)
def kernel_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def outside(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A directory that holds copies of all kernels that are chosen, and a file of inputs. One process then runs them
    all, for most of its time would go by in imports."""
    site = tmp_path_factory.mktemp("site")
    names = [name for name in KERNELS if name in (request.config.getoption("--kernel") or KERNELS)]
    for folder in sorted({folder for name in names for folder in (name, *registry.load(name).needs)}):
        shutil.copytree(registry.folder(folder), site / "elsewhere" / folder, ignore=standalone.IGNORED)
    standalone.write_inputs(site / "inputs.pt", names)
    return site, site / "inputs.pt"


@pytest.fixture(scope="module")
def elsewhere(outside: tuple[Path, Path]) -> subprocess.CompletedProcess[str]:
    site, inputs = outside
    return python(standalone.__file__, "run", "elsewhere", inputs, site, cwd=site)


@pytest.fixture(scope="module")
def beside(outside: tuple[Path, Path]) -> subprocess.CompletedProcess[str]:
    site, inputs = outside
    return python("-c", BESIDE, registry.ROOT, site, inputs, TESTS, cwd=site)


def write_scale_inputs(path: Path) -> None:
    """Inputs of the scaffolded kernel."""
    torch.save({"scale": {"inputs": {"x": torch.randn(5, 9), "alpha": 0.5}, "grads": ["x"]}}, path)


def python(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that knows the installed packages and neither this checkout nor PYTHONPATH."""
    command = [sys.executable, "-I", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def test_works_elsewhere(kernel_name: str, elsewhere: subprocess.CompletedProcess[str]) -> None:
    assert f"elsewhere.{kernel_name}: forward and" in elsewhere.stdout, elsewhere.stderr


def test_works_beside_the_original(kernel_name: str, beside: subprocess.CompletedProcess[str]) -> None:
    """Both in one process: their ops must not have the same name."""
    assert f"{kernel_name}: two separate kernels" in beside.stdout, beside.stderr


@pytest.mark.parametrize("first", ["import kernels; found = kernels.patch", "from kernels import unpatch as found"])
def test_patch_can_be_the_first_thing_that_is_asked_for(first: str) -> None:
    """In a fresh process: once the module has been imported the package has the attribute."""
    code = f"import sys; sys.path.insert(0, {str(registry.ROOT)!r}); {first}; assert callable(found)"
    done = python("-c", code, cwd=registry.ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_newcomers_commands_run_from_an_empty_folder(tmp_path: Path) -> None:
    shutil.copytree(registry.ROOT / "kernels", tmp_path / "elsewhere", ignore=standalone.IGNORED)
    done = python(standalone.__file__, "begin", "elsewhere", tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "all passed" in done.stdout
    assert "elsewhere.patch: " in done.stdout or "elsewhere.patch was not tried" in done.stdout


def test_the_checkout_is_really_out_of_reach(tmp_path: Path) -> None:
    done = python("-c", "import harness.registry", cwd=tmp_path)
    assert "No module named 'harness" in done.stderr


@pytest.mark.parametrize(
    ("file", "right", "wrong", "message"),
    [
        ("op.py", "import torch\n", "import torch\nimport harness.registry\n", "No module named 'harness"),
        ("op.py", "from .plans", "from kernels.scale.plans", "No module named 'kernels"),
        ("kernel.py", "x * alpha", "x + alpha", "AssertionError: wrong in elsewhere: scale"),
        ("kernel.py", "dy * alpha", "-dy * alpha", "AssertionError: wrong in elsewhere: scale"),
    ],
    ids=["needs the harness", "needs its old name", "wrong forward", "wrong backward"],
)
def test_what_is_wrong_is_caught(file: str, right: str, wrong: str, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere" / "scale"
    new.write("scale", folder)
    text = (folder / file).read_text()
    assert right in text
    (folder / file).write_text(text.replace(right, wrong, 1))
    write_scale_inputs(tmp_path / "inputs.pt")
    done = python(standalone.__file__, "run", "elsewhere", tmp_path / "inputs.pt", tmp_path, cwd=tmp_path)
    assert done.returncode != 0
    assert message in done.stderr


def test_a_clash_of_op_names_is_caught(tmp_path: Path) -> None:
    for package in ("kernels", "elsewhere"):
        folder = tmp_path / package / "scale"
        new.write("scale", folder)
        text = (folder / "op.py").read_text()
        (folder / "op.py").write_text(text.replace('__package__.replace(".", "_")', '"ridgeline"'))
    write_scale_inputs(tmp_path / "inputs.pt")
    done = python("-c", BESIDE, tmp_path, tmp_path, tmp_path / "inputs.pt", TESTS, cwd=tmp_path)
    assert "two separate kernels" not in done.stdout
    assert "the original runs the code of the copy" in done.stderr
