"""Mutants of CUDA C++ in one process after each other: what is forgotten between them, and whose fault a failure is.

The kernel is stood in for by a package whose `cuda_driver` compiles a source file to its own text, as bytes, and whose
only check does what that text says: "right" passes, all else is a fault.
"""

from __future__ import annotations

import ast
import functools
import gc
import os
import re
import signal
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from harness import registry
from harness.commands import check
from harness.commands.check import Outcome
from harness.mutation import checks, clock, cuda, leftovers, verdict, worker
from harness.mutation.clock import Clock
from harness.mutation.messages import IMPORT
from harness.mutation.process import Process

ACCURACY, REPLAY = "one.fwd.case.cuda-accuracy", "one.fwd.case.cuda-replay"
FILE = "one.cu"


def driver_in(folder: Path) -> ModuleType:
    """A `cuda_driver` that keeps what it has compiled, and functions of it, as the real one does."""
    driver: Any = ModuleType("kernels.one.cuda_driver")
    driver.__file__, driver.OPTIONS = str(folder / "cuda_driver.py"), ()

    @functools.cache
    def _compiled(source: str, defines: tuple[str, ...]) -> bytes:
        return (folder / source).read_bytes()

    @functools.cache
    def _loaded(source: str) -> str:
        return driver._compiled(source, ()).decode()

    driver._compiled, driver._loaded = _compiled, _loaded
    return driver


@pytest.fixture
def one(tmp_path, monkeypatch):
    """The kernel "one", which has launch plans too. In `state` is what goes wrong later, in `kept` what nothing
    forgets."""
    folder = tmp_path / "kernels" / "one"
    folder.mkdir(parents=True)
    (folder / FILE).write_text("right")
    package: Any = ModuleType("kernels.one")
    launch: Any = ModuleType("kernels.one.launch")
    driver: Any = driver_in(folder)
    plans, state, kept = dict[str, str](), list[str](), list[str]()
    launch._EVERY = [plans]
    for module in (package, launch, driver):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    cases = [SimpleNamespace(name="case", bench=False)]
    items = [
        SimpleNamespace(
            name=name, skip=None, check=name.rpartition("-")[2], implementation="cuda", case=cases[0], mode="fwd"
        )
        for name in (ACCURACY, REPLAY)
    ]

    def run(item: Any, device: str) -> Outcome:
        text = kept[0] if kept else plans.setdefault("plan", driver._loaded(FILE))
        for word in text.split():
            if word == "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            if word == "keeps":
                kept.append(text)
            if word == "hang":
                time.sleep(60)
            if word.startswith("leaves-"):  # something that goes wrong later
                state.append(word.removeprefix("leaves-"))
        if "crashes" in state and not text.startswith("leaves"):
            os.kill(os.getpid(), signal.SIGSEGV)
        spoiled = "spoiled" in state and not text.startswith("leaves")
        skips = "skips" in text
        passes = not spoiled and not text.startswith("wrong") and f"wrong-{item.check}" not in text
        return Outcome(item, "skip" if skips else "pass" if passes else "fail", f"{os.getpid()} {text}")

    monkeypatch.setattr(registry, "ROOT", tmp_path)
    monkeypatch.setattr(registry, "folder", lambda name: folder)
    monkeypatch.setattr(registry, "package", lambda name: f"kernels.{name}")
    monkeypatch.setattr(registry, "load", lambda name: SimpleNamespace(cases=cases))
    monkeypatch.setattr(check, "plan", lambda *_: items)
    monkeypatch.setattr(check, "run", run)
    monkeypatch.setattr(cuda, "_start", lambda: None)
    monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", lambda part: None)
    return SimpleNamespace(driver=driver, plans=plans, folder=folder)


