"""Mutants: what is changed, what a result is, which are run again, and a run on a kernel made for it."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import re
import time

import pytest

from harness import options, registry
from harness.commands import mutate
from harness.mutation import cuda_tokens, mutants, near, operators, plain, report, results

SOURCE = '''
"""Says what it is: 1 + 2."""

from __future__ import annotations

import triton.language as tl

__all__ = ["kernel"]
LIMIT: int = 8


@decorated(3 + 4)
def kernel(x_ptr, n: 5 | 6, eps=0.5):
    """Adds 1 + 1."""
    offsets = tl.program_id(0) * LIMIT + tl.arange(0, 8)
    x = tl.load(x_ptr + offsets.to(tl.int64), mask=offsets < n, other=0.0)
    if n > 4:
        raise ValueError(f"kernel: {n + 1} is more than " + "4")
    x = -x
    tl.multiple_of(x, 16)
    tl.store(x_ptr + offsets, x, mask=offsets < n)
    launch(x, num_warps=4, is_pure=True)
'''

CUDA = """
// a < b
#include "x.cuh"  // 1 + 2
constexpr int ROWS = 8;
struct Ring {
    void next() { slot += 1; }
};
template <int N = 3> __global__ void __launch_bounds__(32, 1)
add(const float * x, float *y, float (&d)[N], int n) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < n) y[at] = x[at] * 2.0f;
    asm volatile("mov.u32 %0, 1 + 2;" : "=r"(n));
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    store(at,
          -n);
    if (n) wgmma_wait<1>();
#if ROWS
    const float a = fmaxf(n ? x[at] : *y, 1.0f) {
#else
    const float a = 0 {
#endif
    };
}
DEVICE u32 last(u32 x) { return x; }
"""


def names(source: str) -> list[str]:
    return [edit.name for _, edit in operators.edits(ast.parse(source))]


def python_mutants(source: str, tmp_path, monkeypatch) -> list[mutants.Mutant]:
    (tmp_path / "kernel.py").write_text(source, encoding="utf-8")
    monkeypatch.setattr(registry, "folder", lambda name: tmp_path)
    return mutants.of_kernel("one")


def test_what_is_changed_and_what_is_left_alone():
    found = names(SOURCE)
    for wanted in (
        "operand: tl.program_id(0) * LIMIT → tl.program_id(0)",
        "arithmetic: tl.program_id(0) * LIMIT → tl.program_id(0) + LIMIT",
        "comparison: offsets < n → offsets <= n",
        "condition: n > 4 → False",
        "constant: 0.5 → 1.0",
        "cast: offsets.to(tl.int64) → offsets",
        "sign: -x → x",
        "statement: drop x = -x",
        "statement: drop tl.store(x_ptr + offsets, x, mask=offsets < n)",
        "statement: drop raise ValueError(f'kernel: {n + 1} is more than ' + '4')",
    ):
        assert wanted in found, found
    assert any(name.startswith("mask:") for name in found)
    alone = ("1 + 2", "1 + 1", "3 + 4", "5 | 6", "n + 1 →", "16 →", "num_warps=4 →", "True →")
    assert not [
        name for name in found if any(text in name.partition("→")[0] + "→" for text in alone) and "drop" not in name
    ]


def test_every_mutant_of_python_is_another_program(tmp_path, monkeypatch):
    found = python_mutants(SOURCE, tmp_path, monkeypatch)
    original = ast.dump(ast.parse(SOURCE))
    programs = [ast.dump(ast.parse(mutant.applied(SOURCE))) for mutant in found]
    assert original not in programs
    assert len(found) >= 40
    assert [m.device for m in found if m.operator.startswith("cast")] == ["cuda"]


def test_identity_outlives_other_lines_and_a_digest_does_not_outlive_its_function(tmp_path, monkeypatch):
    before = {m.key: m for m in python_mutants(SOURCE, tmp_path, monkeypatch)}
    moved = {m.key: m for m in python_mutants("# one line more\n" + SOURCE, tmp_path, monkeypatch)}
    assert before.keys() == moved.keys()
    assert all(moved[key].digest == mutant.digest for key, mutant in before.items())
    changed = {m.key: m for m in python_mutants(SOURCE.replace("x = -x", "x = 2 * x"), tmp_path, monkeypatch)}
    inside = [m for m in before.values() if m.function == "kernel" and m.key in changed]
    assert inside
    assert all(changed[m.key].digest != m.digest for m in inside)
    outside = [m for m in before.values() if not m.function]
    assert all(changed[m.key].digest == m.digest for m in outside)


def cuda_changes(kind: str) -> list[tuple[str, str, str]]:
    """(function, before, after) of the faults of a class."""
    found = [c for c in cuda_tokens.changes(CUDA) if c[1].startswith(f"{kind}:")]
    return [(function, CUDA[start:end], text) for function, _, start, end, text in found]


def test_faults_of_cuda():
    assert cuda_changes("arithmetic") == [("Ring", "+=", "-="), *[("add", a, b) for a, b in ("*+", "+-", "*+")]]
    assert cuda_changes("comparison") == [("add", "<", "<="), ("add", "<", ">=")]
    assert cuda_changes("condition") == [
        ("add", test, value) for test in ("at < n", "n", "n") for value in ("false", "true")
    ]
    numbers = [before for _, before, _ in cuda_changes("constant")]
    assert list(dict.fromkeys(numbers)) == ["8", "1", "32", "2.0f", "1.0f", "0"]
    assert cuda_changes("sign") == [("add", "-", "")]
    assert cuda_changes("call") == [("add", "fmaxf", "fminf")]
    assert cuda_changes("statement") == [
        ("Ring", "slot += 1;", ";"),
        ("add", "y[at] = x[at] * 2.0f;", ";"),
        ("add", "store(at,\n          -n);", ";\n"),
    ]
    assert cuda_changes("synchronisation") == [
        ("add", 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");', ";"),
        ("add", "wgmma_wait<1>();", ";"),
        ("add", "1", "0"),
        ("add", "1", "2"),
    ]


def test_functions_of_cuda():
    """By the name that is declared, with what stands in front of it; a conditional's other branch does not count."""
    found = cuda_tokens.functions(CUDA)
    assert list(found) == ["Ring", "add", "last"]
    assert found["Ring"] == "struct Ring {\n    void next() { slot += 1; }\n}"
    assert found["add"].startswith("template <int N = 3> __global__ void __launch_bounds__(32, 1)\nadd(")
    assert found["last"] == "DEVICE u32 last(u32 x) { return x; }"


