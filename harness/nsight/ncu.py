"""Nsight Compute: finding it, its command lines, its errors, and the figures in its CSV.

A launch is described by
{"name", "duration_us", "dram_bytes", "dram_pct", "l2_pct", "sm_pct", "tensor_pct", "occupancy_pct", "registers",
 "shared_bytes", "spill_bytes", "stalls": [[reason, per cent], ...]}
and, if it lies in the range of a stage, "stage". Percentages are of the peak rate over the whole duration, except
occupancy, which is over the time in which an SM was active. `spill_bytes` is the local-memory traffic through the L1
cache. A stall's percentage is of the time that warps were resident. Figures that ncu could not measure are None.
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import registry
from ..nvtx import DOMAIN, STAGES

DURATION = "gpu__time_duration.sum"
DRAM = ("dram__bytes_read.sum", "dram__bytes_write.sum")
LOCAL = ("l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum", "l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum")
REGISTERS = "launch__registers_per_thread"
SHARED = ("launch__shared_mem_per_block_static", "launch__shared_mem_per_block_dynamic")
PERCENTAGES = {
    "dram_pct": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_pct": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm_pct": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor_pct": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "occupancy_pct": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
METRICS = (DURATION, *DRAM, *LOCAL, REGISTERS, *SHARED, *PERCENTAGES.values())
#: The stall reasons differ between GPUs. Requesting a missing one by name is an error; as part of a section it is
#: omitted.
STALL_SECTION = "WarpStateStats"
_STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
#: Matches each open range of a stage, outermost first.
_STAGE = re.compile(re.escape(STAGES) + r":([^:\"]+)")
#: A warp that issues, which the counters list among the stall reasons.
_ISSUING = "selected"
#: Characters with a meaning in a range filter, and their escaped form.
_SPECIAL, _ESCAPED = re.compile(r"([@,/*+\[\]\\])"), r"\\\1"

INSTALLATIONS = ("/usr/local/cuda/bin/ncu", "/usr/local/cuda-*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")

MISSING = (
    "ncu (Nsight Compute) was not found on PATH, in /usr/local/cuda*/bin or in /opt/nvidia/nsight-compute. It is part "
    "of the CUDA toolkit; NVIDIA also has it by itself: the package nsight-compute-<version> for apt and dnf, "
    "nsight-compute in conda's channel nvidia."
)
FORBIDDEN = (
    "ncu may not read this GPU's performance counters (ERR_NVGPUCTRPERM). The driver reserves them for administrators: "
    "run as root (in a container with --cap-add=SYS_ADMIN), or let every user read them by the line 'options nvidia "
    "NVreg_RestrictProfilingToAdminUsers=0' in a file of /etc/modprobe.d and a reboot of the host."
)
BUSY = (
    "ncu could not get hold of the GPU's performance counters: another profiler or monitor has them. Where DCGM runs, "
    "`dcgmi profile --pause` frees them."
)


class NcuError(RuntimeError):
    """ncu gave no result; the message says why and what to do."""


def find() -> Path:
    """The newest ncu: that of PATH, else of the usual folders. FileNotFoundError says how to get one."""
    if found := shutil.which("ncu"):
        return Path(found)
    candidates = [path for pattern in INSTALLATIONS for path in Path("/").glob(pattern.removeprefix("/"))]
    if not candidates:
        raise FileNotFoundError(MISSING)
    return max(candidates, key=lambda path: [int(n) for n in re.findall(r"\d+", str(path))])


def version(ncu: Path) -> str:
    """The tool's version, such as '2025.3.1.0'."""
    text = subprocess.run([ncu, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"Version ([\d.]+)", text)
    return found.group(1) if found else "unknown"


def command(ncu: Path, report: Path, ranges: Iterable[str], program: Sequence[str], full: bool = False) -> list[str]:
    """Command line that profiles every kernel which `program` launches inside one of the NVTX ranges, into `report`.

    Clocks are not locked, as in the bench. Caches are flushed before each pass, which is ncu's default and corresponds
    to the bench's cold column.
    """
    sections = ["--set", "full"] if full else ["--section", STALL_SECTION]
    includes = [word for name in ranges for word in ("--nvtx-include", range_filter(name))]
    return [
        str(ncu), "--clock-control", "none", "--nvtx", *includes, *sections, "--metrics", ",".join(METRICS),
        "--apply-rules", "no", "--force-overwrite", "--export", str(report), *program,
    ]  # fmt: skip


def range_filter(name: str) -> str:
    """ncu's expression for a push/pop range of the domain."""
    return f"{DOMAIN}@{_SPECIAL.sub(_ESCAPED, name)}/"


def csv_command(ncu: Path, report: Path) -> list[str]:
    """Command line that prints the whole contents of a report."""
    return [str(ncu), "--import", str(report), "--csv", "--page", "raw", "--print-units", "base"]


def profile(ncu: Path, report: Path, ranges: Sequence[str], program: Sequence[str], full: bool = False) -> str:
    """Runs `program` under ncu and returns the report as CSV. NcuError says why there is none."""
    environment = {**os.environ, "LC_ALL": "C"}  # decimal points in figures
    output = []
    with subprocess.Popen(
        command(ncu, report, ranges, program, full), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=environment, cwd=registry.ROOT,
    ) as run:  # fmt: skip
        for line in run.stdout or ():
            output.append(line)
            if not line.startswith("=="):  # the program's own lines report its progress
                print(line, end="", flush=True)
    if run.returncode or not report.is_file():
        raise NcuError(explain("".join(output), run.returncode))
    read = subprocess.run(csv_command(ncu, report), capture_output=True, text=True, env=environment, check=False)
    if read.returncode:
        raise NcuError(explain(read.stdout + read.stderr, read.returncode))
    return read.stdout


def explain(output: str, code: int) -> str:
    """The cause of a failure, from ncu's output."""
    if "ERR_NVGPUCTRPERM" in output:
        return FORBIDDEN
    if "resource was unavailable" in output or "ERR_NVGPUCTRBUSY" in output:
        return BUSY
    lines = output.strip().splitlines()
    errors = [line for line in lines if line.startswith("==ERROR==")]
    if errors:
        # The program's own last output precedes ncu's: usually the end of a traceback.
        own = [line for line in lines if line.strip() and not line.startswith("==")]
        return " ".join([*(line.removeprefix("==ERROR==").strip() for line in errors[:3]), *own[-1:]])
    if "No kernels were profiled" in output:
        return "ncu profiled no kernel: none was launched inside an NVTX range of the domain"
    return f"ncu ended with exit code {code}: {' / '.join(lines[-3:]) or 'no output'}"


def parse(text: str, ranges: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """The launches of each range, in the order in which they ran, from `--csv --page raw`.

    The first row has names, the second units. Ranges without a launch have an empty list. NcuError if this is not such
    a table, or if it does not name the ranges.
    """
    start = text.find('"ID"')
    if start < 0:
        raise NcuError(explain(text, 0))
    table = list(csv.reader(io.StringIO(text[start:])))
    names, units = table[0], table[1] if len(table) > 1 else []
    if "Kernel Name" not in names or len(units) != len(names):
        raise NcuError("ncu's table has no row of units or no kernel names: not a raw page")
    where = [i for i, name in enumerate(names) if "Range" in name and "Domain" in name]
    if not where:
        raise NcuError("ncu's table does not tell the NVTX ranges: was it collected with --nvtx?")
    result: dict[str, list[dict[str, Any]]] = {name: [] for name in ranges}
    for row in table[2:]:
        if len(row) != len(names):
            continue
        inside = [name for name in ranges if any(_within(name, row[i]) for i in where)]
        if inside:
            figures = {name: _number(text, unit) for name, unit, text in zip(names, units, row, strict=True)}
            launch = describe(row[names.index("Kernel Name")], figures)
            stages = [stage for i in where for stage in _STAGE.findall(row[i])]
            result[max(inside, key=len)].append(launch | ({"stage": stages[-1]} if stages else {}))
    return result


def _within(name: str, cell: str) -> bool:
    """Whether a cell names a range. It reads `<thread> "<domain>:<range>:<payload>…"`, once for each open range."""
    return re.search(rf"(?<![\w.+-]){re.escape(name)}(?![\w.+-])", cell) is not None


_TIME = {"s": 1e6, "m": 1e3, "u": 1.0, "µ": 1.0, "n": 1e-3}
_SI = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def _number(text: str, unit: str) -> float | None:
    """A figure in microseconds, bytes or without a unit. ncu scales by powers of 1000, also bytes, and groups digits by
    commas."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    if not math.isfinite(value):  # ncu divided by a counter that was 0
        return None
    if time := re.fullmatch(r"(s|second)|([munµ])s(?:econd)?", unit):
        return value * _TIME[time.group(2) or "s"]
    if size := re.match(r"([KMGT]?)(?:byte|B\b)", unit, re.IGNORECASE):
        return value * _SI[size.group(1).upper()]
    return value


def describe(name: str, figures: Mapping[str, float | None]) -> dict[str, Any]:
    """Describes one launch by its metrics."""
    waits = {m.group(1): value for key, value in figures.items() if value and (m := _STALL.fullmatch(key))}
    resident = sum(waits.values())
    shares = [(100 * value / resident, reason) for reason, value in waits.items() if reason != _ISSUING]
    registers = figures.get(REGISTERS)
    shared = _sum(figures, SHARED)
    return {
        "name": name,
        "duration_us": _rounded(figures.get(DURATION), 3),
        "dram_bytes": _sum(figures, DRAM),
        **{key: _rounded(figures.get(metric), 2) for key, metric in PERCENTAGES.items()},
        "registers": None if registers is None else int(registers),
        "shared_bytes": None if shared is None else int(shared),
        "spill_bytes": _sum(figures, LOCAL),
        "stalls": [[reason, round(share, 2)] for share, reason in sorted(shares, reverse=True)[:5]],
    }


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _sum(figures: Mapping[str, float | None], names: Iterable[str]) -> float | None:
    values = [value for name in names if (value := figures.get(name)) is not None]
    return sum(values) if len(values) == len(tuple(names)) else None
