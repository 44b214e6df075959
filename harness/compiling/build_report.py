"""The files that `build` writes: reports/build/<kernel>.json, and README.md made from every JSON file there.

They do not depend on when or where they were made: they have no times and no paths.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..reporting import markdown, rows_json, tables
from . import ahead, sass

SCHEMA = 2

#: fields of a row of `ahead` that are written, besides "types" and "aligned"; the others serve the build's own checks
WRITTEN = (
    "target", "jit", "constexprs", "num_warps", "num_stages", "registers", "spill_bytes", "shared_bytes", "ctas_per_sm",
    "occupancy_percent", "occupancy_limit", "mma", "loads", "stores", "uses", "bench",
)  # fmt: skip

Built = dict[str, Any]

HEAD = (
    "JIT kernel", "target", "used by", "types", "constexprs", ">warps", ">stages", ">registers", ">spills",
    ">shared", ">CTAs/SM", ">occupancy", "limit", "MMA", "load", "store",
)  # fmt: skip

SMALL_HEAD = ("JIT kernel", "target", ">kernels", ">registers", ">spills", ">shared", ">occupancy", "MMA")

INTRODUCTION = """\
# Ahead-of-time compilation

Every JIT kernel that the cases of a SPEC launch, compiled for each target without a GPU: `python -m harness build`.

- **registers** per thread. **spills**: bytes per thread stored to or loaded from local memory, the larger of the two,
  counted over the instructions as `ptxas -v` does. The build fails on a spill that the SPEC does not declare.
- **shared**: bytes per CTA. **occupancy**: theoretical occupancy, the resident warps per SM as a share of the maximum;
  **limit**: the resource that limits it. The profile has the achieved occupancy.
- **MMA**: tensor-core instructions by kind (HGMMA and QGMMA are Hopper's warp-group instructions). **load**, **store**:
  the widest access to global memory in bits; TMA moves tiles.
- **constexprs**: true ones are shown by name only; false and absent ones are omitted. **stages** is Triton's launch
  option, which a loop with its own `num_stages` overrides.
"""


def built(name: str, rows: list[dict[str, Any]], failures: Sequence[str], skipped: Sequence[str]) -> Built:
    """One kernel in the form of its file."""
    from triton import __version__

    return {
        "schema": SCHEMA,
        "kernel": name,
        "triton": __version__,
        "ptxas": sass.ptxas_version(),
        "failures": sorted(failures),
        "skipped": sorted(skipped),
        "rows": [written(row) for row in sorted(rows, key=ahead.order)],
    }


def written(row: ahead.Row) -> dict[str, Any]:
    """A row of `ahead` in the form of the file: {"types": {"*bf16": "x_ptr out_ptr", "i32": "rows"}, "aligned": "x_ptr
    rows", ...}, arguments by their type."""
    types: dict[str, list[str]] = {}
    for argument, kind in row["types"].items():
        types.setdefault(kind, []).append(argument)
    arguments = {kind: " ".join(names) for kind, names in types.items()}
    return {"types": arguments, "aligned": " ".join(row["aligned"]), **{name: row[name] for name in WRITTEN}}


def write(out: Path, kernels: Iterable[Built]) -> None:
    """Writes the kernels' files, and README.md of all files that are then in the folder."""
    out.mkdir(parents=True, exist_ok=True)
    for kernel in kernels:
        (out / f"{kernel['kernel']}.json").write_text(rows_json.dumps(kernel), encoding="utf-8")
    (out / "README.md").write_text(readme(load(out)), encoding="utf-8")


def load(folder: Path) -> list[Built]:
    """Every kernel built there, by name. ValueError for a file of another schema."""
    return [rows_json.read(path, SCHEMA) for path in sorted(folder.glob("*.json"))]


def readme(kernels: Sequence[Built]) -> str:
    """The page: a table per kernel for the bench cases, and the ranges of the other rows, which are in the JSON."""
    lines = [INTRODUCTION]
    for kernel in kernels:
        bench = [row for row in kernel["rows"] if row["bench"]]
        small = [row for row in kernel["rows"] if not row["bench"]]
        lines += [f"## {kernel['kernel']}", "", f"Triton {kernel['triton']}, ptxas {kernel['ptxas']}.", ""]
        lines += [f"- **Failed:** {failure}" for failure in kernel["failures"]]
        lines += [f"- Skipped: {reason}" for reason in kernel["skipped"]]
        lines += [""] * bool(kernel["failures"] or kernel["skipped"])
        if bench:
            lines += [*markdown.table(HEAD, map(cells, bench)), ""]
        if small:
            lines += ["Compiled for the small cases only:", "", *markdown.table(SMALL_HEAD, small_cells(small)), ""]
    return "\n".join(lines)


def show(kernel: Built) -> None:
    """Prints the same on the console: bench cases row by row, the others in one line."""
    bench = [row for row in kernel["rows"] if row["bench"]]
    title = f"{kernel['kernel']}, compiled ahead of time by Triton {kernel['triton']} and ptxas {kernel['ptxas']}"
    if bench:
        tables.show(title, HEAD, [cells(row) for row in bench])
    if small := len(kernel["rows"]) - len(bench):
        print(f"{kernel['kernel']}: {small} more kernels that only small cases launch")
    for reason in kernel["skipped"]:
        print(f"skipped: {reason}")


def cells(row: Mapping[str, Any]) -> list[object]:
    """One row under HEAD."""
    return [
        row["jit"],
        row["target"],
        ahead.uses(dict(row)),
        _types(row["types"]),
        _constexprs(row["constexprs"]),
        row["num_warps"],
        row["num_stages"],
        row["registers"],
        row["spill_bytes"],
        row["shared_bytes"],
        row["ctas_per_sm"],
        f"{row['occupancy_percent']:.0f} %",
        row["occupancy_limit"],
        _counts(row["mma"]) or "none",
        sass.widest(row["loads"]),
        sass.widest(row["stores"]),
    ]


def small_cells(rows: Sequence[Mapping[str, Any]]) -> list[list[object]]:
    """Rows under SMALL_HEAD: one for each JIT function and target, with ranges from minimum to maximum."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["jit"], row["target"]), []).append(row)

    def span(group: Sequence[Mapping[str, Any]], name: str, unit: str = "") -> str:
        low, high = min(row[name] for row in group), max(row[name] for row in group)
        return f"{low:.0f}{unit}" if low == high else f"{low:.0f} to {high:.0f}{unit}"

    return [
        [
            jit,
            target,
            len(group),
            *(span(group, name) for name in ("registers", "spill_bytes", "shared_bytes")),
            span(group, "occupancy_percent", " %"),
            ", ".join(sorted({kind for row in group for kind in row["mma"]})) or "none",
        ]
        for (jit, target), group in sorted(groups.items())
    ]


def _types(types: Mapping[str, str]) -> str:
    """The element types of the pointers, each once."""
    return " ".join(kind.removeprefix("*") for kind in types if kind.startswith("*"))


def _constexprs(constexprs: Mapping[str, Any]) -> str:
    shown = ((n, v) for n, v in constexprs.items() if v is not None and v is not False)
    return " ".join(name if value is True else f"{name}={value}" for name, value in shown)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())
