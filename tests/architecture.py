"""Who may import whom, and what a folder holds: rules read from the syntax trees. `violations` is the entry.

Each rule is a generator of messages that begin with `path:line:` or `path:`. Nothing is imported, so a tree that
does not even run can be judged; tests/test_architecture.py feeds bad ones to show that each rule can fail.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from harness.commands.vendor import part_of

from .imports import Import, depth, imports, targets, tree, way_back

ALLOWED_IN_KERNELS = frozenset({*sys.stdlib_module_names, "torch", "triton", "cupy"})
# The extra `models`. It may be missing, so it is imported where it is used.
ALSO_IN_WORKLOADS = frozenset({"transformers"})
GPU_LIBRARIES = frozenset({"torch", "triton", "cupy"})
# `report` and `compare` have to work where torch is not installed; the others are what they are reached through.
TORCH_FREE = (
    "cli",
    "commands.compare",
    "commands.new",
    "commands.report",
    "commands.vendor",
    "options",
    "record",
    "registry",
    "roofline",
)
README_BYTES = 8 * 1024  # what was tried besides stands in EXPERIMENTS.md
MEANINGLESS = ("utils.py", "helpers.py", "common.py")
KERNEL_FILES = ("__init__.py", "op.py", "reference.py", "example.py", "bench.py", "README.md")
WORKLOAD_FILES = ("__init__.py", "bench.py", "README.md")
# What the package offers over its kernels.
OVER_KERNELS = ("nn.py", "train.py", "info.py", "selftest.py", "__main__.py", "patch")


def violations(root: Path) -> list[str]:
    """Everything in the checkout at `root` that breaks a rule."""
    found: list[str] = []
    for folder in folders(root, "kernels"):
        found += [*kernel_files(folder, KERNEL_FILES), *kernel_imports(folder), *kernel_order(folder)]
        found += [*circles(folder), *kernel_configs(folder), *kernel_names(folder), *spec_name(folder)]
        found += kernel_readme(folder)
    found += over_kernels(root / "kernels")
    for folder in folders(root, "workloads"):
        found += [*kernel_files(folder, WORKLOAD_FILES), *workload_imports(folder), *spec_name(folder)]
        found += circles(folder)
    found += circles(root / "harness")
    found += [*harness_finds_kernels_by_registry(root), *torch_free(root), *noxfile_is_light(root), *file_names(root)]
    return [message.replace(f"{root}/", "") for message in found]


def folders(root: Path, kind: str) -> list[Path]:
    """The folders of kernels/ or workloads/. A folder without code is a leftover of a removed one: no business here."""
    inner = (path for path in (root / kind).glob("*") if path.is_dir() and any(path.glob("*.py")))
    return sorted(path for path in inner if path.name not in OVER_KERNELS)


def kernel_files(folder: Path, required: tuple[str, ...]) -> Iterator[str]:
    """A reader finds everything about an op without searching."""
    for name in (*required, f"test_{folder.name}.py"):
        if not (folder / name).is_file():
            yield f"{folder}: has no {name}"
    if required is KERNEL_FILES and not any(_layer(folder, path) == "kernel" for path in modules(folder)):
        yield f"{folder}: has no kernel.py, nor another module for its kernels"


def modules(folder: Path) -> list[Path]:
    """Every module of a folder, those of its sub-folders too."""
    return sorted(folder.rglob("*.py"))


def _layer(folder: Path, path: Path) -> str:
    """bench and test_* are `outer`; every module that is none of the known ones is part of the kernel, as those of
    portable/ and sm90/ are. `path` is a module or a package of the folder."""
    first, *below = path.relative_to(folder).with_suffix("").parts
    if path.stem.startswith("test_") or (first == "bench" and not below):
        return "outer"
    if first == "configs":
        return "configs"
    if first.startswith("op_") and not below:
        return "op"
    return first if first in ("__init__", "op", "reference", "example") and not below else "kernel"


def kernel_imports(folder: Path) -> Iterator[str]:
    """What makes a folder standalone: it works when it is copied out under another name, a composed kernel together
    with those that it needs."""
    needed = spec_needs(folder)
    for path in modules(folder):
        for item in imports(path):
            where = f"{path}:{item.line}"
            if item.level == depth(folder, path) + 1 and item.module.split(".")[0] in needed:
                if "." in item.module:
                    yield f"{where}: imports {item.module}: of a kernel in SPEC.needs only what its package exports"
            elif item.level > depth(folder, path):
                yield f"{where}: the import leaves the folder: kernels never import each other"
            elif item.level == 0 and item.root in ("kernels", "workloads", "ridgeline"):
                yield f"{where}: imports {item.module}: kernels never import each other; within a folder, relatively"
            elif item.level == 0 and _layer(folder, path) != "outer" and item.root not in ALLOWED_IN_KERNELS:
                yield f"{where}: imports {item.module}: only the standard library, torch, triton and cupy may be"


def kernel_order(folder: Path) -> Iterator[str]:
    """configs ← kernel ← op ← __init__; reference and example stand alone."""
    may = {
        "__init__": {"op"},
        "op": {"op", "kernel", "configs"},
        "kernel": {"kernel", "configs"},
        "configs": {"configs"},
        "reference": set(),
        "example": set(),
    }
    for path in modules(folder):
        layer = _layer(folder, path)
        for item in imports(path) if layer != "outer" else []:
            if not 0 < item.level <= depth(folder, path):
                continue
            for target in targets(folder, path, item):
                other = _layer(folder, target)
                if other not in may[layer]:
                    name = "configs" if layer == "configs" else path.stem
                    where = f"{path}:{item.line}"
                    yield f"{where}: {name} must not import {other}: configs ← kernel ← op ← __init__ ← bench, test"


def circles(folder: Path) -> Iterator[str]:
    """A reader can begin at a module that needs no other. Imports that are deferred count: they hide a circle."""
    graph: dict[Path, list[Path]] = {}
    for path in modules(folder):
        relative = (item for item in imports(path) if 0 < item.level <= depth(folder, path))
        graph[path] = [target for item in relative for target in targets(folder, path, item) if target != path]
    seen: set[frozenset[Path]] = set()
    for start in graph:
        circle = way_back(graph, start)
        if circle and frozenset(circle) not in seen:
            seen.add(frozenset(circle))
            names = [path.relative_to(folder).with_suffix("").as_posix() for path in (*circle, start)]
            yield f"{start}: imports itself: {' → '.join(names)}"


def kernel_configs(folder: Path) -> Iterator[str]:
    """Whoever asks what is launched for a shape looks in one place, where `tune` replaces the answer too."""
    for path in modules(folder):
        if _layer(folder, path) in ("outer", "configs"):
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef) and node.name.lstrip("_").startswith("pick_"):
                yield f"{path}:{node.lineno}: {node.name} belongs into configs.py, or a module of configs/"
        for item in imports(path):
            for name in item.names:
                if name.lstrip("_").startswith("pick_"):
                    yield f"{path}:{item.line}: call {name} through its module: tune replaces it there"


def kernel_readme(folder: Path) -> Iterator[str]:
    """It is read from beginning to end."""
    readme = folder / "README.md"
    if readme.is_file() and (size := readme.stat().st_size) > README_BYTES:
        yield f"{readme}: has {size} bytes, at most {README_BYTES} may be: what was tried belongs into EXPERIMENTS.md"


def kernel_names(folder: Path) -> Iterator[str]:
    """folder = public function = op; the oracle is `<folder>_reference`; a JIT kernel begins with `_<folder>`, unless
    it is in a copy of a part, which several folders have."""
    name = folder.name
    for file, function in (("op.py", name), ("reference.py", f"{name}_reference")):
        if (folder / file).is_file() and function not in _functions(folder / file):
            yield f"{folder / file}: defines no function {function}"
    if (folder / "__init__.py").is_file() and name not in (_constant(folder / "__init__.py", "__all__") or ()):
        yield f'{folder / "__init__.py"}: must export the public op: __all__ = ["{name}"]'
    for path in modules(folder):
        for function, node in _functions(path).items() if part_of(path) is None else ():
            jitted = any(ast.unparse(d).split("(")[0].endswith("jit") for d in node.decorator_list)
            if jitted and function.endswith("_kernel") and not function.startswith(f"_{name}"):
                yield f"{path}:{node.lineno}: the kernel {function} must be named _{name}…_kernel"


def _functions(path: Path) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in tree(path).body if isinstance(node, ast.FunctionDef)}


def _constant(path: Path, name: str) -> object:
    """The value of a module-level assignment of a literal, or None."""
    for node in tree(path).body:
        if isinstance(node, ast.Assign) and any(getattr(target, "id", None) == name for target in node.targets):
            try:
                return ast.literal_eval(node.value)
            except ValueError:
                return None
    return None


def spec_name(folder: Path) -> Iterator[str]:
    """bench.py holds the declaration, under the folder's name."""
    if not (folder / "bench.py").is_file():
        return
    for node in tree(folder / "bench.py").body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if getattr(target, "id", None) == "SPEC" and isinstance(node.value, ast.Call):
            name = next((k.value for k in node.value.keywords if k.arg == "name"), None)
            if not isinstance(name, ast.Constant) or name.value != folder.name:
                yield f'{folder / "bench.py"}:{node.lineno}: SPEC.name must be "{folder.name}", like the folder'
            return
    yield f"{folder / 'bench.py'}: declares no SPEC = KernelSpec(...)"


