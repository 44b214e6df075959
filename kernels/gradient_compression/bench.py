"""The declaration of gradient_compression: cases, cost, peers. `python -m harness bench --kernel gradient_compression`.

Cases on one GPU time only the kernels; nothing is sent. Cases on several GPUs are compared with NCCL and torch's own
hooks, also with P2P disabled, which stands for a slow link.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from harness.spec import (
    COMPILED,
    COMPILED_MAX,
    EAGER,
    Case,
    Cost,
    Inputs,
    KernelSpec,
    Peer,
    Sharding,
    Tunable,
    Yardstick,
)

from . import configs, gradient_compression, release
from .chunks import Chunks
from .plans import Stages
from .powersgd import as_matrix, power_sgd
from .reference import exchange_reference, gradient_compression_reference
from .topk import top_k

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LARGEST_STEP = {"int8": 1 / 127, "int4": 1 / 7, "fp8": 1 / 14}  # in a block whose largest element is 1
RATIO, RANK = 0.01, 4
MIB = 1 << 20


def _case(numel: int, dtype: torch.dtype, kind: str, bench: bool = False, world: int = 1, **params: Any) -> Case:
    """One case. `feedback`: the dtype of a residual. `slow`: with P2P disabled."""
    short = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]
    size = f"{numel * dtype.itemsize // MIB}MiB" if bench else str(numel)
    words = [size, short, kind, *(["sum"] if params.get("average") is False else [])]
    if feedback := params.get("feedback"):
        words.append(f"residual-{feedback}")
    words += [*(["slow"] if params.get("slow") else []), *([f"x{world}"] if world > 1 else [])]
    mutates = ("tensor", "residual") if feedback else ("tensor",)
    options = {"kind": kind, **params}
    return Case("-".join(words), {"numel": numel}, dtype, options, bench, mutates=mutates, world_size=world)


def _sized(mib: int, dtype: torch.dtype, kind: str, world: int = 1, **params: Any) -> Case:
    return _case(mib * MIB // dtype.itemsize, dtype, kind, bench=True, world=world, **params)


def _of_many(world: int) -> tuple[Case, ...]:
    """The cases on more than two GPUs, fewer than on two: each kind over all sizes, a residual, and a slow link."""
    return (
        *(_sized(mib, BF16, kind, world) for kind in ("int8", "int4", "fp8") for mib in (1, 16, 64, 256, 1024)),
        _sized(64, BF16, "int8", world, feedback="bf16"),
        *(_sized(64, BF16, kind, world, slow=True) for kind in ("int8", "int4")),
    )


CASES = (
    # The kernels, on one GPU.
    _sized(16, BF16, "int8"),
    _sized(256, BF16, "int8"),
    _sized(256, BF16, "int4"),
    _sized(256, BF16, "fp8"),
    _sized(256, BF16, "int8", feedback="bf16"),
    _sized(256, FP32, "int8", feedback="bf16"),
    # Boundary cases: no element, one element, one off a block, primes, every dtype of a residual.
    *(_case(1021, FP32, kind) for kind in ("int8", "int4", "fp8")),
    _case(0, FP32, "int8"),
    _case(1, FP32, "int8"),
    _case(257, FP16, "int8"),
    _case(2047, FP16, "int4", feedback="fp32"),
    _case(1500, FP32, "int8", feedback="bf16"),
    _case(1500, FP32, "int4", feedback="bf16", average=False),
    _case(513, FP32, "fp8", feedback="fp32"),
    _case(5000, BF16, "int8"),
    _case(5000, BF16, "int4", feedback="bf16"),
    _case(5000, BF16, "fp8", feedback="bf16"),
    # Two GPUs.
    *(_sized(mib, BF16, kind, 2) for kind in ("int8", "int4") for mib in (1, 16, 64, 256, 1024)),
    *(_sized(mib, BF16, "fp8", 2) for mib in (1, 16, 64, 256, 1024)),
    _sized(64, BF16, "int8", 2, feedback="bf16"),
    *(_sized(mib, FP32, "int8", 2) for mib in (1, 16, 64, 256, 1024)),
    _sized(64, FP32, "int4", 2, feedback="bf16"),
    *(_sized(mib, BF16, kind, 2, slow=True) for kind in ("int8", "int4") for mib in (1, 16, 64, 256, 1024)),
    *(_sized(mib, FP32, "int8", 2, slow=True) for mib in (1, 16, 64, 256, 1024)),
    *_of_many(4),
    *_of_many(8),
    # Two processes on one CPU.
    _case(3000, FP32, "int8", world=2),
    _case(3000, FP32, "int4", world=2, feedback="bf16"),
)


def make_inputs(case: Case, device: torch.device | str, generator: torch.Generator | None) -> Inputs:
    def normal(dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(case.dims["numel"], dtype=dtype, device=device, generator=generator)

    inputs: Inputs = {"tensor": normal(case.dtype)}
    if feedback := case.params.get("feedback"):
        inputs["residual"] = normal({"bf16": BF16, "fp32": FP32}[feedback]) / 100
    return {**inputs, "kind": case.params["kind"], "average": case.params.get("average", True)}


def make_shard(case: Case, rank: int, device: torch.device | str, generator: torch.Generator) -> Inputs:
    """The inputs of a rank. As in data parallel training, each rank has its own gradient."""
    return make_inputs(case, device, generator)


def cost(case: Case, mode: str) -> Cost:
    """Per GPU: the tensor and the residual are read and written once; codes and scales cross the link twice."""
    numel, world = case.dims["numel"], case.world_size
    residual = {None: 0, "bf16": 2, "fp32": 4}[case.params.get("feedback")]
    chunks = Chunks.whole_blocks(numel, world, case.params["kind"])
    # FLOPs: multiply, round and compare to quantise; multiply and add to reduce; multiply to dequantise. One of the
    # ranks quantises and dequantises the sum again.
    flops = numel * (3 + 2 + 1 + 4 / world)
    link = 2 * (world - 1) * chunks.bytes
    return Cost(flops=flops, bytes=2 * numel * (case.dtype.itemsize + residual), link_bytes=link)


def _with(transport: str) -> Callable[..., Any]:
    """The public function, wrapped to return the tensors that it updates."""

    def run(tensor: torch.Tensor, residual: torch.Tensor | None = None, **options: Any) -> Any:
        gradient_compression(tensor, residual, transport=transport, **options)
        return tensor if residual is None else (tensor, residual)

    return run


_MEMORY: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}


def _local(tensor: torch.Tensor, residual: torch.Tensor | None = None, *, kind: str, average: bool) -> Any:
    """Runs the kernels of one rank. It writes to its own memory the data that it would write to its peers'."""
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = Chunks.whole_blocks(tensor.numel(), world, kind)
    if (chunks, tensor.device) not in _MEMORY:
        memory = torch.zeros(2 * world * chunks.bytes, dtype=torch.uint8, device=tensor.device)
        # Each chunk has a separate slot; a kernel adds the offset of this rank's slot to the address.
        places = [memory.data_ptr() + (c - rank) * chunks.bytes for c in range(2 * world)]
        _MEMORY[chunks, tensor.device] = memory, torch.tensor(places, device=tensor.device).view(2, world)
    memory, tables = _MEMORY[chunks, tensor.device]
    quantized, reduced = memory.chunk(2)
    stages = _stages(chunks, rank, tensor.device, average)
    stages.quantize(tensor, residual, quantized, tables[0])
    stages.reduce(quantized, residual, reduced, tables[1], tensor)
    stages.dequantize(reduced, tensor)
    return tensor if residual is None else (tensor, residual)


