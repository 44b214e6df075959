"""How a mutant's checks are made: which and in which order, in processes of a worker, and what it means for the mutant
how such a process ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from harness import registry
from harness.commands import check
from harness.compiling import nvrtc
from harness.mutation import checkout, checks, clock, compilers, cuda, overlay, process, selection, worker
from harness.mutation.clock import Clock
from harness.mutation.messages import IMPORT, START, say
from harness.mutation.process import Process

ACCURACY, STRIDES = "one.fwd.case.triton-accuracy", "one.fwd.case.triton-strides"
CUDA_TASK = {"file": "one.cu", "device": "cuda"}


def forked(task: dict[str, Any], work: process.Work) -> dict[str, Any]:
    """The answer of a process that is forked now."""
    new = Process(work)
    new.send(task)
    return new.answer()


def answer_to(work, task: dict[str, Any] | None = None) -> dict[str, Any]:
    """The answer of a process that does this."""

    def in_the_process(task, report):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        say(report, at=ACCURACY, limit=0.2)
        work(report)

    return forked({"file": "op.py", **(task or {})}, in_the_process)


def test_what_ends_a_process_is_told_apart():
    passed = answer_to(lambda report: say(report, passed=ACCURACY, seconds=0.5))
    assert (passed["status"], passed["by"], passed["passed"]) == ("survived", "", {ACCURACY: 0.5})
    failed = answer_to(lambda report: say(report, failed="wrong"))
    assert (failed["status"], failed["by"], failed["reason"]) == ("killed", ACCURACY, "wrong")
    raised = answer_to(lambda report: {}["x"])
    assert raised["status"] == "killed" and raised["reason"].startswith("KeyError")
    crashed = answer_to(lambda report: os.kill(os.getpid(), signal.SIGSEGV))
    assert (crashed["status"], crashed["by"], crashed["reason"]) == ("crash", ACCURACY, "SIGSEGV")
    ended = answer_to(lambda report: os.kill(os.getpid(), signal.SIGKILL))  # as when the host's memory runs out
    assert (ended["status"], ended["by"], ended["reason"]) == (
        "unfinished",
        "",
        f"ended from outside, SIGKILL in {ACCURACY}",
    )
    left = answer_to(lambda report: os._exit(3))
    assert (left["status"], left["reason"]) == ("crash", "exit code 3")
    assert answer_to(lambda report: say(report, skipped=STRIDES))["skipped"] == [STRIDES]


def test_what_takes_too_long_is_ended_also_outside_of_python():
    """As a call of the driver that waits for a kernel without an end."""
    start = time.monotonic()

    def hang(report):
        Clock().limit(0.2)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        signal.pause()

    assert answer_to(hang)["status"] == "hang"
    assert time.monotonic() - start < 20


def test_what_takes_too_long_before_anything_of_the_mutant_runs_says_nothing_about_it():
    """Nor does what a compiler does not end."""

    def hangs_after(*said, device: str = "cuda") -> dict[str, Any]:
        def work(report):
            for line in said:
                say(report, **line)
            Clock().limit(0.1)
            signal.pause()

        return answer_to(work, {"device": device})

    imported, passed = {"passed": IMPORT, "seconds": 0.0}, {"passed": STRIDES, "seconds": 0.1}
    compiling, compiled = {"compiler": "triton.compile"}, {"compiler": ""}
    nothing = hangs_after(imported)
    assert (nothing["status"], nothing["by"]) == ("unfinished", "") and "before any kernel" in nothing["reason"]
    long = hangs_after(passed, compiling)
    assert (long["status"], long["reason"]) == ("unfinished", "triton.compile took longer than allowed")
    assert hangs_after(compiling, compiled)["status"] == "hang"
    assert hangs_after({"code": ("variant", "source", "code")})["status"] == "hang"  # found compiled
    assert hangs_after(passed)["status"] == hangs_after(imported, device="cpu")["status"] == "hang"


def slowly(report) -> bool:
    time.sleep(0.7)
    return True


def says_so(task, report) -> None:
    say(report, at=ACCURACY, limit=60.0)
    say(report, passed=task["name"], seconds=0.0)
    time.sleep(task.get("lasts", 0.0))


def test_the_next_process_is_prepared_while_the_one_before_it_works():
    processes = worker.Processes(says_so, slowly)
    processes.prepare()
    one = processes.answer({"name": "one", "lasts": 1.2})
    start = time.monotonic()
    two = processes.answer({"name": "two" + " " * 200_000})  # more than a pipe holds
    assert time.monotonic() - start < 0.6, "it was ready"
    assert (one["status"], list(one["passed"])) == ("survived", ["one"]) and one["seconds"] >= 1.2
    assert (two["status"], two["seconds"] < 0.6, len(*two["passed"])) == ("survived", True, 200_003)
    assert processes.answer({"name": "three"})["seconds"] > 0.3, "one that was not ready is waited for"
    processes._take().kill()


def test_a_process_that_cannot_be_prepared_says_nothing_about_the_mutant(monkeypatch):
    def raises() -> None:
        raise RuntimeError("no GPU")

    def ends() -> None:
        os._exit(0)

    def hangs() -> None:
        time.sleep(60)

    monkeypatch.setattr(cuda, "START_SECONDS", 0.4)
    for start, reason in ((raises, "no GPU"), (ends, "ended in the start of CUDA"), (hangs, "ended in the start")):
        monkeypatch.setattr(cuda, "_start", start)
        processes = worker.Processes(says_so, cuda.start_ahead)
        processes.prepare()
        time.sleep(0.6)
        answer = processes.answer({"name": "one", "device": "cuda"})
        assert answer["status"] == "error" and reason in answer["reason"], answer
        processes._take().kill()


def test_a_process_that_says_nothing_is_killed(monkeypatch):
    monkeypatch.setattr(process._listen, "__defaults__", (0.3,))
    assert answer_to(lambda report: time.sleep(60))["status"] == "hang"


def test_what_a_process_has_started_does_not_hold_up_its_answer():
    """A forked process has the pipe open too."""
    start = time.monotonic()

    def leaves_one_behind(report):
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        say(report, failed="wrong")

    assert answer_to(leaves_one_behind)["status"] == "killed"
    assert time.monotonic() - start < 20


def test_no_mutant_is_counted_that_does_not_compile():
    def work(report):
        say(report, log="error: expected a ;")
        say(report, failed="RuntimeError: NVRTC does not compile one.cu")

    assert answer_to(work, CUDA_TASK)["status"] == "invalid"
    assert answer_to(work)["status"] == "killed"  # the launcher passes it what does not compile


def test_a_compiler_does_not_count_as_the_time_of_a_check(monkeypatch):
    """Triton's and NVRTC's; what NVRTC says of source that it does not compile is kept."""
    modules = {"cupy": ModuleType("cupy"), "cupy.cuda": ModuleType("cupy.cuda")}
    modules["cupy.cuda.nvrtc"] = nvrtc = ModuleType("cupy.cuda.nvrtc")

    def compile_program(program, options):
        time.sleep(0.5)
        if program == "wrong":
            raise ValueError("error: expected\n a ;")

    nvrtc.compileProgram = compile_program  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)

    def compiles(report):
        clock = Clock()
        compilers.watch("", clock, report)
        clock.limit(0.3)
        start = clock.now()
        nvrtc.compileProgram("right", ())  # type: ignore[attr-defined]
        say(report, passed=STRIDES, seconds=clock.now() - start)
        nvrtc.compileProgram("wrong", ())  # type: ignore[attr-defined]

    found = answer_to(compiles, CUDA_TASK)
    assert (found["status"], found["reason"]) == ("invalid", "error: expected a ;")
    assert found["passed"][STRIDES] < 0.3


@pytest.mark.parametrize(
    ("task", "name", "expected"),
    [
        ({"device": "cuda"}, ACCURACY, clock.ORIGINAL_SECONDS),
        ({"device": "cuda", "file": "x"}, ACCURACY, 90.0),
        ({"device": "cpu", "file": "x"}, ACCURACY, 300.0),
        ({"device": "cuda", "file": "x", "seconds": {ACCURACY: 2.0}}, ACCURACY, 60.0),
        ({"device": "cuda", "file": "x", "seconds": {ACCURACY: 2.0}, "crowd": 1.5}, ACCURACY, 90.0),
        ({"device": "cpu", "file": "x", "seconds": {ACCURACY: 2.0}}, ACCURACY, 30.0),
        ({"device": "cuda", "file": "x", "seconds": {IMPORT: 0.0}}, IMPORT, 90.0),
    ],
)
def test_how_long_a_check_may_take(task, name, expected):
    assert clock.limit_of(task, name) == expected


def test_the_checks_of_the_cases_that_launch_what_changed():
    """All checks of the first such case that exists, a few of the others, and all of all cases if there is none."""
    names = {ACCURACY: ("triton", "case", "accuracy")}
    names |= {
        f"{case}-{check}": ("cuda", case, check) for case in ("small", "large") for check in ("accuracy", "opcheck")
    }
    assert selection.of_cases({}, names) == list(names)
    both = [["cuda", "gone"], ["cuda", "large"], ["cuda", "small"]]
    assert selection.of_cases({"cases": both}, names) == ["small-accuracy", "large-accuracy", "large-opcheck"]
    assert selection.of_cases({"cases": both[-1:]}, names) == ["small-accuracy", "small-opcheck"]
    assert selection.of_cases({"cases": [["auto", "small"]]}, names) == list(names)


def test_which_checks_are_made_and_which_come_first():
    chosen = selection.is_wanted
    assert chosen({}, ACCURACY) and not chosen({"without": [ACCURACY]}, ACCURACY)
    assert chosen({"only": [ACCURACY]}, ACCURACY) and not chosen({"only": [ACCURACY]}, STRIDES)
    assert chosen({"quick": True}, ACCURACY, "accuracy") and not chosen({"quick": True}, "x-compile", "compile")
    task = {"seconds": {ACCURACY: 1.0, STRIDES: 1.5, "cheap": 0.1}, "weights": {STRIDES: 1}}
    assert sorted((ACCURACY, STRIDES, "cheap"), key=lambda name: selection.place(task, name)) == [
        "cheap",
        STRIDES,
        ACCURACY,
    ]


def test_what_reaches_cuda_comes_first_for_its_mutants():
    names = ("triton", "auto", "cuda")
    assert sorted(names, key=lambda n: selection.unlikely(CUDA_TASK, n, "strides")) == ["cuda", "auto", "triton"]
    assert {selection.unlikely({"file": "op.py"}, name, "accuracy") for name in names} == {1.0}
    near = {**CUDA_TASK, "cases": [["auto", "case"]]}
    assert selection.unlikely(near, "auto", "accuracy") < selection.unlikely(near, "cuda", "strides")


def test_the_checks_of_a_kernel_on_a_gpu():
    """Their memory, their order and what is left out; the GPU is stood in for by the interpreter."""

    def work(task, report):
        plan, run = check.plan, check.run
        check.plan = lambda spec, device, cases: plan(spec, "cpu", cases)
        check.run = lambda item, device: run(item, "cpu")
        cuda._use = lambda task: say(report, skipped=str(task["memory"]))
        checks.make(task, report)

    names = ("gelu.fwd.1x1-fp32-exact.triton-accuracy", "gelu.bwd.1x1-fp32-exact.triton-accuracy")
    task = {"kernel": "gelu", "device": "cuda", "quick": True, "memory": 0.1, "seconds": {names[0]: 9.0}}
    found = forked({**task, "only": names}, work)
    assert (found["status"], found["skipped"]) == ("survived", ["0.1"]), found
    assert list(found["passed"]) == [IMPORT, names[1], names[0]]


def test_a_process_whose_time_is_up_is_ended_and_no_mutant_is_killed_by_that():
    start = time.monotonic()
    found = answer_to(lambda report: time.sleep(60), {"life": 0.5})
    assert (found["status"], found["by"]) == ("unfinished", "")
    assert time.monotonic() - start < 20

    def fails_first(report):
        say(report, failed="wrong", by=ACCURACY)
        time.sleep(60)

    assert answer_to(fails_first, {"life": 0.5})["status"] == "killed"
    original = answer_to(fails_first, {"life": 0.5, "file": None})
    assert (original["status"], original["failed"]) == ("unfinished", {ACCURACY: "wrong"})


def test_a_process_that_ends_while_cuda_starts_says_nothing_about_the_mutant():
    def starts(report):
        say(report, at=START, limit=0.2)
        Clock().limit(0.2)
        time.sleep(60)

    assert answer_to(starts)["status"] == "error"


def test_a_worker_answers_also_what_it_cannot_do(monkeypatch):
    monkeypatch.setattr(registry, "folder", lambda name: registry.ROOT / "kernels" / "not there")
    found = worker.Processes(says_so).answer({"kernel": "one", "file": "op.py", "source": ""})
    assert found["status"] == "error" and "FileNotFoundError" in found["reason"]


def test_a_gpu_that_cannot_be_used_is_no_kill():
    """The interpreter is on in these tests."""
    found = forked({"kernel": "gelu", "device": "cuda", "quick": True, "memory": 0.1}, checks.make)
    assert found["status"] == "error" and "TRITON_INTERPRET" in found["reason"]


@pytest.fixture
def linked(tmp_path, monkeypatch):
    """A worker's checkout, in which this process stays where it is."""
    original = registry.ROOT
    monkeypatch.setattr(registry, "ROOT", original)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.chdir(tmp_path)
    worker._settle(tmp_path / "0", "3")
    return original, tmp_path / "0"


