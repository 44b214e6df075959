"""The few CUDA driver calls that PyTorch does not offer: holding a stream back, and the persisting part of L2."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

CU_STREAM_WAIT_VALUE_GEQ = 0
CU_LIMIT_PERSISTING_L2_CACHE_SIZE = 6


@cache
def _libcuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: object) -> None:
    status = getattr(_libcuda(), name)(*arguments)
    if status != 0:
        raise RuntimeError(f"{name} failed with CUDA driver error {status}")


def evict_persisting_lines() -> None:
    """Gives the whole L2 back to normal use: a flush cannot evict lines that a kernel has marked as persisting."""
    torch.cuda.current_stream().synchronize()
    _call("cuCtxSetLimit", CU_LIMIT_PERSISTING_L2_CACHE_SIZE, ctypes.c_size_t(0))
    _call("cuCtxResetPersistingL2Cache")


class Gate:
    """Holds a stream back until everything of a round is queued, so that no launch waits for the host.

    The stream waits for a word of pinned memory (cuStreamWaitValue32): unlike a spinning kernel that takes no
    multiprocessor and its length need not be guessed. Work that synchronises with the host while the stream is held
    would wait for ever, and so would more launches than its queue takes; after `timeout` seconds the gate opens by
    itself and says so in `forced`, until the next time.
    """

    def __init__(self, timeout: float = 2.0) -> None:
        self.timeout = timeout
        self.forced = False
        self._ticket = 0
        self._word = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._view = ctypes.c_int32.from_address(self._word.data_ptr())

    @contextmanager
    def hold(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Work queued on `stream` inside the block starts when the block ends."""
        self._ticket += 1
        self.forced = False
        timer = threading.Timer(self.timeout, self._force)
        timer.daemon = True
        timer.start()
        try:
            _call(
                "cuStreamWaitValue32_v2",
                ctypes.c_void_p(stream.cuda_stream),
                ctypes.c_uint64(self._word.data_ptr()),
                ctypes.c_uint32(self._ticket),
                CU_STREAM_WAIT_VALUE_GEQ,
            )
            yield
        finally:
            timer.cancel()
            self._view.value = self._ticket

    def _force(self) -> None:
        self.forced = True
        self._view.value = self._ticket
