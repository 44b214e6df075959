"""Benches that share a GPU take turns: one has it, the others compile on the host meanwhile.

A bench has its turn from a case's first use of the GPU to its last, except while torch.compile, Triton, NVRTC or the
CuTe DSL works on the host, or QuACK's autotuner waits for its pool of processes. What Inductor times on the GPU to
choose a kernel has a turn of its own. So nothing is timed while others use the GPU.

Of those that wait, the one whose case began first is next, so that few cases are half done when time is up.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch

LOOK_SECONDS = 0.01  # between two looks at who is next
ROOM, ROOM_SECONDS = 0.5, 240.0  # of the GPU's memory, for a case to begin, and how long it waits for it
KEPT_SECONDS = 600.0  # after which `once` measures again
SLEEP_SECONDS = 0.5  # of a case that waits for memory; and of QuACK's autotuner, at least, while nothing is compiled
ON_HOST = ("DYNAMO", "LAZY_BACKWARD")  # triggers, as Dynamo calls them, of compilations that need no GPU


class Turns:
    """The turns of those that name the same file, by a lock on it. Without a file nobody else has the GPU."""

    def __init__(self, path: Path | None, device: torch.device) -> None:
        self._file: IO[str] | None = None
        if path is not None:
            self._path, self._file = path, path.open("a", encoding="utf-8")
            self._queue = path.with_name(path.name + ".queue")
            self._queue.mkdir(exist_ok=True)
        self._device = device
        self._ours = False
        self._since = self._taken = time.time()
        self.waited = 0.0  # seconds, for others, in all
        self.had = 0.0  # seconds with the GPU, since the case began

    @property
    def shared(self) -> bool:
        """Whether others may have the GPU."""
        return self._file is not None

    def begin(self) -> None:
        """A case begins. Takes the GPU once ROOM of its memory is free, which those have that wait with their inputs;
        after ROOM_SECONDS in any case."""
        self._since, self.had = time.time(), 0.0
        self.take()
        while self._free() < ROOM and time.time() < self._since + ROOM_SECONDS:
            self.give()
            time.sleep(SLEEP_SECONDS)
            self.take()

    def _free(self) -> float:
        """The part of the GPU's memory that is free; 1 where nobody else has any of it."""
        if self._file is None or self._device.type != "cuda":
            return 1.0
        free, total = torch.cuda.mem_get_info(self._device)
        return free / total

    def take(self) -> None:
        """Waits until nobody else has the GPU, nor wants it for a case that began earlier."""
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
        """Whether no process that runs has an earlier place in the queue."""
        return not any(_runs(other) for other in os.listdir(self._queue) if other < name)

    def give(self) -> None:
        """Lets others have the GPU, once it has done all that it was given."""
        if not self._ours:
            return
        if self._file is not None:
            if self._device.type == "cuda":
                with suppress(torch.AcceleratorError):  # of a context that is lost: nothing runs there any more
                    torch.cuda.synchronize(self._device)
                    torch.cuda.empty_cache()  # others need memory too
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._ours = False
        self.had += time.time() - self._taken

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` returns, which JSON must be able to hold; or what it returned to another of these benches in the
        last KEPT_SECONDS. Call it only while the GPU is ours."""
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
        """A block that may compile. `torch._dynamo.reset` within it ends the effect on what is compiled later in it."""
        if self._file is None:
            yield
            return
        handler, ours = torch._dynamo.callback_handler, [self._ours]

        def begin(event: Any) -> None:
            ours.append(self._ours)
            if event.callback_trigger.name in ON_HOST:
                self.give()

        def end(_: Any) -> None:
            self._turn_to(ours.pop())

        with ExitStack() as stack:
            for replaced in self._replacements():
                stack.enter_context(replaced)
            handler.register_start_callback(begin)
            handler.register_end_callback(end)
            try:
                yield
            finally:
                with suppress(ValueError):  # a reset has removed them
                    handler.remove_start_callback(begin)
                    handler.remove_end_callback(end)
                self._turn_to(ours[0])

    def _replacements(self) -> Iterator[AbstractContextManager[None]]:
        """What gives the GPU away, and takes it, within torch.compile and where something else compiles."""
        from torch._inductor.runtime.benchmarking import benchmarker
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner
        from torch._inductor.select_algorithm import AlgorithmSelectorCache
        from triton.runtime.jit import JITFunction

        yield _replaced(AlgorithmSelectorCache, "benchmark_in_current_process", self._with_gpu)
        yield _replaced(benchmarker, "benchmark_gpu", self._with_gpu)
        # One more configuration of a kernel that is tuned at its first launch.
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
    def _having(self, ours: bool) -> Iterator[None]:
        """A block in which the GPU is ours, or is not. Where that is so already nothing is touched: the block may be in
        a thread of Inductor's, beside one that takes the GPU."""
        if self._ours == ours:
            yield
            return
        self._turn_to(ours)
        try:
            yield
        finally:
            self._turn_to(not ours)

    def _with_gpu(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            with self._having(True):
                return call(*arguments, **keywords)

        return run

    def _without_gpu(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            with self._having(False):
                return call(*arguments, **keywords)

        return run


class _Sleeping:
    """The module `time` as QuACK's autotuner sees it, which sleeps where no configuration is compiled yet."""

    def __init__(self, clock: Any, without_gpu: Callable[[Callable[[float], None]], Callable[[float], None]]) -> None:
        self._clock = clock
        self.sleep = without_gpu(lambda seconds: clock.sleep(max(seconds, SLEEP_SECONDS)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._clock, name)


def _locks(file: IO[str]) -> bool:
    """Whether nobody else has the lock, which then is ours."""
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
    except PermissionError:  # another user's
        return True
    return True


@contextmanager
def _replaced(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """`owner`, an object or a class, with something else under that name, which is made from the present one."""
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
