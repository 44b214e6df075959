"""The lines of a record as objects: runs, rows, and which rows are current."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: a case and a mode
Group = tuple[str, str]

#: prefix of the modes of host time, and suffix of those under torch.compile
HOST, HOST_COMPILED = "host-", "-compiled"


def slug(text: str) -> str:
    """'NVIDIA RTX 6000 Ada' -> 'nvidia-rtx-6000-ada': a name for a folder."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "unknown"


def of_several(folder: str, world_size: int) -> str:
    """'h200' -> 'h200-x2': the folder for records of several GPUs of one host."""
    return folder if world_size == 1 else f"{folder}-x{world_size}"


@dataclass
class Run:
    """One bench of a kernel: its run line, and the progress since."""

    data: Mapping[str, Any]
    starts: list[Group] = field(default_factory=list)
    stop: str | None = None
    #: groups after which the bench continued (another start) or ended
    closed: set[Group] = field(default_factory=set)
    #: groups that have at least one row
    written: set[Group] = field(default_factory=set)

    @property
    def died(self) -> bool:
        """Whether it was neither completed nor interrupted: the process died, or one of its ranks did."""
        return self.stop is None or self.stop.startswith("failed")

    @property
    def id(self) -> str:
        return str(self.data["run"])

    @property
    def kernel(self) -> str:
        return str(self.data["kernel"])

    @property
    def options(self) -> Mapping[str, Any]:
        return self.data.get("options") or {}

    @property
    def environment(self) -> Mapping[str, Any]:
        return self.data.get("environment") or {}

    @property
    def gpu(self) -> Mapping[str, Any]:
        return self.environment.get("gpu") or {}

    @property
    def ceilings(self) -> Mapping[str, Any]:
        return self.data.get("ceilings") or {}

    @property
    def world_size(self) -> int:
        """The number of GPUs that it used."""
        return int(self.data.get("world_size") or 1)

    @property
    def gpus(self) -> str:
        """'one NVIDIA H200', '2 NVIDIA H200'."""
        return f"{'one' if self.world_size == 1 else self.world_size} {self.gpu.get('name') or 'unknown GPU'}"

    @property
    def gpu_folder(self) -> str:
        """Name of the report's folder: the key in the table, or the device's name if it is not in it."""
        name = str(self.gpu.get("key") or slug(str(self.gpu.get("name") or "cpu")))
        return of_several(name, self.world_size)


@dataclass(frozen=True)
class Row:
    """One implementation of one case and mode. The fields of the schema are read with `row["..."]` or `row.get`."""

    run: Run
    data: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.data[name]

    def get(self, name: str, default: Any = None) -> Any:
        value = self.data.get(name)
        return default if value is None else value

    @property
    def kernel(self) -> str:
        return str(self.data["kernel"])

    @property
    def case(self) -> str:
        return str(self.data["case"])

    @property
    def mode(self) -> str:
        return str(self.data["mode"])

    @property
    def implementation(self) -> str:
        return str(self.data["implementation"])

    @property
    def group(self) -> tuple[str, str, str]:
        return self.kernel, self.case, self.mode

    @property
    def key(self) -> tuple[str, str, str, str]:
        return (*self.group, self.implementation)

    @property
    def ours(self) -> bool:
        return self.data.get("kind") == "ours"

    @property
    def yardstick(self) -> bool:
        return self.data.get("kind") == "yardstick"

    @property
    def host(self) -> bool:
        """Whether this is host time, which has neither cost nor roofline."""
        return self.mode.startswith(HOST)

    @property
    def status(self) -> str:
        return str(self.data["status"])

    @property
    def withdrawn(self) -> bool:
        """Whether it turned out later not to have measured what it claimed, so that it is to be repeated."""
        return self.status == "error" and str(self.get("reason", "")).startswith("withdrawn: ")

    @property
    def ok(self) -> bool:
        return self.status == "ok" and self.column() is not None

    @property
    def headline(self) -> str | None:
        return self.data.get("headline")

    def column(self, name: str | None = None) -> Mapping[str, Any] | None:
        """The column of that name, by default the headline; None if it was not measured."""
        column = (self.data.get("columns") or {}).get(name or self.headline)
        return column if column and column.get("median_us") else None

    def seconds(self, column: str | None = None) -> float:
        """The median of a column that was measured."""
        found = self.column(column)
        if found is None:
            raise KeyError(f"{'/'.join(self.key)} has no column {column or self.headline!r}")
        return float(found["median_us"]) * 1e-6


@dataclass
class Records:
    """The contents of a set of files. `rows` are current; `superseded` were measured again later."""

    runs: dict[str, Run] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    superseded: list[Row] = field(default_factory=list)

    def kernels(self) -> list[str]:
        return sorted({row.kernel for row in self.rows})

    def used_runs(self) -> list[Run]:
        """The runs of at least one current row: those of a file oldest first, the file that began first first."""
        used = {row.run.id for row in self.rows}
        return [run for run in self.runs.values() if run.id in used]

    def newest(self) -> list[Row]:
        """The rows of the last run that wrote any."""
        last = self.used_runs()[-1:]
        return [row for row in self.rows if row.run in last]

    def siblings(self, row: Row) -> list[Row]:
        """The rows of the same run, case and mode, superseded or not: what its ratios were measured against."""
        return [r for r in (*self.rows, *self.superseded) if r.run.id == row.run.id and r.group == row.group]
