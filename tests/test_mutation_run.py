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

from harness import registry
from harness.commands import check
from harness.compiling import nvrtc
from harness.mutation import run, worker
from harness.mutation.mutants import Mutant

ACCURACY, STRIDES = "one.fwd.case.triton-accuracy", "one.fwd.case.triton-strides"
A_TEST = "kernels/one/test_one.py::test"
CUDA_TASK = {"file": "one.cu", "device": "cuda"}


def answer_to(work, task: dict[str, Any] | None = None, **options: float) -> dict[str, Any]:
    """What `worker.forked` says of a process that does this."""

    def in_the_process(task, report):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        worker._say(report, at=ACCURACY, limit=0.2)
        work(report)

    return worker.forked({"file": "op.py", **(task or {})}, in_the_process)


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


def test_what_takes_too_long_before_anything_of_the_mutant_runs_says_nothing_about_it():
    """Nor does what a compiler does not end."""

    def hangs_after(*said, device: str = "cuda") -> dict[str, Any]:
        def work(report):
            for line in said:
                worker._say(report, **line)
            worker.Clock().limit(0.1)
            signal.pause()

        return answer_to(work, {"device": device})

    imported, passed = {"passed": worker.IMPORT, "seconds": 0.0}, {"passed": STRIDES, "seconds": 0.1}
    compiling, compiled = {"compiler": "triton.compile"}, {"compiler": ""}
    nothing = hangs_after(imported)
    assert (nothing["status"], nothing["by"]) == ("unfinished", "") and "before any kernel" in nothing["reason"]
    long = hangs_after(passed, compiling)
    assert (long["status"], long["reason"]) == ("unfinished", "triton.compile took longer than allowed")
    assert hangs_after(compiling, compiled)["status"] == "hang"
    assert hangs_after({"code": ("variant", "source", "code")})["status"] == "hang"  # found compiled
    assert hangs_after(passed)["status"] == hangs_after(imported, device="cpu")["status"] == "hang"


def slowly() -> None:
    time.sleep(0.7)


def says_so(task, report) -> None:
    worker._say(report, at=ACCURACY, limit=60.0)
    worker._say(report, passed=task["name"], seconds=0.0)
    time.sleep(task.get("lasts", 0.0))


def test_the_next_process_is_prepared_while_the_one_before_it_works(monkeypatch):
    monkeypatch.setattr(worker, "checks", says_so)
    first = worker.Process(slowly)
    first.wait()
    one, second = worker.answered({"name": "one", "lasts": 1.2}, first)
    start = time.monotonic()
    two, third = worker.answered({"name": "two" + " " * 200_000}, second)  # more than a pipe holds
    assert time.monotonic() - start < 0.6, "it was ready"
    assert (one["status"], list(one["passed"])) == ("survived", ["one"]) and one["seconds"] >= 1.2
    assert (two["status"], two["seconds"] < 0.6, len(*two["passed"])) == ("survived", True, 200_003)
    three, last = worker.answered({"name": "three"}, third)
    assert three["seconds"] > 0.3, "one that was not ready is waited for"
    worker._kill(last._process)


def test_a_process_that_cannot_be_prepared_says_nothing_about_the_mutant(monkeypatch):
    def raises() -> None:
        raise RuntimeError("no GPU")

    def ends() -> None:
        os._exit(0)

    def hangs() -> None:
        time.sleep(60)

    monkeypatch.setattr(worker, "START_SECONDS", 0.4)
    for ahead, reason in ((raises, "no GPU"), (ends, "ended in the start of CUDA"), (hangs, "ended in the start")):
        process = worker.Process(ahead)
        process.wait()
        time.sleep(0.6)
        answer, following = worker.answered({"name": "one", "device": "cuda"}, process)
        assert answer["status"] == "error" and reason in answer["reason"], answer
        assert following is not process
        worker._kill(following._process)


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
        worker._watch_compilers("", clock, report)
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
        ({"device": "cuda", "file": "x"}, ACCURACY, 300.0),
        ({"device": "cpu", "file": "x"}, ACCURACY, 300.0),
        ({"device": "cuda", "file": "x", "seconds": {ACCURACY: 2.0}}, ACCURACY, 80.0),
        ({"device": "cuda", "file": "x", "seconds": {ACCURACY: 2.0}, "crowd": 1.5}, ACCURACY, 120.0),
        ({"device": "cpu", "file": "x", "seconds": {ACCURACY: 2.0}}, ACCURACY, 30.0),
        ({"device": "cuda", "file": "x", "seconds": {worker.IMPORT: 0.0}}, worker.IMPORT, 300.0),
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
    assert {worker._unlikely({"file": "op.py"}, name) for name in names} == {1.0}


