"""Runs kernels where there is no checkout: copied out under another name, or installed from the wheel.

In the checkout, `python -m tests.standalone inputs FILE` writes inputs of every kernel, made from its SPEC. Outside,
`python -I standalone.py run PACKAGE FILE SITE` imports PACKAGE.<kernel> with SITE in front of the path, runs it
forward and backward on them and holds the results against PACKAGE.<kernel>.reference. That half imports torch alone,
and triton through the kernels, so it proves that nothing else is needed.

`python -I standalone.py begin PACKAGE SITE` types what a newcomer does, from an empty folder: `info`, `selftest`, and
PACKAGE.patch on a small Llama where transformers is installed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.spec import Case, KernelSpec

FEW = ("rmsnorm", "gelu", "rope", "swiglu")  # the ops of a selftest in the interpreter, which takes minutes for all
IGNORED = shutil.ignore_patterns("bench.py", "test_*.py", "__pycache__")  # what the wheel leaves out


def kernels() -> list[str]:
    """Those whose SPEC has the arguments of the public function; one that takes lists has its own test for this."""
    from harness import registry

    names = [name for name in registry.names() if registry.package(name).startswith("kernels.")]
    return [name for name in names if _chosen(registry.load(name)) is not None]


def _chosen(spec: KernelSpec) -> Case | None:
    """The smallest fp32 case that has elements and leaves its inputs as they are."""
    import torch

    if not any(getattr(fn, "__name__", "") == spec.name for fn in spec.implementations.values()):
        return None
    cases = [c for c in spec.cases if c.dtype == torch.float32 and not c.mutates and c.world_size == 1]
    cases = [case for case in cases if math.prod(case.dims.values()) > 100]
    return min(cases, key=lambda case: math.prod(case.dims.values()), default=None)


def write_inputs(path: Path, names: list[str] | None = None) -> None:
    """Inputs of one case of each kernel, and which of them have a gradient."""
    import torch

    from harness import registry

    everything = {}
    for name in names or kernels():
        spec = registry.load(name)
        case = _chosen(spec)
        assert case is not None, f"{name} has no case to run"
        inputs = spec.make_inputs(case, "cpu", torch.Generator().manual_seed(0))
        everything[name] = {"inputs": inputs, "grads": [g for g in spec.grads if g in inputs]}
    torch.save(everything, path)


def run(package: str, path: Path, site: Path | None) -> None:
    """Every kernel of the file at `path`, from `package`. Raises AssertionError that names those that are wrong."""
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    if site:
        sys.path.insert(0, str(site))
    checkout = Path(__file__).resolve().parent.parent
    assert checkout not in map(Path.resolve, map(Path, sys.path)), f"{checkout} is on the path: this proves nothing"
    wrong = []
    for name, case in torch.load(path).items():
        try:
            module = importlib.import_module(f"{package}.{name}")
            reference = importlib.import_module(f"{package}.{name}.reference")
            got = results(getattr(module, name), case)
            expected = results(getattr(reference, f"{name}_reference"), case)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        except Exception:
            traceback.print_exc()
            wrong.append(name)
        else:
            print(f"{package}.{name}: forward and {len(case['grads'])} gradients agree with the reference")
    assert not wrong, f"wrong in {package}: {', '.join(wrong)}"


def results(op, case: dict) -> list:
    """Outputs and gradients of one case."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in case["inputs"].items()}
    inputs |= {name: inputs[name].requires_grad_() for name in case["grads"]}
    out = op(**inputs)
    outputs = [out] if isinstance(out, torch.Tensor) else list(out)
    grads: tuple[torch.Tensor, ...] = ()
    if case["grads"]:
        loss = torch.stack([o.sum() + o.square().sum() for o in outputs if o.requires_grad]).sum()
        grads = torch.autograd.grad(loss, [inputs[n] for n in case["grads"]])
    # Triton's interpreter rounds to fp8 wrongly.
    kept = [o for o in outputs if device == "cuda" or o.element_size() > 1]
    return [t.detach().cpu() for t in (*kept, *grads)]