def spec_needs(folder: Path) -> tuple[str, ...]:
    """The kernels that SPEC names as needed."""
    for node in tree(folder / "bench.py").body if (folder / "bench.py").is_file() else []:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Call):
            for keyword in node.value.keywords:
                if keyword.arg == "needs":
                    return tuple(ast.literal_eval(keyword.value))
    return ()


def exported(workload: Path, kernel: str) -> set[str]:
    """The public ops of a kernel."""
    package = workload.parents[1] / "kernels" / kernel / "__init__.py"
    return set((_constant(package, "__all__") if package.is_file() else None) or (kernel,))


def workload_imports(folder: Path) -> Iterator[str]:
    """Workloads are built from the kernels' public ops."""
    for path in modules(folder):
        for item in imports(path):
            where = f"{path}:{item.line}"
            if item.level > depth(folder, path) or (item.level == 0 and item.root == "workloads"):
                yield f"{where}: the import leaves the folder: workloads never import each other"
            elif item.level == 0 and item.root == "kernels":
                _, *inner = item.module.split(".")
                over = f"{inner[0]}.py" in OVER_KERNELS if inner else False
                if len(inner) > 1 or (inner and not over and not set(item.names) <= exported(folder, inner[0])):
                    yield f"{where}: imports {item.module}: of a kernel only the public op may be imported"
            elif item.deferred and item.root in ALSO_IN_WORKLOADS:
                continue
            elif _layer(folder, path) != "outer" and item.level == 0 and item.root not in ALLOWED_IN_KERNELS:
                yield f"{where}: imports {item.module}: only the standard library, torch, triton, cupy and kernels may"