def test_the_checks_of_a_kernel_on_a_gpu():
    """Their memory, their order and what is left out; the GPU is stood in for by the interpreter."""

    def work(task, report):
        plan, run = check.plan, check.run
        check.plan = lambda spec, device, cases: plan(spec, "cpu", cases)
        check.run = lambda item, device: run(item, "cpu")
        worker._use_gpu = lambda task: worker._say(report, skipped=str(task["memory"]))
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
        if "file" not in task:
            passed = {name: s for name, s in self.sound.items() if name in task["only"]}
            return {**empty, "passed": passed, "seconds": sum(passed.values())}
        return {**empty, **self.answers.pop(0)}


@pytest.fixture
def one(tmp_path, monkeypatch):
    """A kernel of four mutants."""
    (tmp_path / "op.py").write_text("x = 1\n")
    monkeypatch.setattr(registry, "folder", lambda name: tmp_path)
    monkeypatch.setattr(registry, "package", lambda name: f"kernels.{name}")
    return run.Kernel("one", [mutant(n) for n in range(4)])


GIVEN = {"device": "cuda"}
KILLED = {"status": "killed", "by": ACCURACY, "reason": "wrong"}


def test_a_check_counts_where_the_original_passes_it(one):
    fake = Fake([KILLED, KILLED], {ACCURACY: 0.5})
    assert one.judge(mutant(0), fake, GIVEN)["status"] == "killed"
    assert [task.get("only") for task in fake.tasks] == [None, [ACCURACY]]
    assert fake.tasks[0]["source"] == "x = 2\n" and fake.tasks[0]["file"] == "op.py"
    one.judge(mutant(1), fake, GIVEN)
    assert len(fake.tasks) == 3, "what the original passes is found out once"
    assert fake.tasks[2]["weights"] == {ACCURACY: 4} and fake.tasks[2]["seconds"] == {ACCURACY: 0.5}


def test_a_check_that_the_original_fails_is_left_out(one):
    survived = {"status": "survived", "passed": {"other": 0.1}}
    fake = Fake([{**KILLED, "passed": {STRIDES: 0.2}}, survived, survived], {})
    assert one.judge(mutant(0), fake, GIVEN)["status"] == "survived"
    assert one.unsound == set(one.failing) == {ACCURACY}
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
    again = Fake([hang, {"status": "survived", "passed": {ACCURACY: 35.0}}], {ACCURACY: 5.0})
    assert one.judge(mutant(0), again, GIVEN)["status"] == "survived"
    fast = Fake([{**hang, "by": STRIDES, "limit": 80.0}], {STRIDES: 0.1})
    assert one.judge(mutant(1), fast, GIVEN)["status"] == "hang"
    assert [task.get("only") for task in fast.tasks] == [None, [STRIDES], [STRIDES]], "once more, by itself"


def test_a_hang_does_not_count_where_the_original_is_slow_or_fails_at_that_time(one):
    """As on a GPU with which something is wrong."""
    one.check_original([ACCURACY], Fake([], {ACCURACY: 1.0}), GIVEN)
    hang = {"status": "hang", "by": ACCURACY, "limit": 80.0}
    slow = one.judge(mutant(0), Fake([hang], {ACCURACY: 50.0}), GIVEN)
    assert (slow["status"], slow["by"], slow["reason"]) == ("unfinished", "", "the original took 50 s too")
    assert one.judge(mutant(1), Fake([hang], {}), GIVEN)["status"] == "unfinished"


