"""The record: raw samples and everything needed to interpret them, as JSON lines. Reports are made from it alone.

`<out>/records/<kernel>.jsonl` is written line by line as a bench proceeds, so that an interrupted run keeps its
results. Every line is an object with a `type` and a `run` (the id that joins them):

run    once per bench of a kernel, first
       {"type": "run", "schema": 2, "run": "20261121T083106Z-3f2a", "kernel": "rmsnorm", "unit": "rows",
        "options": {"gpu": "h200", "quick": false, "timer": "auto", ...},
        "environment": {"gpu": {"key": "h200"|null, "name": "NVIDIA H200", "uuid": ..., "capability": [9, 0],
                                "sms": 132, "memory_bytes": ..., "l2_bytes": ..., "driver": "580.159",
                                "sm_clock_max_mhz": 1980, "power_limit_w": 700},
                        "python": ..., "torch": ..., "cuda": ..., "triton": ..., "packages": {"liger-kernel": "0.8.5"},
                        "variables": {"NCCL_...": ...},                      # of NCCL and symmetric memory, where set
                        "commit": "<sha>"|null, "dirty": bool, "os": ..., "time": ISO-8601 UTC},
        "world_size": 2,                                                     # GPUs of one host, where more than one
        "ceilings": {"measured": {"bandwidth": B/s of a copy, "bandwidth_read": of a read alone,
                                  "bandwidth_2r1w": of two reads and a write,  # the best is the ceiling
                                  "flops": {"bf16": FLOP/s, "fp16": ..., "tf32": ..., "fp32": ...},
                                  "link": B/s each way, "links": {"nccl": {"one way": {bytes: B/s}, ...}, ...}},
                     "datasheet": {"bandwidth", "flops"}, or null for a card that is not in the table}}
start  before the implementations of one case and mode are run: {"type": "start", "run", "kernel", "case", "mode"}.
       A start without rows or a stop after it means that the process crashed; so does a stop that "failed".
row    one per implementation of that case and mode
       {"type": "row", "run", "kernel", "case", "mode", "dims": {"rows": 8192, ...}, "dtype": "bfloat16", "params": {},
        "implementation": "triton", "kind": "ours"|"baseline"|"yardstick",
        "pytorch": bool,                                                     # of a baseline: what a user would write
        "ablation": "...",                                                   # what runs, in a table of what parts bring
        "status": "ok"|"skipped"|"oom"|"error"|"wrong"|"over-roofline"|"crashed", "reason": null|"why not ok",
                          # "error" with a reason that begins with "withdrawn: ": it had not measured what it claimed
        "cost": {"flops": {"fp32": int, ...}, "bytes": int, "link_bytes": int, "host_bytes": int},  # links where used;
        "items": 8192, "unit": "rows",                                       # in schema 1 FLOPs were of one "pipe"
        ... and for status "ok" (and "over-roofline"):
        "timer": "events"|"graph"|"cupti", "headline": "cold"|"graph"|"cupti",
        "columns": {"cold": COLUMN, "warm": COLUMN, "graph": COLUMN, "cupti": COLUMN},  # those that were measured
        "sustained": null | {"median_us", "seconds", "sm_mhz", "power_w"},   # back to back, power-limited
        "ratios": {"eager": {"median": 2.1, "ci95": [2.0, 2.2]}, ...},       # time of that one over this one's, paired
                          # by round, in the headline column; with "unthrottled": null | {"median", "ci95", "n"} if the
                          # GPU throttled in some rounds. Empty for peers, except in older records
        "noise": {"median": 1.0, "ci95": [0.998, 1.003]} | null,             # A/A: this implementation against itself
        "peak_memory_bytes": int,                                            # above what the inputs hold
        "saved_bytes": int | null,            # kept from the forward for the backward, beyond inputs and outputs; null
                                              # in "fwd" and "step"
        "growth_bytes": int | null,           # what ten more calls leave allocated (these two: not in older records)
        "error": {"max": ..., "rms": ..., "eager_max": ..., "eager_rms": ...} | null,
        "clocks": {"sm_mhz": [min, max], "temperature_c": [min, max], "power_w": [min, max],
                   "throttle": ["sw_power_cap"], "throttled_samples": 0, "samples": 40,
                   "rounds": {COLUMN's name: {"sm_mhz": [of each round], "throttled": [numbers of rounds]}}},
        "warnings": ["..."],
        "stages_us": {"attention": 5660.0, ...},                             # of SPEC.stages, where it has any
        "configuration": {"name", "instead_of": "what failed"},              # of a peer that needed a fallback
        "several": SEVERAL}                                                  # where the case is of several GPUs
       COLUMN = {"samples_us": [...], "n", "median_us", "mean_us", "std_us", "min_us", "max_us", "p95_us", "p99_us",
                 "ci95_us": [lo, hi], "outliers", "stop": "converged"|"rounds"|"time", "looks": 5}
                 A compact file has no samples of "warm".
       Host time is a row of a mode that begins with "host-" (`harness/host.py`): its only column is "host", its timer
       "host" and its cost nothing.
       SEVERAL = {"backend": "nccl"|"gloo", "rank_median_us": [of each rank], "axis": null | [series, length],
                  "outside_bytes": null | [of each rank],  # beyond PyTorch's allocator: NCCL, symmetric memory, code
                  "efficiency": null | {"median", "ci95"},  # T1 / (N · TN), paired by round
                  "alone": null | {"implementation", COLUMN of T1}, "alone_reason": "why there is no T1",
                  "exposed_us": null | {"median", "ci95"},  # time saved without transfers, paired by round
                  "local_median_us": median without transfers, "exposed_reason": "why there is none",
                  "plain": null | {"implementation", "link_bytes"},  # the uncompressed exchange (newer ones)
                  "model": null | {"us", "exposed_us", "efficiency"}}  # by SPEC.model, of ours; not in older records
       Times of several GPUs are those of the slowest rank in each round; the peak memory is the maximum over the ranks.
       On CPUs they have the timer "wall" and a column of that name, and no ceilings.
stop   {"type": "stop", "run", "kernel", "reason": "complete"|"part"|"interrupted"|"failed: rank 1 was killed by …"}
       A bench whose ranks start more than once, since their variables differ, is a separate run each time: all but the
       last end as a part.

A row supersedes an earlier row of the same (kernel, case, mode, implementation). A bench that ends compacts its file
(`compaction.py` says how); `load` restores the whole rows. Schema 1 had no compact files.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from .compaction import restore, shorten
from .reporting.entries import Group, Records, Row, Run
from .reporting.markdown import printable

SCHEMA = 2
#: schemas that `load` can read
READABLE = (1, SCHEMA)

#: Options of a bench that do not affect what it measures: they do not distinguish two runs.
NOT_IDENTITY = frozenset({"resume", "out", "turns"})

#: fields without which a line means nothing, by its type; each is a text
NEEDED = {"start": ("case", "mode"), "row": ("kernel", "case", "mode", "implementation", "status")}

Line = tuple[str, dict[str, Any]]


class RecordError(ValueError):
    """A record that cannot be trusted; the message says where and why."""


def new_run_id(now: datetime | None = None) -> str:
    """A fresh id: UTC time, so that ids sort, and four random hex digits, so that two machines do not collide."""
    now = (now or datetime.now(timezone.utc)).astimezone(timezone.utc)
    return f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"


class Writer:
    """Appends lines to a record, each flushed, so that a process that dies loses no finished line.

    A line torn by such a death is dropped when the file is opened again. Non-finite figures become null: a record never
    holds NaN.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        mend(self.path)
        self._file: IO[str] = self.path.open("a", encoding="utf-8")

    def write(self, entry: Mapping[str, Any]) -> None:
        """Writes one line. The entry needs `type` and `run`; a run line without a schema version gets the newest."""
        if "type" not in entry or "run" not in entry:
            raise ValueError(f"a record line needs 'type' and 'run', got {sorted(entry)}")
        if entry["type"] == "run":
            entry = {"type": "run", "schema": SCHEMA, **entry}
        self._file.write(dumps(entry) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        self._file.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def dumps(entry: Mapping[str, Any]) -> str:
    """Strict JSON on one line: NaN and infinities as null, numpy scalars as numbers."""
    return json.dumps(_plain(entry), allow_nan=False, separators=(",", ":"), ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, bool | None):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy scalars and arrays, without importing numpy
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int):
        return value
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a record holds only JSON values, got {type(value).__name__}")


