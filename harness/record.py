"""The record: raw samples and everything needed to argue about them, as JSON lines. Reports are made from it alone.

`<out>/records/<kernel>.jsonl` is written line by line as a bench proceeds, so that an interrupted run keeps what it
has. Every line is an object with a `type` and a `run` (the id that joins them):

run    once per bench of a kernel, first
       {"type": "run", "schema": 1, "run": "20261121T083106Z-3f2a", "kernel": "rmsnorm", "unit": "rows",
        "options": {"gpu": "h200", "quick": false, "timer": "auto", ...},
        "environment": {"gpu": {"key": "h200"|null, "name": "NVIDIA H200", "uuid": ..., "capability": [9, 0], "sms": 132,
                                "memory_bytes": ..., "l2_bytes": ..., "driver": "580.159", "sm_clock_max_mhz": 1980,
                                "power_limit_w": 700},
                        "python": ..., "torch": ..., "cuda": ..., "triton": ..., "packages": {"liger-kernel": "0.8.5"},
                        "commit": "<sha>"|null, "dirty": bool, "os": ..., "time": ISO-8601 UTC},
        "ceilings": {"measured": {"bandwidth": B/s, "flops": {"bf16": FLOP/s, "fp16": ..., "tf32": ..., "fp32": ...}},
                     "datasheet": same shape, or null for a card that is not in the table}}
start  before the implementations of one case and mode are run: {"type": "start", "run", "kernel", "case", "mode"}.
       A start without rows or a stop after it means that the process died there.
row    one per implementation of that case and mode
       {"type": "row", "run", "kernel", "case", "mode", "dims": {"rows": 8192, ...}, "dtype": "bfloat16", "params": {},
        "implementation": "triton", "kind": "ours"|"baseline",
        "status": "ok"|"skipped"|"oom"|"error"|"wrong"|"over-roofline"|"crashed", "reason": null|"why not ok",
        "cost": {"flops": int, "bytes": int, "pipe": "fp32"}, "items": 8192, "unit": "rows",
        ... and for status "ok" (and "over-roofline"):
        "timer": "events"|"graph"|"cupti", "headline": "cold"|"warm"|"graph",
        "columns": {"cold": COLUMN, "warm": COLUMN, "graph": COLUMN},        # those that were measured
        "sustained": null | {"median_us", "seconds", "sm_mhz", "power_w"},   # back to back, power-limited
        "ratios": {"eager": {"median": 2.1, "ci95": [2.0, 2.2]}, ...},       # time of that implementation over this one's,
                                                                             # paired by round, in the headline column
        "noise": {"median": 1.0, "ci95": [0.998, 1.003]} | null,             # A/A: this implementation against itself
        "peak_memory_bytes": int,                                            # above what the inputs hold
        "error": {"max": ..., "rms": ..., "eager_max": ..., "eager_rms": ...} | null,
        "clocks": {"sm_mhz": [min, max], "temperature_c": [min, max], "power_w": [min, max], "throttle": ["sw_power_cap"],
                   "throttled_samples": 0, "samples": 40},
        "warnings": ["..."]}
       COLUMN = {"samples_us": [...], "n", "median_us", "mean_us", "std_us", "min_us", "max_us", "p95_us", "p99_us",
                 "ci95_us": [lo, hi], "outliers", "stop": "converged"|"rounds"|"time"}
stop   {"type": "stop", "run", "kernel", "reason": "complete"|"interrupted"}

A row supersedes an earlier row of the same (kernel, case, mode, implementation).
"""