def test_nothing_is_said_of_a_kernel_that_cannot_be_imported(one):
    fake = Fake([{"status": "killed", "by": worker.IMPORT}], {})
    with pytest.raises(run.Broken, match="cannot be imported"):
        one.judge(mutant(0), fake, GIVEN)


def test_a_mutant_that_is_cut_off_or_cannot_be_begun_says_nothing(one):
    for status in ("unfinished", "error"):
        fake = Fake([{"status": status, "reason": "why"}], {ACCURACY: 1.0})
        assert one.judge(mutant(0), fake, GIVEN)["status"] == status
        assert len(fake.tasks) == 1


def test_a_process_whose_time_is_up_is_ended_and_no_mutant_is_killed_by_that():
    start = time.monotonic()
    found = answer_to(lambda report: time.sleep(60), {"life": 0.5})
    assert (found["status"], found["by"]) == ("unfinished", "")
    assert time.monotonic() - start < 20

    def fails_first(report):
        worker._say(report, failed="wrong", by=ACCURACY)
        time.sleep(60)

    assert answer_to(fails_first, {"life": 0.5})["status"] == "killed"
    original = answer_to(fails_first, {"life": 0.5, "file": None})
    assert (original["status"], original["failed"]) == ("unfinished", {ACCURACY: "wrong"})


def test_a_process_that_ends_while_cuda_starts_says_nothing_about_the_mutant():
    def starts(report):
        worker._say(report, at=worker.START, limit=0.2)
        worker.Clock().limit(0.2)
        time.sleep(60)

    assert answer_to(starts)["status"] == "error"


def test_a_worker_answers_also_what_it_cannot_do(monkeypatch):
    monkeypatch.setattr(registry, "folder", lambda name: registry.ROOT / "kernels" / "not there")
    unused = SimpleNamespace()
    found, following = worker.answered({"kernel": "one", "file": "op.py", "source": ""}, unused)
    assert following is unused
    assert found["status"] == "error" and "FileNotFoundError" in found["reason"]


def test_a_gpu_that_cannot_be_used_is_no_kill():
    """The interpreter is on in these tests."""
    found = worker.forked({"kernel": "gelu", "device": "cuda", "quick": True, "memory": 0.1}, worker.checks)
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
    process = SimpleNamespace(ahead=None, send=read, answer=dict)
    monkeypatch.setattr(worker, "Process", lambda ahead: process)
    worker.answered({"kernel": "gelu", "file": "op.py", "source": "x = 2\n"}, process)
    assert seen == ["x = 2\n"]
    assert not (root / "kernels" / "gelu").is_symlink() and (root / "kernels" / "rope").is_symlink()
    assert text == (original / "kernels" / "gelu" / "op.py").read_text() == (root / "kernels/gelu/op.py").read_text()


def piped() -> tuple[run.Worker, int, int]:
    """A worker, and the ends of the pipes that its process would have."""
    tasks, answers = os.pipe(), os.pipe()
    return run.Worker("worker 0", tasks[1], answers[0]), tasks[0], answers[1]


def test_a_worker_that_ends_is_lost_and_says_why():
    fine, tasks, answers = piped()
    os.write(answers, b'{"ready": true}\n{"status": ')
    os.write(answers, b'"survived"}\n')
    fine.begin(1.0)
    assert fine.ask({"kernel": "one"})["status"] == "survived"
    assert json.loads(os.read(tasks, 1000)) == {"kernel": "one"}
    os.close(answers)
    with pytest.raises(run.Lost, match="worker 0 has ended"):
        fine.ask({})
    broken, _, answers = piped()
    os.write(answers, b'{"broken": "ImportError: torch"}\n')
    with pytest.raises(run.Lost, match="cannot begin: ImportError: torch"):
        broken.begin(1.0)


