"""What can be said of a mutant of CUDA C++ without a GPU: that it does not compile; that NVRTC makes the same machine
code of it in every variant (set of defines) in which the cases of SPEC compile its file, so that no case can show a
fault; or which cases launch a variant that it does change (`near`).
"""

from __future__ import annotations

import hashlib
import itertools
import math
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
from .near import Launcher

CAPABILITY = (9, 0)
ARCHITECTURE = "sm_90a"

DIFFERENT = 2  # variants with other machine code that `judge` looks for
MORE = 3  # variants, at most, that it compiles after the first of these
PAIRS = 3  # launchers that it names

#: Source file, by its path in the kernel's folder → defines → who launches it so, of the cases that are checked.
Variants = Mapping[str, Mapping[tuple[str, ...], Sequence[Launcher]]]


@dataclass(frozen=True)
class Judged:
    """`answer` about a mutant that does not compile, or of which every variant is the same machine code; else None, and
    `near` is who launches what is not the same."""

    answer: Mapping[str, Any] | None
    near: Sequence[Launcher] = ()


def variants(spec: KernelSpec) -> Variants:
    """What SPEC's cases launch. RuntimeError without NVRTC, without which launchers take other paths."""
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
        for case in sorted(spec.cases, key=_size):
            if not execute.unfit(case, CAPABILITY):
                for name in spec.implementations:
                    now[:] = [] if case.bench else [(name, case.name)]
                    for mode in spec.modes_of(case):
                        if not spec.skip_reason(name, case, mode):
                            _launch(spec, name, case, mode)
    return found


def _size(case: Case) -> int:
    return math.prod(value for value in case.dims.values() if value)


def _launch(spec: KernelSpec, name: str, case: Case, mode: str) -> None:
    """Runs an implementation on fake tensors; nothing is compiled, and Triton's kernels are passed over."""
    passed_over = mock.patch.object(JITFunction, "run", lambda *_, **__: mock.MagicMock())
    elsewhere = nvrtc.recording(nvrtc.package_of(spec), CAPABILITY, lambda launch: None)
    # A case that does not run as declared is the build's to report.
    with launches.record(CAPABILITY), elsewhere, passed_over, suppress(Exception):
        execute.bind(spec, spec.implementations[name], spec.make_inputs(case, "cuda", None), mode)()


def judge(mutant: Mutant, known: Variants) -> Judged:
    """Compiles variant after variant until DIFFERENT of them differ from the original. Variants that no checked case
    launches, but a benched one, come last; otherwise the order is drawn from the mutant's key."""
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
    return Judged(None, _few([known[file][defines] for file, defines in different]))


def _few(launchers: Sequence[Sequence[Launcher]]) -> tuple[Launcher, ...]:
    """PAIRS of them in all, taken from the variants in turn: of each first the largest case, in which there is most to
    go wrong, then from the smallest on."""
    ordered = [[*own[-1:], *own[:-1]] for own in launchers]
    turns = dict.fromkeys(launcher for turn in itertools.zip_longest(*ordered) for launcher in turn if launcher)
    return tuple(turns)[:PAIRS]


def _answer(status: str, reason: str) -> dict[str, Any]:
    return {"status": status, "by": "NVRTC", "reason": reason, "seconds": 0.0}
