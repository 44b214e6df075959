"""The machine code of a kernel: registers, spills, tensor-core instructions and access widths, read from the cubin.

Spills are counted in the instructions: bytes per thread stored to and loaded from local memory, summed over the static
STL and LDL instructions. That is how `ptxas -v` counts "spill stores" and "spill loads", and a local array that could
not be kept in registers counts as well.
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

#: Matrix instructions: HMMA (fp16, bf16, tf32), IMMA, DMMA, QMMA (fp8); with a G those of a warp group on Hopper.
_MMA = re.compile(r"(?:BMMA|[DHIQ]MMA|[BHIQ]GMMA|OMMA|UTC[A-Z]*MMA)$")
#: Loads and stores of global memory; LDGSTS copies to shared memory on the way.
_LOADS = {"LDG": "LDG", "LD": "LD", "LDGSTS": "LDGSTS"}
_STORES = {"STG": "STG", "ST": "ST"}
#: Bulk copies and tensor copies move tiles, so they have no width.
_TMA_LOADS = {"UTMALDG", "UBLKCP"}
_TMA_STORES = {"UTMASTG", "UTMAREDG"}
_LOCAL_STORES, _LOCAL_LOADS = "STL", "LDL"

#: Changes whenever `parse` counts otherwise, so that what was remembered is not taken for it.
SCHEMA = b"3"

_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(?P<code>[A-Z][\w.]*)", re.MULTILINE)
_TO_FP8 = re.compile(r"F2FP\.(?:\w+\.)*E[45]M[23]\.F32\.")
_PTX_TO_FP8 = re.compile(r"\bcvt\.rn\.satfinite\.(?:relu\.)?e[45]m[23]x2\.f32\b")
_USAGE = re.compile(r"\bREG:(?P<registers>\d+)\s+STACK:(?P<stack>\d+)")
_THREADS = re.compile(r"\.(?:reqntid|maxntid)\s+([\d, ]+)")


@dataclass(frozen=True)
class Usage:
    """`registers` per thread; `stack`, `spill_stores` and `spill_loads` in bytes per thread. `mma`, `loads` and
    `stores` count instructions: {"HGMMA": 8}, {"LDG.128": 4}; `to_fp8` those that convert fp32 to fp8, `wgmma_waits`
    those that wait for wgmmas: ptxas puts one behind each wgmma whose registers it cannot follow."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    mma: dict[str, int] = field(default_factory=dict)
    loads: dict[str, int] = field(default_factory=dict)
    stores: dict[str, int] = field(default_factory=dict)
    to_fp8: int = 0
    wgmma_waits: int = 0

    @property
    def spills(self) -> int:
        """The figure that `SPEC.spills` bounds."""
        return max(self.spill_stores, self.spill_loads)


@cache
def tool(name: str) -> Path:
    """A binary of the CUDA toolkit that comes with Triton, where Triton's own settings look for it.

    Raises FileNotFoundError saying where it was sought.
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
    """Reads a kernel's cubin with cuobjdump; of one that holds several kernels that `function`."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        path = tool("cuobjdump")
        command = [str(path), "--dump-resource-usage", "--dump-sass", file.name]
        # cuobjdump finds nvdisasm, which lies beside it, by PATH.
        environment = {**os.environ, "PATH": f"{path.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
        run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if run.returncode:
        raise RuntimeError(f"cuobjdump failed: {run.stderr.strip() or run.stdout.strip()}")
    return parse(run.stdout if function is None else _only(run.stdout, function))


def _only(text: str, function: str) -> str:
    """What cuobjdump says of one function: `Function name:` before its resources, `Function : name` before its code."""
    sections = re.split(r"^(?=\s*Function\s*:?\s*\S+)", text, flags=re.MULTILINE)
    return "".join(
        s for s in sections if re.match(rf"\s*Function\s*:?\s*{re.escape(function)}\s*:?\s*$", s.split("\n")[0])
    )


def parse(text: str) -> Usage:
    """The output of `cuobjdump --dump-resource-usage --dump-sass` for one kernel."""
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
    )


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
    """The widest of `loads` or `stores`: "TMA", "LDG.128", or "" where there is none."""
    return max(accesses, key=lambda name: (name == "TMA", int(name.partition(".")[2] or 0), name), default="")


def to_fp8(ptx: str) -> int:
    """How many instructions of a kernel's PTX convert fp32 to fp8."""
    return len(_PTX_TO_FP8.findall(ptx))


def threads(ptx: str, num_warps: int) -> int:
    """Threads per CTA. The PTX says it: a warp-specialised kernel has more than `num_warps` of them."""
    found = _THREADS.search(ptx)
    if found is None:
        return 32 * num_warps
    total = 1
    for extent in found.group(1).split(","):
        total *= int(extent)
    return total
