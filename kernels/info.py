"""`python -m ridgeline info`: the GPU, the versions, which kernels each op launches, and what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import os
import platform
import textwrap
from collections.abc import Iterator

import torch

from . import __version__, selftest

WITHOUT_CUDA = (
    "PyTorch with CUDA: the installed build supports only CPUs (pip install --force-reinstall torch --index-url "
    "https://download.pytorch.org/whl/cu130)"
)
# The packages themselves rather than extras of this one, which is not on PyPI.
WITHOUT_TRANSFORMERS = 'transformers, only for ridgeline.patch (pip install "transformers>=5")'
WITHOUT_CUPY = "CuPy, for the kernels in CUDA C++ (pip install cupy-cuda13x); without it, Triton versions run instead"


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment() -> Iterator[tuple[str, str]]:
    """Yields the versions and the GPU of this environment, as (name, text)."""
    yield "ridgeline", f"{__version__}, {os.path.dirname(__file__)}"
    yield "Python", f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    yield "PyTorch", f"{torch.__version__}, " + (f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA")
    yield "Triton", version("triton") or "not installed"
    yield "CuPy", next(filter(None, map(version, ("cupy-cuda13x", "cupy-cuda12x", "cupy"))), None) or "not installed"
    if not torch.cuda.is_available():
        yield "GPU", "none"
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        yield (
            f"GPU {index}",
            f"{found.name}, compute capability {found.major}.{found.minor}, {found.multi_processor_count} SMs, "
            f"{found.total_memory / 2**30:.0f} GiB",
        )


def missing() -> Iterator[str]:
    """Yields what is absent and would change which kernels run or what the package offers, with how to install it."""
    if version("triton") is None:
        yield "Triton, in which most kernels are written (pip install triton; on Linux it comes with PyTorch)"
    if not torch.version.cuda:
        yield WITHOUT_CUDA
    elif not torch.cuda.is_available():
        yield "an NVIDIA GPU or its driver: run nvidia-smi to see which"
    elif torch.cuda.get_device_capability() < (8, 0):
        yield "a GPU of compute capability 8.0 or later"
    elif torch.cuda.get_device_capability() != (9, 0):
        yield "a GPU of compute capability 9.0 (Hopper), for the kernels that are written for it"
    if importlib.util.find_spec("cupy") is None:
        yield WITHOUT_CUPY
    if version("transformers") is None:
        yield WITHOUT_TRANSFORMERS


def launched(op: str, device: str, with_backward: bool = True, **options: str) -> list[str]:
    """The kernels that an op launches for a call of a size typical of models, as the profiler records them, for forward
    and backward or the forward alone. Kernels of PyTorch itself are omitted. `options` select a version."""
    call = selftest.example(op, device, torch.bfloat16, False)
    call = {**call, "inputs": {**call["inputs"], **options}, "grads": call["grads"] if with_backward else ()}
    fn = selftest.function(op)
    selftest.outputs(fn, call, None, updated=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        selftest.outputs(fn, call, None, updated=True)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    own = (name for name in names if not name.startswith(("void ", "Mem", "at::")))
    return list(dict.fromkeys(own))


def versions(op: str, device: str) -> Iterator[tuple[str, str]]:
    """Yields ("option=value", finding) for each version of an op that has several. The finding is that "auto" selects
    it, if the same kernels are launched; that it runs if requested; or why it does not run. For an option that is not
    for the backward only the forward is compared, as the backward may have other versions."""
    for option, values in selftest.example(op, "meta", torch.bfloat16, False).get("versions", {}).items():
        backward = option == "backward"
        taken = launched(op, device, backward)
        for value in values:
            try:
                found = launched(op, device, backward, **{option: value})
            except RuntimeError as reason:
                yield f'{option}="{value}"', str(reason).splitlines()[0]
            else:
                yield (
                    f'{option}="{value}"',
                    "selected by auto" if found == taken else "not selected by auto; runs if requested",
                )


def on_hopper(op: str) -> str:
    """The version that "auto" uses on compute capability 9.0 for the same call. Tests compare it with the dispatch."""
    call = selftest.example(op, "meta", torch.bfloat16, False)
    if chosen := [f'{option}="{value}"' for option, value in call.get("hopper", {}).items()]:
        return ", ".join(chosen)
    several = "backend" in inspect.signature(selftest.function(op)).parameters
    return "depends on the problem, by the rule below" if several else "one version"


def rule(op: str) -> Iterator[tuple[str, str]]:
    """Yields (function, its docstring) for the pure functions in an op's configs that choose among versions, which
    explain the choice of "auto"."""
    module = f"{__package__}.{op}.configs"
    if importlib.util.find_spec(module) is None:
        return
    configs = importlib.import_module(module)
    modules = [configs, *(m for name, m in vars(configs).items() if name in ("forward", "backward"))]
    for name in ("pick_backend", "pick_versions", "pick_forward", "pick_backward"):
        for found in (getattr(one, name) for one in modules if hasattr(one, name)):
            yield name, " ".join((found.__doc__ or "").split()).replace(" Pure.", "")


def report(names: list[str], device: str) -> int:
    """Prints the whole report. Returns the exit status, 0."""
    for name, text in environment():
        print(f"{name:10} {text}")
    lacks = list(missing())
    for what in lacks:
        print(f"missing    {what}")
    if device == "cpu":
        if not importlib.util.find_spec("triton"):
            print("\nWithout a GPU and without Triton, no op runs.")
            return 0  # the rules below are in modules that import Triton
        print("\nWithout a GPU, ops run only in Triton's interpreter: slowly, and correctly only in fp32 and fp16.")
        print("Set TRITON_INTERPRET=1 before importing ridgeline.")
        print(
            "\nThe version that auto selects on a GPU of compute capability 9.0 (Hopper) with CuPy, for a bf16 problem"
        )
        print("of a size typical of models, and the rule by which it selects:")
        for name in names:
            print(f"{name}\n  {on_hopper(name)}")
            _print_rule(name)
        return 0
    print("\nThe kernels that each op launches for a bf16 problem of a size typical of models, its versions, and the")
    print("rule by which auto selects one:")
    for name in names:
        try:
            print(f"{name}\n  launches  {', '.join(launched(name, device))}")
            for choice, found in versions(name, device):
                print(f"  {choice:20} {found}")
            _print_rule(name)
        except Exception as failure:
            print(f"  failed    {selftest.said(failure)}")
        torch.cuda.empty_cache()
    return 0


def _print_rule(op: str) -> None:
    for function, text in rule(op):
        lines = textwrap.wrap(f"{function}: {text}", 114, initial_indent="  ", subsequent_indent="    ")
        print("\n".join(lines))