def test_a_worker_that_does_not_answer_is_lost(monkeypatch):
    monkeypatch.setattr(run, "PATIENCE", 0.1)
    silent, _, _answers = piped()
    with pytest.raises(run.Lost, match="does not answer"):
        silent.begin(0.1)
    with pytest.raises(run.Lost, match="does not answer"):
        silent.ask({"life": 0.1})


def test_the_pieces_of_an_original_keep_cases_together(monkeypatch):
    monkeypatch.setattr(run, "PIECE", 2)
    kinds = {f"{case}-{check}": ("triton", case, "fwd", check) for check in "xyz" for case in "ab"}
    assert sorted(run._pieces(kinds)) == [["a-x", "a-y"], ["a-z"], ["b-x", "b-y"], ["b-z"]]


def test_the_cheapest_of_each_kind_of_check_come_first():
    took = {"a-x": 3.0, "b-x": 1.0, "a-y": 2.0, "b-y": 2.5, "a-z": 9.0}
    kinds = {name: ("triton", name[0], "fwd", name[2]) for name in took}
    assert run._chosen(took, kinds, None) == ["b-x", "a-y", "a-z", "b-y", "a-x"]
    assert run._chosen(took, kinds, 7.0) == ["b-x", "a-y", "b-y"]


CODES = [("variant", "source", "code")]
TRITON = "import triton\n@triton.jit\ndef f():\n    x = 1\ndef g():\n    x = 1\n"


@pytest.mark.parametrize(
    ("codes", "function", "text", "status"),
    [
        ([("variant", "other", "code")], "f", "2", "same"),
        ([("variant", "other", "different")], "f", "2", "survived"),
        ([("another", "other", "code")], "f", "2", "survived"),  # the original was not compiled so
        (CODES, "f", "2", "survived"),  # nothing of the changed source was launched
        ([], "f", "2", "survived"),
        ([("variant", "other", "code")], "g", "2", "survived"),  # not compiled, but run on the host
        ([("variant", "other", "code")], "f", "2\n", "survived"),  # other functions have moved
    ],
)
def test_a_survivor_with_the_machine_code_of_the_original(one, codes, function, text, status):
    (registry.folder("one") / "op.py").write_text(TRITON)
    at = TRITON.index("1")
    found = Mutant("one", "op.py", function, "x = 1", "constant", 0, 4, at, at + 1, text, "digest")
    one.check_original([ACCURACY], Fake([], {ACCURACY: 1.0}), GIVEN)
    one._codes = {variant: (source, code) for variant, source, code in CODES}
    assert one.judge(found, Fake([{"codes": codes}], {}), GIVEN)["status"] == status


def began(seconds: float) -> None:
    """Ready at once."""


class Team:
    """Workers that answer by the name of a kernel and what is asked of it; "ends" among the answers ends one."""

    def __init__(self, count: int, seconds: float = 0.0, **answers: Any) -> None:
        self.workers = [SimpleNamespace(begin=began, ask=self.ask, name=f"{n}") for n in range(count)]
        self.seconds, self.answers, self.tasks = seconds, answers, []

    def ask(self, task):
        self.tasks.append(task)
        empty = {
            "status": "survived",
            "by": "",
            "reason": "",
            "passed": {},
            "skipped": [],
            "limit": 30.0,
            "seconds": 0.1,
        }
        time.sleep(min(self.seconds, task.get("life", 60.0)))
        if self.seconds > task.get("life", 60.0):
            return {**empty, "status": "unfinished"}
        if "list" in task:
            return {**empty, "checks": [(ACCURACY, ("triton", "case", "fwd", "accuracy"))]}
        if "file" not in task:
            return {**empty, "passed": {ACCURACY: 0.1}, "took": {ACCURACY: 0.1}}
        answer = self.answers.get(task["kernel"], KILLED)
        if answer == "ends":
            raise run.Lost("worker has ended")
        return {**empty, **answer}


