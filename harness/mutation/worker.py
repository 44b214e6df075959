"""Runs the checks on one mutant after another, each in a process of its own that is forked after the imports.

`python -m harness.mutation.worker` reads a JSON list of workers, a line of standard input. It imports what all mutants
need, once, and forks the workers. A worker says that it is ready when the process of its first task is. The process of
the next task is always forked before it is needed: on a GPU it starts CUDA while the checks of the mutant before it
run. No process has two mutants: what one writes out of bounds would be found by the checks of the next. A worker has

root              a folder of its own, in which the checkout is links to the original. The folder of a kernel becomes a
                  copy when the worker first gets a mutant of it
gpu               the value of CUDA_VISIBLE_DEVICES; None without
tasks, answers    the file descriptors from which it reads tasks, a JSON object a line, and to which it writes answers

A task has

kernel, device    whose checks are made, and where: "cpu" or "cuda"
list              only to list the checks and how long the import took; nothing is run
file, source      a file of the kernel's folder and its new text; without them the original is checked
only              the names of the checks and tests that are made; without it all of them
without           names that are not
quick             neither those that compile with PyTorch nor the tests
seconds           name → how long it took where it passed
weights           name → how much it has rejected; what has rejected much, or is cheap, comes first
memory            the part of the GPU's memory that the process may take
crowd             how many times longer a check may take, as processes share the cores
life              the seconds after which the process is killed, and has the status "unfinished"

The kernel is imported after the fork, so each process has the mutant alone: its ops, its plans, its CUDA context. The
process ends at the first check that does not pass, by an exception in it, by a signal (SIGALRM where a check took too
long), or with all checks made. What a check may take does not include the time of a compiler, nor the start of CUDA. An
answer names the check that rejected, those that passed and those that were skipped. The tests of the kernel and its
share of EVERY_KERNEL come after the checks of SPEC. A process that cannot begin, as without memory for its context, has
the status "error" and the exception as its reason: it says nothing about the mutant. Nor does one that took too long
before anything of the mutant was launched, or in a compiler: it is "unfinished".

On a GPU an answer also has the machine code that was launched: for each variant of a kernel a digest of its source and
one of its code. The originals compile into Triton's cache, in which mutants find what they have not changed; what a
mutant compiles is deleted after it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import importlib
import json
import os
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from .. import registry
from . import results

MEMORY = 6 << 30  # bytes that a mutant may take beyond what is there after the imports; the CPU alone is bounded so
START, IMPORT, COLLECTION = "start of CUDA", "import", "collection of the tests"
PHASES = (IMPORT, COLLECTION)
# A check may take FACTOR times as long as where it passed, and SLACK seconds more. On a GPU the first check of a
# process loads what PyTorch launches, and others may start CUDA meanwhile, which holds up all that use the driver.
SLACK, FACTOR = {"cpu": 10.0, "cuda": 60.0}, 10.0
UNSEEN = 300.0  # seconds of a check that has not passed yet
ORIGINAL_SECONDS, COMPILER_SECONDS = 900.0, 120.0
START_SECONDS = 180.0  # when many processes start CUDA at once
SILENCE, UNWILLING = 1200.0, 30.0  # seconds without a word after which a process is killed, and is given up
LIVES = 86400.0  # seconds that a process may take where its task does not say so
EVERY_KERNEL = ("tests/test_addresses.py", "tests/test_call.py")  # each has a share for every kernel
NOT_SLOW = ("-m", "not slow")
SLOW_CHECKS = ("opcheck", "compile")  # left out of a quick run, with the tests
CUDA_SOURCES = (".cu", ".cuh")
LINKED = ("harness", "workloads", "parts", "tests", "examples")
COPIED = ("conftest.py", "pyproject.toml")
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.svg")
_PR_SET_PDEATHSIG = 1
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED


def main() -> None:
    """Forks the workers, and ends when they have."""
    _end_with_parent()
    workers = json.loads(sys.stdin.readline())
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        _imports()
    except BaseException:
        for worker in workers:
            _write(worker["answers"], {"broken": traceback.format_exc()[-2000:]})
        return
    gc.collect()
    gc.freeze()  # what is not visited by the collector stays shared with the forked processes
    for worker in workers:
        if os.fork() == 0:
            code = 1
            try:
                _end_with_parent()
                _close(other for other in workers if other is not worker)
                _serve(worker)
                code = 0
            finally:
                os._exit(code)
    _close(workers)
    for _ in workers:
        os.wait()


def _close(workers: Iterator[Mapping[str, Any]] | Sequence[Mapping[str, Any]]) -> None:
    for worker in workers:
        os.close(worker["tasks"])
        os.close(worker["answers"])


def _write(descriptor: int, answer: Mapping[str, Any]) -> None:
    text = (json.dumps(answer) + "\n").encode()
    while text:
        text = text[os.write(descriptor, text) :]


def _serve(worker: Mapping[str, Any]) -> None:
    """Answers tasks until there are no more."""
    try:
        _settle(Path(worker["root"]), worker["gpu"])
    except BaseException:
        _write(worker["answers"], {"broken": traceback.format_exc()[-2000:]})
        raise
    process = Process(None if worker["gpu"] is None else start_cuda)
    process.wait()
    _write(worker["answers"], {"ready": True})
    with os.fdopen(worker["tasks"], encoding="utf-8") as tasks:
        for line in tasks:
            answer, process = answered(json.loads(line), process)
            _write(worker["answers"], answer)


def _settle(root: Path, gpu: str | None) -> None:
    """Makes a folder the checkout of this process."""
    (root / "kernels").mkdir(parents=True)
    for name in LINKED:
        (root / name).symlink_to(registry.ROOT / name)
    for name in COPIED:
        shutil.copy(registry.ROOT / name, root / name)
    for path in (registry.ROOT / "kernels").iterdir():
        if path.name != "__pycache__":
            (root / "kernels" / path.name).symlink_to(path)
    os.chdir(root)
    sys.path[:] = [str(root), *(p for p in sys.path if Path(p or ".").resolve() not in (registry.ROOT, root.resolve()))]
    importlib.invalidate_caches()
    registry.ROOT = root
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(root / "inductor")
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu


def answered(task: Mapping[str, Any], process: Process) -> tuple[dict[str, Any], Process]:
    """The answer of a process to a task, also where it cannot be done, and the process of the next one."""
    following = process
    try:
        with _written(task) if task.get("file") else contextlib.nullcontext():
            process.send(task)
            following = Process(process.ahead)
            return process.answer(), following
    except Exception:
        return {**_EMPTY, "status": results.ERROR, "reason": traceback.format_exc()[-1000:]}, following


_EMPTY: dict[str, Any] = {"seconds": 0.0, "by": "", "limit": 0.0, "passed": {}, "skipped": []}


@contextlib.contextmanager
def _written(task: Mapping[str, Any]) -> Iterator[None]:
    """While the file has the mutant's text, in a copy of the kernel's folder."""
    folder = registry.folder(task["kernel"])
    if folder.is_symlink():
        source = folder.resolve()
        folder.unlink()
        shutil.copytree(source, folder, ignore=_LEFT_OUT)
    path = folder / task["file"]
    original = path.read_bytes()
    path.write_text(task["source"], encoding="utf-8")
    try:
        yield
    finally:
        path.write_bytes(original)
        shutil.rmtree(_own_cache(), ignore_errors=True)


def _own_cache() -> Path:
    return registry.ROOT / ".triton-of-the-mutant"


def _end_with_parent() -> None:
    """The kernel kills this process when its parent ends, however that ends: no mutant may outlive its run."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _imports() -> None:
    """What every mutant needs and none changes. RuntimeError where an import starts CUDA, which does not survive a
    fork."""
    import torch

    torch.set_num_threads(1)
    for name in ("harness.commands.check", "hypothesis", "pytest", "torch._dynamo", "torch.export", "torch._inductor"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
        if torch.cuda.is_initialized() or _driver_is_started():
            raise RuntimeError(f"the import of {name} has started CUDA, which a forked process cannot use")
    if early := [name for name in sys.modules if name.startswith("kernels.")]:
        raise RuntimeError(f"{early[0]} was imported before the fork: no mutant of it would be seen")


def _driver_is_started() -> bool:
    """Whether something has called cuInit, which PyTorch knows only of itself."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED


class Process:
    """A process that is forked, does `ahead` and waits for a task, to which it does `work` (`checks`)."""

    def __init__(
        self, ahead: Callable[[], None] | None = None, work: Callable[[Mapping[str, Any], Any], None] | None = None
    ) -> None:
        self.ahead = ahead
        self._reader, writer = os.pipe()
        given, self._given = os.pipe()
        self._started, started = os.pipe()
        # The text of the task, which may not fit into a pipe.
        self._text = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        self._process = os.fork()
        if self._process == 0:
            for descriptor in (self._reader, self._given, self._started):
                os.close(descriptor)
            self._do(work or checks, os.fdopen(writer, "w", buffering=1), given, started)
        for descriptor in (writer, given, started):
            os.close(descriptor)

    def wait(self) -> None:
        """Until it has done `ahead`, or has ended."""
        select.select([self._started], [], [], START_SECONDS + UNWILLING)

    def send(self, task: Mapping[str, Any]) -> None:
        """Gives it its task."""
        self._task, self._start = task, time.monotonic()
        with self._text:
            json.dump(task, self._text)
        with contextlib.suppress(BrokenPipeError):  # one that has ended: `answer` tells why
            os.write(self._given, b"\n")
        os.close(self._given)

    def answer(self) -> dict[str, Any]:
        """What the checks said of the source as it is on disk."""
        end = self._start + self._task.get("life", LIVES)
        said, status, late = _listen(self._reader, self._process, end)
        os.close(self._reader)
        os.close(self._started)
        _kill(self._process)
        return _answer(self._task, said, status, round(time.monotonic() - self._start, 2), late)

    def _do(self, work: Callable[[Mapping[str, Any], Any], None], report: Any, given: int, started: int) -> NoReturn:
        """What the forked process does."""
        code = 1
        try:
            _end_with_parent()
            os.setsid()  # so that what it starts can be ended with it
            if self.ahead is None or _starts(self.ahead, report):
                os.close(started)
                if os.read(given, 1):
                    self._text.seek(0)
                    work(json.load(self._text), report)
            code = 0
        except BaseException as error:
            _say(report, failed=f"{type(error).__name__}: {str(error)[:300]}")
        finally:
            report.flush()
            os._exit(code)


def _starts(start: Callable[[], None], report: Any) -> bool:
    """Whether the start of CUDA, in START_SECONDS, does not raise. What it raises is said."""
    clock = Clock()
    clock.limit(START_SECONDS)
    _say(report, at=START, limit=START_SECONDS)
    try:
        start()
    except BaseException:
        _say(report, error=traceback.format_exc()[-1000:])
        return False
    finally:
        clock.limit(0)
    return True


def forked(task: Mapping[str, Any], work: Callable[[Mapping[str, Any], Any], None] | None = None) -> dict[str, Any]:
    """The answer of a process that is forked now."""
    process = Process(None, work)
    process.send(task)
    return process.answer()


def _kill(process: int) -> None:
    """Ends a process, and what it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


def _listen(reader: int, process: int, end: float, silence: float = SILENCE) -> tuple[list[dict[str, Any]], int, bool]:
    """What a process says until it ends, how it ended, and whether it was killed because `end` has come. It need not
    close the pipe: what it has started may hold it open. One that says nothing for `silence` seconds is killed too."""
    text, heard, status, killed, late = b"", time.monotonic(), None, False, False
    while status is None:
        if not late and time.monotonic() > end:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)  # it may not lead a group yet
            _kill(process)
            late = killed = True
            heard = time.monotonic()
        if select.select([reader], [], [], 0.2)[0]:
            if piece := os.read(reader, 1 << 16):
                text, heard = text + piece, time.monotonic()
            else:
                _, status = os.waitpid(process, 0)
            continue
        ended, found = os.waitpid(process, os.WNOHANG)
        if ended:
            status = found
        elif time.monotonic() - heard > (UNWILLING if killed else silence):
            if killed:  # inside a driver's call that never ends: it is left behind
                status = signal.SIGALRM
            else:
                os.kill(process, signal.SIGALRM)
                killed, heard = True, time.monotonic()
    while select.select([reader], [], [], 0)[0] and (piece := os.read(reader, 1 << 16)):
        text += piece
    lines = text.decode(errors="replace").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("}\n")], status, late


