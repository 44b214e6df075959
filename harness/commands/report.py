"""`report`: Markdown and SVG from the records, and from nothing else.

For every folder of `reports/` that holds records: README.md (summary of all kernels), a page per kernel and one for
each of its modes, with their charts, and an overview chart. Repeated runs write equal bytes. `--readme` also rewrites
the blocks between `<!-- report:begin FOLDER -->` and `<!-- report:end -->`: in the top README.md an overview, in a
kernel's its own table. `--compact` first rewrites the records without redundant data.

Records of more than one card are compared in cards.md. If there are records of at least two numbers of GPUs, gpus.md
shows the efficiency over the number. reports/README.md links to both.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .. import record
from ..nsight import profile_report
from ..registry import COLLECTIONS, ROOT
from ..reporting import (
    aggregates,
    cards,
    charts,
    choices,
    efficiency_charts,
    host,
    kernel_page,
    markdown,
    over_gpus,
    pages,
    roofline_charts,
    rows_json,
    several,
    short_tables,
    training,
)
from ..reporting.entries import Records
from ..reporting.findings import Finding, findings, modes_of

LEFT_OUT = "Cases excluded from the means over the fastest peer, by reason (a case may have several):"
ABSENT = "Peers that support these cases but were not installed:"
NEWER = (
    "Peers missing from the run of these cases, because they were added later or the run was restricted to fewer peers:"
)
BLOCK = re.compile(r"(<!-- report:begin (?P<folder>[\w.-]+) -->\n).*?(\n?<!-- report:end -->)", re.DOTALL)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder of one GPU's report, with its records (default: every folder of reports/ that has records)",
    )
    parser.add_argument(
        "--readme", action="store_true", help="also update the generated blocks of README.md and the kernels' READMEs"
    )
    parser.add_argument(
        "--compact", action="store_true", help="first remove superseded and redundant data from the records"
    )
    parser.add_argument(
        "--no-charts", action="store_true", help="pages without charts, e.g. if matplotlib is not installed"
    )


def main(arguments: argparse.Namespace) -> int:
    folders = [arguments.out] if arguments.out else report_folders(ROOT / "reports")
    if not folders:
        raise FileNotFoundError("no records under reports/: run bench first")
    with_charts = not arguments.no_charts
    if with_charts and not charts.available():
        raise ValueError(
            "the charts need matplotlib, which is not installed; --no-charts writes the pages without them"
        )
    if arguments.compact:
        for path in (path for folder in folders for path in record.files(folder)):
            record.compact(path)
    for folder in folders:
        for path in write(folder, with_charts):
            print(path)
    if not arguments.out:
        for path in (*write_cards(ROOT / "reports"), *write_over_gpus(ROOT / "reports", with_charts)):
            print(path)
    if arguments.readme:
        for readme in readmes(ROOT):
            text = readme.read_text(encoding="utf-8")
            updated = update_readme(text, ROOT / "reports", kernel_of(readme, ROOT))
            if updated != text:
                print(_write(readme, updated))
    return 0


def readmes(root: Path) -> list[Path]:
    """Every README.md that may have a marked block: the top one and those of kernels and workloads."""
    found = [root / "README.md", *(path for kind in COLLECTIONS for path in sorted(root.glob(f"{kind}/*/README.md")))]
    return [path for path in found if path.is_file() and _marked(path)]


def _marked(path: Path) -> bool:
    return bool(BLOCK.search(path.read_text(encoding="utf-8")))


def kernel_of(readme: Path, root: Path) -> str | None:
    """The kernel that a README belongs to; None for the top one."""
    return None if readme.parent == root else readme.parent.name


def report_folders(root: Path) -> list[Path]:
    """The folders below `root` that hold records."""
    return sorted({path.parent.parent for path in root.glob("*/records/*.jsonl")})


def write(folder: Path, with_charts: bool = True) -> list[Path]:
    """Writes the whole report of one GPU. Returns the files written. Charts of removed kernels are kept."""
    records = record.load(folder)
    if not records.rows:
        raise FileNotFoundError(f"the records in {folder} hold no rows: run bench first")
    found = findings(records)
    gpu = gpus(records)
    measured = profile_report.medians(records.rows)
    written = [_write_lines(folder / "README.md", pages.index(gpu, records, found, with_charts))]
    for kernel in records.kernels():
        mine = [f for f in found if f.kernel == kernel]
        profile = load(folder / "profile" / f"{kernel}.json", profile_report.SCHEMA)
        if profile:
            profile["rows"] = profile_report.compared(profile["rows"], measured)
        tuned = load(folder / "tune" / f"{kernel}.json", choices.SCHEMA)
        trend = (folder / f"{kernel}-trend.md").is_file()
        trained = load(folder / "training" / f"{kernel}.json", training.SCHEMA)
        lines = kernel_page.page(kernel, gpu, records, mine, profile, tuned, with_charts, trend, bool(trained))
        written.append(_write_lines(folder / f"{kernel}.md", lines))
        if trained:
            written += _trained(folder, kernel, gpu, trained, with_charts)
        for mode in modes_of(mine):
            lines = kernel_page.mode_page(kernel, mode, gpu, mine, with_charts)
            written.append(_write_lines(folder / f"{pages.stem(kernel, mode)}.md", lines))
    if (folder / "profile").is_dir():
        written.append(profile_report.write_readme(folder / "profile", measured))
    if with_charts:
        written += _draw(folder, gpu, records.kernels(), found)
    return written


def _trained(folder: Path, kernel: str, gpu: str, document: dict[str, Any], with_charts: bool) -> list[Path]:
    """Writes the page of a training and its chart."""
    stem = folder / training.stem(kernel)
    written = [_write_lines(stem.with_suffix(".md"), training.page(kernel, gpu, document))]
    if with_charts:
        charts.save(training.chart(kernel, gpu, document), stem.with_suffix(".svg"))
        written.append(stem.with_suffix(".svg"))
    return written


def write_cards(reports: Path) -> list[Path]:
    """Writes the page that compares cards, if there are two to compare, and its link. Returns the files written."""
    return _joint(reports, cards.STEM, cards.LINK_TEXT, cards_page(reports))


def write_over_gpus(reports: Path, with_charts: bool) -> list[Path]:
    """Writes the page over the number of GPUs with charts, if there are two numbers. Returns the files written."""
    found = over_gpus_panels(reports)
    written = _joint(reports, over_gpus.STEM, over_gpus.LINK_TEXT, over_gpus.page(found, with_charts))
    for stem, figure in over_gpus.charts(found).items() if with_charts else ():
        charts.save(figure, reports / f"{stem}.svg")
        written.append(reports / f"{stem}.svg")
    return written


def over_gpus_panels(reports: Path) -> list[over_gpus.Panel]:
    """The panels of each kernel and mode from the records of several GPUs."""
    several_of = [folder for folder in report_folders(reports) if _world_size(folder) > 1]
    return over_gpus.panels((folder.name, findings(record.load(folder))) for folder in several_of)


def _joint(reports: Path, stem: str, text: str, lines: Sequence[str]) -> list[Path]:
    """Writes a page over all folders, if it has lines, and the link to it. Returns the files written."""
    written = [_write_lines(reports / f"{stem}.md", lines)] if lines else []
    readme = reports / "README.md"
    if readme.is_file():
        before = readme.read_text(encoding="utf-8")
        if (updated := with_link(before, stem, text, bool(lines))) != before:
            written.append(_write(readme, updated))
    return written


def cards_page(reports: Path) -> list[str]:
    """The lines of the page; none without two cards."""
    folders = report_folders(reports)
    sizes = Counter(map(_world_size, folders))
    found = []
    for folder in (folder for folder in folders if sizes[_world_size(folder)] > 1):
        records = record.load(folder)
        if records.rows:
            found.append(cards.Card(folder.name, gpus(records), tuple(findings(records)), tuple(records.used_runs())))
    return cards.page(found)


def _world_size(folder: Path) -> int:
    """The number of GPUs of a folder's records, from the first line of one: reading all records takes seconds."""
    with record.files(folder)[0].open(encoding="utf-8") as file:
        return int(json.loads(file.readline() or "{}").get("world_size") or 1)


