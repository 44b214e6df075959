"""`python -m ridgeline selftest`: compares each op with the reference in its folder, forward and backward."""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import os
import pkgutil
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import Any

import torch

# The largest allowed error of an element, relative to the largest element: about ten roundings of the dtype.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
INTERPRETED = (torch.float32, torch.float16)  # the dtypes for which Triton's interpreter is correct


@dataclass(frozen=True)
class Result:
    """The result of one op in one dtype. `status` is "ok", "wrong", "failed" or "skipped". `error` is the largest error
    of all outputs and gradients, in units of the tolerance."""

    op: str
    dtype: torch.dtype
    status: str
    error: float = 0.0
    reason: str = ""
    seconds: float = 0.0


def ops() -> list[str]:
    """The names of the ops in this package, which are those of their folders. Imports none, as that requires Triton."""
    package = importlib.import_module(__package__)
    found = (module.name for module in pkgutil.iter_modules(package.__path__) if module.ispkg)
    folders = {name: [os.path.join(root, name) for root in package.__path__] for name in found}
    return [name for name, paths in folders.items() if PathFinder.find_spec("example", paths)]


def example(op: str, device: torch.device | str, dtype: torch.dtype, small: bool) -> dict[str, Any]:
    """The call of an op that `example.py` in its folder defines."""
    return importlib.import_module(f".{op}.example", __package__).example(device, dtype, small)


def function(op: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(f".{op}", __package__), op)


def run(names: list[str], device: str, jobs: int = 1) -> Iterator[Result]:
    """Yields the results of the named ops, in each dtype; on a GPU also in bf16 at a size typical of models. Most of
    the time is compilation or the interpreter, so ops are distributed over `jobs` processes."""
    if min(jobs, len(names)) <= 1:
        for name in names:
            yield from _results(name, device)
        return
    # Spawned: a process that has used CUDA cannot be forked.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), prepare, (device,)) as pool:
        for found in pool.map(_results, names, itertools.repeat(device)):
            yield from found


def _results(name: str, device: str) -> list[Result]:
    if device.startswith("cuda"):
        sizes = [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)]
    else:
        sizes = [(dtype, True) for dtype in INTERPRETED]
    return [_timed(name, device, dtype, small) for dtype, small in sizes]


def prepare(device: str) -> None:
    """Prepares this process for Triton's interpreter: its many small tensors are slower on several threads, and NumPy
    warns of masked elements."""
    if device == "cpu":
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")


def _timed(name: str, device: str, dtype: torch.dtype, small: bool) -> Result:
    start = time.perf_counter()
    torch.manual_seed(0)

    def result(status: str, error: float = 0.0, reason: str = "") -> Result:
        return Result(name, dtype, status, error, reason, time.perf_counter() - start)

    try:
        error = compare(name, device, dtype, small)
    except torch.OutOfMemoryError:
        return result("skipped", reason="the reference needs more memory than the GPU has")
    except Exception as failure:
        return result("failed", reason=said(failure))
    if error is None:
        return result("skipped", reason="Triton's interpreter computes fp8 incorrectly: needs a GPU")
    return result("ok" if error <= 1 else "wrong", error)


def said(failure: BaseException) -> str:
    """The class and the first line of an exception's message, which may be empty, as that of a bare assert."""
    return ": ".join((type(failure).__name__, *str(failure).strip().splitlines()[:1]))


def compare(name: str, device: str, dtype: torch.dtype, small: bool) -> float | None:
    """The largest error of an output or a gradient, divided by its tolerance. None for a dtype that the interpreter
    does not compute correctly."""
    call = example(name, device, dtype, small)
    reference = getattr(importlib.import_module(f".{name}.reference", __package__), f"{name}_reference")
    wide = torch.float64 if small else torch.float32
    exact = call.get("exact", False)
    expected = outputs(reference, call, None if exact else wide, updated=False)
    try:
        got = outputs(function(name), call, None, updated=True)
    except torch.OutOfMemoryError as error:  # not the reference's, because of which an op is skipped
        raise RuntimeError(f"the op is out of memory: {error}") from error
    assert len(got) == len(expected), f"{len(got)} outputs and gradients, {len(expected)} expected"
    if device == "cpu" and any(t.is_floating_point() and t.element_size() == 1 for t in got):
        return None
    return max(_error(a, b, dtype, exact) for a, b in zip(got, expected, strict=True))


def outputs(fn: Callable[..., Any], call: dict[str, Any], dtype: torch.dtype | None, updated: bool) -> list:
    """Outputs, then gradients, of a call on copies of its inputs, cast to `dtype` if they are floating-point. For an
    op in place (`updated`), the outputs are the inputs that it updates."""

    def copy(value: Any) -> Any:
        if isinstance(value, list):
            return [copy(one) for one in value]
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().clone() if dtype is None or not value.is_floating_point() else value.to(dtype)

    inputs = {name: copy(value) for name, value in call["inputs"].items()}
    wanted = [inputs[name].requires_grad_() for name in call["grads"]]
    made = fn(**inputs)
    if updated and "updates" in call:
        made = [inputs[name] for name in call["updates"]]
    found = list(_tensors(made))
    if not wanted:
        return found
    torch.manual_seed(1)
    parts = [t for t in found if t.requires_grad]
    incoming = [torch.randn(t.shape, device=t.device).to(t.dtype) for t in parts]
    return [*(t.detach() for t in found), *torch.autograd.grad(parts, wanted, incoming)]


def _tensors(made: Any) -> Iterator[torch.Tensor]:
    for one in made if isinstance(made, list | tuple) else (made,):
        if isinstance(one, list | tuple):
            yield from _tensors(one)
        elif one is not None:
            yield one


def _error(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, exact: bool) -> float:
    if a.shape != b.shape:
        return float("inf")
    if exact:
        return 0.0 if torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) else float("inf")
    difference = (a.double() - b.double()).abs().max().item() if a.numel() else 0.0
    scale = max(b.double().abs().max().item() if b.numel() else 0.0, 1e-30)
    error = difference / scale / TOLERANCES[dtype]
    return error if error == error else float("inf")


def report(names: list[str], device: str, jobs: int = 1) -> int:
    """Prints a line per result. Returns the exit status: 1 if one was wrong or failed."""
    print(f"Compares each op with its reference on {device}; error: the largest, in tolerances (at most 1)")
    print(f"{'op':24} {'dtype':9} {'status':8} {'error':>6} {'time/s':>6}")
    bad = skipped = 0
    for one in run(names, device, jobs):
        bad += one.status in ("wrong", "failed")
        skipped += one.status == "skipped"
        dtype = str(one.dtype).removeprefix("torch.")
        line = f"{one.op:24} {dtype:9} {one.status:8} {one.error:6.2f} {one.seconds:6.1f}  {one.reason}"
        print(line.rstrip(), flush=True)
    counts = f"{bad} did not pass" if bad else "all passed"
    print(counts + (f"; {skipped} skipped" if skipped else ""))
    return 1 if bad else 0