def _answer(
    task: Mapping[str, Any], said: Sequence[Mapping[str, Any]], status: int, seconds: float, late: bool
) -> dict[str, Any]:
    begun = next((s for s in reversed(said) if "at" in s), {"at": IMPORT, "limit": 0.0})
    failures = [s for s in said if "failed" in s]
    failed = [s.get("by", begun["at"]) for s in failures]
    answer = {
        "seconds": seconds,
        "by": begun["at"],
        "limit": begun["limit"],
        "passed": {s["passed"]: s["seconds"] for s in said if "passed" in s and s["passed"] not in failed},
        "took": {s["passed"]: s["took"] for s in said if "took" in s},
        "skipped": [s["skipped"] for s in said if "skipped" in s],
        "failed": dict(zip(failed, (s["failed"] for s in failures), strict=True)),
        "codes": sorted({tuple(s["code"]) for s in said if "code" in s}),
    }
    if errors := [s["error"] for s in said if "error" in s]:
        return {**answer, "status": results.ERROR, "by": "", "reason": errors[0]}
    if begun["at"] == START and not late:
        return {**answer, "status": results.ERROR, "by": "", "reason": f"ended in the {START}, status {status}"}
    if lists := [s["checks"] for s in said if "checks" in s]:
        answer["checks"] = lists[0]
    if Path(task.get("file") or "").suffix in CUDA_SOURCES and (logs := [s["log"] for s in said if "log" in s]):
        return {**answer, "status": "invalid", "reason": logs[0]}
    if late and not (failures and task.get("file")):
        return {**answer, "status": results.UNFINISHED, "by": "", "reason": f"time was up in {begun['at']}"}
    if os.WIFSIGNALED(status) and not late:
        number = os.WTERMSIG(status)
        if number == signal.SIGALRM:
            if reason := _says_nothing(task, said):
                return {**answer, "status": results.UNFINISHED, "by": "", "reason": reason}
            return {**answer, "status": "hang", "reason": "took longer than allowed"}
        return {**answer, "status": "crash", "reason": signal.Signals(number).name}
    if failures:
        return {**answer, "status": "killed", "by": failed[0], "reason": failures[0]["failed"]}
    if os.WEXITSTATUS(status):
        return {**answer, "status": "crash", "reason": f"exit code {os.WEXITSTATUS(status)}"}
    return {**answer, "status": "survived", "by": "", "reason": ""}


