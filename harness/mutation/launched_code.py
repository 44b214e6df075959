"""The machine code that checks launch on a GPU, compared by digests: if a survivor's code equals the original's in each
launched variant, these checks cannot detect the fault.

A compiled kernel has three digests: of the variant (the types, constants and options with which it is compiled), of its
source, and of its machine code.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from .mutants import Mutant, is_cuda


def of_triton(kernel: Any, source: Any, target: Any = None, options: Any = None, **_: Any) -> tuple[str, str, str]:
    """The digests of a kernel compiled by Triton: variant, source, code."""
    variant = (source.name, source.signature, _named(source.constants), source.attrs, target, options)
    plain = re.sub(r" at 0x[0-9a-f]+", "", repr(variant))
    return _digest(plain), _digest(source.hash()), _digest(kernel.asm["cubin"])


def _named(constants: Mapping[Any, Any]) -> list[tuple[str, str]]:
    """The constants, with functions replaced by their names: their source is no part of the variant."""
    return sorted((repr(key), getattr(value, "__name__", None) or repr(value)) for key, value in constants.items())


def of_nvrtc(folder: Path, source: str, defines: tuple[str, ...], code: bytes) -> tuple[str, str, str]:
    """The digests of a kernel compiled by NVRTC: variant, source with all headers of the folder, code."""
    texts = [path.read_text(encoding="utf-8") for path in (folder / source, *sorted(folder.glob("*.cuh")))]
    return _digest(repr((source, defines))), _digest(repr(texts)), _digest(code)


def _digest(text: str | bytes) -> str:
    return hashlib.sha256(text if isinstance(text, bytes) else text.encode()).hexdigest()[:16]


def changed_to_the_same(codes: Collection[tuple[str, str, str]], originals: Mapping[str, tuple[str, str]]) -> int:
    """The number of variants whose source differs from the original's (variant → its source and its code). 0 if the
    machine code of one differs too, or if one was not compiled for the original."""
    known = [(originals.get(variant, ("", "")), source, code) for variant, source, code in codes]
    same = all(code and code == original for (_, original), _, code in known)
    return same * sum(source != original for (original, _), source, _ in known)


def is_all_of(mutant: Mutant, source: str) -> bool:
    """Whether everything that a mutant changes is compiled for the GPU: CUDA C++, or a Triton function. In the latter
    the number of lines must not change, since that would change the Triton functions below it."""
    if is_cuda(mutant.file):
        return True
    name = mutant.function.partition(".")[0]
    return name in _jitted(source) and mutant.applied(source).count("\n") == source.count("\n")


@cache
def _jitted(source: str) -> frozenset[str]:
    """The functions of a module that Triton compiles."""
    found = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return frozenset(f.name for f in found if any("jit" in ast.unparse(d).split("(")[0] for d in f.decorator_list))
