"""Compiles what a SPEC launches, for one GPU that need not be present, and describes each compiled kernel.

A row of the result is one compiled kernel, i.e. a JIT function with its types, alignments and constexprs:
{"kernel", "jit", "target": "sm_90", "uses": [[case, mode], ...], "bench": whether a bench case uses it,
 "types": {argument: "*bf16" | "i32" | ...}, "aligned": [arguments known to be multiples of 16],
 "constexprs": {name: value}, "num_warps", "num_stages", "num_ctas", "threads", "registers", "stack_bytes",
 "spill_bytes", "spill_store_bytes", "spill_load_bytes", "spill_allowed", "early_allowed", "shared_bytes",
 "ctas_per_sm", "occupancy_percent", "occupancy_limit", "mma": {kind: count}, "loads": {kind: count},
 "stores": {kind: count}, "to_fp8": [conversions in PTX, in SASS], "early_arrivals", "early_own_reads": as in
 `sass.Usage`}
The mode of a use is what was running: the forward that a backward needs counts as "fwd".
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from .. import execute
from ..nvtx import range_name
from ..spec import WHOLE, Case, KernelSpec
from . import launches, nvrtc, occupancy, sass

Row = dict[str, Any]


@dataclass
class Outcome:
    """The result for one kernel and one target. `failures` and `skipped` are sentences."""

    kernel: str
    target: str
    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


@dataclass
class _Compiled:
    """One compiled kernel and the (case, mode) pairs that launch it."""

    launch: launches.Launch | nvrtc.Launch
    uses: dict[tuple[str, str], None] = field(default_factory=dict)


def target_name(capability: tuple[int, int]) -> str:
    """'sm_90'."""
    return "sm_{}{}".format(*capability)


def compile_spec(
    spec: KernelSpec,
    capability: tuple[int, int],
    cases: Iterable[Case],
    modes: Iterable[str],
    implementations: Iterable[str] | None = None,
) -> Outcome:
    """Runs the implementations of this folder, those named or all, on fake tensors and describes what they launched.

    "fwd+bwd" launches the kernels of "fwd" and "bwd". Fails (in `failures`) if a case does not compile, if a kernel
    spills more than `SPEC.spills` permits, requires more than the GPU has or releases shared memory before its reads
    have completed (of a cluster; of its own CTA by ldmatrix), and if nothing was launched at all.
    """
    outcome = Outcome(spec.name, target_name(capability))
    if spec.needs:
        outcome.skipped.append(f"{outcome.target}: its kernels are those of {', '.join(spec.needs)}")
        return outcome
    wanted = {phase for mode in modes for phase in mode.split("+")}
    names = [name for name in spec.implementations if implementations is None or name in implementations]
    for name in [name for name in names if spec.min_capability.get(name, (0, 0)) > capability]:
        names.remove(name)
        outcome.skipped.append(f"{outcome.target} {name}: needs {target_name(spec.min_capability[name])}")
    found: dict[str, _Compiled] = {}
    traced = False
    for case in cases:
        if reason := execute.unfit(case, capability):
            outcome.skipped.append(f"{outcome.target} {case.name}: {reason}")
            continue
        traced = True
        phases = {phase for mode in spec.modes_of(case) for phase in mode.split("+")} & wanted
        for name in names:
            for mode in (m for m in ("fwd", *WHOLE, "bwd") if m in phases and not spec.skip_reason(name, case, m)):
                _trace(spec, name, case, mode, capability, found, outcome)
    if names and traced and not found and not outcome.failures:
        outcome.failures.append(f"{outcome.target}: {spec.name} launched no kernel in any case")
    for entry in found.values():
        row = describe(spec, entry.launch, capability)
        row["uses"] = sorted([case, mode] for case, mode in entry.uses)
        row["bench"] = any(spec.case(case).bench for case, _ in entry.uses)
        outcome.rows.append(row)
        outcome.failures += faults(row, capability)
    outcome.rows.sort(key=order)
    return outcome


def _trace(
    spec: KernelSpec,
    name: str,
    case: Case,
    mode: str,
    capability: tuple[int, int],
    found: dict[str, _Compiled],
    outcome: Outcome,
) -> None:
    """Adds the launches of one implementation in one case and mode to `found`, or the reason why there are none to
    `outcome`."""
    package = nvrtc.package_of(spec)
    missing = f"{outcome.target} CUDA C++: {nvrtc.MISSING}"
    if nvrtc.driver_of(package) and nvrtc.library() is None and missing not in outcome.skipped:
        outcome.skipped.append(missing)
    try:
        # If ptxas rejects a kernel, Triton prints the whole PTX.
        with (
            launches.record(capability) as seen,
            nvrtc.recording(package, capability, seen.append),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            inputs = spec.make_inputs(case, "cuda", None)
            run = execute.bind(spec, spec.implementations[name], inputs, mode)
            forward = len(seen)
            run()
    except launches.Interpreted:
        raise
    except execute.Unavailable as error:
        outcome.skipped.append(f"{outcome.target} {case.name}: {error}")
        return
    except Exception as error:  # whatever one case raises, the others still get their row
        where = f"{outcome.target} {range_name(spec.name, mode, case.name, name)}"
        if nvrtc.library() is None and nvrtc.MISSING in str(error):  # only CUDA C++ computes this case
            outcome.skipped.append(f"{where}: {nvrtc.MISSING}")
        else:
            outcome.failures.append(f"{where}: {type(error).__name__}: {_brief(error)}")
        return
    for index, launch in enumerate(seen):
        entry = found.setdefault(_identity(launch), _Compiled(launch))
        entry.uses[case.name, "fwd" if index < forward else mode] = None


def _identity(launch: launches.Launch | nvrtc.Launch) -> str:
    """A key that is equal for launches of the same machine code."""
    if isinstance(launch, nvrtc.Launch):
        return repr((launch.source, launch.name, launch.defines))
    return launch.compiled.hash


def _brief(error: Exception) -> str:
    """The error of ptxas, else the first and the last line, in which Triton has the place and the reason. The rest of
    such a message is source code and paths."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    fatal = [line for line in lines if line.startswith("ptxas") and "aborted" not in line]
    return " … ".join(fatal or ([lines[0], lines[-1]] if len(lines) > 1 else lines))


