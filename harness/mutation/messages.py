"""Messages of a forked process, while it works, to the worker that forked it: one JSON object per line.

at, limit         what begins: a check, a test, or one of START, IMPORT and COLLECTION; its time limit in seconds
passed, seconds   what passed, and its seconds without those of compilers
took              its seconds with those of compilers; not for tests
failed, by        why something failed, and what; without `by` it is what began last
skipped           what was skipped
checks            if they are only listed: all checks, each with its implementation, case, mode and check
compiler          the compiler that begins; "" when it ends
log               NVRTC's log for source that does not compile
code, of          digests of a variant of a kernel, of its source and of its machine code; the compiler of CUDA C++
error             the exception that prevented the process from beginning
over              all checks of the task are made; later messages are about the original, not about a mutant
idle              the task is complete, and the process can take another

Each has the time `t`, from the monotonic clock.
"""

from __future__ import annotations

import json
import time
from typing import Any, TextIO

START, IMPORT, COLLECTION = "start of CUDA", "import", "collection of the tests"
PHASES = (IMPORT, COLLECTION)  # which pass or fail like a check


def say(report: TextIO, **fields: Any) -> None:
    report.write(json.dumps({**fields, "t": round(time.monotonic(), 3)}) + "\n")


def read(text: bytes) -> list[dict[str, Any]]:
    """Parses the messages received, without a truncated last one."""
    lines = text.decode(errors="replace").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("}\n")]


def is_idle(text: bytes) -> bool:
    """Whether the last message received says that the process can take another task."""
    last = text[text.rstrip().rfind(b"\n") + 1 :]
    return last.endswith(b"}\n") and "idle" in json.loads(last)