def mend(path: Path) -> None:
    """Truncates the file after its last whole line, which removes a torn one."""
    if not path.exists():
        return
    content = path.read_bytes()
    _, _, tail = content.rpartition(b"\n")
    if not tail:
        return
    with path.open("r+b") as file:
        if _parse_line(tail.decode(errors="replace")) is None:
            file.truncate(len(content) - len(tail))
        else:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")


def _parse_line(line: str) -> dict[str, Any] | None:
    def refuse(token: str) -> None:
        raise ValueError(f"{token} is not JSON")

    try:
        entry = json.loads(line, parse_constant=refuse)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def load(path: Path | str) -> Records:
    """Loads a record file, or every `*.jsonl` of a folder: of `<folder>/records` if there is one, else of every
    `records` folder below it. RecordError names the file and line that is broken; FileNotFoundError a missing path."""
    path = Path(path)
    return parse([(str(file), decoded(str(file), file.read_bytes())) for file in files(path)])


def decoded(name: str, content: bytes) -> str:
    """The text of a record. RecordError names the file and line that is not UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        number = content[: error.start].count(b"\n") + 1
        raise RecordError(f"{name}:{number}: not UTF-8: {error.reason}") from None


def files(path: Path) -> list[Path]:
    """The record files behind a path given to `load`."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"no record at {path}")
    direct = sorted(path.glob("*.jsonl")) or sorted((path / "records").glob("*.jsonl"))
    return direct or sorted(path.glob("**/records/*.jsonl"))


