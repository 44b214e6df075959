"""Facts about a mutant of CUDA C++ that need no GPU: that it does not compile; that NVRTC compiles it to the same
machine code in every variant (set of defines) in which the cases of SPEC compile its file, so that no case can detect
it; or which cases launch a variant that it does change (`near`).
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from triton.runtime.jit import JITFunction

from .. import execute, registry
from ..compiling import launches, nvrtc
from ..spec import Case, KernelSpec
from . import results
from .mutants import Mutant
from .near import Launcher, few, size

CAPABILITY = (9, 0)
ARCHITECTURE = "sm_90a"

DIFFERENT = 2  # number of variants with different machine code after which `judge` stops
MORE = 3  # maximum number of variants that it compiles after the first of these

#: Source file, by its path in the kernel's folder → defines → its launchers among the checked cases.
Variants = Mapping[str, Mapping[tuple[str, ...], Sequence[Launcher]]]


@dataclass(frozen=True)
class Judged:
    """The `answer` about a mutant that does not compile, or whose machine code is the same in every variant; else None,
    and `near` lists launchers of changed machine code."""

    answer: Mapping[str, Any] | None
    near: Sequence[Launcher] = ()


def variants(spec: KernelSpec) -> Variants:
    """The variants that SPEC's cases launch. RuntimeError without NVRTC, because launchers then take other paths."""
    if nvrtc.library() is None:
        raise RuntimeError(nvrtc.MISSING)
    found: dict[str, dict[tuple[str, ...], list[Launcher]]] = {}
    now: list[Launcher] = []

    def note(source: Path, architecture: str, defines: tuple[str, ...]) -> bytes:
        inside = source.relative_to(registry.folder(spec.name)).as_posix()
        launchers = found.setdefault(inside, {}).setdefault(defines, [])
        launchers += [launcher for launcher in now if launcher not in launchers]
        return b""

    with mock.patch.object(nvrtc, "compiled", note):
        for case in sorted(spec.cases, key=size):
            if not execute.unfit(case, CAPABILITY):
                for name in spec.implementations:
                    now[:] = [] if case.bench else [(name, case.name)]
                    for mode in spec.modes_of(case):
                        if not spec.skip_reason(name, case, mode):
                            _launch(spec, name, case, mode)
    return found


def _launch(spec: KernelSpec, name: str, case: Case, mode: str) -> None:
    """Runs an implementation on fake tensors; nothing is compiled, and Triton kernels are skipped."""
    passed_over = mock.patch.object(JITFunction, "run", lambda *_, **__: mock.MagicMock())
    elsewhere = nvrtc.recording(nvrtc.package_of(spec), CAPABILITY, lambda launch: None)
    # A case that does not run as declared is reported by the build.
    with launches.record(CAPABILITY), elsewhere, passed_over, suppress(Exception):
        execute.bind(spec, spec.implementations[name], spec.make_inputs(case, "cuda", None), mode)()


def judge(mutant: Mutant, known: Variants) -> Judged:
    """Compiles variants until DIFFERENT of them differ from the original. Variants launched by bench cases but not by
    checked cases come last; otherwise the order is drawn from the mutant's key."""
    folder = registry.folder(mutant.kernel)
    source = folder / mutant.file
    concerned = [mutant.file] if source.suffix == ".cu" else [f for f in known if (folder / f).parent == source.parent]
    pairs = [(file, defines) for file in concerned for defines in known.get(file, ())]
    pairs.sort(key=lambda pair: hashlib.sha256(repr((mutant.key, pair)).encode()).digest())
    pairs.sort(key=lambda pair: not known[pair[0]][pair[1]])
    different: list[tuple[str, tuple[str, ...]]] = []
    with tempfile.TemporaryDirectory(prefix="mutant-") as scratch:
        copy = Path(scratch, source.parent.name)
        shutil.copytree(source.parent, copy, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        (copy / source.name).write_text(mutant.applied(source.read_text(encoding="utf-8")), encoding="utf-8")
        more = MORE
        try:
            for file, defines in pairs:
                if different and (len(different) == DIFFERENT or not more):
                    break
                more -= bool(different)
                original = folder / file
                code = nvrtc.compiled.__wrapped__(copy / original.name, ARCHITECTURE, defines)
                if code != nvrtc.compiled(original, ARCHITECTURE, defines):
                    different.append((file, defines))
        except RuntimeError as error:
            return Judged(_answer(results.INVALID, " ".join(str(error).split())[:300]))
    if pairs and not different:
        return Judged(_answer(results.SAME, f"the same machine code in all {len(pairs)} variants"))
    return Judged(None, few([known[file][defines] for file, defines in different]))


def _answer(status: str, reason: str) -> dict[str, Any]:
    return {"status": status, "by": "NVRTC", "reason": reason, "seconds": 0.0}