def test_a_worker_has_a_checkout_of_links_and_copies_what_it_changes(linked, monkeypatch):
    original, root = linked
    assert root == registry.ROOT and os.environ["CUDA_VISIBLE_DEVICES"] == "3"
    assert (root / "kernels" / "gelu").is_symlink() and sys.path[0] == str(root)
    text = (original / "kernels" / "gelu" / "op.py").read_text()
    seen = []
    read = lambda task: seen.append((root / "kernels/gelu/op.py").read_text())  # noqa: E731
    process = SimpleNamespace(send=read, answer=dict, ended=True)
    monkeypatch.setattr(worker, "Process", lambda work, ahead: process)
    worker.Processes(says_so).answer({"kernel": "gelu", "file": "op.py", "source": "x = 2\n"})
    assert seen == ["x = 2\n"]
    assert not (root / "kernels" / "gelu").is_symlink() and (root / "kernels" / "rope").is_symlink()
    assert text == (original / "kernels" / "gelu" / "op.py").read_text() == (root / "kernels/gelu/op.py").read_text()


def test_what_the_originals_have_compiled_is_read_and_not_written(tmp_path):
    code = f"""
from pathlib import Path
from triton import knobs
from triton.runtime.cache import get_cache_manager
from harness.mutation import overlay

knobs.cache.dir = {str(tmp_path / "shared")!r}
first = get_cache_manager("aa")
first.put_group("f.json", {{"f.cubin": first.put(b"original", "f.cubin")}})
before = sorted(Path(knobs.cache.dir).rglob("*"))
overlay.write_to({str(tmp_path / "own")!r})
found = get_cache_manager("aa")
assert Path(found.get_group("f.json")["f.cubin"]).read_bytes() == b"original"
assert Path(found.get_file("f.cubin")).read_bytes() == b"original"
other = get_cache_manager("bb")
assert other.get_group("f.json") is None and other.get_file("f.cubin") is None
assert other.put(b"mutant", "f.cubin").startswith({str(tmp_path / "own")!r})
assert get_cache_manager("bb").get_file("f.cubin")
assert sorted(Path({str(tmp_path / "shared")!r}).rglob("*")) == before
"""
    subprocess.run([sys.executable, "-c", code], cwd=registry.ROOT, check=True, timeout=120)


