"""The drivers of kernels in CUDA C++, without a GPU: libcuda is replaced."""

from __future__ import annotations

import importlib

import pytest
import torch

from harness import registry

DRIVERS = sorted(
    ".".join(path.relative_to(registry.ROOT).with_suffix("").parts)
    for path in registry.ROOT.glob("kernels/**/cuda_driver.py")
)


@pytest.mark.parametrize("name", DRIVERS)
@pytest.mark.parametrize("has_context", [False, True])
def test_who_asks_for_kernels_has_a_context_each_time(name, has_context, monkeypatch):
    """Not the first time alone, when they are loaded: another thread may have loaded them."""
    driver, called = importlib.import_module(name), []

    class Library:
        def __getattr__(self, name):
            def call(*arguments) -> int:
                called.append(name)
                if name == "cuCtxGetCurrent" and has_context:
                    arguments[0]._obj.value = 1
                return 0

            return call

    monkeypatch.setattr(driver, "_driver", Library)
    monkeypatch.setattr(driver, "_compiled", lambda source, defines: b"")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for _ in range(2):
        driver.kernels(-1, "source.cu", ("kernel",), (f"HAS_CONTEXT={has_context}",), 0)
    assert called.count("cuModuleLoadData") == 1
    assert called.count("cuCtxSetCurrent") == (0 if has_context else 2)
