"""Mutual exclusion of benches that share a GPU: one uses it while the others compile on the host.

A bench holds the GPU from a case's first use of it to its last, except while torch.compile, Triton, NVRTC or the CuTe
DSL works on the host, or QuACK's autotuner waits for its pool of processes. Kernels that Inductor times on the GPU for
its autotuning acquire the GPU separately, and no thread that compiles meanwhile releases it. So nothing is timed while
others use the GPU.

The waiting bench whose case began first is next, so that few cases are half done when time is up.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch

from .compilations import ON_HOST, watched

LOOK_SECONDS = 0.003  # polling interval for who is next; many holds last some 25 ms
KEPT_BYTES = 1 << 30  # memory that PyTorch's cache may keep while others have the GPU: to free it takes time
ROOM, ROOM_SECONDS = 0.5, 240.0  # fraction of GPU memory that must be free for a case to begin; longest wait for it
KEPT_SECONDS = 600.0  # age after which `once` measures again
SLEEP_SECONDS = 0.5  # while a case waits for memory; minimum while QuACK's autotuner waits for its compilations


class Turns:
    """A file lock shared by the benches that name the same file. Without a file this bench has the GPU to itself."""

    def __init__(self, path: Path | None, device: torch.device) -> None:
        self._file: IO[str] | None = None
        if path is not None:
            self._path, self._file = path, path.open("a", encoding="utf-8")
            self._queue = path.with_name(path.name + ".queue")
            self._queue.mkdir(exist_ok=True)
        self._device = device
        self._ours = False
        self._lock = threading.RLock()  # Inductor compiles in several threads
        self._compilers = 0  # compilations in progress
        self._timed = 0  # nested contexts that keep the GPU
        self._released: list[int] = []  # for each release by a compilation: the number of compilations before it
        self._since = self._taken = time.time()
        self.waited = 0.0  # total seconds of waiting for others
        self._had = 0.0  # seconds with the GPU, since the case began and until its last release

    @property
    def shared(self) -> bool:
        """Whether other benches may use the GPU."""
        return self._file is not None

    @property
    def had(self) -> float:
        """For how many seconds this bench has had the GPU since the case began."""
        return self._had + (time.time() - self._taken if self._ours else 0.0)

    def begin(self) -> None:
        """Begins a case. Acquires the GPU once a fraction ROOM of its memory is free (waiting benches occupy memory
        with their inputs), or after ROOM_SECONDS in any case."""
        self._since, self._had = time.time(), 0.0
        self.take()
        while self._free() < ROOM and time.time() < self._since + ROOM_SECONDS:
            self.give()
            time.sleep(SLEEP_SECONDS)
            self.take()

    def _free(self) -> float:
        """The fraction of the GPU's memory that is free; 1 where no other process uses it."""
        if self._file is None or self._device.type != "cuda":
            return 1.0
        free, total = torch.cuda.mem_get_info(self._device)
        return free / total

    def take(self) -> None:
        """Acquires the GPU: waits until no other bench has it, or wants it for a case that began earlier."""
        with self._lock:
            if self._ours:
                return
            begun = time.time()
            if self._file is not None:
                place = self._queue / f"{self._since:017.6f}-{os.getpid()}"
                place.touch()
                try:
                    while not (self._is_next(place.name) and _locks(self._file)):
                        time.sleep(LOOK_SECONDS)
                finally:
                    place.unlink()
            self._ours, self._taken = True, time.time()
            self.waited += self._taken - begun

    def _is_next(self, name: str) -> bool:
        """Whether no running process has an earlier place in the queue."""
        return not any(_runs(other) for other in os.listdir(self._queue) if other < name)

    def give(self) -> None:
        """Releases the GPU, after all work queued on it is complete."""
        with self._lock:
            if not self._ours:
                return
            if self._file is not None:
                if self._device.type == "cuda":
                    with suppress(torch.AcceleratorError):  # from a lost context, in which nothing runs any more
                        torch.cuda.synchronize(self._device)
                        if _cached(self._device) > KEPT_BYTES:
                            torch.cuda.empty_cache()  # the other benches need memory too
                fcntl.flock(self._file, fcntl.LOCK_UN)
            self._ours = False
            self._had += time.time() - self._taken

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Returns what `make` returns (it must be serialisable as JSON), or what it returned to another of these
        benches within the last KEPT_SECONDS. Call it only while holding the GPU."""
        if self._file is None:
            return make()
        kept = self._path.with_name(f"{self._path.name}.{name}.json")
        if kept.exists() and time.time() - kept.stat().st_mtime < KEPT_SECONDS:
            return json.loads(kept.read_text(encoding="utf-8"))
        made = make()
        kept.write_text(json.dumps(made), encoding="utf-8")
        return made

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Context for code that may compile. A `torch._dynamo.reset` inside ends its effect on later compilations."""
        if self._file is None:
            yield
            return
        ours = [self._ours]

        def begin(event: Any) -> None:
            ours.append(self._ours)
            if event.callback_trigger.name in ON_HOST:
                self.give()

        def end(_: Any) -> None:
            self._turn_to(ours.pop())

        with ExitStack() as stack:
            for replaced in self._replacements():
                stack.enter_context(replaced)
            try:
                with watched(begin, end):
                    yield
            finally:
                self._turn_to(ours[0])

    def _replacements(self) -> Iterator[AbstractContextManager[None]]:
        """Yields patches that release and reacquire the GPU inside torch.compile and other compilers."""
        from torch._inductor.runtime.benchmarking import benchmarker
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner
        from torch._inductor.select_algorithm import AlgorithmSelectorCache
        from triton.runtime.jit import JITFunction

        yield _replaced(AlgorithmSelectorCache, "benchmark_in_current_process", self._with_gpu)
        yield _replaced(benchmarker, "benchmark_gpu", self._with_gpu)
        # A further configuration of a kernel that is autotuned at its first launch.
        yield _replaced(CachingAutotuner, "_precompile_config", self._without_gpu)
        yield _replaced(JITFunction, "_do_compile", self._without_gpu)
        for name, module in list(sys.modules.items()):
            if name.endswith(".cuda_driver") and hasattr(module, "_compiled"):
                yield _replaced(module, "_compiled", self._without_gpu)
        if "cutlass.base_dsl.compiler" in sys.modules:
            yield _replaced(sys.modules["cutlass.base_dsl.compiler"].CompileCallable, "_compile", self._without_gpu)
        if "quack.autotuner" in sys.modules:
            yield _replaced(sys.modules["quack.autotuner"], "time", lambda clock: _Sleeping(clock, self._without_gpu))

    def _turn_to(self, ours: bool) -> None:
        if ours:
            self.take()
        else:
            self.give()

    @contextmanager
    def _having(self) -> Iterator[None]:
        """Context that has the GPU from its begin to its end."""
        with self._lock:
            ours = self._ours
            self.take()
            self._timed += 1
        try:
            yield
        finally:
            with self._lock:
                self._timed -= 1
                self._turn_to(ours)

    @contextmanager
    def _lending(self) -> Iterator[None]:
        """Context that does not need the GPU. It may run in several threads at a time: the first to begin releases the
        GPU, unless something is timed, and the last to end acquires it again."""
        with self._lock:
            if self._ours and not self._timed:
                self.give()
                self._released.append(self._compilers)
            self._compilers += 1
        try:
            yield
        finally:
            with self._lock:
                self._compilers -= 1
                if self._released and self._released[-1] == self._compilers:
                    self._released.pop()
                    self.take()

    def _with_gpu(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            with self._having():
                return call(*arguments, **keywords)

        return run

    def _without_gpu(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            with self._lending():
                return call(*arguments, **keywords)

        return run


class _Sleeping:
    """Replaces the module `time` in QuACK's autotuner; sleeps while no configuration is compiled yet."""

    def __init__(self, clock: Any, without_gpu: Callable[[Callable[[float], None]], Callable[[float], None]]) -> None:
        self._clock = clock
        self.sleep = without_gpu(lambda seconds: clock.sleep(max(seconds, SLEEP_SECONDS)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._clock, name)


def _cached(device: torch.device) -> int:
    """The bytes that PyTorch's allocator keeps without use."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _locks(file: IO[str]) -> bool:
    """Tries to take the lock; returns whether that worked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _runs(place: str) -> bool:
    """Whether the process of a place in the queue, `<time>-<pid>`, still runs."""
    try:
        os.kill(int(place.rpartition("-")[2]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the process of another user
        return True
    return True


@contextmanager
def _replaced(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Context that replaces attribute `name` of `owner` (an object or a class) by `wrap` of its present value."""
    own, present = vars(owner).get(name), getattr(owner, name)
    bound = isinstance(owner, type) and hasattr(present, "__self__")  # a class method
    setattr(owner, name, staticmethod(wrap(present)) if bound else wrap(present))
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
