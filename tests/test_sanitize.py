"""`sanitize`: what the tools are asked, how their words are sorted, and the exit code."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from harness import options, registry
from harness.commands import sanitize
from harness.compiling import build_report
from harness.nsight import plain_products, sanitizer
from harness.on_gpu import Place, place
from harness.reporting import rows_json
from harness.spec import Case, Cost, KernelSpec, Yardstick

MEMCHECK = """\
========= COMPUTE-SANITIZER
ran toy.fwd.a.triton
========= Invalid __global__ read of size 4 bytes
=========     at _toy_fwd_kernel+0x1a0 in kernel.py:88
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7f0000000200 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f0000000000 of size 512 bytes
=========
========= Invalid __global__ read of size 4 bytes
=========     at _toy_fwd_kernel+0x1a0 in kernel.py:88
=========     by thread (1,0,0) in block (0,0,0)
=========     Address 0x7f0000000204 is out of bounds
=========
========= ERROR SUMMARY: 2 errors
"""
INITCHECK = """\
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void at::native::vectorized_elementwise_kernel<4, at::native::toy_functor>(int, T1)+0x240
=========     by thread (31,0,0) in block (1,0,0)
=========     Address 0x7f3c7ec000fc
=========
ran toy.fwd.a.triton
========= ERROR SUMMARY: 1 error
"""
RACECHECK = """\
========= COMPUTE-SANITIZER
ran toy.fwd.a.triton
========= Error: Race reported between Write access at _toy_bwd_kernel+0x90 in kernel.py:41
=========     and Read access at _toy_bwd_kernel+0x100 in kernel.py:51 [508 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
CLEAN = "========= COMPUTE-SANITIZER\nran toy.fwd.a.triton\nran toy.bwd.a.triton\n========= ERROR SUMMARY: 0 errors\n"


def test_findings_of_our_kernels_are_counted_by_place():
    found = sanitizer.parse(MEMCHECK, ["toy", "other"])
    assert found.ours == [
        {
            "what": "Invalid __global__ read of size 4 bytes",
            "kernel": "_toy_fwd_kernel",
            "where": "kernel.py:88",
            "count": 2,
        }
    ]
    assert (found.others, found.failures) == ([], [])


def test_findings_of_other_kernels_are_kept_apart():
    found = sanitizer.parse(INITCHECK, ["toy"])
    assert found.ours == []
    assert found.others[0]["what"] == "Uninitialized __global__ memory read of size 4 bytes"
    assert "vectorized_elementwise_kernel" in found.others[0]["kernel"]
    # Another kernel of the same words in its name is not ours either.
    assert sanitizer.parse(MEMCHECK, ["fwd"]).ours == []


@pytest.mark.parametrize(
    ("function", "ours"),
    [
        ("toy_kernel(float *, int)", True),
        ("void toy_kernel<float, (int)4>(float *, int)", True),
        ("void at::native::toy_kernel<float>(float *, int)", False),
        ("void cub::scan<toy_kernel>(float *)", False),
    ],
)
def test_templates_of_ours_are_told_from_kernels_in_namespaces(function, ours):
    found = sanitizer.parse(MEMCHECK.replace("_toy_fwd_kernel", function), ["toy"])
    assert [finding["kernel"] for finding in (found.ours if ours else found.others)] == [function]
    assert not (found.others if ours else found.ours)


def test_races_name_the_kernel_in_their_first_line():
    (race,) = sanitizer.parse(RACECHECK, ["toy"]).ours
    assert race["kernel"] == "_toy_bwd_kernel"
    assert race["where"] == "kernel.py:41"
    assert race["what"].startswith("Error: Race reported between Write access")


def test_races_in_functions_of_a_kernel_are_its_own():
    text = (
        "========= Error: Race reported between Write access at load_row(const float *)+0x90 in ptx.cuh:28\n"
        "=========     and Read access at shared_pair(unsigned int)+0x100 in ptx.cuh:51 [508 hazards]\n"
    )
    (race,) = sanitizer.parse(text, ["toy"]).ours
    assert (race["kernel"], race["where"]) == ("load_row(const float *)", "ptx.cuh:28")


def test_a_divergent_barrier_is_a_finding():
    text = (
        "========= Barrier error detected. Divergent thread(s) in block.\n"
        "=========     at _toy_fwd_kernel+0xf0 in kernel.py:79\n=========     by thread (37,0,0) in block (0,0,0)\n"
    )
    assert sanitizer.parse(text, ["toy"]).ours[0]["what"] == "Barrier error detected. Divergent thread(s) in block"


def test_a_tool_that_could_not_do_its_work_is_a_failure():
    text = (
        "========= Internal Sanitizer Error: The Sanitizer encountered an error while launching _toy_fwd_kernel\n"
        "========= Error: Target application terminated before first instrumented API call\n"
    )
    found = sanitizer.parse(text, ["toy"])
    assert found.ours == []
    assert len(found.failures) == 2


def test_every_kernel_that_a_spec_launches_is_instrumented():
    """Also those of parts, which do not have the folder's name, and those of the kernels that a composed one needs."""
    built = {kernel["kernel"]: kernel["rows"] for kernel in build_report.load(registry.ROOT / "reports" / "build")}
    for name in ("attention", "cross_entropy", "heads_gmm", "heads_mlp", "mxfp"):
        own = sanitizer.own_kernels([name])
        assert not [row["jit"] for row in built[name] if not any(part in row["jit"] for part in own)]
    assert {"heads_dhidden", "_heads_sum_kernel"} <= {*sanitizer.own_kernels(["heads_mlp"])}
    finding = MEMCHECK.replace("_toy_fwd_kernel", "_heads_sum_kernel")
    assert sanitizer.parse(finding, sanitizer.own_kernels(["heads_mlp"])).ours


def test_kernels_from_outside_the_checkout_have_any_name(tmp_path, monkeypatch):
    (tmp_path / "bench.py").write_text("@triton.jit(do_not_specialize=['n'])\ndef scale(x): pass\ndef plan(x): pass\n")
    (tmp_path / "more.cu").write_text('extern "C" __global__ void __launch_bounds__(2 * W, 1)\n    add(int x) {}\n')
    monkeypatch.setenv(registry.OUTSIDE, json.dumps({"mine": f"{tmp_path / 'bench.py'}:SPEC"}))
    assert sanitizer.own_kernels(["mine"]) == ["mine", "scale", "add"]


def test_a_composed_kernel_is_instrumented_with_what_it_needs(toy, monkeypatch):
    monkeypatch.setattr(options.registry, "load", lambda name: dataclasses.replace(SPEC, needs=("part",)))
    seen = []
    command = sanitizer.command
    monkeypatch.setattr(sanitizer, "command", lambda *parts: seen.append(parts[2]) or command(*parts))
    code, rows = toy({"memcheck": (sanitizer.FOUND, MEMCHECK.replace("_toy_fwd", "_part_fwd"))})
    assert seen == [["toy", "part"]] and (code, rows["memcheck"]["status"]) == (1, "findings")


@pytest.mark.parametrize("tool", sanitizer.TOOLS)
def test_command_line(tool):
    command = sanitizer.command(Path("cs"), tool, ["toy", "gmm"], ["python", "x"])
    assert command[:3] == ["cs", "--tool", tool]
    assert command[-2:] == ["python", "x"]
    assert command[command.index("--error-exitcode") + 1] == "99"
    assert ("--padding" in command) == (tool == "memcheck")
    filters = [command[i + 1] for i, word in enumerate(command) if word == "--kernel-name"]
    # Memory that a kernel writes which initcheck does not look at counts as never written.
    assert filters == ([] if tool == "initcheck" else ["kernel_substring=toy", "kernel_substring=gmm"])
    assert ("--report-api-errors" in command) == (tool == "memcheck")


def test_the_caching_allocator_is_off(monkeypatch, capsys):
    program = "import os; print('=' * 9, 'quiet'); print(os.environ['PYTORCH_NO_CUDA_MEMORY_CACHING'])"
    code, output = sanitizer.run([sys.executable, "-c", program])
    assert (code, output) == (0, "========= quiet\n1\n")
    assert capsys.readouterr().out == "1\n"  # the tool's own lines are summed up instead


def test_without_the_tool_it_is_said_how_to_get_it(monkeypatch):
    monkeypatch.setattr(sanitizer, "INSTALLATIONS", ())
    monkeypatch.setattr(sanitizer.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError, match="nvidia-cuda-sanitizer-api"):
        sanitizer.find()


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_without_a_gpu_it_is_said():
    with pytest.raises(ValueError, match="sanitize needs an NVIDIA GPU, and none was found"):
        place("sanitize", Namespace(gpu="auto", device=None, out=None), ())


SPEC = KernelSpec(
    name="toy",
    implementations={"triton": lambda x: x},
    reference=lambda x: x,
    make_inputs=lambda case, device, generator: {"x": torch.ones(case.dims["n"], device=device)},
    cost=lambda case, mode: Cost(1, 1),
    cases=(Case("large", {"n": 4}, torch.float32, bench=True), Case("a", {"n": 1}, torch.float32)),
    grads=("x",),
    unit="elements",
    items=lambda case: 1,
    fuzz={},
)


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Runs `sanitize` where each tool says what is given for it. Returns exit code and rows by tool."""

    def sanitized(outputs: dict[str, tuple[int, str]], run=None, alone=(0, ""), **given) -> tuple[int, dict]:
        def answer(command: list[str], echo: bool = True) -> tuple[int, str]:
            if command[0] == sys.executable:
                return alone
            return run(command) if run else outputs[command[command.index("--tool") + 1]]

        monkeypatch.setattr(sanitizer, "run", answer)
        arguments = {"kernel": ["toy"], "case": None, "mode": None, "impl": None, "gpu": "auto", "device": None}
        arguments |= {"out": tmp_path, "tool": list(outputs), "jobs": None, "worker": None}
        code = sanitize.main(Namespace(**{**arguments, **given}))
        written = rows_json.read(tmp_path / "sanitize.json", sanitize.SCHEMA)
        return code, {row["tool"]: row for row in written["rows"]}

    monkeypatch.setattr(options.registry, "load", lambda name: SPEC)
    monkeypatch.setattr(sanitize, "place", lambda *_: Place(torch.device("cpu"), "h200", tmp_path))
    monkeypatch.setattr(sanitize.environment, "capture", lambda device: {"commit": "abc", "time": str(tmp_path)})
    monkeypatch.setattr(sanitizer, "find", lambda: Path("cs"))
    monkeypatch.setattr(sanitizer, "version", lambda tool: "2025.3.1.0")
    monkeypatch.setattr(sanitizer, "own_kernels", list)
    return sanitized


@pytest.mark.parametrize(
    ("code", "output", "status", "exit_code"),
    [
        (0, CLEAN, "ok", 0),
        (sanitizer.FOUND, MEMCHECK, "findings", 1),
        (sanitizer.FOUND, INITCHECK, "ok", 0),  # of PyTorch's kernels alone
        (1, CLEAN, "failed", 1),  # a case raised
        (-9, "", "failed", 1),
        (0, "========= COMPUTE-SANITIZER\n", "failed", 1),  # nothing was run, so nothing was checked
        (sanitizer.FOUND, CLEAN, "failed", 1),  # errors that were not understood are not taken for none
    ],
)
def test_exit_code(toy, code, output, status, exit_code):
    found, rows = toy({"memcheck": (code, output)})
    assert (found, rows["memcheck"]["status"]) == (exit_code, status)
    assert bool(rows["memcheck"]["reason"]) == (status == "failed")


def test_what_fails_without_a_tool_is_not_given_to_one(toy):
    code, rows = toy({"memcheck": (0, CLEAN)}, alone=(1, "failed toy.fwd.a.triton: ValueError: no\n"))
    assert (code, rows["memcheck"]["status"], rows["memcheck"]["cases"]) == (1, "failed", 0)
    assert rows["memcheck"]["reason"].startswith(
        "without memcheck exit code 1: failed toy.fwd.a.triton: ValueError: no"
    )


def test_a_program_runs_once_without_a_tool_whatever_their_number(toy, monkeypatch):
    command, tools = sanitize.worker_command, []
    monkeypatch.setattr(sanitize, "worker_command", lambda *words: tools.append(words[1]) or command(*words))
    toy({"memcheck": (0, CLEAN), "initcheck": (0, CLEAN)})
    assert sorted(tools, key=str) == [None, "initcheck", "memcheck"]
    assert "--tool" not in command(Namespace(gpu="h200", case=None, mode=None, impl=None), None, "toy", "1/1")


def test_a_second_call_keeps_the_other_tools(toy, capsys):
    toy({"memcheck": (0, CLEAN), "initcheck": (sanitizer.FOUND, INITCHECK)})
    code, rows = toy({"racecheck": (sanitizer.FOUND, RACECHECK)})
    assert code == 1
    assert list(rows) == ["memcheck", "initcheck", "racecheck"]
    assert {row["kernel"] for row in rows.values()} == {"toy"}
    assert rows["memcheck"]["cases"] == 2
    assert "racecheck toy: Error: Race reported between Write access" in capsys.readouterr().out


def test_each_kernel_has_a_process_and_a_row(toy, monkeypatch):
    monkeypatch.setattr(options.registry, "load", lambda name: dataclasses.replace(SPEC, name=name))
    monkeypatch.setattr(options.registry, "names", lambda: ["other", "toy"])
    seen = []
    command = sanitizer.command
    monkeypatch.setattr(sanitizer, "command", lambda *parts: seen.append((parts[1], *parts[2])) or command(*parts))
    toy({"memcheck": (0, CLEAN), "racecheck": (0, CLEAN)}, kernel=None)
    assert sorted(seen) == [("memcheck", "other"), ("memcheck", "toy"), ("racecheck", "other"), ("racecheck", "toy")]


def test_the_worker_runs_the_small_cases_of_ours(monkeypatch, capsys):
    ran = []

    def run(spec, case, mode, name, device) -> bool:
        ran.append((case.name, mode, name))
        return True

    monkeypatch.setattr(sanitize, "_run", run)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    selection = options.Selection(SPEC, SPEC.cases[:1], SPEC.modes, ("triton", "eager"))
    where = Place(torch.device("cpu"), "h200", Path())
    assert sanitize._work([selection], Namespace(case=None, tool=None, worker="1/1"), where) == 0
    assert ran == [("a", "fwd", "triton"), ("a", "bwd", "triton")]
    ran.clear()
    sanitize._work([selection], Namespace(case=["large"], tool=None, worker="1/1"), where)
    assert ran == [("large", "fwd", "triton"), ("large", "bwd", "triton")]
    ran.clear()
    for part in sanitize.parts(2, of_all=2, jobs=2):
        sanitize._work([selection], Namespace(case=None, tool=None, worker=part), where)
    assert ran == [("a", "fwd", "triton"), ("a", "bwd", "triton")]


def test_a_kernel_that_exits_fails_and_does_not_end_the_worker(monkeypatch, capsys) -> None:
    spec = dataclasses.replace(SPEC, implementations={"triton": lambda x: sys.exit(0)})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert not sanitize._run(spec, spec.cases[1], "fwd", "triton", torch.device("cpu"))
    assert capsys.readouterr().out == "failed toy.fwd.a.triton: SystemExit: 0\n"


def test_the_worker_runs_what_else_is_ours_where_it_takes_the_case() -> None:
    def only_forward(case: Case, mode: str) -> str | None:
        return None if mode == "fwd" else "has no backward"

    others = [
        Yardstick(name, load=lambda: torch.clone, supports=only_forward, cost=SPEC.cost, ours=name == "parts")
        for name in ("parts", "copy")
    ]
    spec = dataclasses.replace(SPEC, baselines=(*SPEC.baselines, *others))
    selection = options.Selection(spec, spec.cases[:1], spec.modes, tuple(options.implementations(spec)))
    runs = sanitize._runs(selection, Namespace(case=None))
    assert [(mode, name) for _, mode, name in runs] == [("fwd", "triton"), ("fwd", "parts"), ("bwd", "triton")]


@pytest.mark.parametrize("tool", ["initcheck", "memcheck"])
def test_products_are_plain_under_initcheck_alone(tool, monkeypatch):
    replaced = []
    plain = nullcontext()
    monkeypatch.setattr(sanitize, "plain_products", lambda: replaced.append(True) or plain)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    program = sanitize.worker_command(Namespace(gpu="h200", case=None, mode=None, impl=None), tool, "toy", "1/1")
    assert program[program.index("--tool") + 1] == tool
    assert sanitize._work([], Namespace(tool=[tool], worker="1/1"), Place(torch.device("cpu"), "h200", Path())) == 0
    assert replaced == [True] * (tool == "initcheck")


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_plain_products(monkeypatch):
    """Of strided operands, into strided memory and in a backward; and no longer afterwards."""
    calls = []
    product = plain_products.product
    monkeypatch.setattr(plain_products, "product", lambda a, b: calls.append(a.shape) or product(a, b))
    a, b, c = torch.randn(5, 7).t(), torch.randn(5, 9), torch.randn(7, 1)
    wanted = torch.mm(a, b)
    with plain_products.plain_products("CPU"):
        torch.testing.assert_close(torch.mm(a, b), wanted)
        torch.testing.assert_close(torch.mm(a, b, out=torch.empty(9, 7).t()), wanted)
        torch.testing.assert_close(torch.bmm(a[None], b[None]), wanted[None])
        torch.testing.assert_close(torch.bmm(a[None], b[None], out=torch.empty(1, 7, 9)), wanted[None])
        torch.testing.assert_close(torch.addmm(c, a, b, beta=2, alpha=3), 2 * c + 3 * wanted)
        torch.testing.assert_close(torch.addmm(c, a, b, out=torch.empty(7, 9)), c + wanted)
        half = torch.mm(a.bfloat16(), b.bfloat16())
        torch.testing.assert_close(half, (a.bfloat16().float() @ b.bfloat16().float()).bfloat16())
        before = len(calls)
        leaf = a.clone().requires_grad_()
        (leaf @ b).sum().backward()
        assert len(calls) - before == 2
        torch.testing.assert_close(leaf.grad, b.sum(1).expand(7, 5))
    before = len(calls)
    torch.mm(a, b)
    assert len(calls) == before


def test_few_runs_are_shared_out_over_all_jobs_and_many_by_twelve():
    assert sanitize.parts(0, of_all=0, jobs=8) == ["1/1"]
    assert len(sanitize.parts(30, of_all=30, jobs=14)) == 10  # three to a process
    assert len(sanitize.parts(30, of_all=300, jobs=14)) == 3
    assert len(sanitize.parts(1, of_all=300, jobs=14)) == 1


def test_many_runs_are_shared_out_and_judged_together(toy, monkeypatch):
    monkeypatch.setattr(sanitize, "RUNS_A_PROCESS", 1)  # forward and backward of one case
    outputs = iter([(sanitizer.FOUND, MEMCHECK), (1, MEMCHECK)])
    with monkeypatch.context() as patch:
        parts = []
        command = sanitizer.command
        patch.setattr(sanitizer, "command", lambda *words: parts.append(words[3]) or command(*words))
        code, rows = toy({"memcheck": (0, "")}, run=lambda command: next(outputs), jobs=1)
    assert [part[part.index("--worker") + 1] for part in parts] == ["1/2", "2/2"]
    assert (code, rows["memcheck"]["status"], rows["memcheck"]["cases"]) == (1, "findings", 2)
    assert [finding["count"] for finding in rows["memcheck"]["findings"]] == [4]
    assert rows["memcheck"]["reason"].startswith("exit code 1")


def test_a_false_alarm_has_its_reason_and_does_not_count(toy, monkeypatch, capsys):
    alarms = {("memcheck", "_toy_fwd_kernel"): "the tool is wrong", ("racecheck", "_toy_fwd_kernel"): "not this"}
    monkeypatch.setattr(options.registry, "load", lambda name: dataclasses.replace(SPEC, false_alarms=alarms))
    code, rows = toy({"memcheck": (sanitizer.FOUND, MEMCHECK), "racecheck": (sanitizer.FOUND, RACECHECK)})
    assert (code, rows["memcheck"]["status"], rows["memcheck"]["findings"]) == (1, "ok", [])
    assert [(a["count"], a["why"]) for a in rows["memcheck"]["false_alarms"]] == [(2, "the tool is wrong")]
    assert (rows["racecheck"]["status"], rows["racecheck"]["false_alarms"]) == ("findings", [])
    assert "_toy_fwd_kernel kernel.py:88, 2 times; a false alarm: the tool is wrong" in capsys.readouterr().out


def test_an_interrupt_keeps_what_was_found_and_ends_what_runs(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(sanitize, "RUNS_A_PROCESS", 1)
    long = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(600)"]
    run, judge, processes = sanitizer.run, sanitize.judge, []

    def once(command) -> tuple[int, str]:
        return (sanitizer.FOUND, MEMCHECK) if "1/2" in command else run(long)

    def interrupted(*arguments):
        judged = judge(*arguments)
        monkeypatch.setattr(rows_json, "merge", lambda *rest: merge(*rest) or press())
        return judged

    def press() -> None:
        while not sanitizer._running:
            time.sleep(0.01)
        processes.extend(sanitizer._running)
        raise KeyboardInterrupt

    merge = rows_json.merge
    monkeypatch.setattr(sanitize, "judge", interrupted)
    with pytest.raises(KeyboardInterrupt):
        toy({"memcheck": (0, "")}, run=once, jobs=2)
    (row,) = rows_json.read(tmp_path / "sanitize.json", sanitize.SCHEMA)["rows"]
    assert (row["status"], row["reason"]) == ("findings", "only 1 of 2 parts were completed")
    assert [process.poll() is not None for process in processes] == [True]


PLANTED = """\
import torch, triton, triton.language as tl

@triton.jit
def _toy_kernel(x_ptr, y_ptr, PAST: tl.constexpr):
    at = tl.arange(0, 128)
    tl.store(y_ptr + at, tl.load(x_ptr + at + PAST))

x = torch.{make}(128, device="cuda")
_toy_kernel[(1,)](x, torch.empty_like(x), PAST={past})
torch.cuda.synchronize()
print("ran toy")
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tool", "make", "past", "finds"),
    [
        ("memcheck", "zeros", 0, False),
        ("memcheck", "zeros", 1, True),
        ("initcheck", "zeros", 0, False),
        ("initcheck", "empty", 0, True),
    ],
)
def test_planted_errors_are_found(tmp_path, tool, make, past, finds):
    try:
        program = sanitizer.find()
    except FileNotFoundError:
        pytest.skip("compute-sanitizer is not installed")
    script = tmp_path / "planted.py"
    script.write_text(PLANTED.format(make=make, past=past))
    code, output = sanitizer.run(sanitizer.command(program, tool, ["toy"], [sys.executable, str(script)]))
    found = sanitizer.parse(output, ["toy"])
    assert bool(found.ours) == finds, output
    assert (code == sanitizer.FOUND) == finds
