"""The transport of quantised chunks to the other ranks: by collectives, or by writes into the peers' memory.

Both classes have `exchange(stages, x, residual)`, a compressed all-reduce of x in place on the current stream.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
import torch.distributed as dist

from .plans import Stages

TRANSPORTS = ("auto", "collectives", "peers")

# PyTorch has renamed these functions, and the old names warn.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
full_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Collectives:
    """The transport by all_to_all and all_gather of a process group with any backend. One rank (group None) sends
    nothing."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def scatter(self, stages: Stages, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Every rank's quantised version of this rank's chunk, concatenated."""
        chunks = stages.chunks
        wire = _bytes(x, chunks.world * chunks.bytes)
        stages.quantize(x, residual, wire)
        if self._group is None:
            return wire
        received = torch.empty_like(wire)
        dist.all_to_all_single(received, wire, group=self._group)
        return received

    def exchange(self, stages: Stages, x: torch.Tensor, residual: torch.Tensor | None) -> None:
        received = self.scatter(stages, x, residual)
        own = _bytes(x, stages.chunks.bytes)
        stages.reduce(received, residual, own)
        if self._group is not None:
            _all_gather(received, own, group=self._group)
            own = received
        stages.dequantize(own, x)


class Peers:
    """The transport by symmetric memory, for a group whose GPUs can access each other's memory. Barriers replace the
    collectives.

    A rank has one area for the quantised versions of its chunk and one for the reduced chunks. Both have a slot per
    rank, which that rank's kernels write. Two barriers per call are enough. The first area is overwritten by the next
    call, after the second barrier, at which its owner arrives only after reading the area. The second area is
    overwritten after the next call's first barrier, at which its owner arrives only after its last kernel has read it.
    So all calls of a Peers must be on one stream, and the areas have the same addresses for tensors of any size.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, capacity: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self.group = group
        self._memory = symmetric.empty(2 * capacity, dtype=torch.uint8, device=device)
        self._handle: Any = symmetric.rendezvous(self._memory, group)
        addresses = list(self._handle.buffer_ptrs)
        # The tensor may begin at an offset in its allocation.
        offset = self._memory.data_ptr() - addresses[group.rank()]
        self._quantized, self._reduced = self._memory[:capacity], self._memory[capacity:]
        self._quantized_table = torch.tensor([a + offset for a in addresses], dtype=torch.int64, device=device)
        self._reduced_table = self._quantized_table + capacity

    def exchange(self, stages: Stages, x: torch.Tensor, residual: torch.Tensor | None) -> None:
        stages.quantize(x, residual, self._quantized, self._quantized_table)
        self._handle.barrier(channel=0)
        stages.reduce(self._quantized, residual, self._reduced, self._reduced_table, x)
        self._handle.barrier(channel=1)
        stages.dequantize(self._reduced, x)


_PEERS: dict[tuple[Any, ...], Peers] = {}
_REACHABLE: dict[tuple[Any, ...], bool] = {}
LEAST_CAPACITY = 1 << 20


def peers(group: dist.ProcessGroup, device: torch.device, needed: int) -> Peers:
    """The Peers with at least `needed` bytes for the current stream, cached until `release`. Creation is collective.

    Sizes are powers of two. Smaller memory is not freed, as a peer may still write it.
    """
    capacity = max(LEAST_CAPACITY, 1 << (needed - 1).bit_length())
    key = (group.group_name, device, capacity, torch.cuda.current_stream(device).cuda_stream)
    found = _PEERS.get(key)
    if found is None or found.group is not group:
        found = _PEERS[key] = Peers(group, device, capacity)
    return found


def reachable(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group's GPUs can access each other's memory. The first call for a group is collective.

    The GPUs must be on one host and visible to each process, and NCCL_P2P_DISABLE must not be set: it makes collectives
    go through the host too, and the peers' memory would then be another link.
    """
    if device.type != "cuda" or group.size() == 1:
        return False
    key = (group.group_name, group.size(), device)
    if key not in _REACHABLE:
        forbidden = os.environ.get("NCCL_P2P_DISABLE", "0") not in ("", "0")
        index = torch.cuda.current_device() if device.index is None else device.index
        within_reach = [i for i in range(torch.cuda.device_count()) if i == index or _linked(index, i)]
        mine = (socket.gethostname(), forbidden, _identity(index), {_identity(i) for i in within_reach})
        everyone: list[Any] = [None] * group.size()
        dist.all_gather_object(everyone, mine, group=group)
        identities = {identity for _, _, identity, _ in everyone}
        _REACHABLE[key] = all(
            host == everyone[0][0] and not without and identities <= reached for host, without, _, reached in everyone
        )
    return _REACHABLE[key]


def _identity(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _linked(index: int, other: int) -> bool:
    return torch.cuda.can_device_access_peer(index, other)


def release() -> None:
    """Frees the symmetric memory of all groups. Call it on every rank, between calls, before a group is destroyed."""
    if _PEERS and torch.cuda.is_available():
        torch.cuda.synchronize()
    _PEERS.clear()
    _REACHABLE.clear()


def all_gather(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """The flat tensors of all ranks, in the order of the ranks."""
    if group is None or group.size() == 1:
        return [tensor]
    everyone = tensor.new_empty(group.size() * tensor.numel())
    _all_gather(everyone, tensor, group=group)
    return list(everyone.view(group.size(), -1))


def mean_in_place(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Replaces a tensor by its mean over the ranks, in its own dtype, with the group's all-reduce."""
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, group=group)
        tensor.div_(group.size())


def _bytes(like: torch.Tensor, count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device=like.device)