def over_kernels(package: Path) -> Iterator[str]:
    """Modules over the kernels are users of theirs: they import what a kernel's package exports, and no more of it."""
    for name in OVER_KERNELS:
        for path in modules(package / name) if (package / name).is_dir() else [package / name]:
            for item in imports(path) if path.is_file() else []:
                if item.level == depth(package, path) and "." in item.module:
                    yield f"{path}:{item.line}: imports {item.module}: of a kernel only what its package exports"
                elif item.level == 0 and item.root in ("kernels", "ridgeline", "harness", "workloads"):
                    yield f"{path}:{item.line}: imports {item.module}: kernels by relative imports, and nothing else"


def harness_finds_kernels_by_registry(root: Path) -> Iterator[str]:
    """Otherwise adding a kernel would mean editing the harness."""
    for path in sorted((root / "harness").rglob("*.py")):
        if "template" in path.relative_to(root).parts:
            continue
        for item in imports(path):
            if item.level == 0 and item.root in ("kernels", "workloads", "ridgeline", "tests", "parts"):
                yield f"{path}:{item.line}: the harness must not import {item.module}: it finds kernels by registry"


def torch_free(root: Path) -> Iterator[str]:
    """No chain of imports that run when the module is imported leads from these to torch."""
    for start in TORCH_FREE:
        path = _module_file(root / "harness", start.split("."))
        if path.is_file() and (chain := _chain_to_torch(root / "harness", start)):
            yield f"{path}: imports torch: {' → '.join(chain)}"


def _chain_to_torch(harness: Path, start: str) -> tuple[str, ...]:
    """The shortest chain of modules of the harness that ends in a GPU library; empty if there is none."""
    queue, seen = [(start,)], {start}
    while queue:
        chain = queue.pop(0)
        for item in imports(_module_file(harness, chain[-1].split("."))):
            if item.deferred:
                continue
            if item.level == 0 and item.root in GPU_LIBRARIES:
                return (*chain, item.root)
            new = [name for name in _loaded(harness, chain[-1], item) if name not in seen]
            queue += [(*chain, name) for name in new]
            seen.update(new)
    return ()


def _loaded(harness: Path, importer: str, item: Import) -> list[str]:
    """The modules of the harness that an import loads, as names below `harness`."""
    parts = [part for part in item.module.split(".") if part]
    if item.level == 0:
        if item.root != "harness":
            return []
        base = parts[1:]
    else:
        package = importer.split(".")[:-1]
        base = [*package[: len(package) - (item.level - 1)], *parts]
    if base and _module_file(harness, base).is_file():
        return [".".join(base)]
    return [".".join([*base, name]) for name in item.names if _module_file(harness, [*base, name]).is_file()]


def _module_file(harness: Path, parts: list[str]) -> Path:
    return harness.joinpath(*parts).with_suffix(".py")


def noxfile_is_light(root: Path) -> Iterator[str]:
    """nox may be installed anywhere: the noxfile can count on nox and the standard library alone."""
    for item in imports(root / "noxfile.py"):
        if item.root not in sys.stdlib_module_names | {"nox"}:
            yield f"{root / 'noxfile.py'}:{item.line}: imports {item.module}: only nox and the standard library may be"


def file_names(root: Path) -> Iterator[str]:
    """A name that says nothing collects everything."""
    for kind in ("kernels", "workloads", "harness", "tests"):
        for path in sorted((root / kind).rglob("*.py")):
            if path.name in MEANINGLESS:
                yield f"{path}: name the file after what it does"
