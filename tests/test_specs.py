"""`check` over every SPEC found: one test for each check of each implementation on each case."""

from __future__ import annotations

import pytest
import torch

from harness import registry
from harness.commands import check

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = metafunc.config.getoption("--kernel") or registry.names()
    metafunc.parametrize(("kernel_name", "item"), [p for name in chosen for p in _params(name)])


def _params(name: str) -> list:
    """A kernel that cannot be imported fails in one test of its own and hides no other."""
    try:
        spec = registry.load(name)
    except Exception as error:
        return [pytest.param(name, error, id=f"{name}-import")]
    return [pytest.param(name, item, id=item.name) for item in check.plan(spec, DEVICE)]


def test_spec(kernel_name: str, item: check.Item | Exception) -> None:
    if isinstance(item, Exception):
        raise item
    outcome = check.run(item, DEVICE)
    if outcome.status == "skip":
        pytest.skip(outcome.reason)
    assert outcome.status == "pass", f"[{outcome.cause}] {outcome.reason}"
