"""Mutants of CUDA C++ of which no GPU is needed to say something: they do not compile, or NVRTC makes the same machine
code of them in every way in which the cases of SPEC compile their file. The second kind are no faults in these cases.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

from triton.runtime.jit import JITFunction

from .. import execute, registry
from ..compiling import launches, nvrtc
from ..spec import Case, KernelSpec
from . import results
from .mutants import Mutant

CAPABILITY = (9, 0)
ARCHITECTURE = "sm_90a"

Variants = Mapping[str, frozenset[tuple[str, ...]]]


def variants(spec: KernelSpec) -> Variants:
    """For each source file that SPEC's cases launch, by its path in the kernel's folder, the sets of defines with which
    they do. RuntimeError without NVRTC, without which launchers take other paths."""
    if nvrtc.library() is None:
        raise RuntimeError(nvrtc.MISSING)
    found: dict[str, set[tuple[str, ...]]] = {}

    def note(source: Path, architecture: str, defines: tuple[str, ...]) -> bytes:
        inside = source.relative_to(registry.folder(spec.name)).as_posix()
        found.setdefault(inside, set()).add(defines)
        return b""

    with mock.patch.object(nvrtc, "compiled", note):
        for case in spec.cases:
            if not execute.unfit(case, CAPABILITY):
                for name in spec.implementations:
                    for mode in spec.modes_of(case):
                        if not spec.skip_reason(name, case, mode):
                            _launch(spec, name, case, mode)
    return {source: frozenset(defines) for source, defines in found.items()}


def _launch(spec: KernelSpec, name: str, case: Case, mode: str) -> None:
    """Runs an implementation on fake tensors; nothing is compiled, and Triton's kernels are passed over."""
    passed_over = mock.patch.object(JITFunction, "run", lambda *_, **__: mock.MagicMock())
    elsewhere = nvrtc.recording(nvrtc.package_of(spec), CAPABILITY, lambda launch: None)
    # A case that does not run as declared is the build's to report.
    with launches.record(CAPABILITY), elsewhere, passed_over, suppress(Exception):
        execute.bind(spec, spec.implementations[name], spec.make_inputs(case, "cuda", None), mode)()


def judge(mutant: Mutant, known: Variants) -> dict[str, Any] | None:
    """The answer about a mutant that does not compile, or of which every variant is the same machine code; else
    None."""
    folder = registry.folder(mutant.kernel)
    source = folder / mutant.file
    concerned = [mutant.file] if source.suffix == ".cu" else [f for f in known if (folder / f).parent == source.parent]
    pairs = [(folder / file, defines) for file in concerned for defines in sorted(known.get(file, ()))]
    with tempfile.TemporaryDirectory(prefix="mutant-") as scratch:
        copy = Path(scratch, source.parent.name)
        shutil.copytree(source.parent, copy, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        (copy / source.name).write_text(mutant.applied(source.read_text(encoding="utf-8")), encoding="utf-8")
        try:
            for original, defines in pairs:
                code = nvrtc.compiled.__wrapped__(copy / original.name, ARCHITECTURE, defines)
                if code != nvrtc.compiled(original, ARCHITECTURE, defines):
                    return None
        except RuntimeError as error:
            return _answer(results.INVALID, " ".join(str(error).split())[:300])
    if not pairs:
        return None
    return _answer(results.SAME, f"the same machine code in all {len(pairs)} variants")


def _answer(status: str, reason: str) -> dict[str, Any]:
    return {"status": status, "by": "NVRTC", "reason": reason, "seconds": 0.0}