@pytest.mark.parametrize("kernel_name", [k for k in registry.names() if list(registry.folder(k).rglob("*.cu"))])
def test_the_kernels_of_every_source_are_found(kernel_name):
    for path in registry.folder(kernel_name).rglob("*.cu"):
        source = path.read_text(encoding="utf-8")
        kernels = re.findall(r"(?m)^extern \"C\" __global__.*\n(\w+)\(", source)
        assert kernels and set(kernels) <= set(cuda_tokens.functions(source)), path


def test_results_that_no_longer_hold_are_dropped(tmp_path, monkeypatch):
    every = python_mutants(SOURCE, tmp_path, monkeypatch)
    answer = {"status": "killed", "by": "one.fwd.case.triton-accuracy", "reason": "", "seconds": 1.0}
    lines = [results.line(m, "interpreter", "c", answer) for m in every[:3]]
    lines[1]["digest"] = "of another function"
    lines.append({**lines[0], "status": "survived"})
    results.path("one", tmp_path).write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"cut', "utf-8")
    results.tidy("one", every, tmp_path)
    kept = results.load("one", tmp_path)
    assert {(line["key"], line["status"]) for line in kept} == {(every[0].key, "survived"), (every[2].key, "killed")}


def test_the_same_machine_code_is_known_until_what_is_compiled_changes(tmp_path, monkeypatch):
    every = python_mutants(SOURCE, tmp_path, monkeypatch)
    (tmp_path / "one.cu").write_text("x")
    answer = {"status": results.SAME, "by": "NVRTC", "reason": "", "seconds": 0.0}
    line = results.line(every[0], "gpu", results.digest_of_source.__wrapped__("one", "kernel.py"), answer)
    monkeypatch.setattr(results, "digest_of_source", results.digest_of_source.__wrapped__)
    assert results.current([line], every, "gpu")
    (tmp_path / "one.cu").write_text("y")
    assert not results.current([line], every, "gpu")


def test_words_are_no_part_of_a_digest():
    """Neither comments nor docstrings, in Python and in CUDA C++; all else is."""
    one = '''"""A module."""

def f(x):  # of one
    """It doubles.

    And no more."""
    # twice
    return "# no comment" if x else 2 * x
'''
    other = '''def f(x):
    """Twice x."""
    return "# no comment" if x else 2 * x
'''
    assert plain.python(one) == plain.python(other) == other.replace('    """Twice x."""\n', "").rstrip()
    assert plain.python(one) != plain.python(other.replace("2 * x", "3 * x"))
    assert plain.python(one) != plain.python(other.replace("# no", "# a"))
    kernel = "// One.\n__global__ void k() {\n    a = b; /* two\n    lines */ c = d;  // three\n\n}\n"
    assert plain.cuda(kernel) == plain.cuda("__global__ void k() {\n    a = b;  c = d;\n}") != plain.cuda("k")