@pytest.fixture
def folders(tmp_path, monkeypatch):
    (tmp_path / "op.py").write_text("x = 1\n")
    monkeypatch.setattr(registry, "folder", lambda name: tmp_path)


def queue(kernels, seconds: float = 60.0, done=lambda mutant, answer: None, say=lambda text: None) -> run.Queue:
    return run.Queue(kernels, GIVEN, time.monotonic() + seconds, done, say)


def kernels_of(count: int, *names: str) -> list[run.Kernel]:
    return [run.Kernel(name, [mutant(n, kernel=name) for n in range(count)]) for name in names]


def test_kernels_take_turns(folders):
    done: list[Mutant] = []
    names = ("one", "two", "three")
    queue(kernels_of(6, *names), done=lambda m, answer: done.append(m)).served_by(Team(1).workers)
    assert [m.kernel for m in done] == [*names] * 6
    assert [m.ordinal for m in done if m.kernel == "one"] == list(range(6)), "in the order that was drawn"


def test_the_originals_come_first_and_all_workers_take_part(folders):
    team, done, said = Team(4), Counter(), []
    found = queue(kernels_of(20, "one", "two"), done=lambda m, answer: done.update([m.kernel]), say=said.append)
    found.originals_first(None)
    found.served_by(team.workers)
    assert done == {"one": 20, "two": 20}
    ready = ["1 of 4 workers ready after 0 s", "4 of 4 workers ready after 0 s"]
    assert sorted(said) == [*ready, "one: 1 checks, 0 s on the original", "two: 1 checks, 0 s on the original"]
    for name in ("one", "two"):
        kinds = [
            ("list" in t and "list") or ("only" in t and "file" not in t and "original")
            for t in team.tasks
            if t["kernel"] == name
        ]
        assert kinds == ["list", "original", *[False] * 20]
    assert all(t["only"] == [ACCURACY] for t in team.tasks if "file" in t)


@pytest.mark.parametrize(
    ("left", "whole", "expected"), [(1000.0, 1200.0, 300.0), (290.0, 310.0, 120.0), (200.0, 200.0, 60.0)]
)
def test_how_long_originals_may_take(left, whole, expected):
    assert run.time_of_originals(left, whole) == expected


def test_the_time_of_the_originals_begins_with_the_first_worker(folders, monkeypatch):
    monkeypatch.setattr(run, "time_of_originals", lambda left, whole: 0.4)
    team, done, said = Team(2, seconds=0.05), Counter(), []
    for number, member in enumerate(team.workers):
        member.begin = lambda seconds, number=number: time.sleep(1.1 + number)
    found = queue(kernels_of(40, "one"), done=lambda m, answer: done.update([answer["status"]]), say=said.append)
    found.originals_first(None)
    found.served_by(team.workers)
    assert done == {"killed": 40}
    assert [line for line in said if "ready" in line] == [
        "1 of 2 workers ready after 1 s",
        "2 of 2 workers ready after 2 s",
    ]


def test_originals_take_turns(folders, monkeypatch):
    monkeypatch.setattr(run.Kernel, "prepare", _prepared)
    kernels = kernels_of(1, "one", "two", "three")
    found = queue(kernels)
    found.originals_first(None)
    for _ in range(11):
        found._original()(Team(1).workers[0])
    assert [kernel.made for kernel in kernels] == [4, 4, 3]


def test_originals_that_take_too_long_are_given_up_and_the_run_ends(folders, monkeypatch):
    team, said = Team(2, seconds=30.0), []
    kernels = kernels_of(3, "one")
    found = queue(kernels, 5.0, say=said.append)
    monkeypatch.setattr(run, "time_of_originals", lambda left, whole: 0.3)
    found.originals_first(None)
    start = time.monotonic()
    found.served_by(team.workers)
    assert time.monotonic() - start < 4
    assert kernels[0].broken and len(kernels[0].left) == 3