@pytest.mark.parametrize(
    ("file", "alone"), [(None, False), ("kernel.py", True), ("sm90/forward.cu", False), ("sm90/tiles.cuh", False)]
)
def test_which_mutants_keep_what_they_compile_apart(monkeypatch, file, alone):
    """Of a mutant of CUDA C++ what Triton compiles is the original's."""
    folders = []
    monkeypatch.setattr(cuda, "_start", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda fraction: None)
    monkeypatch.setattr(overlay, "write_to", folders.append)
    cuda._use({"memory": 0.1} if file is None else {"memory": 0.1, "file": file})
    assert folders == [str(checkout.cache_of_mutant()) if alone else None]


@pytest.mark.parametrize("kernel_name", ["rmsnorm", "grouped_gemm"])
def test_what_nvrtc_compiles_is_said_without_its_lines(kernel_name):
    """In the folder itself, and in sm90/. NVRTC is stood in for."""
    found = forked({"kernel": kernel_name}, _compiles_cuda)
    assert (found["status"], len(found["codes"])) == ("survived", 1), found
    assert all(len(part) == 16 for part in found["codes"][0])


def _compiles_cuda(task, report):
    package = registry.package(task["kernel"])
    driver = nvrtc.driver_of(package)
    driver._compiled = lambda source, defines: b"code"
    source = next(driver._FOLDER.glob("*.cu")).name
    compilers.watch(package, Clock(), report)
    assert "-lineinfo" not in driver.OPTIONS and "--std=c++17" in driver.OPTIONS
    assert driver._compiled(source, ("N=1",)) == b"code"
    assert driver._loaded.__wrapped__.__globals__["_compiled"] is driver._compiled


