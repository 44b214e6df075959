"""Prints where a program is while one operation takes long."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def said_where(seconds: float) -> Iterator[None]:
    """Context that prints the stack of this thread on stderr every `seconds` seconds, later if the GIL is held.

    `faulthandler` would not wait for the GIL, and so reads a stack while it changes: up to Python 3.12.7 that ends the
    process if the innermost frame is one of the interpreter's own (github.com/python/cpython/issues/123967).
    """
    thread, over = threading.get_ident(), threading.Event()

    def watch() -> None:
        while not over.wait(seconds):
            frame = sys._current_frames().get(thread)
            stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
            print(f"{seconds:g} s more without a result; the current stack:\n{stack}", file=sys.stderr, flush=True)

    watcher = threading.Thread(target=watch, name="said_where", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
