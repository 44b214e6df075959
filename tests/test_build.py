"""The ahead-of-time build: what it sees of real launches, how it counts, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from harness import registry
from harness.commands import build
from harness.compiling import ahead, build_report, occupancy, sass
from harness.reporting import tables

H100, A100, T4, RTX3090 = (9, 0), (8, 0), (7, 5), (8, 6)


def _compiler_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=registry.ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], ahead.Outcome]:
    """What the build says of tests/ahead_samples.py, by kernel and target."""
    file = tmp_path_factory.mktemp("ahead") / "outcomes.json"
    run = _compiler_process("-m", "tests.ahead_samples", str(file))
    assert run.returncode == 0, run.stderr
    outcomes = [ahead.Outcome(**entry) for entry in json.loads(file.read_text())]
    return {(outcome.kernel, outcome.target): outcome for outcome in outcomes}


def _only(outcome: ahead.Outcome) -> dict:
    assert not outcome.failures
    assert len(outcome.rows) == 1
    return outcome.rows[0]


# What one SM holds: by hand from the limits of each capability.
@pytest.mark.parametrize(
    ("capability", "threads", "registers", "shared", "ctas", "percent", "limit"),
    [
        (H100, 128, 32, 0, 16, 100.0, "warps"),
        (H100, 256, 64, 0, 4, 50.0, "registers"),
        (H100, 128, 255, 0, 2, 12.5, "registers"),  # 255 is given out as 256: two warps in each quarter
        (H100, 384, 168, 0, 1, 18.75, "registers"),  # three warp groups, as Hopper's attention kernels have
        (H100, 32, 16, 0, 32, 50.0, "ctas"),
        (H100, 128, 32, 100 * 1024, 2, 12.5, "shared"),  # 2 x 101 KiB of 228
        (H100, 128, 32, 113 * 1024, 2, 12.5, "shared"),  # 2 x 114 KiB is exactly 228: the reserved KiB counts
        (H100, 128, 32, 113 * 1024 + 1, 1, 6.25, "shared"),
        (A100, 128, 32, 48 * 1024, 3, 18.75, "shared"),
        (A100, 1024, 32, 0, 2, 100.0, "warps"),
        (RTX3090, 1024, 32, 0, 1, 100 * 32 / 48, "warps"),
        (T4, 256, 64, 32 * 1024, 2, 50.0, "shared"),
        (H100, 1024, 65, 0, 0, 0.0, "registers"),
        (H100, 128, 256, 0, 0, 0.0, "registers"),
        (H100, 128, 32, 227 * 1024 + 1, 0, 0.0, "shared"),
        (H100, 1056, 16, 0, 0, 0.0, "warps"),
    ],
)
def test_occupancy(capability, threads, registers, shared, ctas, percent, limit):
    found = occupancy.calculate(capability, threads, registers, shared)
    assert (found.ctas, found.percent, found.limit) == (ctas, pytest.approx(percent), limit)


def test_occupancy_of_an_unknown_capability_lists_the_known():
    with pytest.raises(ValueError, match=r"\(3, 5\); known: 7\.5, 8\.0"):
        occupancy.limits((3, 5))


def test_every_gpu_of_the_table_has_limits():
    from harness import roofline

    for boards in roofline.table().values():
        assert occupancy.limits(boards[0].capability).shared > 0


SASS = """
Resource usage:
 Common:
  GLOBAL:0
 Function _k:
  REG:168 STACK:16 SHARED:1024 LOCAL:0 CONSTANT[0]:560 TEXTURE:0 SURFACE:0 SAMPLER:0

