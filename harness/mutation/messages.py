"""What a forked process says, while it works, to the worker that forked it: a JSON object a line.

at, limit         what begins: a check, a test, or one of START, IMPORT and COLLECTION; the seconds that it may take
passed, seconds   what passed, and its seconds less those of compilers
took              its seconds with those of compilers; not of tests
failed, by        why something failed, and what; without `by` it is what began last
skipped           what was skipped
checks            where they are only listed, all that there are, each with its implementation, case, mode and check
compiler          the compiler that begins; "" when it ends
log               what NVRTC says of source that it does not compile
code, of          digests of a variant of a kernel, of its source and of its machine code; the compiler of CUDA C++
error             the exception by which the process could not begin
over              all checks of the task are made; what follows says nothing about a mutant, but about the original
idle              the task is done, and the process can take another

Each has the time `t`, by the monotonic clock.
"""

from __future__ import annotations

import json
import time
from typing import Any, TextIO

START, IMPORT, COLLECTION = "start of CUDA", "import", "collection of the tests"
PHASES = (IMPORT, COLLECTION)  # which pass or fail as a check does


def say(report: TextIO, **fields: Any) -> None:
    report.write(json.dumps({**fields, "t": round(time.monotonic(), 3)}) + "\n")


def read(text: bytes) -> list[dict[str, Any]]:
    """The messages in what was heard, without a last one that was cut off."""
    lines = text.decode(errors="replace").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("}\n")]


def is_idle(text: bytes) -> bool:
    """Whether what was heard last is that the process can take another task."""
    last = text[text.rstrip().rfind(b"\n") + 1 :]
    return last.endswith(b"}\n") and "idle" in json.loads(last)