def with_link(text: str, stem: str, said: str, there: bool) -> str:
    """reports/README.md with the block of a page replaced: by a link, or by nothing where there is no page."""
    link = f"\n[{stem}.md]({stem}.md) {said}\n\n" if there else ""
    return BLOCK.sub(lambda m: f"{m[1]}{link}<!-- report:end -->" if m["folder"] == stem else m[0], text)


def _draw(folder: Path, gpu: str, kernels: Iterable[str], found: Sequence[Finding]) -> list[Path]:
    drawn = [(folder / "overview.svg", roofline_charts.overview(found, gpu))]
    for kernel in kernels:
        mine = [f for f in found if f.kernel == kernel]
        drawn.append((folder / f"{kernel}-roofline.svg", roofline_charts.roofline(mine, gpu)))
        for mode in modes_of(mine):
            if any(f.shares() for f in mine if f.mode == mode):
                drawn.append((folder / f"{pages.stem(kernel, mode)}.svg", charts.peers(mine, mode, gpu)))
            if several.points(mine, mode):
                chart = efficiency_charts.efficiency(mine, mode, gpu)
                drawn.append((folder / f"{several.stem(kernel, mode)}.svg", chart))
    for path, figure in drawn:
        charts.save(figure, path)
    return [path for path, _ in drawn]