def test_what_is_known_of_the_originals_when_their_time_is_up_is_used(folders, monkeypatch):
    monkeypatch.setattr(run.Kernel, "prepare", _prepared)
    kernels, done = kernels_of(3, "one"), Counter()
    found = queue(kernels, 60.0, done=lambda m, answer: done.update([answer["status"]]))
    monkeypatch.setattr(run, "time_of_originals", lambda left, whole: 0.7)
    found.originals_first(None)
    found.served_by(Team(1, seconds=0.25).workers)
    assert 0 < len(kernels[0].only) < 50 and done == {"killed": 3}


def _prepared(kernel, worker_, given):
    names = [f"one.fwd.{n}.triton-accuracy" for n in range(50)]
    kernel._kinds = {name: ("triton", name.split(".")[2], "fwd", "accuracy") for name in names}
    kernel.pieces = [[name] for name in names]
    kernel._sound.add(ACCURACY)

    def check_original(names, worker_, given):
        answer = worker_.ask({**given, "kernel": "one"})
        kernel._note({**answer, "passed": dict.fromkeys(names, 0.1), "took": dict.fromkeys(names, 0.1)}, names)
        return answer

    kernel.check_original = check_original
    return {"status": "survived"}


def test_what_runs_when_time_is_up_is_unfinished_and_nothing_more_is_begun(folders):
    done = []
    kernels = kernels_of(9, "one")
    start = time.monotonic()
    queue(kernels, 1.0, lambda m, answer: done.append(answer["status"])).served_by(Team(2, seconds=10.0).workers)
    assert done == ["unfinished"] * 2 and len(kernels[0].left) == 7
    assert time.monotonic() - start < 5


def test_none_is_begun_that_should_not_end_in_time(folders):
    kernels = kernels_of(3, "one", "two")
    kernels[0].ended(100.0)
    done = Counter()
    queue(kernels, 60.0, lambda m, answer: done.update([m.kernel])).served_by(Team(1).workers)
    assert done == {"two": 3}


def test_a_broken_kernel_does_not_stop_the_others(folders):
    done, said = Counter(), []
    kernels = kernels_of(3, "one", "two")

    def judge(self, found, worker, given):
        if self.name == "one":
            raise run.Broken("one: no")
        return {"status": "killed", "by": ACCURACY, "seconds": 0.1}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.Kernel, "judge", judge)
        queue(kernels, 60.0, lambda m, answer: done.update([m.kernel]), said.append).served_by(Team(2).workers)
    assert done == {"two": 3} and said.count("one: no") == 1 and kernels[0].broken


def test_a_worker_that_is_lost_leaves_a_line_and_the_others_go_on(folders):
    done, said = [], []
    kernels = [*kernels_of(1, "one"), *kernels_of(8, "two")]
    team = Team(3, seconds=0.02, one="ends")
    queue(kernels, 60.0, lambda m, answer: done.append((m.kernel, answer["status"])), said.append).served_by(
        team.workers
    )
    assert Counter(done) == {("one", "error"): 1, ("two", "killed"): 8}
    assert said[-1] == "a worker could not go on: worker has ended"


def test_a_worker_that_begins_nothing_gets_no_more_and_takes_no_mutant_away(folders):
    """As one whose GPU is out of order, beside one that works."""
    done, said = [], []
    team = Team(2, seconds=0.02)
    bad = SimpleNamespace(
        name="bad", begin=began, ask=lambda task: {"status": "error", "reason": "no GPU", "seconds": 0.0}
    )
    found = queue(kernels_of(9, "one", "two"), done=lambda m, answer: done.append(answer["status"]), say=said.append)
    found.originals_first(None)
    found.served_by([bad, *team.workers])
    assert done == ["killed"] * 18
    assert said[-1] == "a worker could not go on: bad begins nothing: no GPU"


def test_a_mutant_that_two_workers_cannot_begin_has_a_line_that_says_so(folders):
    done = []
    team = Team(1, one={"status": "error", "reason": "why"})
    kernels = [*kernels_of(1, "one"), *kernels_of(4, "two")]
    queue(kernels, done=lambda m, answer: done.append((m.kernel, answer["status"]))).served_by(team.workers)
    assert Counter(done) == {("one", "error"): 1, ("two", "killed"): 4}


