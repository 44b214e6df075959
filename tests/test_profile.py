"""`profile`: the command line that ncu is given, what its table says, what its errors mean, and the files."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from harness import nvtx, options, record
from harness.commands import profile
from harness.nsight import ncu, profile_report
from harness.on_gpu import Place, place
from harness.reporting import kernel_page
from harness.spec import Case, Cost, KernelSpec

RANGES = ["toy.fwd.a.triton", "toy.fwd.a.triton-2", "toy.bwd.a.triton", "toy.fwd.1x2-bf16.triton"]

PUSH_POP = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
START_END = "Id:Domain:Start/Stop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"

# Name and unit of the columns that matter, and some that must not disturb.
COLUMNS = {
    "ID": "", "Process ID": "", "Process Name": "", "Host Name": "", PUSH_POP: "", START_END: "",
    "Kernel Name": "", "Context": "", "Stream": "", "Block Size": "", "Grid Size": "", "Device": "", "CC": "",
    "dram__bytes_read.sum": "byte", "dram__bytes_write.sum": "byte",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "%",
    "gpu__time_duration.sum": "ns",
    "l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum": "byte", "l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum": "byte",
    "launch__registers_per_thread": "register/thread",
    "launch__shared_mem_per_block_dynamic": "byte/block", "launch__shared_mem_per_block_static": "byte/block",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "%",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": "%",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "%",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "%",
    STALL.format("long_scoreboard"): "inst", STALL.format("barrier"): "inst", STALL.format("selected"): "inst",
}  # fmt: skip

FIGURES = {
    "dram__bytes_read.sum": "67,125,248", "dram__bytes_write.sum": "1000000",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "91.25",
    "gpu__time_duration.sum": "20480",
    "l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum": "0", "l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum": "64",
    "launch__registers_per_thread": "72",
    "launch__shared_mem_per_block_dynamic": "16384", "launch__shared_mem_per_block_static": "16",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "48.5",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": "0",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "30.004",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "43.1",
    STALL.format("long_scoreboard"): "12", STALL.format("barrier"): "3", STALL.format("selected"): "1",
}  # fmt: skip


def _raw_page(launches: list[tuple[str, str, dict[str, str]]], units: dict[str, str] | None = None) -> str:
    """What `ncu --csv --page raw` prints for launches given as (kernel, open range or '', figures); the
    stages that are open within it follow after '|'."""
    columns = {**COLUMNS, **(units or {})}
    file = io.StringIO()
    writer = csv.writer(file, quoting=csv.QUOTE_ALL)
    writer.writerow(columns)
    writer.writerow(columns.values())
    for number, (kernel, name, figures) in enumerate(launches):
        within = "".join(
            f'4127  "{domain}:{text}:none:none:ARGB:16711680:Registered:{text}" '
            for domain, text in zip(
                ("ridgeline", "ridgeline.stages", "ridgeline.stages"), name.split("|"), strict=False
            )
            if text
        )
        fixed = {
            "ID": number, "Process ID": 4127, "Process Name": "python3.12", "Host Name": "127.0.0.1", PUSH_POP: within,
            "Kernel Name": kernel, "Context": 1, "Stream": 7, "Block Size": "(128, 1, 1)", "Grid Size": "(8, 1, 1)",
            "Device": 0, "CC": "9.0",
        }  # fmt: skip
        writer.writerow([{**fixed, **FIGURES, **figures}.get(column, "") for column in columns])
    return f"==WARNING== Note that something was said before the table.\n{file.getvalue()}"


def test_a_launch_is_read():
    launches = ncu.parse(_raw_page([("_toy_kernel", RANGES[0], {})]), RANGES)
    assert launches[RANGES[0]] == [
        {
            "name": "_toy_kernel",
            "duration_us": 20.48,
            "dram_bytes": 68125248.0,
            "dram_pct": 91.25,
            "l2_pct": 48.5,
            "sm_pct": 30.0,
            "tensor_pct": 0.0,
            "occupancy_pct": 43.1,
            "registers": 72,
            "shared_bytes": 16400,
            "spill_bytes": 64.0,
            "stalls": [["long_scoreboard", 75.0], ["barrier", 18.75]],  # of 16 resident warps, one of which issues
        }
    ]
    assert [launches[name] for name in RANGES[1:]] == [[], [], []]


@pytest.mark.parametrize(
    ("unit", "duration"),
    [
        ("ns", 0.0025),
        ("nsecond", 0.0025),
        ("us", 2.5),
        ("usecond", 2.5),
        ("ms", 2500.0),
        ("msecond", 2500.0),
        ("s", 2.5e6),
        ("second", 2.5e6),
    ],
)
def test_units_of_time(unit, duration):
    page = _raw_page([("k", RANGES[0], {ncu.DURATION: "2.5"})], {ncu.DURATION: unit})
    assert ncu.parse(page, RANGES)[RANGES[0]][0]["duration_us"] == pytest.approx(duration, abs=1e-3)


@pytest.mark.parametrize(("unit", "factor"), [("byte", 1), ("Kbyte", 1e3), ("Mbyte", 1e6), ("Gbyte", 1e9)])
def test_units_of_size(unit, factor):
    figures = {"dram__bytes_read.sum": "1,234.5", "dram__bytes_write.sum": "0"}
    page = _raw_page([("k", RANGES[0], figures)], {"dram__bytes_read.sum": unit})
    assert ncu.parse(page, RANGES)[RANGES[0]][0]["dram_bytes"] == pytest.approx(1234.5 * factor)


def test_shared_memory_may_come_in_thousands():
    page = _raw_page(
        [("k", RANGES[0], {"launch__shared_mem_per_block_dynamic": "65.54"})],
        {"launch__shared_mem_per_block_dynamic": "Kbyte/block"},
    )
    assert ncu.parse(page, RANGES)[RANGES[0]][0]["shared_bytes"] == 65556


def test_what_was_not_measured_is_none_and_never_zero():
    figures = {"dram__bytes_write.sum": "n/a", "sm__throughput.avg.pct_of_peak_sustained_elapsed": ""}
    launch = ncu.parse(_raw_page([("k", RANGES[0], figures)]), RANGES)[RANGES[0]][0]
    assert launch["dram_bytes"] is None
    assert launch["sm_pct"] is None


def test_a_ratio_to_a_counter_that_was_zero_is_none():
    figures = {ncu.REGISTERS: "nan", "sm__throughput.avg.pct_of_peak_sustained_elapsed": "-nan", ncu.DURATION: "inf"}
    launch = ncu.parse(_raw_page([("k", RANGES[0], figures)]), RANGES)[RANGES[0]][0]
    assert launch["registers"] is launch["sm_pct"] is launch["duration_us"] is None


def test_launches_go_to_their_range_in_order():
    names = [RANGES[0], RANGES[1], RANGES[2], RANGES[2], "", "other.fwd.a.triton", RANGES[3]]
    page = _raw_page([(f"k{i}", name, {}) for i, name in enumerate(names)])
    found = {name: [launch["name"] for launch in launches] for name, launches in ncu.parse(page, RANGES).items()}
    # A name that begins another, or stands in another, is not taken for it.
    assert found == {RANGES[0]: ["k0"], RANGES[1]: ["k1"], RANGES[2]: ["k2", "k3"], RANGES[3]: ["k6"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no output"),
        ("==WARNING== No kernels were profiled.\n", "no kernel: none was launched inside"),
        ('"ID","Metric Name"\n', "not a raw page"),
        (_raw_page([]).replace("Range", "State"), "does not tell the NVTX ranges"),
    ],
)
def test_what_is_no_table_of_launches_is_refused(text, message):
    with pytest.raises(ncu.NcuError, match=message):
        ncu.parse(text, RANGES)


def test_command_line():
    command = ncu.command(Path("/opt/ncu"), Path("/tmp/r.ncu-rep"), RANGES[:2], ["python", "-m", "harness"])
    assert command[:4] == ["/opt/ncu", "--clock-control", "none", "--nvtx"]
    includes = [command[i + 1] for i, word in enumerate(command) if word == "--nvtx-include"]
    assert includes == ["ridgeline@toy.fwd.a.triton/", "ridgeline@toy.fwd.a.triton-2/"]
    assert command[-3:] == ["python", "-m", "harness"]
    metrics = command[command.index("--metrics") + 1].split(",")
    assert {*ncu.DRAM, ncu.DURATION, ncu.REGISTERS} <= set(metrics)
    assert command[command.index("--section") + 1] == "WarpStateStats"
    assert "--set" not in command
    full = ncu.command(Path("ncu"), Path("r"), RANGES, [], full=True)
    assert full[full.index("--set") + 1] == "full"
    assert "--section" not in full


def test_what_means_something_to_the_filter_is_escaped():
    name = nvtx.range_name("toy", "fwd+bwd", "1x2-bf16", "triton")
    assert ncu.range_filter(name) == r"ridgeline@toy.fwd\+bwd.1x2-bf16.triton/"
    assert ncu.range_filter("a/b@c,d[e]*") == r"ridgeline@a\/b\@c\,d\[e\]\*/"


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            "==PROF== Connected to process 7\n==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access "
            "NVIDIA GPU Performance Counters on the target device 0.\n",
            "NVreg_RestrictProfilingToAdminUsers=0",
        ),
        ("==ERROR== Profiling failed because a driver resource was unavailable.\n", "dcgmi profile --pause"),
        (
            "Traceback (most recent call last):\nKeyError: 'x'\n"
            "==ERROR== The application returned an error code (1).\n",
            r"The application returned an error code \(1\)\. KeyError: 'x'",
        ),
        ("Killed\n", "exit code 9: Killed"),
    ],
)
def test_errors_are_explained(output, message):
    assert re.search(message, ncu.explain(output, 9))


def test_without_ncu_it_is_said_how_to_get_it(monkeypatch):
    monkeypatch.setattr(ncu, "INSTALLATIONS", ())
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError, match="part of the CUDA toolkit"):
        ncu.find()


def test_the_newest_installation_is_taken(monkeypatch, tmp_path):
    for number in ("2024.3.2", "2025.3.1", "2025.3.0"):
        (tmp_path / number).mkdir()
        (tmp_path / number / "ncu").touch()
    monkeypatch.setattr(ncu, "INSTALLATIONS", (f"{tmp_path}/*/ncu",))
    monkeypatch.setenv("PATH", "")
    assert ncu.find() == tmp_path / "2025.3.1" / "ncu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_without_a_gpu_it_is_said():
    with pytest.raises(ValueError, match="profile needs an NVIDIA GPU, and none was found"):
        place("profile", Namespace(gpu="auto", device=None, out=None), ())


# The whole way, with a program in place of ncu.

FAKE_NCU = """\
import json, sys
arguments = sys.argv[1:]
if "--version" in arguments:
    print("Version 2025.3.1.0 (build 1)")
