"""How mutants are run: what a process that ends in any way is taken for, which checks count, and who takes turns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from harness import registry
from harness.commands import check
from harness.mutation import run, worker
from harness.mutation.mutants import Mutant

ACCURACY, STRIDES = "one.fwd.case.triton-accuracy", "one.fwd.case.triton-strides"
A_TEST = "kernels/one/test_one.py::test"
CUDA_TASK = {"path": "kernels/one/one.cu", "device": "cuda"}


def answer_to(work, task: dict[str, Any] | None = None, **options: float) -> dict[str, Any]:
    """What `worker.forked` says of a process that does this."""

    def in_the_process(task, report):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        worker._say(report, at=ACCURACY, limit=0.2)
        work(report)

    return worker.forked({"path": "kernels/one/op.py", **(task or {})}, in_the_process)


def test_what_ends_a_process_is_told_apart():
    passed = answer_to(lambda report: worker._say(report, passed=ACCURACY, seconds=0.5))
    assert (passed["status"], passed["by"], passed["passed"]) == ("survived", "", {ACCURACY: 0.5})
    failed = answer_to(lambda report: worker._say(report, failed="wrong"))
    assert (failed["status"], failed["by"], failed["reason"]) == ("killed", ACCURACY, "wrong")
    raised = answer_to(lambda report: {}["x"])
    assert raised["status"] == "killed" and raised["reason"].startswith("KeyError")
    crashed = answer_to(lambda report: os.kill(os.getpid(), signal.SIGKILL))
    assert (crashed["status"], crashed["by"], crashed["reason"]) == ("crash", ACCURACY, "SIGKILL")
    left = answer_to(lambda report: os._exit(3))
    assert (left["status"], left["reason"]) == ("crash", "exit code 3")
    assert answer_to(lambda report: worker._say(report, skipped=STRIDES))["skipped"] == [STRIDES]


def test_what_takes_too_long_is_ended_also_outside_of_python():
    """As a call of the driver that waits for a kernel without an end."""
    start = time.monotonic()

    def hang(report):
        worker.Clock().limit(0.2)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        signal.pause()

    assert answer_to(hang)["status"] == "hang"
    assert time.monotonic() - start < 20


def test_a_process_that_says_nothing_is_killed(monkeypatch):
    monkeypatch.setattr(worker._listen, "__defaults__", (0.3,))
    assert answer_to(lambda report: time.sleep(60))["status"] == "hang"


def test_what_a_process_has_started_does_not_hold_up_its_answer():
    """A forked process has the pipe open too."""
    start = time.monotonic()

    def leaves_one_behind(report):
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        worker._say(report, failed="wrong")

    assert answer_to(leaves_one_behind)["status"] == "killed"
    assert time.monotonic() - start < 20


def test_no_mutant_is_counted_that_does_not_compile():
    def work(report):
        worker._say(report, log="error: expected a ;")
        worker._say(report, failed="RuntimeError: NVRTC does not compile one.cu")

    assert answer_to(work, CUDA_TASK)["status"] == "invalid"
    assert answer_to(work)["status"] == "killed"  # the launcher passes it what does not compile


def test_a_compiler_does_not_count_as_the_time_of_a_check(monkeypatch):
    """Triton's and NVRTC's; what NVRTC says of source that it does not compile is kept."""
    compilers = {"cupy": ModuleType("cupy"), "cupy.cuda": ModuleType("cupy.cuda")}
    compilers["cupy.cuda.nvrtc"] = nvrtc = ModuleType("cupy.cuda.nvrtc")

    def compile_program(program, options):
        time.sleep(0.5)
        if program == "wrong":
            raise ValueError("error: expected\n a ;")

    nvrtc.compileProgram = compile_program  # type: ignore[attr-defined]
    for name, module in compilers.items():
        monkeypatch.setitem(sys.modules, name, module)

    def compiles(report):
        clock = worker.Clock()
        worker._stop_for_compilers(clock, report)
        clock.limit(0.3)
        start = clock.now()
        nvrtc.compileProgram("right", ())  # type: ignore[attr-defined]
        worker._say(report, passed=STRIDES, seconds=clock.now() - start)
        nvrtc.compileProgram("wrong", ())  # type: ignore[attr-defined]

    found = answer_to(compiles, CUDA_TASK)
    assert (found["status"], found["reason"]) == ("invalid", "error: expected a ;")
    assert found["passed"][STRIDES] < 0.3


@pytest.mark.parametrize(
    ("task", "name", "expected"),
    [
        ({"device": "cuda"}, ACCURACY, worker.ORIGINAL_SECONDS),
        ({"device": "cuda", "path": "x"}, ACCURACY, 30.0),
        ({"device": "cpu", "path": "x"}, ACCURACY, 300.0),
        ({"device": "cuda", "path": "x", "seconds": {ACCURACY: 2.0}}, ACCURACY, 30.0),
        ({"device": "cuda", "path": "x", "seconds": {ACCURACY: 5.0}}, ACCURACY, 60.0),
        ({"device": "cuda", "path": "x", "seconds": {worker.IMPORT: 0.0}}, worker.IMPORT, 30.0),
    ],
)
def test_how_long_a_check_may_take(task, name, expected):
    assert worker.limit_of(task, name) == expected


def test_which_checks_are_made_and_which_come_first():
    chosen = worker._is_wanted
    assert chosen({}, ACCURACY) and not chosen({"without": [ACCURACY]}, ACCURACY)
    assert chosen({"only": [ACCURACY]}, ACCURACY) and not chosen({"only": [ACCURACY]}, STRIDES)
    assert chosen({"quick": True}, ACCURACY, "accuracy") and not chosen({"quick": True}, "x-compile", "compile")
    task = {"seconds": {ACCURACY: 1.0, STRIDES: 1.5, "cheap": 0.1}, "weights": {STRIDES: 1}}
    assert sorted((ACCURACY, STRIDES, "cheap"), key=lambda name: worker._place(task, name)) == [
        "cheap",
        STRIDES,
        ACCURACY,
    ]


def test_what_reaches_cuda_comes_first_for_its_mutants():
    names = ("triton", "auto", "cuda")
    assert sorted(names, key=lambda name: worker._unlikely(CUDA_TASK, name)) == ["cuda", "auto", "triton"]
    assert {worker._unlikely({"path": "kernels/one/op.py"}, name) for name in names} == {1.0}


def test_the_checks_of_a_kernel_on_a_gpu():
    """Their memory, their order and what is left out; the GPU is stood in for by the interpreter."""

    def work(task, report):
        plan, run = check.plan, check.run
        check.plan = lambda spec, device, cases: plan(spec, "cpu", cases)
        check.run = lambda item, device: run(item, "cpu")
        torch.cuda.set_per_process_memory_fraction = lambda part: worker._say(report, skipped=str(part))
        worker.checks(task, report)

    checks = ("gelu.fwd.1x1-fp32-exact.triton-accuracy", "gelu.bwd.1x1-fp32-exact.triton-accuracy")
    task = {"kernel": "gelu", "device": "cuda", "quick": True, "memory": 0.1, "seconds": {checks[0]: 9.0}}
    found = worker.forked({**task, "only": checks}, work)
    assert (found["status"], found["skipped"]) == ("survived", ["0.1"]), found
    assert list(found["passed"]) == [worker.IMPORT, checks[1], checks[0]]


def mutant(number: int, file: str = "op.py", kernel: str = "one") -> Mutant:
    return Mutant(kernel, file, "f", "x = 1", "constant: 1 → 2", number, 1, 4, 5, "2", "digest")


class Fake:
    """A worker whose mutants get the answers of a list; the original passes what `sound` names, in so many seconds."""

    def __init__(self, answers: list[dict[str, Any]], sound: dict[str, float]) -> None:
        self.root, self.answers, self.sound, self.tasks = registry.ROOT, list(answers), sound, []

    def ask(self, task):
        self.tasks.append(task)
        empty = {"status": "survived", "by": "", "reason": "", "passed": {}, "skipped": [], "limit": 30.0}
        if "path" not in task:
            return {**empty, "passed": {name: s for name, s in self.sound.items() if name in task["only"]}}
        return {**empty, **self.answers.pop(0)}


@pytest.fixture
def one(tmp_path, monkeypatch):
    """A kernel of four mutants."""
    (tmp_path / "op.py").write_text("x = 1\n")
    monkeypatch.setattr(registry, "folder", lambda name: tmp_path)
    monkeypatch.setattr(registry, "package", lambda name: f"kernels.{name}")
    return run.Kernel("one", [mutant(n) for n in range(4)], least=0)


GIVEN = {"device": "cuda"}
KILLED = {"status": "killed", "by": ACCURACY, "reason": "wrong"}


def test_a_check_counts_where_the_original_passes_it(one):
    fake = Fake([KILLED, KILLED], {ACCURACY: 0.5})
    assert one.judge(mutant(0), fake, GIVEN)["status"] == "killed"
    assert [task.get("only") for task in fake.tasks] == [None, [ACCURACY]]
    assert fake.tasks[0]["source"] == "x = 2\n" and fake.tasks[0]["path"].endswith("kernels/one/op.py")
    one.judge(mutant(1), fake, GIVEN)
    assert len(fake.tasks) == 3, "what the original passes is found out once"
    assert fake.tasks[2]["weights"] == {ACCURACY: 4} and fake.tasks[2]["seconds"] == {ACCURACY: 0.5}


def test_a_check_that_the_original_fails_is_left_out(one):
    survived = {"status": "survived", "passed": {"other": 0.1}}
    fake = Fake([{**KILLED, "passed": {STRIDES: 0.2}}, survived, survived], {})
    assert one.judge(mutant(0), fake, GIVEN)["status"] == "survived"
    assert one.unsound == one.failing == {ACCURACY}
    assert fake.tasks[2]["without"] == [ACCURACY, STRIDES], "what has passed is not made again"
    one.judge(mutant(1), fake, GIVEN)
    assert fake.tasks[3]["without"] == [ACCURACY]


def test_a_check_that_only_the_mutant_skips_rejects_it(one):
    fake = Fake([{"status": "survived", "skipped": [STRIDES, A_TEST]}] * 2, {A_TEST: 1.0})
    found = one.judge(mutant(0), fake, GIVEN)
    assert (found["status"], found["by"]) == ("killed", A_TEST)
    assert one.unsound == {STRIDES}


def test_a_hang_counts_where_the_original_is_much_faster(one):
    hang = {"status": "hang", "by": ACCURACY}
    slow = Fake([hang, {"status": "survived", "passed": {ACCURACY: 35.0}}], {ACCURACY: 25.0})
    assert one.judge(mutant(0), slow, GIVEN)["status"] == "survived"
    fast = Fake([{**hang, "by": STRIDES}], {STRIDES: 0.1})
    assert one.judge(mutant(1), fast, GIVEN)["status"] == "hang"


def test_nothing_is_said_of_a_kernel_that_cannot_be_imported(one):
    fake = Fake([{"status": "killed", "by": worker.IMPORT}], {})
    with pytest.raises(run.Broken, match="cannot be imported"):
        one.judge(mutant(0), fake, GIVEN)


def queue(kernels, minutes: float, done=lambda mutant, answer: None, say=lambda text: None) -> run.Queue:
    return run.Queue(kernels, GIVEN, time.monotonic() + 60 * minutes, done, say)


def test_kernels_take_turns():
    names = ("one", "two", "three")
    kernels = [run.Kernel(name, [mutant(n, kernel=name) for n in range(6)], least=0) for name in names]
    found = queue(kernels, minutes=1)
    begun = [found._next() for _ in range(7)]
    assert [kernel.name for kernel, _ in begun if kernel] == [*names, *names, "one"]
    assert [m.ordinal for kernel, m in begun if kernel.name == "one"] == [0, 1, 2], "in the order that was drawn"


def test_late_only_those_are_begun_that_are_needed():
    kernels = [run.Kernel(name, [mutant(n) for n in range(6)], least) for name, least in (("one", 2), ("two", 0))]
    found = queue(kernels, minutes=-1)
    assert [kernel.name for kernel, _ in iter(found._next, None)] == ["one", "one"]


def test_a_broken_kernel_does_not_stop_the_others(monkeypatch):
    done, said = Counter(), []
    kernels = [run.Kernel(name, [mutant(n, kernel=name) for n in range(3)], least=0) for name in ("one", "two")]

    def judge(self, found, worker, given):
        if self.name == "one":
            raise run.Broken("one: no")
        return {"status": "killed", "by": ACCURACY}

    monkeypatch.setattr(run.Kernel, "judge", judge)
    team = [SimpleNamespace(), SimpleNamespace()]
    queue(kernels, 1, lambda m, answer: done.update([m.kernel]), said.append).served_by(team)
    assert done == {"two": 3} and said == ["one: no"] and kernels[0].broken


def test_the_error_of_a_worker_is_raised_when_the_others_have_finished(monkeypatch):
    monkeypatch.setattr(run.Kernel, "judge", lambda *_: (_ for _ in ()).throw(RuntimeError("the worker ended")))
    with pytest.raises(RuntimeError, match="the worker ended"):
        queue([run.Kernel("one", [mutant(0)], 0)], 1).served_by([SimpleNamespace()])


def test_workers_share_compiled_kernels_and_nothing_that_inductor_keeps(tmp_path):
    first, second = (run._environment("cuda", tmp_path / name) for name in "01")
    assert first["TRITON_CACHE_DIR"] == second["TRITON_CACHE_DIR"] == str(tmp_path / "triton")
    assert first["TORCHINDUCTOR_CACHE_DIR"] != second["TORCHINDUCTOR_CACHE_DIR"]
    assert run._environment("cpu", tmp_path)["CUDA_VISIBLE_DEVICES"] == ""


def test_a_driver_that_was_started_before_the_fork_is_seen(monkeypatch):
    def driver(code):
        return lambda name: SimpleNamespace(cuDeviceGetCount=lambda count: code)

    monkeypatch.setattr(worker.ctypes, "CDLL", driver(worker._NOT_INITIALIZED))
    assert not worker._driver_is_started()
    monkeypatch.setattr(worker.ctypes, "CDLL", driver(0))
    assert worker._driver_is_started()


def test_an_answer_is_one_line():
    assert "\n" not in json.dumps(answer_to(lambda report: worker._say(report, failed="a\nb")))
