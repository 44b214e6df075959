"""The machine code of a kernel, read from the cubin: registers, spills, tensor-core instructions, access widths, and
arrivals at an mbarrier that may precede the completion of shared-memory reads.

Spills are counted in the instructions: bytes per thread stored to and loaded from local memory, summed over the static
STL and LDL instructions. That is how `ptxas -v` counts "spill stores" and "spill loads"; a local array that is not kept
in registers counts as well.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

#: Matrix instructions: HMMA (fp16, bf16, tf32), IMMA, DMMA, QMMA (fp8); with a G the warpgroup instructions of Hopper.
_MMA = re.compile(r"(?:BMMA|[DHIQ]MMA|[BHIQ]GMMA|OMMA|UTC[A-Z]*MMA)$")
#: Loads and stores of global memory; LDGSTS also copies to shared memory.
_LOADS = {"LDG": "LDG", "LD": "LD", "LDGSTS": "LDGSTS"}
_STORES = {"STG": "STG", "ST": "ST"}
#: Bulk copies and tensor copies move tiles, so they have no width.
_TMA_LOADS = {"UTMALDG", "UBLKCP"}
_TMA_STORES = {"UTMASTG", "UTMAREDG"}
_LOCAL_STORES, _LOCAL_LOADS = "STL", "LDL"
#: Reads of shared memory, and reads by generic addresses, which may be of shared memory.
_SHARED_READS = {"LDS", "LDSM", "LD", "ATOMS", "ATOM"}
#: Arrivals at an mbarrier of another CTA, and of the own CTA, except those of producers, which expect bytes.
_REMOTE_ARRIVAL = re.compile(r"\bSYNCS\.ARRIVE\.(?:\w+\.)*RED\b")
_OWN_ARRIVAL = re.compile(r"\bSYNCS\.ARRIVE\.(?!(?:\w+\.)*RED\b)(?:\w+\.)*A1T0\b")

#: Changes whenever `parse` counts differently, which invalidates cached results.
SCHEMA = b"6"

_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(?P<code>[A-Z][\w.]*)", re.MULTILINE)
#: The same with operands and encoding; the second word of the encoding holds the scoreboards.
_ENCODED = re.compile(
    r"^\s*/\*(?P<place>[0-9a-f]{4,})\*/\s+(?P<predicate>@!?U?P\w+\s+)?(?P<code>[A-Z][\w.]*)(?P<operands>[^;]*);"
    r"\s*/\* 0x[0-9a-f]{16} \*/\s*/\* 0x(?P<control>[0-9a-f]{16}) \*/",
    re.MULTILINE,
)
#: Instructions that do not fall through, unless predicated. BRA P0, 0x70 and BRA.DIV UR4, 0x70 may.
_ENDS = re.compile(r"EXIT|BRA 0x[0-9a-f]+")
_TARGET = re.compile(r"\b0x([0-9a-f]+)$")
_TO_FP8 = re.compile(r"F2FP\.(?:\w+\.)*E[45]M[23]\.F32\.")
_PTX_TO_FP8 = re.compile(r"\bcvt\.rn\.satfinite\.(?:relu\.)?e[45]m[23]x2\.f32\b")
_USAGE = re.compile(r"\bREG:(?P<registers>\d+)\s+STACK:(?P<stack>\d+)")
_THREADS = re.compile(r"\.(?:reqntid|maxntid)\s+([\d, ]+)")


@dataclass(frozen=True)
class Usage:
    """`registers` per thread; `stack`, `spill_stores` and `spill_loads` in bytes per thread. `mma`, `loads` and
    `stores` count instructions: {"HGMMA": 8}, {"LDG.128": 4}. `to_fp8` counts conversions from fp32 to fp8.
    `wgmma_waits` counts waits for wgmmas: ptxas inserts one after each wgmma whose registers it cannot track.
    `early_arrivals` counts the arrivals at another CTA's mbarrier that the function `early_arrivals` finds, and
    `early_own_reads` the pending reads at arrivals at an mbarrier of the own CTA: {"LDS.64": 2, "LDSM": 4}."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    mma: dict[str, int] = field(default_factory=dict)
    loads: dict[str, int] = field(default_factory=dict)
    stores: dict[str, int] = field(default_factory=dict)
    to_fp8: int = 0
    wgmma_waits: int = 0
    early_arrivals: int = 0
    early_own_reads: dict[str, int] = field(default_factory=dict)

    @property
    def spills(self) -> int:
        """The figure that `SPEC.spills` limits."""
        return max(self.spill_stores, self.spill_loads)


