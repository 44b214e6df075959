"""Scaffolds a kernel: a copy of `template/` with the placeholder replaced, and of the parts that it needs. The copy
passes its tests unchanged, so that one starts from working code. Nothing outside its folder is changed.

A template line that ends in `#cuda` is for a kernel with a CUDA C++ version, one that ends in `#triton` for a kernel
without. The files of `template/cuda/` are only copied for the former.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import keyword
import re
import sys
from pathlib import Path

from .. import registry
from . import vendor

TEMPLATE = Path(__file__).resolve().parent.parent / "template"
PLACEHOLDER = "TEMPLATE"
LONGEST = 30  # the name appears in tables, file names and NVTX ranges
SUFFIX = ".in"
PARTS = ("checks.py", "launch.py")
CUDA_PARTS = ("cuda_driver.py", "sm90/vectors.cuh")
OVER_KERNELS = ("info", "nn", "patch", "selftest", "train")
# A function with one of these names would hide the module.
MODULES = (
    "bench",
    "checks",
    "configs",
    "cuda_driver",
    "example",
    "kernel",
    "launch",
    "op",
    "plans",
    "reference",
    "sm90",
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="name of folder, public function, op and SPEC, e.g. layer_norm")
    parser.add_argument("--cuda", action="store_true", help="add a CUDA C++ version for Hopper to the Triton version")


def main(arguments: argparse.Namespace) -> int:
    folder = scaffold(arguments.name, arguments.cuda)
    shown = folder.relative_to(registry.ROOT)
    print(f"{shown}: a working kernel, y = alpha · x. Replace it, beginning with reference.py and SPEC in bench.py.")
    for session, what in (
        (f"test-{arguments.name}", "runs its own tests and those generated from its SPEC"),
        (f"bench-{arguments.name}", "checks and times it, or without a GPU compiles it and prints its roofline bound"),
        ("support", "adds it to docs/SUPPORT.md, which a test requires"),
    ):
        print(f"  nox -s {session:{len(arguments.name) + 6}}  {what}")
    return 0


def scaffold(name: str, cuda: bool = False) -> Path:
    """Writes kernels/<name> and returns its path. ValueError for an invalid name; nothing is written then."""
    if reason := problem(name):
        raise ValueError(f"cannot make a kernel named {name!r}: {reason}")
    folder = registry.ROOT / "kernels" / name
    write(name, folder, cuda)
    return folder


def write(name: str, folder: Path, cuda: bool = False) -> None:
    """Writes the template, under that name, into a folder that does not exist yet."""
    folder.mkdir(parents=True)
    sources = [*TEMPLATE.glob(f"*{SUFFIX}"), *((TEMPLATE / "cuda").glob(f"*{SUFFIX}") if cuda else ())]
    for source in sorted(sources):
        target = folder / source.name.removesuffix(SUFFIX).replace(PLACEHOLDER, name)
        target.write_text(_filled(source.read_text(encoding="utf-8"), name, cuda), encoding="utf-8")
    for part in (*PARTS, *(CUDA_PARTS if cuda else ())):
        (folder / Path(part).name).write_text(vendor.text_of(registry.ROOT, part), encoding="utf-8")


def _filled(text: str, name: str, cuda: bool) -> str:
    kept = []
    for line in text.splitlines():
        code, marker, chosen = line.rpartition("#")
        if not marker or chosen not in ("cuda", "triton"):
            kept.append(line)
        elif (chosen == "cuda") == cuda:
            kept.append(code.rstrip())
    return "\n".join(kept).replace(PLACEHOLDER, name) + "\n"


def _bound() -> set[str]:
    """The names bound in those files of the template that define or import the public function, by its plain name. A
    function of one of these names would hide what is there, or be hidden."""
    found: set[str] = set()
    for source in TEMPLATE.rglob(f"*.py{SUFFIX}"):
        for cuda in (False, True):
            bound = set()
            for node in ast.walk(ast.parse(_filled(source.read_text(encoding="utf-8"), PLACEHOLDER, cuda))):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    bound.add(node.id)
                elif isinstance(node, ast.arg):
                    bound.add(node.arg)
                elif isinstance(node, ast.alias):
                    bound.add((node.asname or node.name).partition(".")[0])
                elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                    bound.add(node.name)
            found |= bound if PLACEHOLDER in bound else set()
    return found


def problem(name: str) -> str | None:
    """Why `name` cannot be a kernel's name, or None."""
    if not re.fullmatch("[a-z][a-z0-9_]*", name):
        return "use lower-case letters, digits and underscores, a letter first"
    if len(name) > LONGEST:
        return f"it has {len(name)} characters, at most {LONGEST} are allowed"
    if keyword.iskeyword(name) or keyword.issoftkeyword(name):
        return "it is a keyword of Python"
    if name in sys.stdlib_module_names or name in ("torch", "triton", "cupy"):
        return "a Python module has that name"
    if name in dir(builtins):
        return "it would hide the builtin function"
    if name in OVER_KERNELS:
        return "the package has a module of that name"
    if name in MODULES:
        return "each kernel's folder has a module of that name"
    if name in _bound():
        return "the template has a variable or function of that name"
    for kind in registry.COLLECTIONS:
        if (registry.ROOT / kind / name).exists():
            return f"{kind}/{name} exists"
    return None
