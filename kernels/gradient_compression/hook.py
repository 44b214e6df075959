"""compress_hook, the communication hook of DDP: averages a bucket of gradients with compression."""

# No `from __future__ import annotations`: DDP inspects a hook's annotations, which must not be strings.

import torch
from torch.distributed import GradBucket, ProcessGroup

from .exchange import all_reduce, group_of
from .powersgd import as_matrix, power_sgd, worth_it
from .state import CompressState
from .topk import top_k
from .transport import mean_in_place


def compress_hook(state: CompressState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket over the ranks according to the options in `state`. To be registered with
    `DistributedDataParallel.register_comm_hook(state, compress_hook)`.

    On a GPU everything runs on a stream that belongs to the state, after the gradients have been computed and
    overlapped with the rest of the backward. Returns a future, on which DDP waits. On a CPU the work is complete when
    this returns.
    """
    buffer, stream = bucket.buffer(), None
    if buffer.is_cuda:
        stream = state.stream(buffer.device)
        stream.wait_stream(torch.cuda.current_stream(buffer.device))
    with torch.cuda.stream(stream), torch.no_grad():
        _reduce(state, bucket)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[buffer.device] if stream else None)
        future.set_result(buffer)  # records the current stream of a GPU; a wait on the future waits for it
    return future


def _reduce(state: CompressState, bucket: GradBucket) -> None:
    """Replaces the bucket's buffer by its mean over the ranks."""
    group = group_of(state.group)
    buffer, gradients = bucket.buffer(), bucket.gradients()
    numbers = state.numbers.of(bucket.parameters())
    exempt = [g for g in gradients if _exempt(state, g)]
    if state.step < state.warmup_steps or len(exempt) == len(gradients):
        _mean([buffer], group)
    else:
        # The buffer is compressed as a whole, so that the other elements keep their positions: exempt gradients are set
        # to zero meanwhile.
        averaged = [g.clone() for g in exempt]
        _mean(averaged, group)
        for gradient in exempt:
            gradient.zero_()
        _compress(state, bucket.index(), buffer, gradients, numbers, group)
        for gradient, mean in zip(exempt, averaged, strict=True):
            gradient.copy_(mean)
    if bucket.is_last():
        state.step += 1


def _exempt(state: CompressState, gradient: torch.Tensor) -> bool:
    if gradient.dim() <= 1 or gradient.numel() < state.min_numel:
        return True
    return state.kind == "powersgd" and not worth_it(gradient.shape, state.rank)


def _mean(tensors: list[torch.Tensor], group: ProcessGroup | None) -> None:
    """Averages tensors over the ranks in place, in fp32, with one all-reduce."""
    if not tensors:
        return
    flat = torch.cat([t.reshape(-1).float() for t in tensors])
    mean_in_place(flat, group)
    for tensor, mean in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(mean.view(tensor.shape))


def _compress(
    state: CompressState,
    index: int,
    buffer: torch.Tensor,
    gradients: list[torch.Tensor],
    numbers: list[int],
    group: ProcessGroup | None,
) -> None:
    residual = None
    begins = [int(g.storage_offset() - buffer.storage_offset()) for g in gradients]
    if state.error_feedback:
        places = [(n, b, g.numel()) for n, b, g in zip(numbers, begins, gradients, strict=True)]
        residual = state.residuals.of(index, places, buffer)
    if state.kind == "topk":
        compressed = sum(g.numel() for g in gradients if not _exempt(state, g))
        top_k(buffer, residual, group, state.ratio, compressed)
    elif state.kind == "powersgd":
        chosen = {n: (g, b) for n, g, b in zip(numbers, gradients, begins, strict=True) if not _exempt(state, g)}
        _power_sgd(state, chosen, residual, group)
    else:
        all_reduce(buffer, residual, group, state.kind, True, state.transport)


def _power_sgd(
    state: CompressState,
    chosen: dict[int, tuple[torch.Tensor, int]],
    residual: torch.Tensor | None,
    group: ProcessGroup | None,
) -> None:
    """Averages the gradients in `chosen` with PowerSGD. `chosen` maps a parameter's number to (gradient, offset in the
    bucket)."""
    matrices, kept = {}, {}
    for number, (gradient, begin) in chosen.items():
        matrix = gradient.float().reshape(as_matrix(gradient.shape))
        if residual is not None:
            kept[number] = residual[begin : begin + gradient.numel()].view(matrix.shape)
            matrix = matrix + kept[number]
        matrices[number] = matrix
    for number, mean in power_sgd(matrices, state.factors, group, state.rank).items():
        if residual is not None:
            lost = matrices[number] - mean
            kept[number].copy_(torch.where(lost.isfinite(), lost, 0.0))
        chosen[number][0].copy_(mean.view(chosen[number][0].shape))