@cache
def tool(name: str) -> Path:
    """A binary of the CUDA toolkit that is installed with Triton, where Triton's own settings look for it.

    Raises FileNotFoundError, which says where it was looked for.
    """
    from triton import knobs

    configured = getattr(knobs.nvidia, name, None)
    folder = Path(knobs.__file__).parent / "backends" / "nvidia" / "bin"
    for path in (getattr(configured, "path", None), folder / name):
        if path and Path(path).is_file():
            return Path(path)
    raise FileNotFoundError(f"{name} is not in {folder}, where Triton's wheel has it")


@cache
def ptxas_version() -> str:
    """The release of the ptxas that Triton calls, such as '12.8'."""
    text = subprocess.run([tool("ptxas"), "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release (\d+\.\d+)", text)
    return found.group(1) if found else "unknown"


def inspect(cubin: bytes, function: str | None = None) -> Usage:
    """Reads a kernel's cubin with cuobjdump; `function` selects one kernel if there are several."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        path = tool("cuobjdump")
        command = [str(path), "--dump-resource-usage", "--dump-sass", file.name]
        # cuobjdump finds nvdisasm, which is in the same folder, through PATH.
        environment = {**os.environ, "PATH": f"{path.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
        run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if run.returncode:
        raise RuntimeError(f"cuobjdump failed: {run.stderr.strip() or run.stdout.strip()}")
    return parse(run.stdout if function is None else _only(run.stdout, function))


def _only(text: str, function: str) -> str:
    """cuobjdump's output for one function: `Function name:` precedes its resources, `Function : name` its code."""
    sections = re.split(r"^(?=\s*Function\s*:?\s*\S+)", text, flags=re.MULTILINE)
    return "".join(
        s for s in sections if re.match(rf"\s*Function\s*:?\s*{re.escape(function)}\s*:?\s*$", s.split("\n")[0])
    )


def parse(text: str) -> Usage:
    """Parses the output of `cuobjdump --dump-resource-usage --dump-sass` for one kernel."""
    usage = _USAGE.search(text)
    codes = _INSTRUCTION.findall(text)
    if usage is None or not codes:
        raise RuntimeError("cuobjdump printed no resource usage or no instructions")
    parts = [code.split(".") for code in codes]
    return Usage(
        registers=int(usage["registers"]),
        stack=int(usage["stack"]),
        spill_stores=sum(_bits(p) for p in parts if p[0] == _LOCAL_STORES) // 8,
        spill_loads=sum(_bits(p) for p in parts if p[0] == _LOCAL_LOADS) // 8,
        mma=_count(p[0] for p in parts if _MMA.match(p[0])),
        loads=_count(_access(p, _LOADS, _TMA_LOADS) for p in parts),
        stores=_count(_access(p, _STORES, _TMA_STORES) for p in parts),
        to_fp8=sum(_TO_FP8.match(code) is not None for code in codes),
        wgmma_waits=sum(code.startswith("WARPGROUP.DEPBAR") for code in codes),
        early_arrivals=len(early_arrivals(text)),
        early_own_reads=_count(read for reads in early_arrivals(text, own=True) for read in reads),
    )


@dataclass(frozen=True)
class _Step:
    """An instruction with its address `place`. `waits` has a bit for each of the six scoreboards that it waits for
    before it is issued; `sets` is the one that it holds until its shared-memory read completes, or None."""

    place: int
    code: str
    arrives: bool
    waits: int
    sets: int | None
    target: int | None
    falls_through: bool


def early_arrivals(text: str, own: bool = False) -> list[list[str]]:
    """The arrivals at an mbarrier of another CTA, or with `own` of the own CTA, that may be issued before a read of
    shared memory has completed; for each the pending reads, such as ["LDS.64", "LDSM"].

    Such an arrival signals that the memory may be overwritten. ptxas does not make it wait for any read, so it can come
    first; the remedy is `fence_reads` of mbarrier.cuh. In the own CTA the fence is needed if TMA writes next: writes of
    threads are ordered after other threads' reads that precede the arrival. `text` is as for `parse`, of compute
    capability 7.0 or more.

    A read (LDS, LDSM, ATOMS, and LD and ATOM by generic addresses) is pending from its issue until an instruction
    waits for its scoreboard, on any path of branches whose target is in the text. Scoreboards are per warp: a wait
    covers the reads that its lanes have issued together. Every read counts, also one of memory that the arrival does
    not release. Not detected are: diverged lanes, one of which arrives before another has issued its read (`ldmatrix`
    is issued by all lanes together, other reads need __syncwarp() before the arrival); reads by wgmma and by TMA, which
    have no scoreboard; branches to computed targets (BRX, RET); and releases by other means than an mbarrier, such as
    the barriers of a CTA or of the cluster.

    Raises RuntimeError if there are such arrivals and the output lacks the encodings of the instructions.
    """
    arrival = _OWN_ARRIVAL if own else _REMOTE_ARRIVAL
    if not arrival.search(text):
        return []
    steps = [_step(found, arrival) for found in _ENCODED.finditer(text)]
    if len(steps) != len(_INSTRUCTION.findall(text)):
        raise RuntimeError("cuobjdump printed instructions without their encodings, which have the scoreboards")
    starts = [index for index, step in enumerate(steps) if index == 0 or step.place < steps[index - 1].place]
    return [reads for a, b in zip(starts, [*starts[1:], len(steps)], strict=True) for reads in _early(steps[a:b])]


def _step(found: re.Match[str], arrival: re.Pattern[str]) -> _Step:
    """Decodes an instruction. The control bits start at bit 105: 4 of stall and 1 of yield, 3 for the scoreboard of the
    result and 3 for that of the operands (7 is none), and a mask of 6 scoreboards to wait for."""
    control = int(found["control"], 16) >> 41
    code, operands = found["code"], found["operands"].strip()
    name, result = code.split(".")[0], control >> 5 & 7
    target = _TARGET.search(operands) if name in ("BRA", "CALL", "JMP", "WARPSYNC") else None
    return _Step(
        place=int(found["place"], 16),
        code=code,
        arrives=arrival.match(code) is not None,
        waits=control >> 11 & 63,
        sets=result if name in _SHARED_READS and result < 6 else None,
        target=int(target[1], 16) if target else None,
        falls_through=bool(found["predicate"]) or not _ENDS.fullmatch(f"{code} {operands}".strip()),
    )


def _early(steps: list[_Step]) -> list[list[str]]:
    """`early_arrivals` of one function, by fixed-point iteration. The reads that may be pending before each instruction
    have one bit for each kind of read and scoreboard."""
    index_of = {step.place: index for index, step in enumerate(steps)}
    kinds = sorted({_read(step.code) for step in steps if step.sets is not None})
    everywhere = sum(1 << 6 * kind for kind in range(len(kinds)))
    held = [0 if s.sets is None else 1 << 6 * kinds.index(_read(s.code)) + s.sets for s in steps]
    pending, grows = [0] * (len(steps) + 1), True
    while grows:
        grows = False
        for index, step in enumerate(steps):
            after = pending[index] & ~(step.waits * everywhere) | held[index]
            nexts = [index + 1] if step.falls_through else []
            if step.target in index_of:
                nexts.append(index_of[step.target])
            for to in nexts:
                grows |= to <= index and bool(after & ~pending[to])
                pending[to] |= after
    left = [before & ~(step.waits * everywhere) for step, before in zip(steps, pending, strict=False) if step.arrives]
    return [[kind for i, kind in enumerate(kinds) if bits >> 6 * i & 63] for bits in left if bits]


def _read(code: str) -> str:
    """The kind of a shared-memory read: LDSM, or with its width, as in LDS.64."""
    parts = code.split(".")
    return "LDSM" if parts[0] == "LDSM" else f"{parts[0]}.{_bits(parts)}"


def _bits(parts: list[str]) -> int:
    """Width of a memory instruction: a modifier such as 64, 128, U8 or S16, else 32."""
    for part in parts[1:]:
        found = re.fullmatch(r"[US]?(8|16|32|64|128|256)", part)
        if found:
            return int(found.group(1))
    return 32


def _access(parts: list[str], widths: dict[str, str], tma: set[str]) -> str | None:
    if parts[0] in tma:
        return "TMA"
    name = widths.get(parts[0])
    return f"{name}.{_bits(parts)}" if name else None


def _count(names: Iterable[str | None]) -> dict[str, int]:
    counted = Counter(name for name in names if name is not None)
    return {name: counted[name] for name in sorted(counted)}


def widest(accesses: dict[str, int]) -> str:
    """The widest of `loads` or `stores`: "TMA", "LDG.128", or "" if there is none."""
    return max(accesses, key=lambda name: (name == "TMA", int(name.partition(".")[2] or 0), name), default="")


def to_fp8(ptx: str) -> int:
    """The number of instructions in a kernel's PTX that convert fp32 to fp8."""
    return len(_PTX_TO_FP8.findall(ptx))


def threads(ptx: str, num_warps: int) -> int:
    """Threads per CTA, from the PTX, since a warp-specialised kernel has more than `num_warps` warps."""
    found = _THREADS.search(ptx)
    if found is None:
        return 32 * num_warps
    total = 1
    for extent in found.group(1).split(","):
        total *= int(extent)
    return total