COMPILED = """
import importlib.util, sys
import triton
from triton.backends.compiler import GPUTarget
from harness.mutation import launched_code

found = []
for path in sys.argv[1:]:
    spec = importlib.util.spec_from_file_location("one", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    signature = {"x": "*fp32", "N": "constexpr"}
    source = triton.compiler.ASTSource(module.f, signature, {"N": 32})
    target = GPUTarget("cuda", 90, 32)
    compiled = triton.compile(source, target=target)
    found.append(launched_code.of_triton(compiled, source, target=target, options={"num_warps": 1}))
first, same, other = found
assert same[0] == first[0] and same[1] != first[1] and same[2] == first[2]
assert other[0] == first[0] and other[1] != first[1] and other[2] != first[2]
"""


def test_the_machine_code_of_a_mutant_is_compared_without_its_lines(tmp_path):
    text = "import triton\nimport triton.language as tl\n\n@triton.jit\ndef f(x, N: tl.constexpr):\n"
    text += "    at = tl.arange(0, N)\n    tl.store(x + at, {})\n"
    files = []
    for name, value in (("first", "at + 1.0"), ("same", "at + (2.0 - 1.0)"), ("other", "at + 2.0")):
        files.append(tmp_path / f"{name}.py")
        files[-1].write_text(text.format(value))
    environment = {**os.environ, "TRITON_DISABLE_LINE_INFO": "1", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", COMPILED, *map(str, files)]
    subprocess.run(command, cwd=registry.ROOT, env=environment, check=True, timeout=300)


def test_a_driver_that_was_started_before_the_fork_is_seen(monkeypatch):
    def driver(code):
        return lambda name: SimpleNamespace(cuDeviceGetCount=lambda count: code)

    monkeypatch.setattr(cuda.ctypes, "CDLL", driver(cuda._NOT_INITIALIZED))
    assert not cuda._driver_is_started()
    monkeypatch.setattr(cuda.ctypes, "CDLL", driver(0))
    assert cuda._driver_is_started()


def test_an_answer_is_one_line():
    assert "\n" not in json.dumps(answer_to(lambda report: say(report, failed="a\nb")))
