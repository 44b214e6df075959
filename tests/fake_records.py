"""Made-up records in the schema of `harness.record`, for the tests of everything that reads records.

The figures are invented; they only have the shape of real ones (noise, outliers, throttling, skips).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.measure import stats
from harness.record import Writer

H200 = {
    "key": "h200",
    "name": "NVIDIA H200",
    "uuid": "GPU-00000000-0000-0000-0000-000000000000",
    "capability": [9, 0],
    "sms": 132,
    "memory_bytes": 150_109_880_320,
    "l2_bytes": 62_914_560,
    "driver": "580.00",
    "sm_clock_max_mhz": 1980,
    "power_limit_w": 700,
}
MEASURED = {"bandwidth": 4.25e12, "flops": {"bf16": 780e12, "fp16": 770e12, "tf32": 390e12, "fp32": 51e12}}
DATASHEET = {"bandwidth": 4.8e12, "flops": {"bf16": 989.4e12, "fp16": 989.4e12, "tf32": 494.7e12, "fp32": 66.9e12}}


def run_line(kernel: str, run: str = "20260101T000000Z-0000", **changes: Any) -> dict[str, Any]:
    """A run line; `gpu`, `options`, `environment` and `ceilings` are merged into the defaults."""
    environment = {
        "gpu": {**H200, **changes.pop("gpu", {})},
        "python": "3.12.1",
        "torch": "2.11.0+cu130",
        "cuda": "13.0",
        "triton": "3.6.0",
        "packages": {"liger-kernel": "0.8.5", "quack-kernels": "0.6.5"},
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "dirty": False,
        "os": "Linux 6.8 x86_64",
        "time": "2026-01-01T00:00:00+00:00",
        **changes.pop("environment", {}),
    }
    line = {
        "type": "run",
        "schema": 1,
        "run": run,
        "kernel": kernel,
        "unit": "rows",
        "options": {"gpu": "auto", "quick": False, "timer": "auto", **changes.pop("options", {})},
        "environment": environment,
        "ceilings": {"measured": MEASURED, "datasheet": DATASHEET},
    }
    return {**line, **changes}


def samples(median_us: float, n: int = 60, noise: float = 0.004, seed: int = 0) -> list[float]:
    """Log-normal noise with a tail: what a GPU's timings look like."""
    draw = random.Random(f"{median_us}/{n}/{noise}/{seed}")
    return [median_us * draw.lognormvariate(0, noise) * (1.08 if draw.random() < 0.02 else 1) for _ in range(n)]


def column(values: Sequence[float], stop: str = "converged") -> dict[str, Any]:
    """A COLUMN of the schema."""
    return stats.column(values, stop)


def row(
    kernel: str,
    case: str,
    mode: str,
    implementation: str,
    values: Sequence[float] | None = None,
    *,
    run: str = "20260101T000000Z-0000",
    kind: str | None = None,
    cost: Mapping[str, Any] | None = None,
    headline: str = "cold",
    **changes: Any,
) -> dict[str, Any]:
    """One row; without `values` (samples of the headline column, in µs) one that was not measured."""
    kind = kind or ("ours" if implementation.startswith(("triton", "cuda", "gluon")) else "baseline")
    cost = dict(cost or {"flops": 4 * 8192 * 4096, "bytes": 4 * 8192 * 4096, "pipe": "fp32"})
    line = {
        "type": "row",
        "run": run,
        "kernel": kernel,
        "case": case,
        "mode": mode,
        "dims": {"rows": 8192, "dim": 4096},
        "dtype": "bfloat16",
        "params": {},
        "implementation": implementation,
        "kind": kind,
        "status": "skipped" if values is None else "ok",
        "reason": "not asked for" if values is None else None,
        "cost": cost,
        "items": 8192,
        "unit": "rows",
    }
    if values is not None:
        columns = {"cold": column(values), "warm": column([v * 0.97 for v in values])}
        if headline == "graph":
            columns = {"cold": column([v + 2.5 for v in values]), "warm": columns["warm"], "graph": column(values)}
        line |= {
            "timer": "graph" if headline == "graph" else "events",
            "headline": headline,
            "columns": columns,
            "sustained": None,
            "ratios": {},
            "noise": {"median": 1.0004, "ci95": [0.9985, 1.0021]} if kind == "ours" else None,
            "peak_memory_bytes": 64 * 2**20,
            "error": {"max": 3.1e-2, "rms": 1.2e-3, "eager_max": 6.2e-2, "eager_rms": 2.9e-3},
            "clocks": {
                "sm_mhz": [1905, 1980],
                "temperature_c": [41, 46],
                "power_w": [310, 522],
                "throttle": [],
                "throttled_samples": 0,
                "samples": len(values),
            },
            "warnings": [],
        }
    return {**line, **changes}


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Enters the paired ratios of a group's measured rows into each other."""
    measured = [r for r in rows if "columns" in r]
    for mine in measured:
        for other in measured:
            if other is not mine:
                a, b = (r["columns"][mine["headline"]] for r in (other, mine))
                rounds = mine["clocks"].get("rounds", {}).get(mine["headline"], {})
                mine["ratios"][other["implementation"]] = stats.ratio_of_columns(a, b, rounds.get("throttled", ()))
    return rows