\tcode for sm_90a
\t\tFunction : _k
        /*0000*/                   LDC R1, c[0x0][0x28] ;                  /* 0x00000a00ff017b82 */
                                                                           /* 0x000e220000000800 */
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;        /* 0x0000000000007919 */
        /*0020*/              @!P0 LDG.E R4, desc[UR4][R2.64] ;            /* 0x0000000000007919 */
        /*0030*/               @P1 LDG.E.U16 R4, desc[UR4][R2.64] ;        /* 0x0000000000007919 */
        /*0040*/                   LDGSTS.E.BYPASS.128 [R5], desc[R2.64] ; /* 0x0000000000007919 */
        /*0050*/                   STL [R1], R9 ;                          /* 0x0000000000007919 */
        /*0060*/                   STL.64 [R1+0x8], R10 ;                  /* 0x0000000000007919 */
        /*0070*/                   LDL.LU R9, [R1] ;                       /* 0x0000000000007919 */
        /*0080*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ; /* 0x0000000000007919 */
        /*0090*/                   HFMA2.MMA R1, -RZ, RZ, 0, 0 ;           /* 0x0000000000007919 */
        /*00a0*/              @UP0 UTMALDG.2D [UR8], [UR4] ;               /* 0x0000000000007919 */
        /*00b0*/                   STG.E.64 desc[UR4][R2.64], R4 ;         /* 0x0000000000007919 */
        /*00c0*/                   F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R7, R34, R7, RZ ; /* 0x0000000000007919 */
        /*00d0*/                   F2FP.SATFINITE.E5M2.F32.PACK_AB_MERGE_C R7, R34, R7, R7 ; /* 0x0000000000007919 */
        /*00e0*/                   F2FP.BF16.F32.PACK_AB R7, R34, R7 ;     /* 0x0000000000007919 */
        /*00f0*/                   F2FP.F16.E4M3.UNPACK_B R7, R34 ;        /* 0x0000000000007919 */
"""


def test_sass_is_counted():
    usage = sass.parse(SASS)
    assert (usage.registers, usage.stack) == (168, 16)
    assert (usage.spill_stores, usage.spill_loads, usage.spills) == (12, 4, 12)
    assert usage.mma == {"HGMMA": 1}  # HFMA2.MMA is arithmetic on pairs of halves, not the tensor core
    assert usage.loads == {"LDG.128": 1, "LDG.16": 1, "LDG.32": 1, "LDGSTS.128": 1, "TMA": 1}
    assert sass.widest(usage.loads) == "TMA"
    assert sass.widest({"LDG.64": 9, "LDG.128": 1}) == "LDG.128"
    assert sass.widest(usage.stores) == "STG.64"
    assert sass.widest({}) == ""
    assert usage.to_fp8 == 2


def test_arrivals_that_do_not_wait_for_reads_fail_beyond_what_is_granted(samples):
    row = _only(samples["square", "sm_90"])
    assert (row["early_arrivals"], row["early_allowed"]) == (0, 0)
    assert ahead.faults({**row, "early_arrivals": 1, "early_allowed": 1}, (9, 0)) == []
    for granted in (0, 1):
        (fault,) = ahead.faults({**row, "early_arrivals": granted + 1, "early_allowed": granted}, (9, 0))
        assert f"may then write over: {granted + 1}" in fault


def test_a_conversion_to_fp8_that_ptxas_makes_twice_fails(samples):
    row = _only(samples["square", "sm_90"])
    assert row["to_fp8"] == [0, 0]
    assert ahead.faults({**row, "to_fp8": [8, 8]}, (9, 0)) == []
    assert ahead.faults({**row, "to_fp8": [8, 2]}, (9, 0)) == []  # of equal ones, one is enough
    (fault,) = ahead.faults({**row, "to_fp8": [8, 10]}, (9, 0))
    assert "converts to fp8 8 times in PTX and 10 times in SASS" in fault
    assert sass.to_fp8("cvt.rn.satfinite.e4m3x2.f32  %rs1, %r2, %r3; cvt.rn.f16x2.e4m3x2 %r1, %rs1;") == 1


# A read of shared memory, a remote arrival, and the first use of what was read: by NVRTC 13 for sm_90a.
READ_AND_ARRIVE = """
        /*00a0*/                   LDS R5, [R0] ;                                         /* 0x0000000000057984 */
                                                                                          /* 0x000e220000000800 */
        /*00b0*/                   ISETP.GT.U32.AND P0, PT, R4, 0x1, PT ;                 /* 0x000000010400780c */
                                                                                          /* 0x000fda0003f04070 */
        /*00e0*/                   NOP ;                                                  /* 0x0000000000007918 */
                                                                                          /* 0x000fc60000000000 */
        /*00f0*/              @!P0 SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [R4+URZ], RZ ;       /* 0x000000ff04ff89a7 */
                                                                                          /* 0x000fe2000810043f */
        /*0100*/                   STG.E desc[UR4][R2.64], R5 ;                           /* 0x0000000502007986 */
                                                                                          /* 0x001fe2000c101904 */
        /*0110*/                   EXIT ;                                                 /* 0x000000000000794d */
                                                                                          /* 0x000fea0003800000 */
