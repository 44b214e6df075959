"""Measures the ceilings of this GPU, on random data: the bandwidth of a copy, of a read and of two reads and a write,
and the rate of plain GEMMs, in fp8 with fast accumulation.

No program reaches the datasheet's figures, so a percentage of them says little about a kernel. With --gpus N it also
measures the rates of the links between that many GPUs of this host, by engine, direction and size.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from .. import environment, roofline
from ..measure import stats
from ..ranks import links
from ..ranks.launch import RanksFailed, launch

COPY_BYTES = 4 * 2**30
GEMM_SIZES = (4096, 8192)
REPEATS = 20


def configure(parser: argparse.ArgumentParser) -> None:
    from ..options import add_target

    add_target(parser)
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="also measure the links between N GPUs")


def main(arguments: argparse.Namespace) -> int:
    device, _ = environment.target(arguments.gpu, arguments.device)
    if device.type != "cuda":
        raise ValueError(
            f"calibrate needs an NVIDIA GPU, and none was found (torch {torch.__version__}): "
            "peak rates are measured, not looked up"
        )
    if (found := torch.cuda.device_count()) < arguments.gpus:
        raise ValueError(f"--gpus {arguments.gpus}: {found} GPUs found")
    measured = measure(device)
    if arguments.gpus > 1:
        try:
            measured |= launch(arguments.gpus, links.measure, links.SIZES)[0]
        except RanksFailed as error:
            print(error, file=sys.stderr)
            return 1
    print(json.dumps({"gpu": environment.gpu(device)["name"], **measured}, indent=2))
    return 0


def measure(device: torch.device) -> dict[str, Any]:
    """`ceilings.measured` of a record: the bandwidths of `roofline.BANDWIDTHS` in bytes per second (reads plus writes),
    and FLOP/s by pipe, the best median over the sizes tried."""
    free = torch.cuda.mem_get_info(device)[0]
    size = min(COPY_BYTES, free // 4)
    source, other = (
        torch.randint(-(2**31), 2**31 - 1, (size // 4,), dtype=torch.int32, device=device) for _ in range(2)
    )
    target = torch.empty_like(source)
    sink = torch.empty((), dtype=torch.int32, device=device)
    copy = _seconds(lambda: target.copy_(source))
    read = _seconds(lambda: torch.amax(source, dim=0, out=sink))
    combined = _seconds(lambda: torch.bitwise_xor(source, other, out=target))
    flops = {pipe: max(_gemm_rate(device, pipe, n) for n in GEMM_SIZES) for pipe in _pipes(device)}
    bandwidths = (2 * size / copy, size / read, 3 * size / combined)
    return {**dict(zip(roofline.BANDWIDTHS, bandwidths, strict=True)), "flops": flops}


def ceilings(measured: dict[str, Any]) -> roofline.Ceilings:
    """Converts the measured ceilings to the roofline's."""
    found = roofline.Ceilings.from_record(measured, "measured")
    assert found is not None
    return found


def _pipes(device: torch.device) -> list[str]:
    capability = torch.cuda.get_device_capability(device)
    return ["fp32", "fp16"] + ["tf32", "bf16"] * (capability >= (8, 0)) + ["fp8"] * (capability >= (8, 9))


def _gemm_rate(device: torch.device, pipe: str, n: int) -> float:
    """FLOP/s of an n×n×n GEMM through PyTorch."""
    dtype = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16}.get(pipe, torch.bfloat16)
    a, b = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(2))
    if pipe == "fp8":
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).T
        one = torch.ones((), device=device)

        def run() -> torch.Tensor:
            return torch._scaled_mm(a8, b8, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    else:

        def run() -> torch.Tensor:
            return torch.mm(a, b)

    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = pipe == "tf32"
    try:
        return 2 * n**3 / _seconds(run)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def _seconds(run: Callable[[], object]) -> float:
    """Median over samples of a few back-to-back calls each, so that host time is negligible."""
    for _ in range(3):
        run()
    samples = []
    for _ in range(REPEATS // 4):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(4):
            run()
        stop.record()
        stop.synchronize()
        samples.append(start.elapsed_time(stop) / 4e3)
    return stats.quantile(sorted(samples), 0.5)