elif "--import" in arguments:
    print(open({page!r}).read())
else:
    open(arguments[arguments.index("--export") + 1], "w").close()
    open(arguments[arguments.index("--worker") + 1], "w").write(open({statuses!r}).read())
    print("profiling toy.fwd.a.triton")
"""

SPEC = KernelSpec(
    name="toy",
    implementations={"triton": lambda x: x},
    reference=lambda x: x,
    make_inputs=lambda case, device, generator: {"x": torch.ones(4, device=device)},
    cost=lambda case, mode: Cost(flops=4, bytes=1_000_000),
    cases=(Case("a", {"n": 4}, torch.float32, bench=True), Case("small", {"n": 1}, torch.float32)),
    grads=("x",),
    unit="elements",
    items=lambda case: 4,
    fuzz={},
)


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Runs `profile` on SPEC, with ncu's table and the worker's statuses given. Returns exit code and written file."""
    out = tmp_path / "h200"
    environment = {"gpu": {"name": "NVIDIA H200", "driver": "580"}, "torch": "2.11", "commit": "abc", "time": "now"}
    fake = SimpleNamespace(environment=environment, given=[])

    def run(page: str, statuses: dict, **given) -> tuple[int, dict]:
        (tmp_path / "page").write_text(page)
        (tmp_path / "statuses").write_text(json.dumps(statuses))
        script = tmp_path / "fake.py"
        script.write_text(FAKE_NCU.format(page=str(tmp_path / "page"), statuses=str(tmp_path / "statuses")))
        program = tmp_path / "ncu"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n')
        program.chmod(0o755)
        arguments = {"kernel": ["toy"], "case": None, "mode": None, "impl": None, "gpu": "auto", "device": None}
        arguments |= {"out": out, "full": False, "keep": None, "worker": None, "gpus": 1}
        code = profile.main(Namespace(**{**arguments, **given}))
        return code, json.loads((out / "profile" / "toy.json").read_text())

    monkeypatch.setattr(options.registry, "load", lambda name: SPEC)
    monkeypatch.setattr(profile, "place", lambda *_: Place(torch.device("cpu"), "h200", out))
    monkeypatch.setattr(profile.environment, "capture", lambda device: dict(fake.environment))
    monkeypatch.setattr(ncu, "find", lambda: tmp_path / "ncu")
    fake.run, fake.out = run, out
    return fake