def begin(package: str, site: Path) -> None:
    """`info`, `selftest` and `patch`. Raises CalledProcessError for what fails."""
    import torch

    ops = () if torch.cuda.is_available() else FEW
    chosen = [word for op in ops for word in ("--op", op)]
    commands = [("-m", package, "info"), ("-m", package, "selftest", *chosen)]
    if importlib.util.find_spec("transformers"):
        commands.append(("-I", __file__, "patch", package, str(site.resolve())))
    environment = {**os.environ, "PYTHONPATH": str(site.resolve())}
    environment.pop("TRITON_INTERPRET", None)  # the commands see to it
    with tempfile.TemporaryDirectory() as empty:
        for command in commands:
            print("$ python", *command, flush=True)
            subprocess.run([sys.executable, *command], cwd=empty, env=environment, check=True)
    if len(commands) == 2:
        print(f"transformers is not installed: {package}.patch was not tried")


def patch(package: str, site: Path) -> None:
    """A step of training of a small Llama, as it is and patched: the same loss and gradients."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(site))
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1)
    config = LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=48, pad_token_id=0, **heads)
    model = LlamaForCausalLM(config).to(device).train()
    tokens = torch.randint(1, 61, (2, 9), device=device)
    found = []
    for change in (lambda model: model, importlib.import_module(package).patch):
        model = change(model)
        loss = model(input_ids=tokens, labels=tokens).loss
        found.append((loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))))
    counts = importlib.import_module(f"{package}.patch").patched(model)
    assert counts == dict(norm=3, rope=1, mlp=1, attention=1, loss=1), counts
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-5)
    print(f"{package}.patch: {', '.join(f'{count} {op}' for op, count in counts.items())}; loss and gradients agree")


def check_contents(wheel: Path) -> None:
    """The wheel holds `ridgeline` and its metadata at top level, every kernel, and nothing that needs the harness."""
    files = zipfile.ZipFile(wheel).namelist()
    roots = {name.split("/")[0] for name in files}
    assert {r for r in roots if not r.endswith(".dist-info")} == {"ridgeline"}, f"unexpected at top level: {roots}"
    names = [Path(name).name for name in files]
    unwanted = sorted(name for name in names if name == "bench.py" or name.startswith("test_"))
    assert not unwanted, f"the wheel must not ship {unwanted}"
    kernels = {path.parent.name for path in Path(__file__).resolve().parent.parent.glob("kernels/*/bench.py")}
    missing = sorted(kernel for kernel in kernels if f"ridgeline/{kernel}/op.py" not in files)
    assert not missing, f"the wheel lacks {missing}"
    print(f"{wheel.name}: {len(kernels)} kernels, {len(files)} files")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("inputs").add_argument("file", type=Path)
    commands.add_parser("contents").add_argument("wheel", type=Path)
    commands.add_parser("ship").add_argument("site", type=Path)
    for name in ("begin", "patch"):
        command = commands.add_parser(name)
        command.add_argument("package")
        command.add_argument("site", type=Path)
    outside = commands.add_parser("run")
    outside.add_argument("package")
    outside.add_argument("file", type=Path)
    outside.add_argument("site", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "inputs":
        write_inputs(arguments.file)
    elif arguments.command == "contents":
        check_contents(arguments.wheel)
    elif arguments.command == "ship":
        source = Path(__file__).resolve().parent.parent / "kernels"
        shutil.copytree(source, arguments.site / "ridgeline", ignore=IGNORED)
    elif arguments.command == "begin":
        begin(arguments.package, arguments.site)
    elif arguments.command == "patch":
        patch(arguments.package, arguments.site)
    else:
        run(arguments.package, arguments.file, arguments.site)


if __name__ == "__main__":
    main()
