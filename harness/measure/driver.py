"""CUDA driver calls that PyTorch does not expose: blocking a stream, and resetting the persisting lines of L2."""

from __future__ import annotations

import ctypes
import os
import threading
import time
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
    """Resets persisting lines of L2 to normal: a flush cannot evict lines that a kernel has marked as persisting."""
    torch.cuda.current_stream().synchronize()
    _call("cuCtxSetLimit", CU_LIMIT_PERSISTING_L2_CACHE_SIZE, ctypes.c_size_t(0))
    _call("cuCtxResetPersistingL2Cache")


class Alarm:
    """Writes 1 into eight bytes of memory after a number of seconds, whatever the interpreter is doing.

    A Python thread could not: a launch that waits for room in the queue may hold the interpreter's lock. So the
    operating system's kernel does it, in a thread blocked in read() of a timerfd, whose result is the number of
    expirations.
    """

    def __init__(self, address: int, seconds: float) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._timer = self._libc.timerfd_create(time.CLOCK_MONOTONIC, 0)
        if self._timer < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._set(int(seconds * 1e9))
        self._thread = threading.Thread(target=self._libc.read, args=(self._timer, ctypes.c_void_p(address), 8))
        self._thread.daemon = True
        self._thread.start()
        time.sleep(2e-4)  # releases the interpreter's lock, so that the thread reaches its read()

    def _set(self, nanoseconds: int) -> None:
        setting = (ctypes.c_long * 4)(0, 0, *divmod(nanoseconds, 10**9))  # no interval; the initial expiration
        if self._libc.timerfd_settime(self._timer, 0, setting, None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def stop(self) -> None:
        """Makes it expire now, and waits until it has written."""
        self._set(1)
        self._thread.join()
        os.close(self._timer)


class Gate:
    """Blocks a stream until all work of a round is queued, so that no launch waits for the host.

    The stream waits for a word of pinned memory (cuStreamWaitValue32): unlike a spinning kernel this occupies no SM,
    and its length need not be guessed. Work that synchronises with the host while the stream is blocked would
    deadlock, as would more launches than its queue holds. Therefore an alarm releases the stream after `timeout`
    seconds, and `forced` is true until the next time.
    """

    def __init__(self, timeout: float = 2.0) -> None:
        self.timeout = timeout
        self._was_forced = False
        self._held = False
        self._word = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._view = ctypes.c_int64.from_address(self._word.data_ptr())

    @property
    def forced(self) -> bool:
        """Whether the alarm has opened the gate, now or at the end of the last block."""
        return bool(self._view.value) if self._held else self._was_forced

    @contextmanager
    def hold(self, stream: torch.cuda.Stream, timeout: float | None = None) -> Iterator[None]:
        """Context in which work queued on `stream` does not start until the block ends, or until `timeout` seconds (by
        default the gate's own) have passed."""
        stream.synchronize()  # it must have passed the previous wait
        self._view.value = 0
        alarm, self._held = Alarm(self._word.data_ptr(), timeout or self.timeout), True
        try:
            _call(
                "cuStreamWaitValue32_v2",
                ctypes.c_void_p(stream.cuda_stream),
                ctypes.c_uint64(self._word.data_ptr()),
                ctypes.c_uint32(1),
                CU_STREAM_WAIT_VALUE_GEQ,
            )
            yield
        finally:
            self._was_forced, self._held = self.forced, False
            alarm.stop()