def describe(spec: KernelSpec, launch: launches.Launch | nvrtc.Launch, capability: tuple[int, int]) -> Row:
    """The row of one compiled kernel, without its uses."""
    said = _of_cuda(launch) if isinstance(launch, nvrtc.Launch) else _of_triton(launch)
    usage: sass.Usage = said.pop("usage")
    fit = occupancy.calculate(capability, said["threads"], usage.registers, said["shared_bytes"])
    return {
        "kernel": spec.name,
        "target": target_name(capability),
        **said,
        "registers": usage.registers,
        "stack_bytes": usage.stack,
        "spill_bytes": usage.spills,
        "spill_store_bytes": usage.spill_stores,
        "spill_load_bytes": usage.spill_loads,
        "spill_allowed": spec.spills.get(said["jit"], 0),
        "early_allowed": spec.early_arrivals.get(said["jit"], 0),
        "ctas_per_sm": fit.ctas,
        "occupancy_percent": fit.percent,
        "occupancy_limit": fit.limit,
        "mma": usage.mma,
        "loads": usage.loads,
        "stores": usage.stores,
        "early_arrivals": usage.early_arrivals,
        "early_own_reads": usage.early_own_reads,
    }


def _of_triton(launch: launches.Launch) -> dict[str, Any]:
    """What Triton's compiler reports about a kernel, and the `usage` of the machine code."""
    metadata, source, asm = launch.compiled.metadata, launch.compiled.src, launch.compiled.asm
    usage = _usage(asm["cubin"])
    names = source.fn.arg_names
    constants = {".".join([names[path[0]], *map(str, path[1:])]): v for path, v in source.constants.items()}
    return {
        "jit": launch.jit,
        "types": {name: _type(kind) for name, kind in source.signature.items() if kind != "constexpr"},
        "aligned": [names[path[0]] for path, attrs in sorted(source.attrs.items()) if ["tt.divisibility", 16] in attrs],
        "constexprs": {name: _plain(value) for name, value in constants.items()},
        "num_warps": metadata.num_warps,
        "num_stages": metadata.num_stages,
        "num_ctas": metadata.num_ctas,
        "threads": sass.threads(asm["ptx"], metadata.num_warps),
        "shared_bytes": metadata.shared,
        "to_fp8": [sass.to_fp8(asm["ptx"]), usage.to_fp8],
        "usage": usage,
    }


