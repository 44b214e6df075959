"""The pages of one kernel: one with its charts, summary, profile and configurations, and one for each mode with every
implementation, case and column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import roofline
from . import breakdown, by_stage, choices, host, link_speeds, memory_table, pages, several, training
from . import markdown as md
from .entries import Records, Row
from .findings import Finding, cost_of, is_reference, modes_of

RESULT_HEAD = (
    "implementation", ">median", ">95 % CI", ">this kernel's speed-up", ">throughput", ">% of measured roofline",
    ">% of datasheet roofline", ">items/s", ">peak memory", ">max error", ">RMS error",
)  # fmt: skip

COLUMN_HEAD = (
    "implementation", "timing", ">median", ">95 % CI", ">mean", ">std", ">min", ">max", ">p95", ">p99", ">outliers",
    ">samples", "stop reason",
)  # fmt: skip

CLOCK_HEAD = ("implementation", ">SM clock", ">temperature", ">power", "throttled", "sustained", "A/A ratio", "timer")

PROFILE_HEAD = (
    "implementation", "kernel", ">time µs", ">DRAM", ">DRAM %", ">L2 %", ">SM %", ">tensor %", ">occupancy %",
    ">registers", ">shared", ">spill", "stalls",
)  # fmt: skip


CHART_TEXT = (
    "One line per case, one marker per implementation; the tables give the reason if an implementation was not "
    "measured. *(graph)* or *(warm)* after a case: timed in a CUDA graph or with a warm L2 instead of a cold one."
)

MODE_TEXT = (
    "- **Bold** implementations are this kernel's versions, the others its peers. The reported *timing* of a case is "
    "cold (L2 flushed before each call), warm, or in a CUDA graph.",
    "- **Compulsory** work: each input read once, each output written once, the useful FLOPs. **Floor**: the "
    "roofline's lower bound on the time for this work, at peak rates measured on this GPU and at those of the "
    "datasheet; **% of roofline**: the floor divided by the median.",
    "- **This kernel's speed-up**: the time of the row divided by that of this kernel's default version, per round.",
    "- **Items/s** counts the kernel's unit, such as elements or tokens.",
    "- **Errors** are relative to the fp64 oracle; after the slash, the error of PyTorch eager in the same dtype.",
    memory_table.TEXT,
    "- **Sustained**: median of back-to-back calls over the given time. **A/A ratio**: this kernel's time relative to "
    "itself, timed as two implementations.",
)


def page(
    kernel: str,
    gpu: str,
    records: Records,
    found: Sequence[Finding],
    profile: Mapping[str, Any] | None,
    tuned: Mapping[str, Any] | None,
    charts: bool,
    trend: bool = False,
    trained: bool = False,
) -> list[str]:
    """<kernel>.md. `profile` and `tuned` are the contents of these files, if there are any; `trend` and `trained` say
    whether there is a page of times over the history, and one of a training."""
    modes = modes_of(found)
    links = " · ".join(f"[{mode}: all implementations]({pages.stem(kernel, mode)}.md)" for mode in modes)
    lines = [f"# {kernel} on {gpu}", "", pages.GENERATED, "", f"[All kernels](README.md) · {links}", ""]
    if trend:
        lines[-2] += f" · [over time]({kernel}-trend.md)"
    if trained:
        lines[-2] += f" · [training]({training.stem(kernel)}.md)"
    if charts:
        lines += _charts(kernel, gpu, found)
    lines += ["## Summary", "", *pages.SUMMARY, "", *pages.summary(found), ""]
    lines += breakdown.stages(found) + breakdown.ablation(found)
    if trained and charts:
        lines += ["## Training", "", *training.image(kernel)]
    lines += several.section(found, charts)
    lines += link_speeds.section(found)
    lines += host.section(records, kernel)
    if profile:
        lines += ["## Profile", "", *profiled(profile), ""]
    if tuned:
        lines += ["## Configurations", "", *choices.section(tuned)]
    runs = [run for run in records.used_runs() if run.kernel == kernel]
    lines += ["## Runs", "", *pages.run_table(runs), ""]
    return lines


def _charts(kernel: str, gpu: str, found: Sequence[Finding]) -> list[str]:
    lines = [line for mode in modes_of(found) for line in pages.chart(kernel, found, mode, gpu)]
    lines = [*lines, CHART_TEXT, ""] if lines else []
    return [*lines, f"![{kernel}: roofline]({kernel}-roofline.svg)", ""]


def mode_page(kernel: str, mode: str, gpu: str, found: Sequence[Finding], charts: bool) -> list[str]:
    """<kernel>-<mode>.md: every implementation of every case, with every timing. `found` has the kernel's findings."""
    links = [f"[{kernel}]({kernel}.md)", "[All kernels](README.md)"]
    links += [f"[{other}]({pages.stem(kernel, other)}.md)" for other in modes_of(found) if other != mode]
    lines = [f"# {kernel} {mode} on {gpu}", "", pages.GENERATED, "", " · ".join(links), ""]
    if charts and (image := pages.chart(kernel, found, mode, gpu)):
        lines += [*image, CHART_TEXT, ""]
    lines += [*MODE_TEXT, ""]
    for finding in (f for f in found if f.mode == mode):
        lines += [*case(finding), ""]
    return lines


