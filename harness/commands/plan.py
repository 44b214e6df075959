"""`plan`: how long a case would take on many GPUs, and how efficiently, by the performance model of its SPEC.

    python -m harness plan --kernel ring_attention --gpus 8 --gpus 64 --seq 1048576

The rates of one GPU's kernel and of its link come from the committed records of several GPUs, or from --tflops and
--link. The output is a model, not a measurement.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from .. import registry
from ..reporting import measured_rates
from ..reporting.markdown import table
from ..reporting.measured_rates import Rate
from ..spec import Case, KernelSpec

GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kernel", metavar="NAME", help="kernel with a performance model (default: the first)")
    parser.add_argument(
        "--case",
        metavar="NAME",
        help="case that sets heads and mask (default: the bench case nearest to --seq, else the first)",
    )
    parser.add_argument("--mode", choices=("fwd", "bwd"), default="fwd", help="default: fwd")
    parser.add_argument("--gpus", type=int, action="append", metavar="N", help="GPUs; may be given more than once")
    parser.add_argument("--seq", type=int, metavar="N", help="length of the whole sequence (default: the case's)")
    parser.add_argument("--tflops", type=float, help="rate of the kernel on one GPU (default: from the records)")
    parser.add_argument(
        "--link", type=float, metavar="GB/s", help="link bandwidth per direction (default: from the records)"
    )
    parser.add_argument(
        "--reports",
        type=Path,
        default=registry.ROOT / "reports",
        metavar="FOLDER",
        help="reports with the records (default: reports/)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Prints a row for each number of GPUs."""
    for name in ("gpus", "seq"):
        values = getattr(arguments, name)
        if any(value < 1 for value in (values if isinstance(values, list) else [values]) if value is not None):
            raise ValueError(f"--{name}: at least 1, got {values}")
    spec = _spec(arguments.kernel)
    case = spec.case(arguments.case) if arguments.case else _nearest(spec, arguments.seq)
    flops, link = _rates(spec, case, arguments)
    print(f"A prediction, not a measurement: {spec.name} {arguments.mode}, heads and mask of {case.name},")
    print(f"length {arguments.seq or 'of the case'}.")
    print(f"{flops.value * 1e-12:.4g} TFLOP/s per GPU: {flops.source}.")
    print(f"{link.value * 1e-9:.4g} GB/s per link: {link.source}.\n")
    print("\n".join(rows(spec, case, arguments, flops.value, link.value)))
    return 0


def rows(spec: KernelSpec, case: Case, arguments: argparse.Namespace, flops: float, link: float) -> list[str]:
    """The lines of the table."""
    assert spec.model is not None
    found = []
    for gpus in arguments.gpus or GPUS:
        seconds, exposed, efficiency = spec.model(case, arguments.mode, gpus, arguments.seq, flops, link)
        found.append((gpus, f"{1e3 * seconds:.3f}", f"{1e3 * exposed:.3f}", f"{100 * efficiency:.1f} %"))
    return table([">GPUs", ">ms", ">exposed transfers, ms", ">efficiency"], found)


def _rates(spec: KernelSpec, case: Case, arguments: argparse.Namespace) -> tuple[Rate, Rate]:
    """The rates of the kernel and of the link. ValueError if neither an option nor a record gives one."""
    given = {name: getattr(arguments, name) for name in ("tflops", "link")}
    if any(value is not None and not 0 < value < math.inf for value in given.values()):
        raise ValueError(f"--tflops and --link must be positive and finite, got {given['tflops']} and {given['link']}")
    recorded = measured_rates.rows(arguments.reports, spec.name) if None in given.values() else []
    series, length = _axis(spec, case)
    flops = (
        measured_rates.kernel_rate(recorded, arguments.mode, series, arguments.seq or length)
        if given["tflops"] is None
        else Rate(given["tflops"] * 1e12, "from --tflops")
    )
    link = (
        measured_rates.link_rate(recorded, flops.gpu if flops else None)  # of the same GPU
        if given["link"] is None
        else Rate(given["link"] * 1e9, "from --link")
    )
    if flops is None or link is None:
        missing = " and ".join(name for name, rate in (("--tflops", flops), ("--link", link)) if rate is None)
        raise ValueError(f"no record of several GPUs in {arguments.reports} has this rate: give {missing}")
    return flops, link


def _axis(spec: KernelSpec, case: Case) -> tuple[str | None, int]:
    """The series and the length of a case."""
    if spec.sharding is None or spec.sharding.axis is None:
        return None, max(case.dims.values())
    return spec.sharding.axis(case)


def _nearest(spec: KernelSpec, length: int | None) -> Case:
    """The bench case with the nearest length, the first of several."""
    cases = [case for case in spec.cases if case.bench]
    return min(cases, key=lambda case: abs(math.log(_axis(spec, case)[1] / length))) if length else cases[0]


def _spec(name: str | None) -> KernelSpec:
    if name:
        spec = registry.load(name)
        if spec.model is None:
            raise ValueError(f"{name} has no performance model for several GPUs")
        return spec
    return next(spec for spec in map(registry.load, registry.names()) if spec.model)
