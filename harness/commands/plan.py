"""`plan`: how long a case would take on many GPUs, and how efficiently, by the model of its SPEC.

    python -m harness plan --kernel ring_attention --gpus 8 --gpus 64 --seq 1048576 --tflops T --link G

T and G are what was measured of one GPU's kernel and of its link. What is printed is a model and no measurement.
"""

from __future__ import annotations

import argparse

from .. import registry
from ..reporting.markdown import table
from ..spec import Case, KernelSpec

GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kernel", metavar="NAME", help="default: the one that has a model")
    parser.add_argument("--case", metavar="NAME", help="whose heads and mask; default: its first bench case")
    parser.add_argument("--mode", choices=("fwd", "bwd"), default="fwd")
    parser.add_argument("--gpus", type=int, action="append", metavar="N", help="may be given more than once")
    parser.add_argument("--seq", type=int, metavar="N", help="length of the whole sequence; default: the case's own")
    parser.add_argument("--tflops", type=float, required=True, help="of the kernel on one GPU, measured")
    parser.add_argument("--link", type=float, required=True, metavar="GB/s", help="of one GPU and direction, measured")


def main(arguments: argparse.Namespace) -> int:
    """Prints a row for each number of GPUs."""
    if arguments.tflops <= 0 or arguments.link <= 0:
        raise ValueError(f"--tflops and --link must be positive, got {arguments.tflops} and {arguments.link}")
    spec = _spec(arguments.kernel)
    case = spec.case(arguments.case) if arguments.case else next(case for case in spec.cases if case.bench)
    print(f"A model, not a measurement: {spec.name} {arguments.mode}, heads and mask of {case.name},")
    print(f"length {arguments.seq or 'its own'}, {arguments.tflops:g} TFLOP/s a GPU, {arguments.link:g} GB/s a link.\n")
    print("\n".join(rows(spec, case, arguments)))
    return 0


def rows(spec: KernelSpec, case: Case, arguments: argparse.Namespace) -> list[str]:
    """The table."""
    assert spec.model is not None
    found = []
    for gpus in arguments.gpus or GPUS:
        rates = arguments.tflops * 1e12, arguments.link * 1e9
        seconds, exposed, efficiency = spec.model(case, arguments.mode, gpus, arguments.seq, *rates)
        found.append((gpus, f"{1e3 * seconds:.3f}", f"{1e3 * exposed:.3f}", f"{100 * efficiency:.1f} %"))
    return table([">GPUs", ">ms", ">ms waiting for transfers", ">efficiency"], found)


def _spec(name: str | None) -> KernelSpec:
    if name:
        spec = registry.load(name)
        if spec.model is None:
            raise ValueError(f"{name} has no model of several GPUs")
        return spec
    return next(spec for spec in map(registry.load, registry.names()) if spec.model)