def test_code_beside_a_docstring_and_comments_in_strings_count():
    one = 'class A(Exception): """One."""\n\n\ndef f(x=1): "Two."\n'
    assert plain.python(one) == "class A(Exception):\ndef f(x=1):"
    ptx = 'asm("mov %0, 1; // {a} /* b */" : "=r"(c));  // d'
    assert plain.cuda(ptx) == ptx.removesuffix("  // d")


@pytest.mark.parametrize("file", ["interpreter", "sampling", "execute", "spec", "correctness/fuzz", "commands/check"])
def test_survivors_are_tried_again_when_what_judges_them_changes(file, tmp_path, monkeypatch):
    root = tmp_path / "checkout"
    for folder in ("harness/correctness", "harness/commands", "kernels/one"):
        (root / folder).mkdir(parents=True)
    (root / "kernels/one/bench.py").write_text("")
    monkeypatch.setattr(results.registry, "ROOT", root)
    judge = root / "harness" / f"{file}.py"
    judge.write_text("limit = 1\n")
    before = results.digest_of_checks("one")
    judge.write_text("limit = 1  # of one\n")
    assert results.digest_of_checks("one") == before
    judge.write_text("limit = 2\n")
    assert results.digest_of_checks("one") != before


def test_a_reason_has_no_folder_of_this_machine(tmp_path, monkeypatch):
    (mutant, *_) = python_mutants(SOURCE, tmp_path, monkeypatch)
    told = "/home/me/.venv/lib/triton/runtime/interpreter.py:1353: ValueError: 1/2 of kernels/one/op.py"
    answer = {"status": "killed", "by": "kernels/one/test_one.py::test", "reason": told, "seconds": 1.0}
    kept = results.line(mutant, "interpreter", "c", answer)
    assert kept["reason"] == "interpreter.py:1353: ValueError: 1/2 of op.py" and kept["by"] == answer["by"]
    compiler = {**answer, "reason": "one.cu: /tmp/mutants-1/0/kernels/one/sm90/tiles.cuh(3): error: a / b"}
    assert results.line(mutant, "gpu", "c", compiler)["reason"] == "one.cu: tiles.cuh(3): error: a / b"


@pytest.mark.parametrize(
    ("known", "argued", "again", "expected"),
    [
        (None, False, False, True),
        (None, False, True, False),
        ({"status": "killed", "checks": "old"}, False, False, False),
        ({"status": "survived", "checks": "new"}, False, False, False),
        ({"status": "survived", "checks": "old"}, False, False, True),
        ({"status": "survived", "checks": "old"}, True, False, False),
        ({"status": "survived", "checks": "new"}, True, True, True),
        ({"status": "hang", "checks": "new"}, False, True, False),
        ({"status": "unfinished", "checks": "new"}, False, False, True),
        ({"status": "error", "checks": "new"}, False, False, True),
    ],
)
def test_what_is_run(known, argued, again, expected):
    assert mutate._to_run(known, {"new"}, argued, argparse.Namespace(again=again, quick=False)) is expected


def test_what_a_quick_run_launched_is_not_all_machine_code():
    same = {"status": "same", "checks": "digest-quick"}
    for quick in (False, True):
        assert mutate._to_run(same, set(), False, argparse.Namespace(again=False, quick=quick)) is not quick
    whole = {**same, "checks": "digest"}
    assert not mutate._to_run(whole, set(), False, argparse.Namespace(again=False, quick=False))


def test_a_quick_run_does_not_try_again_what_all_checks_let_pass(tmp_path, monkeypatch):
    """But all checks are tried on what a quick run let pass."""
    every = python_mutants(SOURCE, tmp_path, monkeypatch)[:2]
    survived = {"status": "survived", "by": "", "reason": "", "seconds": 1.0}
    digests = [results.digest_of_checks("one", quick) for quick in (False, True)]
    lines = [results.line(m, "gpu", digest, survived) for m, digest in zip(every, digests, strict=True)]
    results.path("one", tmp_path).write_text("".join(json.dumps(line) + "\n" for line in lines))

    def left(quick):
        arguments = argparse.Namespace(out=tmp_path, quick=quick, seed=0, again=False, near=False, most=None)
        return mutate._left("one", every, every, "gpu", arguments)

    assert left(quick=True) == []
    assert left(quick=False) == [every[1]]