def test_a_run_without_workers_raises(folders):
    done = []
    with pytest.raises(run.Lost, match="has ended"):
        queue(kernels_of(5, "one"), done=lambda m, answer: done.append(answer)).served_by(Team(2, one="ends").workers)
    assert [answer["status"] for answer in done] == ["error"] * 2


def test_gpus_are_shared_among_the_workers(tmp_path, monkeypatch):
    """The process that forks them is stood in for by one that says what it was given."""
    code = "import sys; open('given', 'w').write(sys.stdin.readline())"
    start = subprocess.Popen
    monkeypatch.setattr(
        run.subprocess,
        "Popen",
        lambda command, **options: start([sys.executable, "-c", code], **{**options, "cwd": tmp_path}),
    )
    team = run.Team("cuda", tmp_path, 5, ["0", "4"])
    team._process.wait()
    listed = json.loads((tmp_path / "given").read_text())
    assert [entry["gpu"] for entry in listed] == ["0", "4", "0", "4", "0"]
    assert len({entry["root"] for entry in listed}) == 5
    assert [w.name for w in team.workers][:2] == ["worker 0 on GPU 0", "worker 1 on GPU 4"]
    team.close()


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


@pytest.mark.parametrize("kernel_name", ["rmsnorm", "grouped_gemm"])
def test_what_nvrtc_compiles_is_said_without_its_lines(kernel_name):
    """In the folder itself, and in sm90/. NVRTC is stood in for."""
    found = worker.forked({"kernel": kernel_name}, _compiles_cuda)
    assert (found["status"], len(found["codes"])) == ("survived", 1), found
    assert all(len(part) == 16 for part in found["codes"][0])


def _compiles_cuda(task, report):
    package = registry.package(task["kernel"])
    driver = nvrtc.driver_of(package)
    driver._compiled = lambda source, defines: b"code"
    source = next(driver._FOLDER.glob("*.cu")).name
    worker._watch_compilers(package, worker.Clock(), report)
    assert "-lineinfo" not in driver.OPTIONS and "--std=c++17" in driver.OPTIONS
    assert driver._compiled(source, ("N=1",)) == b"code"
    assert driver._loaded.__wrapped__.__globals__["_compiled"] is driver._compiled


COMPILED = """
import importlib.util, sys
import triton
from triton.backends.compiler import GPUTarget
from harness.mutation import worker

found = []
for path in sys.argv[1:]:
    spec = importlib.util.spec_from_file_location("one", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    signature = {"x": "*fp32", "N": "constexpr"}
    source = triton.compiler.ASTSource(module.f, signature, {"N": 32})
    target = GPUTarget("cuda", 90, 32)
    compiled = triton.compile(source, target=target)
    found.append(worker._of_triton(compiled, source, target=target, options={"num_warps": 1}))
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


def test_on_a_gpu_nothing_is_interpreted(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    there, here = run._environment("cuda", tmp_path), run._environment("cpu", tmp_path)
    assert "TRITON_INTERPRET" not in there and there["TRITON_CACHE_DIR"] == str(tmp_path / "triton")
    assert here["TRITON_INTERPRET"] == "1" and here["CUDA_VISIBLE_DEVICES"] == ""


def test_a_driver_that_was_started_before_the_fork_is_seen(monkeypatch):
    def driver(code):
        return lambda name: SimpleNamespace(cuDeviceGetCount=lambda count: code)

    monkeypatch.setattr(worker.ctypes, "CDLL", driver(worker._NOT_INITIALIZED))
    assert not worker._driver_is_started()
    monkeypatch.setattr(worker.ctypes, "CDLL", driver(0))
    assert worker._driver_is_started()


def test_an_answer_is_one_line():
    assert "\n" not in json.dumps(answer_to(lambda report: worker._say(report, failed="a\nb")))