FWD, BWD = "toy.fwd.a.triton", "toy.bwd.a.triton"
OK = {FWD: ["ok", None], BWD: ["ok", None]}


def _write_record(path: Path) -> None:
    column = {"samples_us": [25.6], "n": 1, "median_us": 25.6}
    row = {"kernel": "toy", "case": "a", "mode": "fwd", "implementation": "triton", "kind": "ours", "status": "ok"}
    with record.Writer(path) as writer:
        writer.write({"type": "run", "run": "r", "kernel": "toy", "environment": {"time": "2026"}})
        writer.write({"type": "row", "run": "r", **row, "headline": "cold", "columns": {"cold": column}})


def _measured(out: Path) -> profile_report.Medians:
    return profile_report.medians(record.load(out / "records").rows)


def test_rows_compare_with_cost_and_with_the_record(toy, capsys):
    _write_record(toy.out / "records" / "toy.jsonl")
    page = _raw_page([("_k", FWD, {}), ("_dx", BWD, {}), ("_dw", BWD, {"dram__bytes_write.sum": "n/a"})])
    code, written = toy.run(page, OK)
    forward, backward = profile_report.compared(written["rows"], _measured(toy.out))
    assert code == 0
    assert (forward["status"], forward["reason"], forward["cost_bytes"]) == ("ok", None, 1_000_000)
    assert forward["bytes_ratio"] == pytest.approx(68.125248)
    assert (forward["harness_us"], forward["duration_ratio"]) == (25.6, pytest.approx(0.8))
    # Two kernels in one call add up; a figure that is missing for one of them is missing for the call.
    assert [launch["name"] for launch in backward["launches"]] == ["_dx", "_dw"]
    assert backward["duration_us"] == pytest.approx(40.96)
    assert (backward["dram_bytes"], backward["bytes_ratio"], backward["harness_us"]) == (None, None, None)
    assert [run["ncu"] for run in written["environments"]] == ["2025.3.1.0"]
    page = (toy.out / "profile" / "README.md").read_text()
    assert "| a | fwd | triton | 1 | 20.5 µs | 25.6 µs | 0.800 | 68.1 MB | 1.00 MB | 68.1 | abc |" in page
    assert "long_scoreboard 75, barrier 19" in page
    assert "profiling toy.fwd.a.triton" in capsys.readouterr().out


