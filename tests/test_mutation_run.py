"""How mutants are run: which checks count, who takes turns, and what is done when a worker is lost or time is up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from harness import registry
from harness.mutation import mutant_queue, selection, team
from harness.mutation.kernel import Broken, Kernel
from harness.mutation.messages import IMPORT
from harness.mutation.mutant_queue import Queue
from harness.mutation.mutants import Mutant
from harness.mutation.team import Lost, Worker

ACCURACY, STRIDES = "one.fwd.case.triton-accuracy", "one.fwd.case.triton-strides"
A_TEST = "kernels/one/test_one.py::test"


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
    return Kernel("one", [mutant(n) for n in range(4)])


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


def test_what_was_made_of_the_original_in_the_same_process_is_not_asked_for(one):
    original = {"passed": {ACCURACY: 0.5}, "skipped": [STRIDES], "took": {}, "codes": [("variant", "source", "code")]}
    killed = {**KILLED, "original": original, "spent": {"start": 0.5, "checks": 2.0}}
    fake = Fake([killed, killed], {})
    assert one.judge(mutant(0), fake, GIVEN)["status"] == "killed"
    assert len(fake.tasks) == 1 and one._sound == {ACCURACY} and one._codes == {"variant": ("source", "code")}
    spoiled = {**KILLED, "by": A_TEST, "original": {**original, "passed": {}}}
    fake = Fake([spoiled], {A_TEST: 1.0})
    assert one.judge(mutant(1), fake, GIVEN)["status"] == "killed"
    assert [task.get("only") for task in fake.tasks] == [None, [A_TEST]], "the process was spoiled"
    survived = {"status": "survived", "skipped": [STRIDES], "original": {**original, "passed": {}}}
    assert one.judge(mutant(2), Fake([survived], {}), GIVEN)["status"] == "survived"
    assert one.unsound == {STRIDES}


def test_where_the_time_of_a_mutant_went(one):
    """Over all of its tasks."""
    first = {**KILLED, "spent": {"start": 0.5, "checks": 2.0}}
    found = one.judge(mutant(0), Fake([first, {"spent": {"checks": 1.0, "again": 3.0}}], {}), GIVEN)
    assert found["spent"] == {"start": 0.5, "checks": 3.0, "again": 3.0, "original": 0.0}


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
    fake = Fake([{"status": "killed", "by": IMPORT}], {})
    with pytest.raises(Broken, match="cannot be imported"):
        one.judge(mutant(0), fake, GIVEN)


def test_a_mutant_that_is_cut_off_or_cannot_be_begun_says_nothing(one):
    for status in ("unfinished", "error"):
        fake = Fake([{"status": status, "reason": "why"}], {ACCURACY: 1.0})
        assert one.judge(mutant(0), fake, GIVEN)["status"] == status
        assert len(fake.tasks) == 1


def piped() -> tuple[Worker, int, int]:
    """A worker, and the ends of the pipes that its process would have."""
    tasks, answers = os.pipe(), os.pipe()
    return Worker("worker 0", tasks[1], answers[0]), tasks[0], answers[1]


def test_a_worker_that_ends_is_lost_and_says_why():
    fine, tasks, answers = piped()
    os.write(answers, b'{"ready": true}\n{"status": ')
    os.write(answers, b'"survived"}\n')
    fine.begin(1.0)
    assert fine.ask({"kernel": "one"})["status"] == "survived"
    assert json.loads(os.read(tasks, 1000)) == {"kernel": "one"}
    os.close(answers)
    with pytest.raises(Lost, match="worker 0 has ended"):
        fine.ask({})
    broken, _, answers = piped()
    os.write(answers, b'{"broken": "ImportError: torch"}\n')
    with pytest.raises(Lost, match="cannot begin: ImportError: torch"):
        broken.begin(1.0)


def test_a_worker_that_does_not_answer_is_lost(monkeypatch):
    monkeypatch.setattr(team, "PATIENCE", 0.1)
    silent, _, _answers = piped()
    with pytest.raises(Lost, match="does not answer"):
        silent.begin(0.1)
    with pytest.raises(Lost, match="does not answer"):
        silent.ask({"life": 0.1})


def test_the_pieces_of_an_original_keep_cases_together(monkeypatch):
    monkeypatch.setattr(selection, "PIECE", 2)
    kinds = {f"{case}-{check}": ("triton", case, "fwd", check) for check in "xyz" for case in "ab"}
    assert sorted(selection.pieces(kinds)) == [["a-x", "a-y"], ["a-z"], ["b-x", "b-y"], ["b-z"]]


def test_the_cheapest_of_each_kind_of_check_come_first():
    took = {"a-x": 3.0, "b-x": 1.0, "a-y": 2.0, "b-y": 2.5, "a-z": 9.0}
    kinds = {name: ("triton", name[0], "fwd", name[2]) for name in took}
    assert selection.cheapest(took, kinds, None) == ["b-x", "a-y", "a-z", "b-y", "a-x"]
    assert selection.cheapest(took, kinds, 7.0) == ["b-x", "a-y", "b-y"]


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
            raise Lost("worker has ended")
        return {**empty, **answer}


@pytest.fixture
def folders(tmp_path, monkeypatch):
    (tmp_path / "op.py").write_text("x = 1\n")
    monkeypatch.setattr(registry, "folder", lambda name: tmp_path)


def queue(kernels, seconds: float = 60.0, done=lambda mutant, answer: None, say=lambda text: None) -> Queue:
    return Queue(kernels, GIVEN, time.monotonic() + seconds, done, say)


def kernels_of(count: int, *names: str) -> list[Kernel]:
    return [Kernel(name, [mutant(n, kernel=name) for n in range(count)]) for name in names]


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
    assert mutant_queue.time_of_originals(left, whole) == expected


def test_the_time_of_the_originals_begins_with_the_first_worker(folders, monkeypatch):
    monkeypatch.setattr(mutant_queue, "time_of_originals", lambda left, whole: 0.4)
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
    monkeypatch.setattr(Kernel, "prepare", _prepared)
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
    monkeypatch.setattr(mutant_queue, "time_of_originals", lambda left, whole: 0.3)
    found.originals_first(None)
    start = time.monotonic()
    found.served_by(team.workers)
    assert time.monotonic() - start < 4
    assert kernels[0].broken and len(kernels[0].left) == 3


def test_what_is_known_of_the_originals_when_their_time_is_up_is_used(folders, monkeypatch):
    monkeypatch.setattr(Kernel, "prepare", _prepared)
    kernels, done = kernels_of(3, "one"), Counter()
    found = queue(kernels, 60.0, done=lambda m, answer: done.update([answer["status"]]))
    monkeypatch.setattr(mutant_queue, "time_of_originals", lambda left, whole: 0.7)
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
            raise Broken("one: no")
        return {"status": "killed", "by": ACCURACY, "seconds": 0.1}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kernel, "judge", judge)
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
    with pytest.raises(Lost, match="has ended"):
        queue(kernels_of(5, "one"), done=lambda m, answer: done.append(answer)).served_by(Team(2, one="ends").workers)
    assert [answer["status"] for answer in done] == ["error"] * 2


def test_gpus_are_shared_among_the_workers(tmp_path, monkeypatch):
    """The process that forks them is stood in for by one that says what it was given."""
    code = "import sys; open('given', 'w').write(sys.stdin.readline())"
    start = subprocess.Popen
    monkeypatch.setattr(
        team.subprocess,
        "Popen",
        lambda command, **options: start([sys.executable, "-c", code], **{**options, "cwd": tmp_path}),
    )
    started = team.Team("cuda", tmp_path, 5, ["0", "4"])
    started._process.wait()
    listed = json.loads((tmp_path / "given").read_text())
    assert [entry["gpu"] for entry in listed] == ["0", "4", "0", "4", "0"]
    assert len({entry["root"] for entry in listed}) == 5
    assert [w.name for w in started.workers][:2] == ["worker 0 on GPU 0", "worker 1 on GPU 4"]
    started.close()


def test_on_a_gpu_nothing_is_interpreted(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    there, here = team.environment("cuda", tmp_path), team.environment("cpu", tmp_path)
    assert "TRITON_INTERPRET" not in there and there["TRITON_CACHE_DIR"] == str(tmp_path / "triton")
    assert here["TRITON_INTERPRET"] == "1" and here["CUDA_VISIBLE_DEVICES"] == ""