def write(path: Path, entries: Sequence[Mapping[str, Any]]) -> Path:
    """A record file of these lines."""
    with Writer(path) as writer:
        for entry in entries:
            writer.write(entry)
    return path


def bench(kernel: str, groups: Mapping[tuple[str, str], list[dict[str, Any]]], **run: Any) -> list[dict[str, Any]]:
    """The lines of a complete bench: groups of rows by (case, mode)."""
    first = run_line(kernel, **run)
    lines: list[dict[str, Any]] = [first]
    for (case, mode), rows in groups.items():
        lines.append({"type": "start", "run": first["run"], "kernel": kernel, "case": case, "mode": mode})
        lines += [{**r, "run": first["run"]} for r in with_ratios(rows)]
    return [*lines, {"type": "stop", "run": first["run"], "kernel": kernel, "reason": "complete"}]


#: kernel -> (pipe, modes, case -> (items, flops, bytes), implementation -> share of the roofline by mode)
WORLD: dict[str, tuple[str, tuple[str, ...], dict[str, tuple[int, float, float]], dict[str, tuple[float, ...]]]] = {
    "rmsnorm": (
        "fp32",
        ("fwd", "bwd"),
        {
            "llama-7b": (8192, 1.3e8, 1.34e8),
            "wide": (32768, 1.1e9, 1.07e9),
            "long": (131072, 4.3e9, 4.29e9),
            "narrow-many": (205000, 4.2e8, 4.2e8),
            "decode": (16, 2.6e5, 2.6e5),
        },
        {
            "triton": (0.97, 0.93),
            "eager": (0.66, 0.38),
            "compile": (0.93, 0.61),
            "liger": (0.94, 0.57),
            "quack": (0.962, 0.81),
        },
    ),
    "gmm_logprob": (
        "fp32",
        ("fwd", "bwd"),
        {"small": (5000, 1.6e6, 6.2e5), "rollout": (205000, 6.6e7, 2.5e7), "epoch": (8400000, 2.7e9, 1.04e9)},
        {"triton": (0.92, 0.9), "eager": (0.027, 0.045), "compile": (0.13, 0.27)},
    ),
    "attention": (
        "bf16",
        ("fwd", "bwd"),
        {
            "causal-4k": (4 * 4096, 5.5e11, 5.4e8),
            "full-8k": (8192, 1.1e12, 2.7e8),
            "rectangular": (4 * 11000, 4.5e11, 1.7e8),
        },
        {
            "gluon": (0.86, 0.79),
            "triton": (0.66, 0.55),
            "eager": (0.41, 0.36),
            "cudnn": (0.8, 0.69),
            "fa4": (0.855, 0.785),
        },
    ),
}


def world(folder: Path, **run: Any) -> Path:
    """Records of three kernels under `folder`/records, with a skip, an out-of-memory row and a throttled one."""
    for kernel, (pipe, modes, cases, implementations) in WORLD.items():
        groups = {}
        for case, (items, flops, moved) in cases.items():
            for index, mode in enumerate(modes):
                factor = 2.5 if index else 1.0
                cost = {"flops": int(flops * factor), "bytes": int(moved * (1.5 if index else 1)), "pipe": pipe}
                floor = max(cost["bytes"] / MEASURED["bandwidth"], cost["flops"] / MEASURED["flops"][pipe]) * 1e6
                rows = []
                for name, shares in implementations.items():
                    median = floor / shares[index] + 1.9
                    values = samples(median, seed=index)
                    headline = "graph" if floor < 50 else "cold"
                    shared = {"cost": cost, "items": items, "headline": headline}
                    if (name, case) == ("liger", "narrow-many"):
                        rows.append(row(kernel, case, mode, name, reason="liger 0.8.5 needs dim >= 1024", **shared))
                    elif (name, case, mode) == ("eager", "epoch", "bwd"):
                        rows.append(row(kernel, case, mode, name, status="oom", reason="out of memory", **shared))
                    else:
                        rows.append(row(kernel, case, mode, name, values, **shared))
                if (kernel, case, mode) == ("attention", "full-8k", "bwd"):
                    rows[0]["clocks"] |= {"throttle": ["sw_power_cap"], "throttled_samples": 12}
                    rows[0]["sustained"] = {"median_us": rows[0]["columns"]["cold"]["median_us"] * 1.06, "seconds": 5.0,
                                            "sm_mhz": 1590, "power_w": 698}  # fmt: skip
                groups[case, mode] = rows
        write(folder / "records" / f"{kernel}.jsonl", bench(kernel, groups, **run))
    return folder