def test_launches_are_summed_by_stage(toy, capsys):
    """The innermost range of a stage counts; of several launches of a kernel in a stage the table has one line."""
    twice = {"gpu__time_duration.sum": "40960", "sm__throughput.avg.pct_of_peak_sustained_elapsed": "90"}
    launches = [
        ("_round", FWD, {}),
        ("_k", f"{FWD}|mlp", {}),
        ("_k", f"{FWD}|loss|mlp", twice),
        ("_k", f"{FWD}|loss", {}),
    ]
    code, written = toy.run(_raw_page([*launches, ("_dx", BWD, {})]), OK)
    forward, backward = written["rows"]
    assert code == 0 and [launch.get("stage") for launch in forward["launches"]] == [None, "mlp", "mlp", "loss"]
    assert not any("stage" in launch for launch in backward["launches"])
    page = (toy.out / "profile" / "README.md").read_text()
    assert "**a**, fwd, triton. By stage, forward" in page and page.count("By stage") == 1
    lines = [
        "| mlp | 2 | 61.4 µs | 60.0 % | 130 MiB | 91.2 | 48.5 | 70.0 | 0.000 |",
        "| loss | 1 | 20.5 µs | 20.0 % | 65.0 MiB | 91.2 | 48.5 | 30.0 | 0.000 |",
        "| rest | 1 | 20.5 µs | 20.0 % | 65.0 MiB | 91.2 | 48.5 | 30.0 | 0.000 |",
    ]
    assert "\n".join(lines) in page
    assert "| a | fwd | triton | mlp: 2 × _k | 61.4 µs | 91.2 |" in page and "| a | bwd | triton | _dx |" in page
    assert "stages of a, triton" in capsys.readouterr().out
    own = "\n".join(kernel_page.profiled(written))
    assert "\n".join(lines) in own and "`mlp: 2 × _k`" in own and "`_dx`" in own


