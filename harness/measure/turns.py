"""Benches that share a GPU take turns: one has it, the others compile on the host meanwhile.

A bench has its turn from its first use of the GPU to its end, except while torch.compile works on the host. What
Inductor times on the GPU to choose a kernel has a turn of its own, so that no choice and no figure is made beside other
work.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
import torch._dynamo


class Turns:
    """The turns of those that name the same file, by a lock on it. Without a file nobody else has the GPU."""

    def __init__(self, path: Path | None, device: torch.device) -> None:
        self._file: IO[str] | None = None if path is None else path.open("a", encoding="utf-8")
        self._device = device
        self._depth = 0  # blocks and callbacks within each other in which the GPU is ours

    def take(self) -> None:
        """Waits until nobody else has the GPU."""
        self._depth += 1
        if self._file is not None and self._depth == 1:
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def give(self) -> None:
        """Ends what `take` began, once the GPU has done all that it was given."""
        self._depth -= 1
        if self._file is not None and self._depth == 0:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            fcntl.flock(self._file, fcntl.LOCK_UN)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """A block that may compile. `torch._dynamo.reset` within it ends the effect."""
        if self._file is None:
            yield
            return
        from torch._inductor.runtime.benchmarking import benchmarker
        from torch._inductor.select_algorithm import AlgorithmSelectorCache

        handler, on_host = torch._dynamo.callback_handler, ("DYNAMO", "LAZY_BACKWARD")

        def begin(event: Any) -> None:
            if event.callback_trigger.name in on_host:
                self.give()

        def end(event: Any) -> None:
            if event.callback_trigger.name in on_host:
                self.take()

        with ExitStack() as stack:
            stack.enter_context(_replaced(AlgorithmSelectorCache, "benchmark_in_current_process", self._in_turn))
            stack.enter_context(_replaced(benchmarker, "benchmark_gpu", self._in_turn))
            handler.register_start_callback(begin)
            handler.register_end_callback(end)
            try:
                yield
            finally:
                with suppress(ValueError):  # a reset has removed them
                    handler.remove_start_callback(begin)
                    handler.remove_end_callback(end)

    def _in_turn(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            self.take()
            try:
                return call(*arguments, **keywords)
            finally:
                self.give()

        return run


@contextmanager
def _replaced(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """`owner` with another function under that name, which is made from the present one."""
    own = vars(owner).get(name)
    wrapped = wrap(getattr(owner, name))
    setattr(owner, name, staticmethod(wrapped) if isinstance(owner, type) else wrapped)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