class Judge:
    """A worker's processes, and how many there were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.forked = list[Process]()

        def fork(work: Any, ahead: Any) -> Process:
            self.forked.append(Process(work, ahead))
            return self.forked[-1]

        monkeypatch.setattr(worker, "Process", fork)
        self.processes = worker.Processes(checks.make)

    def __call__(self, source: str | None, **given: Any) -> dict[str, Any]:
        changed = {} if source is None else {"file": FILE, "source": source}
        task = {"kernel": "one", "device": "cuda", "quick": True, "memory": 0.1, **changed, **given}
        return self.processes.answer(task)


@pytest.fixture
def judge(one, monkeypatch):
    gc.freeze()  # as in a worker: a collection in a process has little to visit
    new = Judge(monkeypatch)
    yield new
    gc.unfreeze()
    for process in new.forked:
        process.kill()


def test_one_process_has_one_mutant_after_another(judge, one):
    found = [judge(source) for source in ("wrong 1", "right 2", "wrong 3", "right-enough wrong-replay", None)]
    assert [a["status"] for a in found] == ["killed", "survived", "killed", "killed", "survived"], found
    assert [a["by"] for a in found] == [ACCURACY, "", ACCURACY, REPLAY, ""]
    assert len({a["reason"].split()[1] for a in found if a["by"]}) == 1, "all in the same process"
    assert found[0]["reason"].endswith("wrong 1")
    assert [list(a["original"]["passed"]) for a in found if a["by"]] == [[ACCURACY], [ACCURACY], [REPLAY]]
    assert len(judge.forked) == 1 and judge.forked[0].mutants == 4
    assert (one.folder / FILE).read_text() == "right"
    assert len({tuple(a["codes"]) for a in found}) == 5, "each has the machine code of its own source"
    assert found[1]["loaded"] and not found[1]["original"]["passed"]


def test_it_is_the_same_process_for_all_and_none_is_forked_ahead(judge):
    judge("wrong")
    judge(None)
    judge(None, list=True)
    assert len(judge.forked) == 1 and not judge.forked[0].ended
    assert judge.processes._used is judge.forked[0] and judge.processes._new is None


def test_a_mutant_of_python_has_a_process_to_itself(judge, one):
    (one.folder / "op.py").write_text("x = 1\n")
    judge("wrong")
    judge("x = 2\n", file="op.py")
    assert [p.ended for p in judge.forked] == [False, True, False], "one is used, and the next is forked"
    assert "original" not in judge("wrong", quick=False), "it has tests"
    assert leftovers.is_for_used({"device": "cuda", "quick": True})
    assert not leftovers.is_for_used({"device": "cpu", "quick": True})


def test_a_crash_ends_the_process_and_is_judged_again_in_a_new_one(judge):
    judge("wrong")
    found = judge("crash")
    assert (found["status"], found["by"], found["reason"]) == ("crash", ACCURACY, "SIGSEGV")
    assert "again" in found["spent"]
    assert [p.mutants for p in judge.forked] == [1 + 1, 1, 0], "and one is forked ahead"
    assert judge("wrong")["status"] == "killed"
    assert len(judge.forked) == 3


def test_the_first_mutant_of_a_process_that_crashes_it_is_judged_once(judge):
    judge(None)
    assert judge("crash")["status"] == "crash"
    assert [p.mutants for p in judge.forked] == [1, 0]


@pytest.mark.parametrize("left", ["leaves-spoiled", "leaves-crashes"])
def test_what_a_mutant_leaves_behind_is_not_blamed_on_the_next(judge, left):
    assert judge(left)["status"] == "survived"
    found = judge("right 2")
    assert (found["status"], found["by"]) == ("survived", ""), found
    assert len(judge.forked) == 3 and judge.forked[0].ended


def test_nor_on_the_original(judge):
    assert judge("leaves-spoiled")["status"] == "survived"
    found = judge(None, only=[ACCURACY, REPLAY])
    assert (found["status"], [*found["passed"]]) == ("survived", [IMPORT, ACCURACY, REPLAY])


def test_a_mutant_that_spoils_its_own_process_is_killed_and_the_process_ends(judge):
    """It was the first one there. Whether the original passes the check another task has to find out."""
    judge(None)
    found = judge("wrong leaves-spoiled")
    assert (found["status"], found["original"]["passed"]) == ("killed", {})
    assert judge.forked[0].ended
    assert judge("right 2")["status"] == "survived"


def test_a_hang_in_the_second_task_is_its_own(judge, monkeypatch):
    monkeypatch.setitem(clock.UNSEEN, "cuda", 3.0)
    assert judge("wrong")["status"] == "killed"
    time.sleep(3.2)  # the alarm of the task before it is off
    found = judge("hang")
    assert (found["status"], found["by"], found["limit"]) == ("hang", ACCURACY, 3.0)
    assert found["spent"]["again"] < 2.5, "a used process has less time"
    assert 2.5 < found["spent"]["checks"] < found["seconds"] - found["spent"]["again"] + 0.1 < 5.5
    assert judge("wrong")["status"] == "killed"


def test_a_task_whose_time_is_up_ends_the_process(judge):
    judge("wrong")
    found = judge("hang", life=0.5)
    assert found["status"] == "unfinished" and found["seconds"] < 5
    assert [p.tasks for p in judge.forked] == [2, 0], "no time is left to judge it again"
    assert judge("wrong")["status"] == "killed"


def test_what_the_original_skips_too_is_no_fault(judge, one):
    (one.folder / FILE).write_text("skips")
    judge("right")
    found = judge("skips 2")
    assert (found["status"], found["skipped"]) == ("survived", [ACCURACY, REPLAY])
    assert found["original"]["skipped"] == [ACCURACY, REPLAY] and len(judge.forked) == 1


def test_a_survivor_that_was_not_loaded_anew_is_judged_again(judge):
    """As where a launcher keeps a function in a way that is not known."""
    assert judge("right keeps")["loaded"]
    found = judge("wrong")
    assert (found["status"], found["reason"].split(maxsplit=1)[1][-5:]) == ("killed", "wrong"), found
    assert "again" in found["spent"] and judge.forked[0].ended


def test_a_process_has_so_many_tasks(judge, monkeypatch):
    monkeypatch.setattr(leftovers, "TASKS", 2)
    assert [judge("wrong")["status"] for _ in range(3)] == ["killed"] * 3
    assert [p.tasks for p in judge.forked] == [2, 1]


def test_what_knows_the_source_is_forgotten(one):
    compiled = one.driver._compiled
    one.driver._compiled = functools.wraps(compiled)(lambda *given: compiled(*given))  # as it is watched
    assert one.driver._loaded(FILE) == "right"
    one.plans["plan"] = "right"
    (one.folder / FILE).write_text("wrong")
    assert one.driver._loaded(FILE) == "right"
    leftovers.forget()
    assert one.driver._loaded(FILE) == "wrong" and not one.plans


@pytest.mark.parametrize("folder", [path.parent for path in registry.ROOT.glob("kernels/*/**/cuda_driver.py")], ids=str)
def test_a_kernel_keeps_functions_of_cuda_only_where_they_are_forgotten(folder):
    """In plans, and in caches of functions of a module: in no container of a module or class."""
    for path in (folder.parent if folder.name.startswith("sm") else folder).rglob("*.py"):
        if path.name.startswith("test_") or path.name == "bench.py":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            empty = isinstance(value, ast.Dict | ast.List | ast.Set) and not ast.unparse(value)[1:-1]
            made = isinstance(value, ast.Call) and re.search(
                "(dict|list|set|Dict|Dictionary)$", ast.unparse(value.func)
            )
            assert not (empty or made) or "_EVERY" in ast.unparse(node), f"{path}:{node.lineno}"
        nested = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f not in tree.body]
        cached = [f.name for f in nested if any("cache" in ast.unparse(d) for d in f.decorator_list)]
        assert not cached, f"{path}: {cached}"


def test_where_the_time_of_a_task_went():
    messages = [
        {"passed": IMPORT, "t": 12.0},
        {"compiler": "nvrtc", "t": 13.0},
        {"compiler": "", "t": 13.5},
        {"over": True, "t": 15.0},
        {"compiler": "nvrtc", "t": 15.5},
        {"compiler": "", "t": 16.0},
    ]
    spent = verdict._spent(messages, 11.0, 17.0)
    assert spent == {"start": 1.0, "compilers": 0.5, "checks": 2.5, "original": 2.0}
    assert verdict._spent(messages[:2], 11.0, 17.0) == {"start": 1.0, "compilers": 4.0, "checks": 1.0}
    assert verdict._spent([], 11.0, 17.0) == {"start": 6.0, "compilers": 0.0, "checks": 0.0}


def test_a_module_that_starts_cuda_is_not_imported_before_the_fork(monkeypatch):
    monkeypatch.setattr(cuda, "is_started", lambda: "wave" in sys.modules)
    assert cuda.is_started_by("wave") and "wave" not in sys.modules
    assert not cuda.is_started_by("not.there")
    assert Clock().now() > 0