def test_a_record_that_comes_later_is_compared_too(toy):
    """And a figure of an earlier version's file counts for nothing."""
    toy.run(_raw_page([("_k", FWD, {}), ("_dx", BWD, {})]), OK)
    path = toy.out / "profile" / "toy.json"
    path.write_text(path.read_text().replace('"mode": "bwd"', '"mode": "bwd", "harness_us": 1.0'))
    assert "| a | fwd | triton | 1 | 20.5 µs | – | – |" in (toy.out / "profile" / "README.md").read_text()
    _write_record(toy.out / "records" / "toy.jsonl")
    page = profile_report.write_readme(toy.out / "profile", _measured(toy.out)).read_text()
    assert "| a | fwd | triton | 1 | 20.5 µs | 25.6 µs | 0.800 |" in page
    assert "| a | bwd | triton | 1 | 20.5 µs | – | – |" in page


def test_what_was_not_profiled_has_its_reason(toy):
    page = _raw_page([("_k", FWD, {})])
    code, written = toy.run(page, OK)
    assert code == 1
    assert (written["rows"][1]["status"], written["rows"][1]["reason"]) == (
        "error",
        "no kernel launch in its NVTX range was profiled",
    )
    code, written = toy.run(page, {FWD: ["ok", None], BWD: ["skipped", "liger is not installed"]})
    assert code == 0
    assert written["rows"][1]["reason"] == "liger is not installed"
    code, written = toy.run(page, {FWD: ["ok", None]})
    assert (code, written["rows"][1]["reason"]) == (1, "the profiled process ended before this case")


def test_a_failure_of_ncu_is_the_reason_of_every_row(toy):
    code, written = toy.run("==ERROR== ERR_NVGPUCTRPERM\n", OK)
    assert code == 1
    assert {row["status"] for row in written["rows"]} == {"error"}
    assert all("NVreg_RestrictProfilingToAdminUsers" in row["reason"] for row in written["rows"])