_LOCAL: dict[Any, Stages] = {}


def _stages(chunks: Chunks, rank: int, device: torch.device, average: bool) -> Stages:
    key = (chunks, rank, device, average)
    if key not in _LOCAL:
        _LOCAL[key] = Stages(chunks, rank, device, average, peers=True)
    return _LOCAL[key]


def _release() -> None:
    _MEMORY.clear()
    _LOCAL.clear()
    release()


def check_shard(fn: Callable[..., Any], case: Case, mode: str, device: torch.device) -> str | None:
    """Checks on 5000 elements that the result is close to the mean of all ranks, quantised or not, and the same on all
    ranks. Results with a residual must equal the oracle bit for bit, since only ours has one."""
    small = dataclasses.replace(case, dims={"numel": 5000})
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    inputs = make_shard(small, dist.get_rank(), device, generator)
    tensor, residual = inputs["tensor"], inputs.get("residual")
    tensors = _everyone(tensor)
    residuals = [None] * len(tensors) if residual is None else _everyone(residual)
    want, kept = exchange_reference(tensors, residuals, inputs["kind"], inputs["average"])
    wide = [t.double() + (0 if r is None else r.double()) for t, r in zip(tensors, residuals, strict=True)]
    mean = torch.stack(wide).mean(0)
    largest = max(float(t.abs().max()) for t in wide)
    result = fn(**inputs)
    got = result[0] if isinstance(result, tuple) else result
    # Half a quantisation step for each of the two quantisations, or the rounding of bf16.
    allowed = largest * (1.01 * LARGEST_STEP[inputs["kind"]] + 2**-7)
    if (error := float((got.double() - mean).abs().max())) > allowed:
        return f"differs from the mean of the ranks by {error:.3g}, allowed {allowed:.3g}"
    if any(not torch.equal(other, got) for other in _everyone(got)):
        return "the ranks have different results"
    if isinstance(result, tuple) and not (torch.equal(got, want) and torch.equal(result[1], kept[dist.get_rank()])):
        return "tensor or residual differs from the oracle's bits"
    return None