"""
# A loop whose arrival is ahead of its read, so that it gives back what the turn before has read.
ARRIVE_AND_READ = """
        /*0140*/                   ISETP.EQ.OR P1, PT, RZ, UR4, P0 ;                      /* 0x00000004ff007c0c */
                                                                                          /* 0x000fda0008722670 */
        /*0160*/              @!P1 SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [R2+URZ], RZ ;       /* 0x000000ff02ff99a7 */
                                                                                          /* 0x0007e2000810043f */
        /*01a0*/                   STG.E desc[UR6][R2.64], R11 ;                          /* 0x0000000b02007986 */
                                                                                          /* 0x0101e2000c101906 */
        /*01d0*/                   LDS R11, [R0] ;                                        /* 0x00000000000b7984 */
                                                                                          /* 0x0003220000000800 */
        /*0200*/              @!P1 BRA 0x140 ;                                            /* 0xfffffffc00cc9947 */
                                                                                          /* 0x000fea000383ffff */
        /*0240*/                   STG.E desc[UR6][R2.64], R11 ;                          /* 0x0000000b02007986 */
                                                                                          /* 0x010fe2000c101906 */
        /*0250*/                   EXIT ;                                                 /* 0x000000000000794d */
                                                                                          /* 0x000fea0003800000 */