def case(finding: Finding) -> list[str]:
    """The section of one case in one mode."""
    first = finding.rows[0]
    settings = [f"{k} = {v}" for k, v in {**first.get("dims", {}), **first.get("params", {})}.items()]
    lines = [f"## {finding.case}", "", f"{', '.join([first.get('dtype', ''), *settings])}. {_work(finding)}", ""]
    for name, share in finding.of_yardsticks():
        lines += [f"This kernel reaches {md.percent(100 * share)} of the rate of **{name}** in the same rounds.", ""]
    notes: set[str] = set()
    measured = [row for row in finding.rows if row.ok]
    if measured:
        lines += md.table(RESULT_HEAD, [_result(finding, row, notes) for row in measured])
    lines += ["", *pages.explained(notes)] if notes else []
    absent = [row for row in finding.rows if not row.ok]
    if absent:
        lines += ["", *(f"- {row.implementation}: **{row.status}**, {row.get('reason', '')}" for row in absent)]
    smaller = [(row.implementation, row["configuration"]) for row in measured if row.get("configuration")]
    if smaller:
        said = (f"- {name} ran with {c['name']}; its default failed: {c['instead_of']}" for name, c in smaller)
        lines += ["", *said]
    warnings = [f"- {row.implementation}: {text}" for row in finding.rows for text in row.get("warnings", [])]
    if warnings:
        lines += ["", "Warnings by the harness:", "", *warnings]
    lines += memory_table.section([row.data for row in measured])
    if measured:
        lines += ["", *md.details("all timings, clocks and noise", _everything(measured))]
    return lines


def _work(finding: Finding) -> str:
    cost = finding.cost
    work = [md.size(cost.bytes)]
    work += [f"{md.size(moved)} over the {name}" for name, moved in _links(cost) if moved]
    work += [f"{md.prefixed(flops, 'FLOP')} ({pipe})" for pipe, flops in cost.by_pipe.items()]
    intensity = f"{md.figures(finding.intensity)} FLOP per byte"
    floors = []
    for name, ceilings in (("measured peak rates", finding.measured), ("datasheet", finding.datasheet)):
        if ceilings:
            floor = roofline.floor_seconds(finding.cost, ceilings)
            floors.append(f"{roofline.microseconds(floor.seconds)} ({name})")
    return (
        f"Compulsory: {', '.join(work[:-1])} and {work[-1]}, {intensity}; "
        f"bound by {finding.limit}; floor {', '.join(floors) or 'unknown'}. Reported timing: {finding.column}."
    )


def _links(cost: roofline.Cost) -> list[tuple[str, float]]:
    return [("links between GPUs", cost.link_bytes), ("link to the host", cost.host_bytes)]


def _result(finding: Finding, row: Row, notes: set[str]) -> list[object]:
    name = f"**{row.implementation}**" if row.ours else row.implementation
    if is_reference(row):
        name += " (the reference)"
    if configuration := row.get("configuration"):
        name += f" ({configuration['name']})"
    name += pages.marks(finding, row, notes)
    seconds = finding.seconds(row)
    column = row.column(finding.column)
    if seconds is None or column is None:
        return [name, f"no {finding.column} timing", *[None] * 9]
    error = row.get("error", {})
    paired = finding.best is not None and row.run.id == finding.best.run.id
    faster = next((s for s in finding.speedups if paired and s.peer == row.implementation), None)
    return [
        name,
        roofline.microseconds(seconds),
        md.interval(column.get("ci95_us")) + " µs",
        pages.speedup(faster),
        roofline.throughput(seconds, cost_of(row), finding.limit),
        pages.share(finding, row, notes),
        md.percent(finding.percent(row, finding.datasheet)),
        roofline.rate(row["items"], seconds, row["unit"]),
        md.size(row.get("peak_memory_bytes")),
        _error(error, "max"),
        _error(error, "rms"),
    ]


def _error(error: Mapping[str, Any], which: str) -> str | None:
    """The error and, after a slash, that of eager in the same dtype."""
    mine, eager = error.get(which), error.get(f"eager_{which}")
    if mine is None:
        return None
    return f"{mine:.1e}" if eager is None else f"{mine:.1e} / {eager:.1e}"