def _everyone(tensor: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return parts


class Bucket:
    """The part of DDP's GradBucket that torch's hooks use. It has one gradient, a nearly square matrix."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    @staticmethod
    def shape_of(numel: int) -> tuple[int, int]:
        columns = max(1, min(1 << numel.bit_length() // 2, numel & -numel))  # a power of two that divides numel
        return numel // columns, columns

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return False

    def buffer(self) -> torch.Tensor:
        return self._tensor

    def set_buffer(self, tensor: torch.Tensor) -> None:
        self._tensor.copy_(tensor)

    def gradients(self) -> list[torch.Tensor]:
        return [self._tensor.view(self.shape_of(self._tensor.numel()))]


Hook = Callable[[Any], torch.futures.Future]  # a communication hook of torch, here called with a Bucket


def _world() -> Any:
    return dist.group.WORLD


def _all_reduce(dtype: torch.dtype | None) -> Callable[[], Callable[..., Any]]:
    """NCCL's all-reduce in another dtype, or in the tensor's own. NCCL computes the mean, without a separate pass."""

    def run(tensor: torch.Tensor, **_: Any) -> torch.Tensor:
        sent = tensor if dtype is None else tensor.to(dtype)
        if sent.is_cuda:
            dist.all_reduce(sent, dist.ReduceOp.AVG)
        else:  # gloo does not support AVG
            dist.all_reduce(sent.div_(dist.get_world_size()))
        return tensor if sent is tensor else tensor.copy_(sent)

    return lambda: run


def _plain(case: Case) -> tuple[str, int] | None:
    """Traffic of a ring all-reduce: it sends and receives (world − 1) / world of the elements, twice."""
    if case.params.get("feedback"):
        return None
    return "all-reduce", 2 * case.dims["numel"] * case.dtype.itemsize * (case.world_size - 1) // case.world_size


def _hook(make: Callable[[], Hook]) -> Callable[[], Callable[..., Any]]:
    """Wraps one of torch's hooks, called with a bucket of one matrix."""

    def load() -> Callable[..., Any]:
        hook = make()

        def run(tensor: torch.Tensor, **_: Any) -> torch.Tensor:
            mean = hook(Bucket(tensor)).wait()
            mean = mean[0] if isinstance(mean, list) else mean
            return tensor if mean.data_ptr() == tensor.data_ptr() else tensor.copy_(mean)

        return run

    return load


def _bf16_hook() -> Hook:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    return lambda bucket: bf16_compress_hook(_world(), bucket)


def _quantization_hook() -> Hook:
    from torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks import quantization_pertensor_hook

    return lambda bucket: quantization_pertensor_hook(_world(), bucket)


def _power_sgd_hook() -> Hook:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    state = PowerSGDState(_world(), matrix_approximation_rank=RANK, start_powerSGD_iter=2)
    state.iter = 2
    return lambda bucket: powerSGD_hook(state, bucket)


def _top_k(tensor: torch.Tensor, **_: Any) -> torch.Tensor:
    top_k(tensor, None, _world(), RATIO, tensor.numel())
    return tensor


def _power_sgd() -> Callable[..., Any]:
    factors: dict[int, torch.Tensor] = {}

    def run(tensor: torch.Tensor, **_: Any) -> torch.Tensor:
        gradient = Bucket(tensor).gradients()[0]
        matrix = gradient.float().reshape(as_matrix(gradient.shape))
        mean = power_sgd({tensor.numel(): matrix}, factors, _world(), RANK)[tensor.numel()]
        gradient.copy_(mean)
        return tensor

    return run


def _top_k_cost(case: Case, mode: str) -> Cost:
    numel, size = case.dims["numel"], case.dtype.itemsize
    link = 8 * round(RATIO * numel) * (case.world_size - 1)
    return Cost(flops=2 * numel, bytes=2 * numel * size, link_bytes=link)


def _power_sgd_cost(case: Case, mode: str) -> Cost:
    numel, size, world = case.dims["numel"], case.dtype.itemsize, case.world_size
    rows, columns = Bucket.shape_of(numel)
    link = 8 * RANK * (rows + columns) * (world - 1) // world
    return Cost(flops=6 * RANK * numel, bytes=2 * numel * size, link_bytes=link)


def _several(dtypes: tuple[torch.dtype, ...]) -> Callable[[Case, str], str | None]:
    """The reason why a peer cannot run a case: it needs several GPUs, one of these dtypes, and no residual."""

    def supports(case: Case, mode: str) -> str | None:
        if case.world_size == 1:
            return "one GPU sends nothing"
        if case.params.get("feedback"):
            return "does not support error feedback (a residual)"
        return (
            None if case.dtype in dtypes else f"does not support gradients in {str(case.dtype).removeprefix('torch.')}"
        )

    return supports


def _on_nccl(case: Case, mode: str) -> str | None:
    """The reason why a case cannot run: quantization_pertensor_hook supports only the futures of NCCL."""
    return _several((FP32,))(case, mode) or (None if case.bench else "requires NCCL")


PEERS = (
    Peer("all-reduce", load=_all_reduce(None), supports=_several((BF16, FP32))),
    Peer("all-reduce-fp32", load=_all_reduce(FP32), supports=_several((BF16,))),
    Peer("bf16_compress_hook", load=_hook(_bf16_hook), supports=_several((FP32,))),
    Peer("quantization_pertensor_hook", load=_hook(_quantization_hook), supports=_on_nccl),
    Yardstick("powerSGD_hook", load=_hook(_power_sgd_hook), supports=_several((FP32,)), cost=_power_sgd_cost),
    Yardstick("powersgd", load=_power_sgd, supports=_several((BF16, FP32)), cost=_power_sgd_cost),
    Yardstick("topk", load=lambda: _top_k, supports=_several((BF16, FP32)), cost=_top_k_cost),
)


def _alias(implementation: str, case: Case, mode: str) -> str | None:
    slow = implementation == "collectives" and case.params.get("slow")
    return "same version as auto, since P2P is disabled" if slow else None


def _candidates(case: Case) -> list[configs.Config]:
    return [
        configs.Config(rows, warps) for rows in (2, 4, 8, 16) for warps in (2, 4, 8) if 8 * warps >= rows >= warps // 4
    ]


SPEC = KernelSpec(
    name="gradient_compression",
    implementations={"auto": _with("auto"), "collectives": _with("collectives")},
    baselines=(EAGER, COMPILED, COMPILED_MAX, *PEERS),
    pytorch=("all-reduce",),
    reference=gradient_compression_reference,
    make_inputs=make_inputs,
    cost=cost,
    cases=CASES,
    grads=(),
    modes=("fwd",),
    determinism={"fwd": "run-to-run"},
    unit="elements",
    items=lambda case: case.dims["numel"],
    fuzz={"numel": (0, 1500)},
    alias_reason=_alias,
    tunables=(
        Tunable(configs, "pick_config", "fwd", _candidates, tuple(c for c in CASES if c.bench and c.world_size == 1)),
    ),
    host_cases=(dataclasses.replace(_case(4096, BF16, "int8"), name="4096-bf16-int8-host"),),
    sharding=Sharding(
        make_shard=make_shard,
        check_shard=check_shard,
        local={"auto": _local},
        plain=_plain,
        environment=lambda case: {"NCCL_P2P_DISABLE": "1"} if case.params.get("slow") else {},
        release=_release,
    ),
)
