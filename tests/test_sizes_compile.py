"""Every kernel compiles for Hopper at widths for which no case of a SPEC is made, in 16 bits, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from harness import registry

PROGRAM = """
import contextlib, dataclasses, importlib, io, sys
import torch
from harness import execute, registry
from harness.compiling import launches

SIZES = (1, 3, 1025, 2049, 2050, 4097, 8193)

def compiled(what, call):
    try:
        with launches.record((9, 0)), contextlib.redirect_stdout(io.StringIO()):  # Triton prints PTX that fails
            call()
    except execute.Unavailable:
        return 0
    except (RuntimeError, ValueError) as error:
        # What CUDA C++ alone computes, and sizes that the op refuses.
        assert "cannot run here" in str(error) or " must " in str(error), (what, error)
        return 0
    return 1

def of_spec(name):
    spec = registry.load(name)
    how = "auto" if "auto" in spec.implementations else next(iter(spec.implementations))
    small = [case for case in spec.cases if not case.bench and case.dtype != torch.float32] or spec.cases
    counts = (of_case(spec, how, case) for case in sorted(small, key=lambda case: case.dtype != torch.bfloat16))
    return next(filter(None, counts), 0)  # of the first case that Triton computes

def of_case(spec, how, case):
    count = 0
    for dim in spec.fuzz:
        for size in SIZES:
            odd = dataclasses.replace(case, dims={**case.dims, dim: size})
            for mode in spec.modes:
                if not spec.skip_reason(how, odd, mode):
                    def call():
                        inputs = spec.make_inputs(odd, "cuda", None)
                        execute.bind(spec, spec.implementations[how], inputs, mode)()
                    count += compiled((dict(odd.dims), mode), call)
    return count

def of_fp8(name):
    op = getattr(importlib.import_module(f"kernels.{name.removesuffix('_fp8')}"), name)
    blocks = dict(granularity="1x128", transpose=True)
    ways = [dict(transpose=True)] if name == "gelu_fp8" else [blocks, dict(granularity="row")]
    count = 0
    for size in SIZES:
        for options in ways:
            def call():
                x = torch.empty(3, size, dtype=torch.bfloat16, device="cuda")
                op(x, x, **options) if name == "swiglu_fp8" else op(x, **options)
            count += compiled((size, options), call)
    return count

print(of_fp8(sys.argv[1] + "_fp8") if sys.argv[2] == "fp8 output" else of_spec(sys.argv[1]))
"""

FP8_OUTPUTS = ("gelu", "rmsnorm", "swiglu")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = metafunc.config.getoption("--kernel") or registry.names()
    names = [name for name in chosen if registry.COLLECTIONS[0] in registry.package(name)]
    pairs = [*((name, "spec") for name in names), *((name, "fp8 output") for name in names if name in FP8_OUTPUTS)]
    metafunc.parametrize(("kernel_name", "of"), pairs)


@pytest.mark.slow
def test_odd_sizes_compile(kernel_name: str, of: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = [sys.executable, "-c", PROGRAM, kernel_name, of]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=registry.ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) > 0
