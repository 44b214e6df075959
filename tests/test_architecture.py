"""The checkout keeps the rules of tests/architecture.py, and each rule rejects a tree that breaks it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .architecture import README_BYTES, TORCH_FREE, folders, violations
from .imports import imports

ROOT = Path(__file__).resolve().parent.parent

GOOD_TREE = {
    "noxfile.py": "import sys\nimport nox\n",
    "harness/__init__.py": "",
    "harness/registry.py": "import importlib\nimport importlib as i\ndef load(name): return i.import_module(name)\n",
    "harness/spec.py": "import torch\n",
    "harness/record.py": "import json\n",
    "harness/reporting/__init__.py": "",
    "harness/reporting/pages.py": "from .. import record\nfrom .tables import show\n",
    "harness/reporting/tables.py": "import json\n",
    "harness/commands/report.py": (
        "from typing import TYPE_CHECKING\n"
        "from .. import record\n"
        "from ..reporting import pages\n"
        "if TYPE_CHECKING:\n    from ..spec import Case\n"
        "def main():\n    import torch\n"
    ),
    "tests/test_specs.py": "import torch\nfrom harness import registry\n",
    "kernels/__init__.py": "",
    "kernels/alpha/__init__.py": 'from .op import alpha\n__all__ = ["alpha"]\n',
    "kernels/alpha/kernel.py": (
        "import math\nimport torch\nimport triton\nfrom .tiles import size\n"
        "@triton.jit\ndef _alpha_fwd_kernel(x_ptr): pass\ndef alpha_fwd(x): pass\n"
    ),
    "kernels/alpha/tiles.py": "size = 1\n",
    "kernels/alpha/configs.py": "from dataclasses import dataclass\ndef pick_config(dim): return 4\n",
    "kernels/alpha/portable/__init__.py": "",
    "kernels/alpha/portable/forward.py": (
        "import triton\nfrom .. import configs\nfrom ..tiles import size\nfrom .loads import load\n"
        "@triton.jit\ndef _alpha_portable_kernel(x_ptr): pass\n"
    ),
    "kernels/alpha/portable/loads.py": "def load(): pass\n",
    "kernels/alpha/op.py": (
        "import torch\nfrom . import configs\nfrom .kernel import alpha_fwd\ndef alpha(x): return alpha_fwd(x)\n"
    ),
    "kernels/alpha/reference.py": "import torch\ndef alpha_reference(x): return x\n",
    "kernels/alpha/example.py": "def example(device, dtype, small): pass\n",
    "kernels/alpha/bench.py": (
        "from harness.spec import KernelSpec\nfrom . import alpha, kernel\nfrom .reference import alpha_reference\n"
        'SPEC = KernelSpec(name="alpha")\n'
    ),
    "kernels/alpha/test_alpha.py": "import pytest\nfrom harness import registry\nfrom . import alpha\n",
    "kernels/alpha/README.md": "# alpha\n",
    "workloads/model/__init__.py": "import torch\nfrom kernels.alpha import alpha\nfrom .layer import Layer\n",
    "workloads/model/layer.py": "import torch\nclass Layer:\n    def load(self):\n        import transformers\n",
    "workloads/model/bench.py": 'from harness.spec import KernelSpec\nSPEC = KernelSpec(name="model")\n',
    "workloads/model/test_model.py": "import pytest\n",
    "workloads/model/README.md": "# model\n",
}

# What is written over or added to the good tree (None: removed), and what must then be said.
BAD = {
    "kernel imports numpy": ("kernels/alpha/kernel.py", "import numpy\n", "imports numpy: only the standard"),
    "kernel imports the harness": (
        "kernels/alpha/op.py",
        "from harness import spec\ndef alpha(): 0\n",
        "imports harness",
    ),
    "reference imports the harness": (
        "kernels/alpha/reference.py",
        "import harness.spec\ndef alpha_reference(): 0\n",
        "imports harness.spec",
    ),
    "hidden in a function": (
        "kernels/alpha/op.py",
        "def alpha():\n    from harness import spec\n",
        "op.py:2: imports harness",
    ),
    "hidden in a string": (
        "kernels/alpha/op.py",
        'import importlib\ndef alpha(): importlib.import_module("harness.spec")\n',
        "op.py:2: imports harness.spec",
    ),
    "another kernel": ("kernels/alpha/tiles.py", "from kernels.beta import beta\n", "imports kernels.beta"),
    "another kernel, relatively": (
        "kernels/alpha/tiles.py",
        "from ..beta import beta\n",
        "tiles.py:1: the import leaves",
    ),
    "another kernel, from a test": ("kernels/alpha/test_alpha.py", "from kernels.beta import beta\n", "kernels never"),
    "itself, absolutely": ("kernels/alpha/bench.py", 'import kernels.alpha\nSPEC = K(name="alpha")\n', "relatively"),
    "kernel imports op": ("kernels/alpha/kernel.py", "from .op import alpha\n", "kernel must not import op"),
    "kernel imports the package": ("kernels/alpha/tiles.py", "from . import alpha\n", "tiles must not import __init__"),
    "op imports reference": (
        "kernels/alpha/op.py",
        "from .reference import alpha_reference\ndef alpha(): 0\n",
        "op must not import reference",
    ),
    "op imports the package": (
        "kernels/alpha/op.py",
        "from . import x\ndef alpha(): 0\n",
        "op must not import __init__",
    ),
    "reference imports kernel": (
        "kernels/alpha/reference.py",
        "from .kernel import x\ndef alpha_reference(): 0\n",
        "reference must not import kernel",
    ),
    "package imports kernel": (
        "kernels/alpha/__init__.py",
        'from . import kernel\n__all__ = ["alpha"]\n',
        "__init__ must not import kernel",
    ),
    "kernel in a sub-folder imports numpy": (
        "kernels/alpha/portable/loads.py",
        "import numpy\n",
        "imports numpy: only",
    ),
    "kernel in a sub-folder leaves the folder": (
        "kernels/alpha/portable/loads.py",
        "from ...beta import beta\n",
        "loads.py:1: the import leaves",
    ),
    "kernel in a sub-folder imports op": (
        "kernels/alpha/portable/loads.py",
        "from ..op import alpha\n",
        "loads must not import op",
    ),
    "kernel in a sub-folder imports the package": (
        "kernels/alpha/portable/loads.py",
        "from .. import alpha\n",
        "loads must not import __init__",
    ),
    "nameless kernel in a sub-folder": (
        "kernels/alpha/portable/loads.py",
        "import triton\n@triton.jit\ndef _fwd_kernel(x): pass\n",
        "loads.py:3: the kernel _fwd_kernel must be named _alpha",
    ),
    "two modules import each other": (
        "kernels/alpha/tiles.py",
        "from .kernel import alpha_fwd\n",
        "imports itself: kernel → tiles → kernel",
    ),
    "two modules import each other, one of them late": (
        "kernels/alpha/tiles.py",
        "def size():\n    from . import kernel\n",
        "imports itself: kernel → tiles → kernel",
    ),
    "a circle in a sub-folder": (
        "kernels/alpha/portable/loads.py",
        "from .forward import x\n",
        "imports itself: portable/forward → portable/loads → portable/forward",
    ),
    "a circle through a sub-folder": (
        "kernels/alpha/tiles.py",
        "def size():\n    from .portable import forward\n",
        "imports itself: portable/forward → tiles → portable/forward",
    ),
    "a choice beside the kernel": (
        "kernels/alpha/portable/loads.py",
        "def pick_load(): pass\n",
        "loads.py:1: pick_load belongs into configs.py",
    ),
    "a choice inside a function": (
        "kernels/alpha/op.py",
        "def alpha():\n    def _pick_one(): pass\n",
        "op.py:2: _pick_one belongs into configs.py",
    ),
    "a choice by its own name": (
        "kernels/alpha/tiles.py",
        "from .configs import pick_config\n",
        "tiles.py:1: call pick_config through its module",
    ),
    "configs import a kernel": (
        "kernels/alpha/configs.py",
        "from .tiles import size\n",
        "configs must not import kernel",
    ),
    "configs in a package import a kernel": (
        "kernels/alpha/configs/forward.py",
        "from ..portable import forward\n",
        "configs must not import kernel",
    ),
    "a README that nobody reads to its end": (
        "kernels/alpha/README.md",
        "x" * (README_BYTES + 1),
        "README.md: has 8193 bytes, at most 8192",
    ),
    "package exports something else": (
        "kernels/alpha/__init__.py",
        'from .op import a\n__all__ = ["a"]\n',
        "must export the public op",
    ),
    "package exports nothing": ("kernels/alpha/__init__.py", "from .op import alpha\n", "must export the public op"),
    "no public function": ("kernels/alpha/op.py", "def beta(): pass\n", "op.py: defines no function alpha"),
    "no oracle": ("kernels/alpha/reference.py", "def reference(): pass\n", "no function alpha_reference"),
    "nameless kernel": (
        "kernels/alpha/tiles.py",
        "import triton\n@triton.jit\ndef _fwd_kernel(x): pass\n",
        "tiles.py:3: the kernel _fwd_kernel must be named _alpha",
    ),
    "nameless kernel, with options": (
        "kernels/alpha/tiles.py",
        "import triton\n@triton.jit(noinline=True)\ndef _fwd_kernel(x): pass\n",
        "tiles.py:3: the kernel _fwd_kernel must be named _alpha",
    ),
    "another name in SPEC": ("kernels/alpha/bench.py", 'SPEC = KernelSpec(name="beta")\n', 'SPEC.name must be "alpha"'),
    "no SPEC": ("kernels/alpha/bench.py", "CASES = ()\n", "declares no SPEC"),
    "no README": ("kernels/alpha/README.md", None, "alpha: has no README.md"),
    "no test": ("kernels/alpha/test_alpha.py", None, "alpha: has no test_alpha.py"),
    "no reference": ("kernels/alpha/reference.py", None, "alpha: has no reference.py"),
    "no example": ("kernels/alpha/example.py", None, "alpha: has no example.py"),
    "utils": ("kernels/alpha/utils.py", "", "utils.py: name the file"),
    "helpers": ("harness/helpers.py", "", "helpers.py: name the file"),
    "common": ("tests/wrong/common.py", "", "common.py: name the file"),
    "a module over the kernels goes into one": (
        "kernels/nn.py",
        "from .alpha.op import alpha\n",
        "nn.py:1: imports alpha.op: of a kernel only what its package exports",
    ),
    "a package over the kernels goes into one": (
        "kernels/patch/norms.py",
        "from ..alpha.tiles import size\n",
        "norms.py:1: imports alpha.tiles: of a kernel only what its package exports",
    ),
    "a module over the kernels names their package": (
        "kernels/__main__.py",
        "from kernels.alpha import alpha\n",
        "__main__.py:1: imports kernels.alpha: kernels by relative imports",
    ),
    "harness imports a kernel": (
        "harness/measure/stats.py",
        "from kernels.alpha import alpha\n",
        "must not import kernels.alpha",
    ),
    "harness imports a test": ("harness/measure/stats.py", "import tests.wrong\n", "must not import tests.wrong"),
    "harness imports a part": ("harness/measure/stats.py", "import parts.launch\n", "must not import parts.launch"),
    "record imports torch": ("harness/record.py", "import torch\n", "harness/record.py: imports torch: record → torch"),
    "report imports torch through record": ("harness/record.py", "import torch\n", "report → record → torch"),
    "report imports torch through two": (
        "harness/record.py",
        "from .spec import Case\n",
        "report → record → spec → torch",
    ),
    "report imports torch through a package": (
        "harness/reporting/tables.py",
        "from ..spec import Case\n",
        "report → reporting.pages → reporting.tables → spec → torch",
    ),
    "a package of the harness imports a kernel": (
        "harness/reporting/tables.py",
        "import kernels.alpha\n",
        "must not import kernels.alpha",
    ),
    "record imports torch in a try": (
        "harness/record.py",
        "try:\n    import torch\nexcept ImportError: 0\n",
        "record → torch",
    ),
    "record imports torch in an else": (
        "harness/record.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    0\nelse:\n    import torch\n",
        "record → torch",
    ),
    "a circle in the harness": (
        "harness/reporting/tables.py",
        "def show():\n    from .pages import page\n",
        "imports itself: reporting/pages → reporting/tables → reporting/pages",
    ),
    "a circle in a workload": (
        "workloads/model/layer.py",
        "from . import Layer\n",
        "imports itself: __init__ → layer → __init__",
    ),
    "noxfile imports torch": ("noxfile.py", "import nox\nimport torch\n", "noxfile.py:2: imports torch"),
    "noxfile imports torch late": ("noxfile.py", "def test(s):\n    import torch\n", "noxfile.py:2: imports torch"),
    "noxfile imports the harness": ("noxfile.py", "from harness import registry\n", "noxfile.py:1: imports harness"),
    "workload imports a launcher": (
        "workloads/model/layer.py",
        "from kernels.alpha.kernel import alpha_fwd\n",
        "only the public op",
    ),
    "workload imports a module": (
        "workloads/model/layer.py",
        "from kernels.alpha import kernel\n",
        "only the public op",
    ),
    "workload imports a workload": (
        "workloads/model/layer.py",
        "from ..other import x\n",
        "workloads never import each",
    ),
    "workload imports the harness": ("workloads/model/layer.py", "import harness\n", "layer.py:1: imports harness"),
    "workload imports the harness in a sub-folder": (
        "workloads/model/blocks/layer.py",
        "from harness import spec\nfrom ..layer import Layer\n",
        "blocks/layer.py:1: imports harness",
    ),
    "workload imports an extra when it is imported itself": (
        "workloads/model/layer.py",
        "import transformers\n",
        "layer.py:1: imports transformers",
    ),
    "workload without a name": ("workloads/model/bench.py", 'SPEC = KernelSpec(name="x")\n', 'must be "model"'),
}


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def test_this_checkout() -> None:
    assert violations(ROOT) == []


def test_a_good_tree_passes(tmp_path: Path) -> None:
    write_tree(tmp_path, GOOD_TREE)
    assert violations(tmp_path) == []


@pytest.mark.parametrize("what", BAD)
def test_a_bad_tree_is_rejected(what: str, tmp_path: Path) -> None:
    name, content, message = BAD[what]
    write_tree(tmp_path, {**GOOD_TREE, name: content or ""})
    if content is None:
        (tmp_path / name).unlink()
    found = violations(tmp_path)
    assert any(re.search(re.escape(message), violation) for violation in found), found


COMPOSED = {
    "kernels/beta/__init__.py": 'from .op import beta\n__all__ = ["beta"]\n',
    "kernels/beta/steps.py": "from ..alpha import alpha\n",
    "kernels/beta/op.py": "from .steps import alpha\ndef beta(x): return alpha(x)\n",
    "kernels/beta/reference.py": "def beta_reference(x): return x\n",
    "kernels/beta/example.py": "def example(device, dtype, small): pass\n",
    "kernels/beta/bench.py": 'from harness.spec import KernelSpec\nSPEC = KernelSpec(name="beta", needs=("alpha",))\n',
    "kernels/beta/test_beta.py": "from ..alpha import alpha\n",
    "kernels/beta/README.md": "# beta\n",
}


def test_a_composed_kernel_imports_what_it_needs(tmp_path: Path) -> None:
    write_tree(tmp_path, {**GOOD_TREE, **COMPOSED})
    assert violations(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "steps.py",
            "from ..alpha.kernel import alpha_fwd\n",
            "steps.py:1: imports alpha.kernel: of a kernel in SPEC.needs",
        ),
        ("steps.py", "from ..gamma import gamma\n", "steps.py:1: the import leaves the folder"),
        ("steps.py", "from kernels.alpha import alpha\n", "steps.py:1: imports kernels.alpha: kernels never"),
        ("bench.py", 'SPEC = KernelSpec(name="beta")\n', "steps.py:1: the import leaves the folder"),
    ],
)
def test_a_composed_kernel_imports_nothing_else(name: str, content: str, message: str, tmp_path: Path) -> None:
    write_tree(tmp_path, {**GOOD_TREE, **COMPOSED, f"kernels/beta/{name}": content})
    assert any(message in violation for violation in violations(tmp_path)), violations(tmp_path)


def test_a_folder_needs_a_module_for_its_kernels(tmp_path: Path) -> None:
    tree = {
        name: text
        for name, text in GOOD_TREE.items()
        if name not in ("kernels/alpha/kernel.py", "kernels/alpha/tiles.py") and "portable" not in name
    }
    write_tree(tmp_path, {**tree, "kernels/alpha/op.py": "def alpha(): 0\n"})
    assert any("has no kernel.py" in violation for violation in violations(tmp_path))


def test_deferred_imports_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    deferred = "def f():\n    import c\nif TYPE_CHECKING:\n    import d\nelse:\n    import e\n"
    path.write_text(f"import a\nclass C:\n    import b\n{deferred}")
    found = {item.module: item.deferred for item in imports(path)}
    assert found == {"a": False, "b": False, "c": True, "d": True, "e": False}


def test_the_rules_look_at_something() -> None:
    """A rule over modules that were renamed away would pass for ever."""
    files = [ROOT.joinpath("harness", *name.split(".")).with_suffix(".py") for name in TORCH_FREE]
    assert [file for file in files if not file.is_file()] == []
    assert folders(ROOT, "kernels")