def parse(texts: Iterable[tuple[str, str]]) -> Records:
    """Records from (name, content) pairs. The later of two equal keys supersedes, across files by the times of runs."""
    sources = [(name, _whole(name, text)) for name, text in texts]
    sources.sort(key=lambda source: (_first_time(source[1]), source[0]))
    return _collect(line for _, lines in sources for line in _timed(lines))


def _whole(name: str, text: str) -> list[Line]:
    """The lines of one file, with what compaction left out restored."""
    lines = list(_lines(name, text))
    try:
        restore(entry for _, entry in lines)
    except ValueError as error:
        raise RecordError(f"{name}: {error}") from None
    return lines


def _collect(lines: Iterable[tuple[str, Line]]) -> Records:
    """Joins lines with their times, as `_timed` yields them."""
    records = Records()
    latest: dict[tuple[str, ...], tuple[str, Row]] = {}
    for time, (where, entry) in lines:
        row = _take(records.runs, where, entry)
        if row is not None:
            key = (row.run.gpu_folder, *row.key)
            if key in latest and latest[key][0] > time:  # of another file
                records.superseded.append(row)
                continue
            if key in latest:
                records.superseded.append(latest.pop(key)[1])
            latest[key] = time, row
    records.rows = [row for _, row in latest.values()]
    return records


def _first_time(lines: list[Line]) -> str:
    return next((_time(e) for _, e in lines if e["type"] == "run"), "")


def _timed(lines: Iterable[Line]) -> Iterator[tuple[str, Line]]:
    """Yields the lines of a file with the latest time of a run up to each: its own order counts, whatever its clock
    did."""
    latest = ""
    for line in lines:
        if line[1]["type"] == "run":
            latest = max(latest, _time(line[1]))
        yield latest, line


def _time(run: Mapping[str, Any]) -> str:
    return str((run.get("environment") or {}).get("time"))


def _lines(name: str, text: str) -> Iterator[Line]:
    """Yields (where, entry) of each line. Only the last may be torn, by a killed process."""
    raw = text.split("\n")
    last = max((i for i, line in enumerate(raw) if line.strip()), default=-1)
    for number, line in enumerate(raw):
        if not line.strip():
            continue
        entry = _parse_line(line)
        if entry is None:
            if number == last:
                return
            raise RecordError(f"{name}:{number + 1}: not a line of JSON")
        if "type" not in entry or "run" not in entry:
            raise RecordError(f"{name}:{number + 1}: a line needs 'type' and 'run'")
        yield f"{name}:{number + 1}", entry