def _of_cuda(launch: nvrtc.Launch) -> dict[str, Any]:
    """The same for a CUDA C++ kernel, for which there is no PTX and whose types are in its source."""
    defines = dict(define.split("=", 1) for define in launch.defines)
    usage = sass.inspect(launch.cubin, launch.name)
    return {
        "jit": launch.name,
        "types": {},
        "aligned": [],
        "constexprs": {name: int(value) for name, value in defines.items()},
        "num_warps": launch.threads // 32,
        "num_stages": int(defines.get("STAGES", 1)),
        "num_ctas": int(defines.get("CLUSTER", 1)),
        "threads": launch.threads,
        "shared_bytes": launch.shared,
        "to_fp8": [usage.to_fp8, usage.to_fp8],
        "usage": usage,
    }


def faults(row: Row, capability: tuple[int, int]) -> list[str]:
    """The faults of a compiled kernel, as sentences that name it, the case and both figures."""
    where = f"{row['target']} {row['jit']} ({uses(row)})"
    wrong = []
    if row["spill_bytes"] > row["spill_allowed"]:
        granted = f"{row['spill_allowed']} bytes" if row["spill_allowed"] else "none"
        wrong.append(f"{where} spills {row['spill_bytes']} bytes per thread, SPEC.spills allows {granted}")
    if row["to_fp8"][1] > row["to_fp8"][0]:
        wrong.append(
            f"{where} converts to fp8 {row['to_fp8'][0]} times in PTX and {row['to_fp8'][1]} times in SASS: ptxas 12.8 "
            "has been seen to make a conversion twice and to use the first one's result before it is there"
        )
    if row["early_arrivals"] > row["early_allowed"]:
        wrong.append(
            f"{where}: arrivals at another CTA's mbarrier that do not wait for reads of shared memory, which that CTA "
            f"may then write over: {row['early_arrivals']}. fence_reads() of mbarrier.cuh waits for them"
        )
    if own := row["early_own_reads"].get("LDSM"):
        wrong.append(
            f"{where}: arrivals at an mbarrier that do not wait for ldmatrix, whose tile TMA may then write over: {own}"
            ". fence_reads() of mbarrier.cuh waits for it"
        )
    if row["ctas_per_sm"] == 0:
        sm = occupancy.limits(capability)
        wrong.append(
            f"{where} does not fit on an SM: too little {row['occupancy_limit']}: {row['threads']} threads, "
            f"{row['registers']} registers per thread and {row['shared_bytes']} bytes of shared memory per CTA, "
            f"of which it may have {sm.shared_per_cta}"
        )
    return wrong


def uses(row: Row, most: int = 2) -> str:
    """The cases that use a kernel, the first `most` by name: 'a fwd, b bwd and 3 more'."""
    named = [f"{case} {mode}" for case, mode in row["uses"]]
    return ", ".join(named[:most]) + (f" and {len(named) - most} more" if len(named) > most else "")


def order(row: Row) -> tuple[Any, ...]:
    """Sort key of a report's rows: bench cases first, by JIT function, then by target and distinguishing properties."""
    settings = json.dumps([row["types"], row["constexprs"], row["aligned"], row["num_warps"], row["num_stages"]])
    return row["kernel"], not row["bench"], row["jit"], row["target"], row["uses"], settings


def _usage(cubin: bytes) -> sass.Usage:
    """`sass.inspect`, cached in Triton's own cache, since disassembling takes as long as compiling."""
    from triton.runtime.cache import get_cache_manager

    key = hashlib.sha256(sass.SCHEMA + cubin).hexdigest()
    manager = get_cache_manager(key)
    if path := manager.get_file("usage.json"):
        with open(path, encoding="utf-8") as file:
            return sass.Usage(**json.load(file))
    usage = sass.inspect(cubin)
    manager.put(json.dumps(asdict(usage)), "usage.json", binary=False)
    return usage


def _type(kind: Any) -> str:
    return kind if isinstance(kind, str) else str(kind)


def _plain(value: Any) -> Any:
    """A constexpr in JSON form."""
    value = getattr(value, "value", value)
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return getattr(value, "__name__", str(value))
