"""`python -m ridgeline info`: the GPU, the versions, which kernels each op launches, and what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator

import torch

from . import __version__, selftest

WITHOUT_CUPY = (
    'CuPy, for the kernels in CUDA C++ (pip install "ridgeline-kernels[cuda]"); without it Triton versions run instead'
)


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment() -> Iterator[tuple[str, str]]:
    """What there is, as (name, text)."""
    yield "ridgeline", f"{__version__}, {os.path.dirname(__file__)}"
    yield "Python", f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    yield "PyTorch", f"{torch.__version__}, " + (f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA")
    yield "Triton", version("triton") or "absent"
    yield "CuPy", next(filter(None, map(version, ("cupy-cuda13x", "cupy-cuda12x", "cupy"))), None) or "absent"
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
    """What is absent and would change which kernels run, with the way to bring it."""
    if version("triton") is None:
        yield "Triton, in which most kernels are written (pip install triton; on Linux it comes with PyTorch)"
    if not torch.version.cuda:
        yield "a build of PyTorch with CUDA (this one runs on CPUs alone)"
    elif not torch.cuda.is_available():
        yield "an NVIDIA GPU, or its driver: nvidia-smi says which"
    elif torch.cuda.get_device_capability() < (8, 0):
        yield "a GPU of compute capability 8.0 or later"
    elif torch.cuda.get_device_capability() != (9, 0):
        yield "a GPU of compute capability 9.0 (Hopper), for the kernels that are written for it"
    if importlib.util.find_spec("cupy") is None:
        yield WITHOUT_CUPY


def launched(op: str, device: str) -> list[str]:
    """The kernels that an op launches for a call of a size that models have, forward and backward, as the profiler
    sees them; kernels of PyTorch itself are left out."""
    call = selftest.example(op, device, torch.bfloat16, False)
    fn = selftest.function(op)
    selftest.outputs(fn, call, None, updated=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        selftest.outputs(fn, call, None, updated=True)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    own = (name for name in names if not name.startswith(("void ", "Mem", "at::")))
    return list(dict.fromkeys(own))


def versions(op: str, device: str) -> Iterator[tuple[str, str]]:
    """Each version of an op that has several, as ("option=value", what its call says): "runs", or why it does not."""
    call = selftest.example(op, device, torch.bfloat16, False)
    for option, values in call.get("versions", {}).items():
        for value in values:
            chosen = {**call, "inputs": {**call["inputs"], option: value}}
            try:
                selftest.outputs(selftest.function(op), chosen, None, updated=True)
            except RuntimeError as reason:
                yield f'{option}="{value}"', str(reason).splitlines()[0]
            else:
                yield f'{option}="{value}"', "runs"


def report(names: list[str], device: str) -> int:
    """Prints it all; 0."""
    for name, text in environment():
        print(f"{name:10} {text}")
    lacks = list(missing())
    for what in lacks:
        print(f"missing    {what}")
    if device == "cpu":
        where = "Triton's interpreter" if importlib.util.find_spec("triton") else "nothing"
        print(f"\nWithout a GPU ops run in {where} alone: set TRITON_INTERPRET=1 before they are imported. They are:")
        print("  " + ", ".join(names))
        return 0
    print("\nWhat each op launches in bf16 for a problem of a size that models have, and its other versions there:")
    for name in names:
        try:
            print(f"{name}\n  launches  {', '.join(launched(name, device))}")
            for choice, found in versions(name, device):
                print(f"  {choice:20} {found}")
        except Exception as failure:
            print(f"  failed    {type(failure).__name__}: {str(failure).strip().splitlines()[0]}")
        torch.cuda.empty_cache()
    return 0
