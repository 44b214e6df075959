"""The answer to a task: the meaning, for a mutant, of the messages of its process and of how that ended.

status    "survived" if all checks passed; "killed" by a check that failed; "hang" if one took too long; "crash" by a
          signal or an exit code. Inconclusive: "invalid", CUDA C++ that does not compile; "error", a process that could
          not begin, e.g. without memory for its context; "unfinished", if the time of the whole task was up, or if a
          process took too long in a compiler, or before any code of the mutant was launched
by        the check that rejected; "" if none did
reason    why, in one line
seconds   the duration
spent     its parts: "start" of CUDA and imports, "compilers", "checks", "original", for checks of the original after a
          mutant and for dropping their state, and "again", for everything done before in another process
limit     the time limit of what began last
passed    name → its seconds without those of compilers
took      name → its seconds with those of compilers
skipped   the names of the checks that were skipped
failed    name → the reason; an original may have several
codes     the digests of each variant launched on a GPU, of its source and of its machine code
loaded    whether any of the codes is of CUDA C++
checks    all checks, if the task was to list them
original  for a mutant: passed, took, skipped, failed and codes of the checks of the original in the same process
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from . import results
from .messages import IMPORT, PHASES, START
from .mutants import is_cuda

# Signals that no fault of a process raises: the kernel's choice when the host's memory runs out, or someone else's.
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)

Answer = Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]


def of_process(
    task: Mapping[str, Any], messages: Messages, ended: int, start: float, end: float, late: bool
) -> dict[str, Any]:
    """The answer to a task that took from `start` to `end`, by a process that sent these messages and ended with the
    `waitpid` status `ended` (0 if it has not ended), or was killed since the time of the task was up (`late`)."""
    said = list(itertools.takewhile(lambda message: "over" not in message, messages))
    after = messages[len(said) :]
    if after:  # how that ended is not the mutant's doing
        ended, late = 0, False
    begun: Mapping[str, Any] = next((s for s in reversed(said) if "at" in s), {"at": IMPORT, "limit": 0.0})
    failures = [(s.get("by", begun["at"]), s["failed"]) for s in said if "failed" in s]
    status, by, reason = _meaning(task, said, begun["at"], failures, ended, late)
    answer = {
        "status": status,
        "by": by,
        "reason": reason,
        "seconds": round(end - start, 2),
        "spent": _spent(messages, start, end),
        "limit": begun["limit"],
        "loaded": any("of" in s for s in said),
        **_made(said, dict(failures)),
    }
    if after:
        answer["original"] = _made(after, {s["by"]: s["failed"] for s in after if "by" in s})
    if lists := [s["checks"] for s in said if "checks" in s]:
        answer["checks"] = lists[0]
    return answer


def _made(said: Messages, failed: Mapping[str, str]) -> dict[str, Any]:
    return {
        "passed": {s["passed"]: s["seconds"] for s in said if "passed" in s and s["passed"] not in failed},
        "took": {s["passed"]: s["took"] for s in said if "took" in s},
        "skipped": [s["skipped"] for s in said if "skipped" in s],
        "failed": failed,
        "codes": sorted({tuple(s["code"]) for s in said if "code" in s}),
    }


def _spent(messages: Messages, start: float, end: float) -> dict[str, float]:
    """The seconds of each part. Every message has its time, so they are known however a process ends."""
    imported = next((m["t"] for m in messages if m.get("passed") == IMPORT), end)
    over = next((m["t"] for m in messages if "over" in m), end)
    compiling = [(m["t"], bool(m["compiler"])) for m in messages if "compiler" in m and m["t"] <= over]
    steps = itertools.pairwise([*compiling, (over, False)])
    compilers = sum(after - before for (before, runs), (after, _) in steps if runs)
    parts = {"start": imported - start, "compilers": compilers, "checks": over - imported - compilers}
    parts |= {"original": end - over} if over < end else {}
    return {name: round(max(0.0, seconds), 2) for name, seconds in parts.items()}


def holds(task: Mapping[str, Any], answer: Answer) -> bool:
    """Whether an answer is valid from a process in which another mutant has run before: all checks passed, or the
    original passes or skips those that did not (see `leftovers`)."""
    if not task.get("file"):
        return answer["status"] == "survived" and {*task.get("only", ())} <= {*answer["passed"], *answer["skipped"]}
    original = answer.get("original", {"passed": (), "skipped": ()})
    suspects = [answer["by"]] if answer["by"] else answer["skipped"]
    if not {*suspects} <= {*original["passed"], *original["skipped"]}:
        return False
    return answer["status"] in ("killed", results.INVALID) or (answer["status"] == "survived" and answer["loaded"])


def not_begun(reason: str) -> dict[str, Any]:
    """The answer to a task that could not begin."""
    nothing = {"by": "", "seconds": 0.0, "spent": {}, "limit": 0.0, "passed": {}, "skipped": []}
    return {**nothing, "status": results.ERROR, "reason": reason}


def _meaning(
    task: Mapping[str, Any],
    said: Messages,
    at: str,
    failures: Sequence[tuple[str, str]],
    ended: int,
    late: bool,
) -> tuple[str, str, str]:
    """The status, the check that rejected and the reason. `at` is what began last."""
    if errors := [s["error"] for s in said if "error" in s]:
        return results.ERROR, "", errors[0]
    if not said and not late:
        return results.ERROR, "", f"ended before the task, status {ended}"
    if at == START and not late:
        return results.ERROR, "", f"ended in the {START}, status {ended}"
    if is_cuda(task.get("file")) and (logs := [s["log"] for s in said if "log" in s]):
        return results.INVALID, at, logs[0]
    if late and not (failures and task.get("file")):
        return results.UNFINISHED, "", f"time was up in {at}"
    if os.WIFSIGNALED(ended) and not late:
        number = os.WTERMSIG(ended)
        if number in FROM_OUTSIDE:
            return results.UNFINISHED, "", f"ended from outside, {signal.Signals(number).name} in {at}"
        if number != signal.SIGALRM:
            return "crash", at, signal.Signals(number).name
        if reason := _says_nothing(task, said):
            return results.UNFINISHED, "", reason
        return "hang", at, "took longer than allowed"
    if failures:
        name, reason = failures[0]
        return "killed", name, reason
    if os.WEXITSTATUS(ended):
        return "crash", at, f"exit code {os.WEXITSTATUS(ended)}"
    return "survived", "", ""


def _says_nothing(task: Mapping[str, Any], said: Messages) -> str:
    """Why a timeout need not be the mutant's, or ""."""
    compilers = [s["compiler"] for s in said if "compiler" in s]
    if compilers and compilers[-1]:
        return f"{compilers[-1]} took longer than allowed"
    passed = any(s.get("passed", IMPORT) not in PHASES for s in said)
    launched = compilers or any("code" in s for s in said)
    if task.get("device") == "cuda" and not launched and not passed:
        return "took longer than allowed before any kernel was launched"
    return ""