def test_a_part_keeps_the_other_rows_and_their_commit(toy):
    page = _raw_page([("_k", FWD, {}), ("_dx", BWD, {})])
    toy.run(page, OK)
    _, written = toy.run(page, OK, mode=["bwd"])
    assert [row["mode"] for row in written["rows"]] == ["fwd", "bwd"]
    toy.environment["commit"] = "def"
    _, written = toy.run(page, OK, mode=["bwd"])
    commits = [run["commit"] for run in written["environments"]]
    assert [(row["mode"], commits[row["run"]]) for row in written["rows"]] == [("fwd", "abc"), ("bwd", "def")]
    _, written = toy.run(page, OK)
    assert [run["commit"] for run in written["environments"]] == ["def"]


def test_reports_can_be_kept_for_the_user_interface(toy, tmp_path):
    toy.run(_raw_page([("_k", FWD, {}), ("_dx", BWD, {})]), OK, keep=tmp_path / "kept")
    assert [file.name for file in (tmp_path / "kept").iterdir()] == ["toy.ncu-rep"]
    assert not list(toy.out.glob("**/*.ncu-rep"))


def test_what_an_implementation_cannot_take_is_skipped_and_not_run(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    spec = dataclasses.replace(SPEC, unsupported_reason=lambda name, case, mode: f"{name} takes wider rows")
    target = profile.Target(spec, "fwd", spec.cases[0], "triton")
    assert profile._run(target, torch.device("cpu")) == ("skipped", "triton takes wider rows")


def test_the_worker_is_given_the_same_selection(toy):
    targets = [profile.Target(SPEC, mode, SPEC.cases[0], "triton") for mode in ("fwd", "bwd")]
    command = profile.worker_command(targets, Namespace(gpu="h200"), Path("/s"))
    assert command[1:5] == ["-m", "harness", "profile", "--worker"]
    selection = "--kernel toy --case a --mode fwd --mode bwd --impl triton --gpu h200"
    assert command[5:] == ["/s", *selection.split()]


def test_a_file_of_another_schema_is_refused(tmp_path):
    (tmp_path / "toy.json").write_text('{"schema": 0, "rows": []}')
    with pytest.raises(ValueError, match="schema 0"):
        profile_report.write(tmp_path, "toy", "h200", {}, [], {})


@pytest.mark.gpu
def test_ncu_profiles_a_range(tmp_path):
    """The real thing: one fill of 64 MiB writes at least half of that to DRAM, and is the only kernel in its range."""
    try:
        tool = ncu.find()
    except FileNotFoundError:
        pytest.skip("ncu is not installed")
    script = tmp_path / "program.py"
    script.write_text(
        "import torch\nfrom harness import nvtx\n"
        "x = torch.empty(1 << 24, device='cuda')\nx.fill_(1.0)\n"
        "with nvtx.range('toy.fwd+bwd.a-1.triton'):\n    x.fill_(2.0)\n    torch.cuda.synchronize()\n"
    )
    run_in_repository = "import sys; exec(open(sys.argv[1]).read())"  # -c puts the working folder on the path
    program = [sys.executable, "-c", run_in_repository, str(script)]
    names = ["toy.fwd+bwd.a-1.triton", "toy.fwd.a-1.triton"]
    try:
        text = ncu.profile(tool, tmp_path / "r.ncu-rep", names, program)
    except ncu.NcuError as error:
        if str(error) in (ncu.FORBIDDEN, ncu.BUSY):
            pytest.skip(str(error))
        raise
    launches = ncu.parse(text, names)
    assert launches[names[1]] == []
    (launch,) = launches[names[0]]
    assert 0.5 < launch["dram_bytes"] / 2**26 < 1.1
    assert launch["duration_us"] > 0
    assert launch["registers"] > 0
    assert launch["stalls"]
