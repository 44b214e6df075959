"""What every test needs before anything else: the interpreter where there is no GPU, one thread per worker, a seed."""

from __future__ import annotations

import gc
import os
import sys
import zlib
from typing import Any

import pytest

import harness  # noqa: F401  (before torch: it sets what CUDA reads when it starts)

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers share the cores: a thread pool in each of them makes all of them slower. Read when torch is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

HAS_GPU = torch.cuda.is_available()
MEMORY_KEPT = 1 << 30  # bytes
if not HAS_GPU:
    # Triton decides when @triton.jit is reached, so this comes before the first import of a kernel.
    os.environ["TRITON_INTERPRET"] = "1"
    from harness import interpreter
    from tests.lean_interpreter import make_lean

    make_lean()
    interpreter.ignore_nan()
    interpreter.spoil_masked()

# The template's files carry a placeholder for a name; tests/test_new.py tests what is made from them.
collect_ignore = ["harness/template"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kernel",
        action="append",
        default=[],
        metavar="NAME",
        help="only this kernel's share of the tests that run over every SPEC; may be given more than once",
    )


def pytest_configure(config: pytest.Config) -> None:
    from harness import registry

    if unknown := sorted(set(config.getoption("--kernel")) - set(registry.names())):
        known = ", ".join(registry.names())
        raise pytest.UsageError(f"unknown kernel {', '.join(map(repr, unknown))}; known: {known}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """`-n auto`: one process on a GPU, where workers would fight over its memory; else xdist's choice, the cores."""
    return 0 if HAS_GPU else None


@pytest.fixture(autouse=True)
def _draws_the_same_numbers(request: pytest.FixtureRequest):
    """A test that fails does so again when it is run alone, by another worker or in another order."""
    torch.manual_seed(zlib.crc32(request.node.name.encode()))


def _forget_launch_plans() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("kernels.") and name.endswith(".launch") and hasattr(module, "forget"):
            module.forget()


@pytest.fixture(autouse=True)
def _makes_launch_plans_anew():
    """A test that replaces a part of a kernel leaves no plan that was made with it."""
    yield
    _forget_launch_plans()


@pytest.fixture
def undeclared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of made-up records have no peers but those in them."""
    from harness.reporting import declared

    monkeypatch.setattr(declared, "peers", lambda kernel: ())


@pytest.fixture
def monkeypatch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """pytest's, for tests that replace parts of a kernel one after another: no call takes a plan from before."""
    replace = monkeypatch.setattr

    def replace_and_forget(*arguments: Any, **options: Any) -> None:
        replace(*arguments, **options)
        _forget_launch_plans()

    monkeypatch.setattr = replace_and_forget  # type: ignore[method-assign]
    return monkeypatch


@pytest.fixture(autouse=HAS_GPU)
def _gives_memory_back():
    """Workers share a GPU's memory: what a test leaves unused in PyTorch's cache would be lacking elsewhere."""
    yield
    if torch.cuda.memory_reserved() > MEMORY_KEPT:
        gc.collect()
        torch.cuda.empty_cache()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _choose_kernels(config, items)
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker and (reason := _unfit(marker.kwargs.get("min_capability", (0, 0)))):
            item.add_marker(pytest.mark.skip(reason=reason))


def _choose_kernels(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects, in tests that are parametrised over kernels, those that --kernel does not name."""
    chosen = set(config.getoption("--kernel"))
    if not chosen:
        return
    dropped = [item for item in items if (name := _kernel_of(item)) is not None and name not in chosen]
    config.hook.pytest_deselected(items=dropped)
    gone = set(dropped)
    items[:] = [item for item in items if item not in gone]


def _kernel_of(item: pytest.Item) -> str | None:
    """The kernel that an item was parametrised with: by `kernel_name`, by a `spec`, or by an `item` that has a spec."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    if "kernel_name" in params:
        return params["kernel_name"]
    spec = params.get("spec", getattr(params.get("item"), "spec", None))
    return spec if isinstance(spec, str) else getattr(spec, "name", None)


def _unfit(min_capability: tuple[int, int]) -> str | None:
    """Why this machine cannot run a test marked `gpu`, or None."""
    if not HAS_GPU:
        return "needs an NVIDIA GPU"
    found = torch.cuda.get_device_capability()
    if found < tuple(min_capability):
        needed = ".".join(map(str, min_capability))
        return f"needs an NVIDIA GPU of compute capability {needed}, found {'.'.join(map(str, found))}"
    return None