def _take(runs: dict[str, Run], where: str, entry: Mapping[str, Any]) -> Row | None:
    """Enters one line into `runs` and returns its row, if it is one."""
    kind, id = entry["type"], str(entry["run"])
    if kind == "run":
        if entry.get("schema") not in READABLE:
            readable = " and ".join(map(str, READABLE))
            raise RecordError(f"{where}: schema {entry.get('schema')!r}, this version reads schema {readable}")
        runs[id] = Run(entry)
        return None
    if id not in runs:
        raise RecordError(f"{where}: a {kind} of run {id!r}, which has no run line before it")
    if absent := [name for name in NEEDED.get(kind, ()) if not isinstance(entry.get(name), str)]:
        raise RecordError(f"{where}: a {kind} needs {', '.join(map(repr, absent))}")
    run = runs[id]
    if kind == "start":
        run.closed.update(run.starts[-1:])
        run.starts.append((entry["case"], entry["mode"]))
    elif kind == "stop":
        run.stop = entry.get("reason")
        if run.stop in ("complete", "part"):
            run.closed.update(run.starts[-1:])
    elif kind == "row":
        group = (entry["case"], entry["mode"])
        run.written.add(group)
        if group not in run.starts[-1:]:  # noted without being run, because it killed an earlier process
            run.closed.add(group)
        row = Row(run, entry)
        if row.ok and None in ((row.column() or {}).get("samples_us") or [None]):
            raise RecordError(f"{where}: a row that is ok needs the samples of its column {row.headline!r}")
        return row
    else:
        raise RecordError(f"{where}: unknown type {kind!r}")
    return None


@dataclass(frozen=True)
class Finished:
    """The progress of an interrupted bench, as two sets of (case, mode).

    done   measured, and the bench continued after it
    died   started without a result: the process crashed, so another try may crash again
    """

    done: frozenset[Group] = frozenset()
    died: frozenset[Group] = frozenset()


def finished(
    path: Path | str,
    *,
    options: Mapping[str, Any],
    commit: str | None,
    dirty: bool | None,
    gpu: str | None,
    among: Collection[str] | None = None,
) -> Finished:
    """The groups that `bench --resume` need not repeat. With `among`, the ids of runs of a bench that continued in
    another process, the groups that it need not repeat.

    Looks at the newest run of the file and, if that was itself a resumption, at those before it, as long as they have
    the same options (except --resume and --out), commit and GPU (device name) and were not completed. The group in
    which an interruption fell is neither done nor died: it is measured again.

    Raises ValueError if the newest run was not completed and is of another commit, or if either has uncommitted
    changes; not with `among`, whose runs are of this checkout.
    """
    path = Path(path)
    if not path.is_file():
        return Finished()
    done: set[Group] = set()
    died: set[Group] = set()
    wanted = _identity(options), commit, gpu
    runs = [run for run in load(path).runs.values() if among is None or run.id in among]
    if among is None and runs and runs[-1].stop != "complete":
        begun = runs[-1].environment
        if begun.get("commit") != commit:
            raise ValueError(f"--resume: {path} was begun at commit {begun.get('commit')}, the checkout is at {commit}")
        if dirty or begun.get("dirty"):
            when = "this checkout has" if dirty else f"{path} was begun with"
            raise ValueError(f"--resume: {when} uncommitted changes, so the code may differ")
    for back, run in enumerate(reversed(runs)):
        same = (_identity(run.options), run.environment.get("commit"), run.gpu.get("name")) == wanted
        if not same or (back and run.stop == "complete"):
            break
        done |= run.closed & run.written
        died |= {group for group in run.starts[-1:] if run.died and group not in run.written}
    return Finished(frozenset(done), frozenset(died - done))


def _identity(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in _plain(options).items() if key not in NOT_IDENTITY}


def compact(path: Path | str) -> int:
    """Rewrites a record file without superseded rows, without runs that have no row left, and without redundancy
    (`compaction.shorten`). Returns the number of lines dropped.

    Atomic: at any time the file is the old one or the new one.
    """
    path = Path(path)
    lines = _whole(str(path), decoded(str(path), Path(path).read_bytes()))
    records = _collect(_timed(lines))
    runs = {row.run.id for row in records.rows}
    rows = {id(row.data) for row in records.rows}
    alive = {(row.run.id, row.case, row.mode) for row in records.rows}
    emptied = {(row.run.id, row.case, row.mode) for row in records.superseded} - alive

    def kept(entry: dict[str, Any]) -> bool:
        if entry["type"] == "row":
            return id(entry) in rows
        group = (entry["run"], entry.get("case"), entry.get("mode"))
        return entry["run"] in runs and not (entry["type"] == "start" and group in emptied)

    remaining = [{**entry, "schema": SCHEMA} if entry["type"] == "run" else entry for _, entry in lines if kept(entry)]
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with scratch.open("w", encoding="utf-8") as file:
        file.writelines(dumps(entry) + "\n" for entry in shorten(remaining))
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)
    return len(lines) - len(remaining)