def gpus(records: Records) -> str:
    """'one NVIDIA H200'. ValueError if the records of one folder come from different cards, or from different numbers
    of them: these cannot be compared."""
    names = dict.fromkeys(run.gpus for run in records.used_runs())
    if len(names) > 1:
        raise ValueError(f"the records of one report come from different GPUs: {', '.join(names)}")
    return next(iter(names))


def load(path: Path, schema: int) -> dict[str, Any] | None:
    """A file of `profile` or `tune`, or None. ValueError for another schema."""
    return rows_json.read(path, schema) if path.is_file() else None


def update_readme(text: str, reports: Path, kernel: str | None = None) -> str:
    """`text` with every marked block regenerated from the records of its folder; without records a block is emptied.

    The block is that of the top README or, with `kernel`, of that kernel's.
    """

    def replace(match: re.Match[str]) -> str:
        folder = reports / match["folder"]
        block = kernel_block(folder, kernel) if kernel else readme_block(folder)
        return match[1] + block + ("\n" if block else "") + "<!-- report:end -->"

    return BLOCK.sub(replace, text)


def readme_block(folder: Path) -> str:
    """The README's block for one GPU: the overview chart and a table over all cases. Empty without records."""
    if not folder.is_dir():
        return ""
    records = record.load(folder)
    if not records.rows:
        return ""
    link = f"reports/{folder.name}"
    run = max(records.used_runs(), key=lambda run: str(run.environment.get("time")))
    triton, torch = run.environment.get("triton"), run.environment.get("torch")
    gpu, found = gpus(records), findings(records)
    lines = [
        "",
        f"![Share of the roofline of {gpu} that the kernels reach]({link}/overview.svg)",
        "",
        *short_tables.of_kernels(found, link),
        "",
        f"{markdown.sentence(gpu)}, PyTorch {torch}, Triton {triton}. Speed-up: the other implementation's time "
        "divided by the kernel's. *In the mean*: how many of the cases the geometric mean in the next column includes; "
        "the range is their minimum and maximum. The *fastest peer* is the fastest other implementation in the same "
        "rounds, torch.compile included. *PyTorch* is what a PyTorch user would write. A row marked fp8 has the cases "
        "that the kernel computes in fp8, whatever precision the peers use. "
        f"[The full report]({link}/README.md) begins with the number of cases that are faster or slower than the "
        "fastest peer. It has every case with its confidence interval, peers, clocks and errors, and lists the "
        "excluded cases.",
        "",
        *([said, ""] if (said := aggregates.unthrottled(found)) else []),
        *([LEFT_OUT, "", *left_out, ""] if (left_out := aggregates.captions(found)) else []),
        *([ABSENT, "", *absent, ""] if (absent := aggregates.absent(found)) else []),
        *([NEWER, "", *newer, ""] if (newer := aggregates.newer(found)) else []),
    ]
    return "\n".join(lines)


def kernel_block(folder: Path, kernel: str) -> str:
    """A kernel README's block for one GPU: for each mode a chart with its peers and a short table. Empty without
    records."""
    if not (folder / "records" / f"{kernel}.jsonl").is_file():
        return ""
    records = record.load(folder / "records" / f"{kernel}.jsonl")
    link = f"../../reports/{folder.name}"
    gpu = gpus(records)
    found = findings(records)
    lines = [""]
    for mode in modes_of(found):
        lines += [f"**{mode}**", "", *pages.chart(kernel, found, mode, gpu, f"{link}/")]
        lines += [*short_tables.of_mode([f for f in found if f.mode == mode]), ""]
    lines += host.short(records)
    if (folder / "training" / f"{kernel}.json").is_file():
        lines += training.image(kernel, f"{link}/")
    lines += [
        f"{markdown.sentence(gpu)}. [The report]({link}/{kernel}.md) has all implementations, confidence intervals, "
        "clocks and errors, and explains columns and marks.",
        "",
    ]
    return "\n".join(lines)


def _write_lines(path: Path, lines: Sequence[str]) -> Path:
    return _write(path, "\n".join(lines).rstrip() + "\n")


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(markdown.printable(text), encoding="utf-8")
    return path