def _says_nothing(task: Mapping[str, Any], said: Sequence[Mapping[str, Any]]) -> str:
    """Why the mutant need not be what took too long, or ""."""
    compilers = [s["compiler"] for s in said if "compiler" in s]
    if compilers and compilers[-1]:
        return f"{compilers[-1]} took longer than allowed"
    passed = any(s.get("passed", IMPORT) not in PHASES for s in said)
    launched = compilers or any("code" in s for s in said)
    if task.get("device") == "cuda" and not launched and not passed:
        return "took longer than allowed before any kernel was launched"
    return ""


def _say(report: Any, **fields: Any) -> None:
    report.write(json.dumps(fields) + "\n")


def limit_of(task: Mapping[str, Any], name: str) -> float:
    """How long a check may take on a mutant, in seconds."""
    if not task.get("file"):
        return ORIGINAL_SECONDS
    seconds = None if name in PHASES else task.get("seconds", {}).get(name)
    return task.get("crowd", 1.0) * (UNSEEN if seconds is None else SLACK[task["device"]] + FACTOR * seconds)


class Clock:
    """The time of the checks, less that of the compilers. A check that takes longer than it may ends the process:
    SIGALRM's default action does so in C code too, and where a kernel never ends."""

    def __init__(self) -> None:
        self._compiled = 0.0
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def limit(self, seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def now(self) -> float:
        return time.monotonic() - self._compiled

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """While a compiler runs, which has COMPILER_SECONDS."""
        left, start = signal.getitimer(signal.ITIMER_REAL)[0], time.monotonic()
        self.limit(COMPILER_SECONDS)
        try:
            yield
        finally:
            self._compiled += time.monotonic() - start
            self.limit(left)


def _watch_compilers(package: str, clock: Clock, report: Any) -> None:
    """Stops the clock for Triton and for NVRTC. What they make is said, and what NVRTC does not compile."""
    import triton.compiler

    def note(*given: Any, **options: Any) -> None:
        try:
            code = _of_triton(*given, **options)
        except Exception as error:
            code = ("", f"{type(error).__name__}: {error}", "")  # equals no original's
        _say(report, code=code)

    _wrap(triton.compiler, "compile", clock, report, lambda error: None, note)
    with contextlib.suppress(Exception):  # without a driver CuPy raises more than ImportError
        nvrtc = importlib.import_module("cupy.cuda.nvrtc")

        def refused(error: Exception) -> None:
            _say(report, log=" ".join(str(error).split())[:300])

        _wrap(nvrtc, "compileProgram", clock, report, refused)
    from ..compiling import nvrtc as ahead

    if driver := ahead.driver_of(package):
        # Lines are no part of the code, and a mutant may change their columns.
        driver.OPTIONS = tuple(option for option in driver.OPTIONS if option != "-lineinfo")  # type: ignore[attr-defined]
        compiled = driver._compiled

        @wraps(compiled)
        def said(source: str, defines: tuple[str, ...]) -> bytes:
            code = compiled(source, defines)
            _say(report, code=_of_nvrtc(Path(str(driver.__file__)).parent, source, defines, code))
            return code

        driver._compiled = said  # type: ignore[attr-defined]


def _of_triton(kernel: Any, source: Any, target: Any = None, options: Any = None, **_: Any) -> tuple[str, str, str]:
    """Of what Triton has compiled: the variant, its source, its code."""
    variant = (source.name, source.signature, _named(source.constants), source.attrs, target, options)
    plain = re.sub(r" at 0x[0-9a-f]+", "", repr(variant))
    return _digest(plain), _digest(source.hash()), _digest(kernel.asm["cubin"])


def _named(constants: Mapping[Any, Any]) -> list[tuple[str, str]]:
    """Functions among them by their name: their source is no part of the variant."""
    return sorted((repr(key), getattr(value, "__name__", None) or repr(value)) for key, value in constants.items())


def _of_nvrtc(folder: Path, source: str, defines: tuple[str, ...], code: bytes) -> tuple[str, str, str]:
    """Of what NVRTC has compiled: the variant, its source with all headers of the folder, its code."""
    texts = [path.read_text(encoding="utf-8") for path in (folder / source, *sorted(folder.glob("*.cuh")))]
    return _digest(repr((source, defines))), _digest(repr(texts)), _digest(code)


def _digest(text: str | bytes) -> str:
    return hashlib.sha256(text if isinstance(text, bytes) else text.encode()).hexdigest()[:16]


def _wrap(
    module: ModuleType,
    name: str,
    clock: Clock,
    report: Any,
    failed: Callable[[Exception], None],
    made: Callable[..., None] | None = None,
) -> None:
    function = getattr(module, name)

    @wraps(function)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        with clock.stopped():
            _say(report, compiler=f"{module.__name__}.{name}")
            try:
                result = function(*arguments, **options)
            except Exception as error:
                failed(error)
                raise
            finally:
                _say(report, compiler="")
            if made:
                made(result, *arguments, **options)
            return result

    setattr(module, name, wrapped)


def start_cuda() -> None:
    """Starts CUDA, cuBLAS and Triton's driver, or finds that they work. RuntimeError where kernels would be
    interpreted."""
    import torch
    import triton
    from triton import knobs

    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: nothing would be compiled")
    ones = torch.ones(64, 64, device="cuda")  # PyTorch makes a context when it first needs one
    if float((ones @ ones).sum()) != 64.0**3:
        raise RuntimeError("the GPU computes wrong products")
    triton.runtime.driver.active.get_current_device()
    with contextlib.suppress(Exception):  # without a driver CuPy raises more than ImportError
        importlib.import_module("cupy.cuda.nvrtc")


def _use_gpu(task: Mapping[str, Any]) -> None:
    """With a bound on what the process may allocate, and Triton's cache."""
    import torch

    start_cuda()
    torch.cuda.set_per_process_memory_fraction(task["memory"])
    if task.get("file"):
        from . import overlay

        overlay.write_to(str(_own_cache()))


def checks(task: Mapping[str, Any], report: Any) -> None:
    """Every check and test of the task, those that are likely to reject first."""
    clock, device = Clock(), task["device"]
    if device == "cpu":
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    with contextlib.suppress(ImportError):
        import hypothesis

        # One example that fails is enough: no search for the smallest.
        phases = tuple(phase for phase in hypothesis.Phase if phase.name != "shrink")
        hypothesis.settings.register_profile("mutants", phases=phases)
        hypothesis.settings.load_profile("mutants")
    if device == "cuda" and not _starts(lambda: _use_gpu(task), report):
        return
    _begin(IMPORT, task, clock, report)
    from harness.commands import check

    start = clock.now()
    spec = registry.load(task["kernel"])
    _say(report, passed=IMPORT, seconds=0.0, took=round(clock.now() - start, 3))
    if device == "cuda":
        _watch_compilers(registry.package(task["kernel"]), clock, report)
    items = {item.name: item for item in check.plan(spec, device, [c for c in spec.cases if not c.bench])}
    wanted = [name for name, item in items.items() if item.skip is None and _is_wanted(task, name, item.check)]
    if task.get("list"):
        chosen = [(name, items[name]) for name in wanted]
        _say(report, checks=[(name, (i.implementation, i.case.name, i.mode, i.check)) for name, i in chosen])
        return
    known = [
        name for name in task.get("seconds", {}) if "::" not in name and name not in PHASES and _is_wanted(task, name)
    ]

    def place(name: str) -> float:
        return _place(task, name) * (_unlikely(task, items[name].implementation) if name in items else 1.0)

    for name in sorted((*wanted, *(n for n in known if n not in items)), key=place):
        _begin(name, task, clock, report)
        if name not in items:
            _say(report, failed="the case or the implementation is gone")
            return
        start, began = clock.now(), time.monotonic()
        outcome = check.run(items[name], device)
        reason = f"[{outcome.cause or outcome.status}] {' '.join(outcome.reason.split())[:300]}"
        if outcome.status == "pass":
            took = round(time.monotonic() - began, 3)
            _say(report, passed=name, seconds=round(clock.now() - start, 3), took=took)
        elif outcome.status == "skip":
            if device == "cpu" or "out of memory" not in outcome.reason:  # others take a GPU's memory too
                _say(report, skipped=name)
        else:
            _say(report, failed=reason, by=name)
            if task.get("file"):
                return
    if not task.get("quick") and (not task.get("only") or any("::" in n or n == COLLECTION for n in task["only"])):
        _tests(task, clock, report)


def _begin(name: str, task: Mapping[str, Any], clock: Clock, report: Any) -> None:
    limit = limit_of(task, name)
    clock.limit(limit)
    _say(report, at=name, limit=limit)


def _is_wanted(task: Mapping[str, Any], name: str, check: str = "") -> bool:
    if task.get("quick") and check in SLOW_CHECKS:
        return False
    return name not in task.get("without", ()) and (not task.get("only") or name in task["only"])


def _place(task: Mapping[str, Any], name: str) -> float:
    """What comes first has the least: the seconds that it takes for each mutant that it rejects."""
    return (0.02 + task.get("seconds", {}).get(name, 1.0)) / (1 + task.get("weights", {}).get(name, 0))


def _unlikely(task: Mapping[str, Any], implementation: str) -> float:
    """More than 1 for an implementation that hardly reaches the file, less for one that does: of CUDA C++, Triton's
    never does, "auto" does for some shapes, and what is named for it does for all that it takes."""
    if Path(task.get("file") or "").suffix not in CUDA_SOURCES:
        return 1.0
    return 10.0 if implementation.startswith("triton") else 1.0 if implementation == "auto" else 0.1


def _tests(task: Mapping[str, Any], clock: Clock, report: Any) -> None:
    """The kernel's own tests, and its share of those that every kernel has."""
    import pytest

    class Watch:
        """Says which test runs, gives each its time, and chooses and orders them as the task has it."""

        def pytest_collection_modifyitems(self, items: list[Any]) -> None:
            _say(stream, passed=COLLECTION, seconds=0.0)
            items[:] = [item for item in items if _is_wanted(task, item.nodeid)]
            items.sort(key=lambda item: _place(task, item.nodeid))

        def pytest_runtest_logstart(self, nodeid: str) -> None:
            _begin(nodeid, task, clock, report)

        def pytest_runtest_logreport(self, report: Any) -> None:  # pytest passes it by this name
            if report.failed:
                reason = " ".join(str(getattr(report.longrepr, "reprcrash", report.longrepr)).split())
                _say(stream, failed=reason[-300:], by=report.nodeid)
            elif report.when == "call" and report.passed:
                _say(stream, passed=report.nodeid, seconds=round(report.duration, 3))

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                _say(stream, failed=" ".join(str(report.longrepr).split())[-300:], by=COLLECTION)

    stream = report
    _begin(COLLECTION, task, clock, report)
    folder = registry.folder(task["kernel"]).relative_to(registry.ROOT).as_posix()
    stop = ["-x"] if task.get("file") else ["--continue-on-collection-errors"]
    if not _is_wanted({**task, "only": ()}, COLLECTION):  # the original has one that fails
        stop.append("--continue-on-collection-errors")
    files = [path for path in (folder, *EVERY_KERNEL) if (registry.ROOT / path).exists()]
    plugins = ("-p", "no:cacheprovider", "-p", "no:xdist")
    pytest.main([*files, "--kernel", task["kernel"], "-q", *NOT_SLOW, *plugins, *stop], plugins=[Watch()])


if __name__ == "__main__":
    main()