"""
WAITS_FOR_0 = "0x000fc60000000000", "0x001fc60000000000"


@pytest.mark.parametrize(
    ("old", "new", "count"),
    [
        ("", "", 1),
        ("LDS R5", "LDSM.16.M88.4 R4", 1),
        ("LDS R5", "LDS.U.128 R4", 1),
        ("LDS R5", "@P1 LD.E R5", 1),  # a generic address
        ("LDS R5", "ATOMS.ADD R5", 1),
        ("LDS R5", "LDG.E R5", 0),
        ("RED.A1T0", "A1T0", 0),  # at an mbarrier of this CTA
        (*WAITS_FOR_0, 0),
        ("0x000fc60000000000", "0x03ffe20000000000", 0),  # as fence_reads() does, for all scoreboards
        ("0x000fc60000000000", "0x002fc60000000000", 1),  # for another one
        ("0x000fe2000810043f", "0x001fe2000810043f", 0),  # the arrival itself waits
        ("0x000e220000000800", "0x000fe20000000800", 0),  # no scoreboard, so the result is not used
        ("0x000e220000000800", "0x000ee20000000800", 1),  # scoreboard 3: nothing waits for it
        ("NOP ;", "BRA 0x100 ;", 0),  # past the arrival
        ("NOP ;", "@P0 BRA 0x100 ;", 1),
        ("NOP ;", "BRA.DIV UR4, 0x100 ;", 1),
        ("NOP ;", "EXIT ;", 0),
    ],
)
def test_arrivals_that_do_not_wait_for_reads_are_counted(old, new, count):
    assert old in READ_AND_ARRIVE
    assert len(sass.early_arrivals(READ_AND_ARRIVE.replace(old, new, 1))) == count
    assert sass.parse("REG:12 STACK:0" + READ_AND_ARRIVE.replace(old, new, 1)).early_arrivals == count


def test_arrivals_in_the_own_cta_are_found_by_themselves():
    own = READ_AND_ARRIVE.replace("RED.A1T0", "A1T0")
    assert (sass.early_arrivals(own), sass.early_arrivals(own, own=True)) == ([], [["LDS.32"]])
    assert sass.early_arrivals(own.replace(*WAITS_FOR_0), own=True) == []
    assert sass.early_arrivals(READ_AND_ARRIVE, own=True) == []
    usage = sass.parse("REG:12 STACK:0" + own)
    assert (usage.early_arrivals, usage.early_own_reads) == (0, {"LDS.32": 1})
    expecting = own.replace(".A1T0 RZ, [R4+URZ], RZ", " RZ, [R4+URZ], R6")
    assert sass.early_arrivals(expecting, own=True) == []


LINE = READ_AND_ARRIVE.index("        /*00b0*/")  # of what follows the read


@pytest.mark.parametrize(
    ("code", "scoreboard", "pending"),
    [
        ("LDSM.16.M88.4 R8, [R1]", 0, ["LDS.32", "LDSM"]),
        ("LDSM.16.M88.4 R8, [R1]", 1, ["LDS.32", "LDSM"]),
        ("LDS.U.128 R8, [R1]", 1, ["LDS.128", "LDS.32"]),
        ("LDS R8, [R1]", 1, ["LDS.32"]),
    ],
)
def test_the_kinds_of_pending_reads(code, scoreboard, pending):
    """Of two reads; a wait for the first one's scoreboard leaves the other's, if that is another."""
    control = f"0x{0x000E200000000800 | scoreboard << 46:016x}"
    read = f"        /*00a8*/  {code} ;  /* 0x0000000000087984 */\n  /* {control} */\n"
    both = (READ_AND_ARRIVE[:LINE] + read + READ_AND_ARRIVE[LINE:]).replace("RED.A1T0", "A1T0")
    assert sass.early_arrivals(both, own=True) == [pending]
    second = [kind for kind in pending if kind != "LDS.32" or len(pending) == 1]
    assert sass.early_arrivals(both.replace(*WAITS_FOR_0), own=True) == ([second] if scoreboard else [])
    assert sass.parse("REG:12 STACK:0" + both).early_own_reads == dict.fromkeys(pending, 1)


def test_a_read_is_pending_in_the_next_turn_of_a_loop():
    early = [["LDS.32"]]
    assert sass.early_arrivals(ARRIVE_AND_READ) == early
    assert sass.early_arrivals(ARRIVE_AND_READ.replace("@!P1 BRA 0x140", "@!P1 BRA 0x1a0")) == []
    assert sass.early_arrivals(ARRIVE_AND_READ.replace("0x000fea000383ffff", "0x010fea000383ffff")) == []
    assert sass.early_arrivals(ARRIVE_AND_READ + READ_AND_ARRIVE) == 2 * early  # of two functions
    assert sass.early_arrivals(ARRIVE_AND_READ + READ_AND_ARRIVE.replace(*WAITS_FOR_0)) == early


def test_arrivals_without_their_encodings_are_refused():
    with pytest.raises(RuntimeError, match="without their encodings"):
        sass.early_arrivals("\n".join(READ_AND_ARRIVE.splitlines()[1::2]))


def test_output_that_is_not_sass_is_refused():
    with pytest.raises(RuntimeError, match="no resource usage"):
        sass.parse("cuobjdump info: file does not contain device code")


def test_threads_are_those_of_the_ptx():
    assert sass.threads(".visible .entry k()\n.reqntid 384, 1, 1\n", num_warps=4) == 384
    assert sass.threads(".maxntid 128\n", num_warps=4) == 128
    assert sass.threads("", num_warps=2) == 64


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_forward_backward_and_specialisation_are_seen(samples, target):
    outcome = samples["scale", target]
    assert outcome.failures == []
    by_cases = {tuple(map(tuple, row["uses"])): row for row in outcome.rows}
    # Two cases of one specialisation are one kernel, and the backward, an op that calls an op, launches it too.
    shared = next(row for uses, row in by_cases.items() if ("4096", "fwd") in uses)
    assert {("4096", "bwd"), ("again", "fwd"), ("again", "bwd")} <= set(map(tuple, shared["uses"]))
    assert shared["bench"]
    assert shared["aligned"] == ["x_ptr", "y_ptr", "n"]
    assert sass.widest(shared["loads"]) == "LDG.128"
    # A view that starts at element 1 is not 16-byte aligned, which costs it the wide loads.
    offset = by_cases[(("offset", "fwd"),)]
    assert "x_ptr" not in offset["aligned"]
    assert sass.widest(offset["loads"]) == "LDG.32"
    assert not offset["bench"]
    assert shared["types"] == {"x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i32", "by": "fp32"}


def test_launchers_see_the_gpu_that_is_compiled_for(samples):
    multiprocessors = {
        target: {row["constexprs"]["SMS"] for row in samples["scale", target].rows} for target in ("sm_80", "sm_90")
    }
    assert multiprocessors == {"sm_80": {108}, "sm_90": {132}}


def test_a_case_that_the_target_cannot_run_is_skipped_with_its_reason(samples):
    assert samples["scale", "sm_80"].skipped == ["sm_80 half: needs compute capability 9.0"]
    assert samples["scale", "sm_90"].skipped == []
    assert any(["half", "fwd"] in row["uses"] for row in samples["scale", "sm_90"].rows)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_an_implementation_that_the_target_cannot_run_is_skipped_with_its_reason(samples, target):
    outcome = samples["two", target]
    assert outcome.skipped == [f"{target} cuda: needs sm_100"] and _only(outcome)


def test_tensor_core_instructions_are_those_of_the_target(samples):
    ampere, hopper = _only(samples["square", "sm_80"]), _only(samples["square", "sm_90"])
    assert set(ampere["mma"]) == {"HMMA"}
    assert set(hopper["mma"]) == {"HGMMA"}
    assert ampere["shared_bytes"] > 0
    assert ampere["threads"] == 128


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_gluon_takes_the_same_path(samples, target):
    row = _only(samples["copy", target])
    assert (row["jit"], row["constexprs"]["BLOCK"], row["mma"]) == ("_copy_kernel", 512, {})


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_a_spill_that_is_not_declared_fails(samples, target):
    outcome = samples["spilling", target]
    spilled = outcome.rows[0]["spill_bytes"]
    assert spilled > 0
    assert outcome.failures == [
        f"{target} _spilling_kernel (2048 fwd) spills {spilled} bytes per thread, SPEC.spills allows none"
    ]
    granted = samples["granted", target]
    assert granted.failures == []
    assert granted.rows[0]["spill_bytes"] == spilled


def test_a_kernel_that_no_sm_can_hold_fails(samples):
    assert re.search(
        r"does not fit .* too little shared: .* it may have 232448", samples["greedy", "sm_90"].failures[0]
    )
    assert samples["greedy", "sm_90"].rows[0]["ctas_per_sm"] == 0


def test_what_does_not_compile_fails_and_the_other_cases_stand(samples):
    outcome = samples["broken", "sm_80"]
    assert len(outcome.failures) == 1
    assert outcome.failures[0].startswith("sm_80 broken.fwd.large.triton: ")
    assert "the block is too large" in outcome.failures[0]
    assert [row["uses"] for row in outcome.rows] == [[["fits", "fwd"]]]


def test_an_op_that_launches_nothing_fails(samples):
    assert samples["silent", "sm_90"].failures == ["sm_90: silent launched no kernel in any case"]


def test_spills_are_counted_as_ptxas_counts_them(samples, tmp_path):
    script = (
        "import sys, triton; from tests.ahead_samples import *; from harness.compiling import ahead, launches, sass\n"
        "with launches.record((9, 0)) as seen:\n"
        "    spilling(torch.empty(2048, device='cuda'))\n"
        "print(sass.tool('ptxas'))\n"
        "open(sys.argv[1], 'w').write(seen[0].compiled.asm['ptx'])\n"
    )
    ptx = tmp_path / "k.ptx"
    run = _compiler_process("-c", script, str(ptx))
    assert run.returncode == 0, run.stderr
    command = [
        run.stdout.strip(),
        "-v",
        "--regAllocOptLevel=2",
        "--gpu-name=sm_90a",
        str(ptx),
        "-o",
        str(tmp_path / "k"),
    ]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    stores, loads = map(int, re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said).groups())
    row = samples["spilling", "sm_90"].rows[0]
    assert (row["spill_store_bytes"], row["spill_load_bytes"]) == (stores, loads)


def test_everything_is_put_back():
    script = (
        "import torch, triton; from triton.runtime.jit import JITFunction; from triton.runtime.driver import driver\n"
        "from torch._subclasses.fake_tensor import FakeTensor; from harness.compiling import launches\n"
        "def state(): return (JITFunction.run, driver._active, torch.cuda.device, torch.cuda.get_device_properties,\n"
        "    torch.cuda.current_stream, vars(FakeTensor)['device'], 'data_ptr' in vars(FakeTensor),\n"
        "    torch._C._len_torch_dispatch_stack())\n"
        "before = state()\n"
        "try:\n"
        "    with launches.record((9, 0)):\n"
        "        assert state() != before; assert torch.empty(1, device='cuda').is_cuda; raise KeyError\n"
        "except KeyError: pass\n"
        "assert state() == before; print('as before')\n"
    )
    run = _compiler_process("-c", script)
    assert run.stdout.strip() == "as before", run.stderr


def test_the_interpreter_is_refused_with_the_remedy():
    script = (
        "import os; os.environ['TRITON_INTERPRET'] = '1'\n"
        "from harness.compiling import launches\n"
        "try:\n"
        "    with launches.record((9, 0)): print('compiled')\n"
        "except launches.Interpreted as error: print(error)\n"
    )
    run = _compiler_process("-c", script)
    assert "unset TRITON_INTERPRET" in run.stdout, run.stderr


def test_an_unknown_target_lists_the_known():
    launches = pytest.importorskip("harness.compiling.launches", reason="needs Triton, which there is on Linux alone")
    with pytest.raises(ValueError, match=r"known: 10\.0, 7\.5, 8\.0"):
        launches.gpu_of((5, 2))


# The command, its files and its exit code.


def _built(samples, name: str) -> build_report.Built:
    outcomes = [outcome for (kernel, _), outcome in samples.items() if kernel == name]
    return build.merge(SimpleNamespace(name=name), outcomes)


def test_the_report_is_the_same_whoever_makes_it(samples, tmp_path):
    kernels = [_built(samples, name) for name in ("scale", "square", "spilling")]
    build_report.write(tmp_path / "a", kernels)
    build_report.write(tmp_path / "b", list(reversed(kernels)))
    for file in sorted((tmp_path / "a").iterdir()):
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
        assert "/tmp" not in file.read_text()
        assert str(Path.home()) not in file.read_text()
    assert build_report.load(tmp_path / "a") == sorted(kernels, key=lambda kernel: kernel["kernel"])


def test_the_page_shows_bench_cases_first_and_what_failed(samples):
    page = build_report.readme([_built(samples, "scale"), _built(samples, "spilling")])
    assert page.index("4096 bwd, 4096 fwd and 3 more") < page.index("Compiled for the small cases only")
    assert "| _scale_kernel | sm_90 | 2 | " in page  # those of the cases offset and half
    assert "- **Failed:** sm_90 _spilling_kernel (2048 fwd) spills" in page
    assert "- Skipped: sm_80 half: needs compute capability 9.0" in page
    assert "SMS=132 BLOCK=1024" in page


def test_a_folder_of_another_schema_is_refused(tmp_path):
    (tmp_path / "k.json").write_text('{"schema": 99}')
    with pytest.raises(ValueError, match="schema 99"):
        build_report.load(tmp_path)


def _arguments(tmp_path: Path, **given) -> SimpleNamespace:
    options = {"kernel": None, "case": None, "mode": None, "impl": None, "quick": False, "out": None}
    return SimpleNamespace(**{**options, "worker": None, "pair": [], **given})


@pytest.mark.parametrize(("kernel", "code"), [("square", 0), ("spilling", 1), ("silent", 1)])
def test_exit_code(samples, tmp_path, monkeypatch, capsys, kernel, code):
    spec = SimpleNamespace(name=kernel, compile_targets=(A100, H100))
    outcomes = [outcome for (name, _), outcome in samples.items() if name == kernel]
    monkeypatch.setattr(build, "_selections", lambda arguments: [SimpleNamespace(spec=spec)])
    monkeypatch.setattr(build, "run_workers", lambda pairs, arguments: outcomes)
    assert build.main(_arguments(tmp_path, out=tmp_path / "out")) == code
    assert (tmp_path / "out" / f"{kernel}.json").is_file()
    assert ("FAILED" in capsys.readouterr().err) == bool(code)


@pytest.mark.parametrize("part", [{"quick": True}, {"case": ["64"]}, {"mode": ["fwd"]}])
def test_a_part_of_a_kernel_does_not_overwrite_the_whole(samples, tmp_path, monkeypatch, part):
    spec = SimpleNamespace(name="square", compile_targets=(A100,))
    monkeypatch.setattr(registry, "ROOT", tmp_path)
    monkeypatch.setattr(build, "_selections", lambda arguments: [SimpleNamespace(spec=spec)])
    monkeypatch.setattr(build, "run_workers", lambda pairs, arguments: [samples["square", "sm_80"]])
    assert build.main(_arguments(tmp_path, **part)) == 0
    assert not (tmp_path / "reports").exists()
    assert build.main(_arguments(tmp_path)) == 0
    assert (tmp_path / "reports" / "build" / "README.md").is_file()


def test_a_kernel_from_outside_is_not_written_into_the_checkout(samples, tmp_path, monkeypatch):
    spec = SimpleNamespace(name="square", compile_targets=(A100,))
    monkeypatch.setattr(registry, "ROOT", tmp_path / "checkout")
    monkeypatch.setattr(build, "_selections", lambda arguments: [SimpleNamespace(spec=spec)])
    monkeypatch.setattr(build, "run_workers", lambda pairs, arguments: [samples["square", "sm_80"]])
    monkeypatch.setenv(registry.OUTSIDE, json.dumps({"square": "/elsewhere/square.py:SPEC"}))
    monkeypatch.chdir(tmp_path)
    assert build.main(_arguments(tmp_path)) == 0
    assert (tmp_path / ".out" / "build" / "square.json").is_file() and not (tmp_path / "checkout").exists()


def test_a_worker_that_dies_is_a_failure_of_its_pairs(tmp_path):
    outcomes = build._collect(-9, [("square", A100), ("copy", H100)], tmp_path / "absent.json")
    assert [(o.kernel, o.target) for o in outcomes] == [("square", "sm_80"), ("copy", "sm_90")]
    assert all("exit code -9" in o.failures[0] for o in outcomes)


def test_workers_neither_interpret_nor_see_a_gpu(tmp_path, monkeypatch):
    started = {}
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(subprocess, "Popen", lambda command, **rest: started.update(command=command, **rest))
    build._start([("rmsnorm", H100)], tmp_path / "f", _arguments(tmp_path, mode=["bwd"], quick=True))
    assert "TRITON_INTERPRET" not in started["env"]
    assert started["env"]["CUDA_VISIBLE_DEVICES"] == ""
    assert started["command"][-5:] == ["--pair", "rmsnorm:9.0", "--mode", "bwd", "--quick"]
    assert build._parse_pair("rmsnorm:9.0") == ("rmsnorm", H100)


def test_plain_tables_are_aligned():
    lines = tables.plain("title", ("name", ">n"), [["a", "1"], ["long", "100"]])
    assert lines == ["title", "name    n", "a       1", "long  100"]


def test_a_kernel_of_several_gpus_alone_launches_nothing_here_and_that_is_no_failure():
    spec = registry.load("rmsnorm")
    outcome = ahead.compile_spec(spec, (9, 0), [replace(spec.cases[0], name="ring", world_size=2)], ("fwd",))
    assert outcome.failures == [] and outcome.rows == []
    assert outcome.skipped[-1] == "sm_90 ring: needs 2 GPUs of one host: bench --gpus 2"


@pytest.mark.gpu
def test_the_build_compiles_what_a_launch_runs():
    """The kernels that the stand-ins lead to are those, to the hash, that the same call launches on this GPU."""
    from triton.runtime.jit import JITFunction

    from harness.compiling import launches
    from harness.execute import bind

    capability = torch.cuda.get_device_capability()
    spec = registry.load(registry.names()[0])
    case = next(case for case in spec.cases if case.bench)
    real: list[str] = []
    original = JITFunction.run

    def run(self, *args, **kwargs):
        compiled = original(self, *args, **kwargs)
        real.append(compiled.hash)
        return compiled

    fn = next(iter(spec.implementations.values()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        bind(spec, fn, spec.make_inputs(case, "cuda", None), "bwd")()
    with launches.record(capability) as seen:
        bind(spec, fn, spec.make_inputs(case, "cuda", None), "bwd")()
    assert [launch.compiled.hash for launch in seen] == real


def test_what_an_op_tells_the_allocator_of_streams_does_not_stop_it():
    """The update with clipping, whose table is used on a stream that is a stand-in here."""
    script = """
from harness.compiling import ahead
from harness import registry
spec = registry.load("adamw")
cases = [case for case in spec.cases if case.name == "clip-fp32"]
outcome = ahead.compile_spec(spec, (9, 0), cases, ("step",), ("triton",))
assert outcome.rows and not outcome.failures, outcome.failures
"""
    done = _compiler_process("-c", script)
    assert done.returncode == 0, done.stderr