def test_no_more_are_run_than_asked_for(tmp_path, monkeypatch):
    every = python_mutants(SOURCE, tmp_path, monkeypatch)
    arguments = argparse.Namespace(out=tmp_path, quick=False, seed=0, again=False, near=False, most=7)
    first = mutants.order(every, 0)[:7]
    assert mutate._left("one", every, every, "gpu", arguments) == first
    near.store("one", {first[0].key: [["cuda", "case"]], first[1].key: []}, every, tmp_path)
    arguments.near = True  # without those that no case executes, in whose place no others are taken
    assert mutate._left("one", every, every, "gpu", arguments) == [first[0], *first[2:]]


def test_results_of_another_machine_are_added(tmp_path, monkeypatch, capsys):
    """What was cut off there replaces nothing, and a survivor nothing that was killed."""
    every = python_mutants(SOURCE, tmp_path, monkeypatch)
    here, there = tmp_path / "here", tmp_path / "there"

    def write(folder, statuses):
        folder.mkdir()
        answers = [{"status": status, "by": "", "reason": "", "seconds": 1.0} for status in statuses]
        lines = [results.line(m, "gpu", "c", a) for m, a in zip(every, answers, strict=False)]
        results.path("one", folder).write_text("".join(json.dumps(line) + "\n" for line in lines))

    write(here, ("killed", "killed", "survived", "survived", "unfinished"))
    write(there, ("survived", "error", "unfinished", "killed", "survived", "crash"))
    assert mutate._merge(there, here) == 0
    found = results.current(results.load("one", here), every, "gpu")
    expected = ("killed", "killed", "survived", "killed", "survived", "crash")
    assert [found[m.key]["status"] for m in every[:6]] == list(expected)
    assert len(results.load("one", here)) == 6
    with pytest.raises(FileNotFoundError, match="has no results"):
        mutate._merge(tmp_path / "nothing", here)


def test_a_survivor_of_another_machine_counts_where_the_function_has_changed_since_it_was_killed(tmp_path, monkeypatch):
    every = python_mutants(SOURCE, tmp_path, monkeypatch)
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, mutant, status in (
        (here, dataclasses.replace(every[0], digest="before"), "killed"),
        (there, every[0], "survived"),
    ):
        folder.mkdir()
        answer = {"status": status, "by": "", "reason": "", "seconds": 1.0}
        results.path("one", folder).write_text(json.dumps(results.line(mutant, "gpu", "c", answer)) + "\n")
    assert mutate._merge(there, here) == 0
    assert [line["status"] for line in results.load("one", here)] == ["survived"]


