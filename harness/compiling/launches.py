"""Compiles every Triton launch of real code for a GPU that need not be present.

The launchers already define constexprs, warps, stages, and which kernel runs for which shape; the ahead-of-time build
must not duplicate that. So it runs the public op itself. Inside `record(capability)`

 - tensors are fake (`FakeTensorMode`): shapes, strides and dtypes without memory;
 - to Python they are on "cuda"; PyTorch itself treats them as CPU tensors, because the autograd of a build without CUDA
   does not support GPU tensors, not even fake ones;
 - a call of an op registered with torch.library runs its Python implementation, where PyTorch would only infer shapes;
 - `torch.cuda` describes the GPU of `roofline`'s table with that capability;
 - Triton's driver names that GPU as target, and a launch compiles and returns.

Gluon kernels and `triton_op`s take the same path. Everything is restored at the end of the block.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch._library.custom_ops import OPDEFS
from torch._library.triton import set_wrap_triton_enabled
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from .. import roofline
from . import occupancy

#: Triton caches compiled kernels by device index; these indices belong to no real device.
_FIRST_INDEX = 1000


class Interpreted(RuntimeError):
    """Triton's interpreter is on, which compiles nothing."""


@dataclass(frozen=True)
class Launch:
    """One launch: the JIT function's name and what Triton compiled for it."""

    jit: str
    compiled: Any


class _Driver:
    """The part of Triton's driver that compilation uses."""

    def __init__(self, gpu: roofline.Gpu) -> None:
        major, minor = gpu.capability
        self._capability = 10 * major + minor
        limits = occupancy.limits(gpu.capability)
        properties = {
            "max_shared_mem": limits.shared_per_cta,
            "max_num_regs": limits.registers,
            "multiprocessor_count": gpu.sms,
            "warpSize": limits.warp_size,
        }
        self.utils = SimpleNamespace(get_device_properties=lambda device: dict(properties))

    def is_active(self) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return _FIRST_INDEX + self._capability

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


class _Stage(TorchDispatchMode):
    """Intercepts every operator: runs the implementation of a registered op, and sends the others to the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.backstage = 0  # nesting depth inside PyTorch's own code, where a tensor has its actual device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        definition = OPDEFS.get(getattr(getattr(func, "_schema", None), "name", None))
        if definition is not None:
            with self, set_wrap_triton_enabled(False):  # a mode is off while it dispatches, and an op may call ops
                return definition._init_fn(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(torch.device, _to_cpu, (args, kwargs or {}))
        self.backstage += 1
        try:
            return func(*args, **kwargs)
        finally:
            self.backstage -= 1

    def disguise(self) -> dict[str, Any]:
        """Attributes that make a fake tensor appear to be on "cuda" from Python while this mode is on."""
        inner = vars(FakeTensor)["device"].fget

        def device(tensor: FakeTensor) -> torch.device:
            actual = inner(tensor)
            return torch.device("cuda", 0) if actual.type == "cpu" and not self.backstage else actual

        return {
            "device": property(device),
            "is_cuda": property(lambda tensor: tensor.device.type == "cuda"),
            "is_cpu": property(lambda tensor: tensor.device.type == "cpu"),
            "get_device": lambda tensor: 0,
            # Triton specialises on alignment: a view at an address that is not 16-byte aligned is another kernel.
            "data_ptr": lambda tensor: int(tensor.storage_offset()) * tensor.element_size(),
        }


def _to_cpu(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "cuda" else device


@contextmanager
def record(capability: tuple[int, int]) -> Iterator[list[Any]]:
    """Yields the list of launches, which grows as the block makes them; repeated launches are listed repeatedly.

    Raises Interpreted in a process that runs Triton's interpreter, and ValueError for a capability that no GPU of the
    table has.
    """
    if triton.knobs.runtime.interpret:
        raise Interpreted("the ahead-of-time build needs Triton's compiler: unset TRITON_INTERPRET and start again")
    gpu = gpu_of(capability)
    launches: list[Launch] = []
    original = JITFunction.run

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = original(self, *args, grid=grid, warmup=True, **kwargs)
        launches.append(Launch(self.__name__, compiled))
        return compiled

    stage = _Stage()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "run", run))
        stack.enter_context(mock.patch.object(driver, "_active", _Driver(gpu)))
        fake = {**stage.disguise(), "record_stream": lambda tensor, stream: None}
        for owner, stand_ins in ((torch.cuda, _cuda(gpu)), (FakeTensor, fake)):
            for name, stand_in in stand_ins.items():
                stack.enter_context(mock.patch.object(owner, name, stand_in))
        for launcher in _launchers():
            stack.enter_context(mock.patch.object(launcher, "_current_device", lambda: 0))
            if hasattr(launcher, "raw_stream"):
                stack.enter_context(mock.patch.object(launcher, "raw_stream", lambda device: 0))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(stage)
        yield launches


def _launchers() -> list[ModuleType]:
    """Modules that query `torch._C` for the current device: without a driver a PyTorch with CUDA would raise."""
    modules = [m for m in list(sys.modules.values()) if isinstance(m, ModuleType)]
    return [m for m in modules if {"Launch", "_current_device"} <= vars(m).keys()]


def gpu_of(capability: tuple[int, int]) -> roofline.Gpu:
    """The first GPU of the table with that capability. ValueError lists the known capabilities."""
    boards = [board for entry in roofline.table().values() for board in entry]
    for board in boards:
        if board.capability == tuple(capability):
            return board
    known = sorted({"{}.{}".format(*board.capability) for board in boards})
    raise ValueError(f"no GPU in harness/gpus.toml has compute capability {capability}; known: {', '.join(known)}")


def _cuda(gpu: roofline.Gpu) -> dict[str, Any]:
    """The attributes of `torch.cuda` that launchers query, with that GPU's answers."""
    limits = occupancy.limits(gpu.capability)
    properties = SimpleNamespace(
        name=gpu.title,
        major=gpu.capability[0],
        minor=gpu.capability[1],
        multi_processor_count=gpu.sms,
        total_memory=int(gpu.memory_bytes),
        L2_cache_size=gpu.l2_bytes,
        regs_per_multiprocessor=limits.registers,
        max_threads_per_multi_processor=limits.warps * limits.warp_size,
        shared_memory_per_multiprocessor=limits.shared,
        shared_memory_per_block_optin=limits.shared_per_cta,
        warp_size=limits.warp_size,
    )
    stream = SimpleNamespace(cuda_stream=0, device=torch.device("cuda", 0), synchronize=lambda: None)

    def guard(*_: Any) -> AbstractContextManager[None]:
        return nullcontext()

    return {
        "device": guard,
        "device_of": guard,
        "stream": guard,
        "current_device": lambda: 0,
        "current_stream": lambda device=None: stream,
        "get_device_capability": lambda device=None: gpu.capability,
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: gpu.title,
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda device=None: None,
    }