def _everything(rows: Sequence[Row]) -> list[str]:
    columns = [_column(row, name, data) for row in rows for name, data in row.get("columns", {}).items()]
    lines = ["Times in µs; the reported timing is in bold.", ""]
    lines += md.table(COLUMN_HEAD, columns)
    alike: dict[tuple[object, ...], list[str]] = {}
    for row in rows:  # rows that were timed interleaved have the same clocks
        alike.setdefault(_clocks(row), []).append(row.implementation)
    return [*lines, "", *md.table(CLOCK_HEAD, [[", ".join(names), *clocks] for clocks, names in alike.items()])]


def _column(row: Row, name: str, data: Mapping[str, Any]) -> list[object]:
    mark = "**" if name == row.headline else ""
    figures = [md.figures(data.get(f"{key}_us")) for key in ("median", "mean", "std", "min", "max", "p95", "p99")]
    return [
        row.implementation,
        f"{mark}{name}{mark}",
        figures[0],
        md.interval(data.get("ci95_us")),
        *figures[1:],
        data.get("outliers"),
        data.get("n"),
        data.get("stop"),
    ]


def _clocks(row: Row) -> tuple[object, ...]:
    clocks = row.get("clocks", {})
    throttled = clocks.get("throttled_samples") or 0
    reasons = ", ".join(clocks.get("throttle") or [])
    sustained, noise = row.get("sustained"), row.get("noise")
    return (
        md.span(clocks.get("sm_mhz"), "MHz"),
        md.span(clocks.get("temperature_c"), "°C"),
        md.span(clocks.get("power_w"), "W"),
        f"{throttled} of {clocks.get('samples')} samples ({reasons})" if throttled else "no",
        _sustained(sustained) if sustained else None,
        f"{noise['median']:.4f}" if noise and noise.get("median") else None,
        row.get("timer"),
    )


def _sustained(entry: Mapping[str, Any]) -> str:
    seconds = f"{entry['seconds']:.1f} s" if entry.get("seconds") else "seconds"
    at = f" at {entry['sm_mhz']:.0f} MHz" if entry.get("sm_mhz") else ""
    power = f", {entry['power_w']:.0f} W" if entry.get("power_w") else ""
    return f"{md.figures(entry.get('median_us'))} µs over {seconds}{at}{power}"


def profiled(profile: Mapping[str, Any]) -> list[str]:
    """Nsight Compute's figures, compared with the cost and with the harness's times."""
    rows = profile.get("rows") or []
    commits = dict.fromkeys(str(e["commit"])[:12] for e in profile.get("environments") or () if e.get("commit"))
    at = f", at commit {', '.join(f'`{commit}`' for commit in commits)}" if commits else ""
    lines = [
        f"Nsight Compute (ncu), in a separate profiling run{at}. *Compulsory* are the bytes that the case must move at "
        "least. *Harness* is the cold median of the newest record, which may be of newer code than the profile.",
        "",
    ]
    head = (
        "case",
        "mode",
        "implementation",
        ">DRAM",
        ">compulsory",
        ">DRAM / compulsory",
        ">ncu",
        ">harness",
        ">ncu / harness",
        "status",
    )
    table = []
    for row in rows:
        where = [row.get("case"), row.get("mode"), row.get("implementation")]
        status = row.get("status")
        table.append(
            [
                *where,
                md.size(row.get("dram_bytes")),
                md.size(row.get("cost_bytes")),
                _ratio(row.get("bytes_ratio")),
                _us(row.get("duration_us")),
                _us(row.get("harness_us")),
                _ratio(row.get("duration_ratio")),
                status if status == "ok" else f"{status}: {row.get('reason')}",
            ]
        )
    lines += md.table(head, table)
    for row in rows:
        if row.get("launches"):
            title = f"{row.get('case')} {row.get('mode')} {row.get('implementation')}: launches"
            if by_stage.staged(row["launches"]):
                name = f"**{row.get('case')}**, {row.get('mode')}, {row.get('implementation')}. {by_stage.TEXT}"
                lines += ["", name, "", *md.table(by_stage.HEAD, by_stage.cells(row["launches"]))]
            launches = [[row.get("implementation"), *_launch(launch)] for launch in by_stage.grouped(row["launches"])]
            lines += ["", *md.details(title, md.table(PROFILE_HEAD, launches))]
    return lines


def _launch(launch: Mapping[str, Any]) -> list[object]:
    shares = [launch.get(f"{name}_pct") for name in ("dram", "l2", "sm", "tensor", "occupancy")]
    stalls = ", ".join(f"{name} {value:.0f} %" for name, value in launch.get("stalls") or [] if value is not None)
    return [
        f"`{launch.get('name')}`",
        md.figures(launch.get("duration_us")),
        md.size(launch.get("dram_bytes")),
        *(None if value is None else f"{value:.0f}" for value in shares),
        launch.get("registers"),
        md.size(launch.get("shared_bytes")),
        md.size(launch.get("spill_bytes")),
        stalls,
    ]


def _ratio(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}×"


def _us(value: float | None) -> str | None:
    return None if value is None else md.figures(value, " µs")