def test_which_gpus_are_used(monkeypatch):
    assert options.gpus("0, 2") == ["0", "2"]
    with pytest.raises(argparse.ArgumentTypeError, match="not a list of GPUs"):
        options.gpus("0,,1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    assert options.visible_gpus() == ["1", "3"]


@pytest.mark.parametrize(
    ("options", "said"),
    [(["--check-seconds", "3"], "needs --quick"), (["--device", "cpu", "--devices", "0"], "needs --device cuda")],
)
def test_options_that_do_not_go_together_are_refused(options, said, capsys):
    from harness import cli

    assert cli.main(["mutate", "--kernel", "gelu", *options]) == 2
    assert said in capsys.readouterr().err


def test_files_are_chosen_by_a_pattern(tmp_path, monkeypatch):
    (tmp_path / "sm90").mkdir()
    (tmp_path / "sm90" / "one.cu").write_text(CUDA)
    every = python_mutants(SOURCE, tmp_path, monkeypatch)
    assert {m.file for m in mutate._chosen(every, "cuda", None)} == {"kernel.py", "sm90/one.cu"}
    assert {m.file for m in mutate._chosen(every, "cuda", ["*.cu*"])} == {"sm90/one.cu"}
    assert {m.file for m in mutate._chosen(every, "cpu", None)} == {"kernel.py"}


def test_the_order_is_drawn_and_does_not_depend_on_other_mutants(tmp_path, monkeypatch):
    every = python_mutants(SOURCE, tmp_path, monkeypatch)
    drawn = mutants.order(every, 0)
    assert drawn != every
    assert mutants.order(every, 1) != drawn
    fewer = every[: len(every) // 2]
    assert mutants.order(fewer, 0) == [m for m in drawn if m in fewer]


def test_the_report_counts(tmp_path, monkeypatch):
    every = python_mutants(SOURCE, tmp_path, monkeypatch)
    entry = {"file": "kernel.py", "function": every[1].function, "line": every[1].line, "operator": every[1].operator}
    text = "\n".join(f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in entry.items())
    (tmp_path / mutants.EQUIVALENT).write_text(f'[[mutant]]\n{text}\nordinal = {every[1].ordinal}\nwhy = "no call"\n')
    monkeypatch.setattr(registry, "names", lambda: ["one"])
    monkeypatch.setattr(registry, "package", lambda name: "kernels.one")
    with results.path("one", tmp_path).open("w") as file:
        statuses = (
            "killed",
            "survived",
            "survived",
            "hang",
            "crash",
            "killed",
            "invalid",
            "same",
            "unfinished",
            "error",
        )
        for mutant, status in zip(every, statuses, strict=False):
            answer = {"status": status, "by": "one.fwd.case.triton-strides", "reason": "", "seconds": 1.0}
            checks = results.digest_of_source("one", "kernel.py") if status == "same" else "c-quick"
            file.write(json.dumps(results.line(mutant, "interpreter", checks, answer)) + "\n")
    scored = report.scored("one", "interpreter", tmp_path)
    assert (scored.run, len(scored.killed), len(scored.equivalent), len(scored.survived)) == (7, 4, 1, 1)
    assert (scored.invalid, scored.same, scored.quick, scored.unfinished) == (1, 1, 1, 1)
    assert scored.score == 100 * 4 / 6, "what is not known to be rejected counts as survived"
    page = report.page(tmp_path)
    counted = f"| one | interpreter | 7 of {scored.able} | 1 | 1 | 4 | 1 | 1 | 1 | 1, 1 of them quick | 1 | 66.7 % |"
    assert counted in page
    assert "None." in page.partition("## Surviving synchronisation")[2]
    assert "| strides | 4 |" in page
    assert every[2].operator in page
    assert "no call" in page


def test_surviving_synchronisation_is_listed_by_itself(tmp_path, monkeypatch):
    (tmp_path / "one.cu").write_text(CUDA)
    monkeypatch.setattr(registry, "folder", lambda name: tmp_path)
    monkeypatch.setattr(registry, "names", lambda: ["one"])
    monkeypatch.setattr(registry, "package", lambda name: "kernels.one")
    survived = {"status": "survived", "by": "", "reason": "", "seconds": 1.0}
    chosen = [m for m in mutants.of_kernel("one") if m.operator.startswith(("synchronisation: wgmma", "sign"))]
    lines = [results.line(m, "gpu", "c", survived) for m in chosen]
    results.path("one", tmp_path).write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = report.page(tmp_path)
    survivors, _, synchronisation = page.partition("## Surviving synchronisation")
    assert "`sign: - → nothing" in survivors and "wgmma_wait<1>()" not in survivors
    assert "`synchronisation: wgmma_wait<1>(); → nothing" in synchronisation
    assert "| one | gpu | 2 of" in page and "| 2 | 0 | 0.0 % |" in page


@pytest.mark.parametrize(
    "kernel_name", [k for k in registry.names() if (registry.folder(k) / mutants.EQUIVALENT).is_file()]
)
def test_every_argument_is_about_a_mutant_that_there_is(kernel_name):
    known = {mutant.identity for mutant in mutants.of_kernel(kernel_name)}
    arguments = mutants.equivalent(kernel_name)
    assert not [identity for identity in arguments if identity not in known]
    assert all(len(why) > 20 for why in arguments.values())


@pytest.mark.slow
def test_a_run_kills_what_is_wrong_and_takes_up_where_it_stopped(tmp_path, capsys):
    """On gelu: three mutants, of which no two runs make the same one."""
    command = ["--kernel", "gelu", "--device", "cpu", "--jobs", "1", "--quick", "--check-seconds", "3"]
    from harness import cli

    for most in ("2", "3"):
        arguments = [*command, "--file", "kernel.py", "--most", most, "--minutes", "5", "--out", str(tmp_path)]
        assert cli.main(["mutate", *arguments]) == 0
    lines = results.load("gelu", tmp_path)
    assert len({line["key"] for line in lines}) == len(lines) == 3
    assert {line["status"] for line in lines} & {"killed", "crash", "hang"}
    assert "gelu: 1 " in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_ends_in_time_with_what_it_has(tmp_path, capsys):
    from harness import cli

    command = ["--kernel", "gelu", "--device", "cpu", "--jobs", "1", "--quick", "--out", str(tmp_path)]
    start = time.monotonic()
    cli.main(["mutate", *command, "--minutes", "0.02"])
    assert time.monotonic() - start < 60
    assert re.search(r"gelu: .*; \d+ were not begun", capsys.readouterr().out)
    assert not results.load("gelu", tmp_path)
