"""Counters with which the CTAs of a launch find out who is last: zero before each launch, zero again after it.

Two launches that may overlap must not share a counter:

  eager   launches of one stream run one after the other, so counters belong to a stream
  graph   a captured launch runs again whenever, and on whatever stream, its graph is replayed. It gets counters of its
          own, which no other launch ever uses; replays of one graph never overlap themselves. Where none can be had
          without allocating eagerly, or they have run out, fresh ones are zeroed inside the graph, by a memset node.

They come from one array for each device, zeroed once.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

COUNTERS = 1 << 16
STREAM = 1024  # counters that belong to a stream

_lock = threading.Lock()


@dataclass
class _Counters:
    array: torch.Tensor
    taken: int = 0
    by_stream: dict[int, int] = field(default_factory=dict)

    def take(self, count: int, stream: int | None) -> torch.Tensor | None:
        """The stream's, or where `stream` is None some that were never used before; None when there are none left."""
        if stream in self.by_stream:
            return self.array[self.by_stream[stream] :]
        size = count if stream is None else STREAM
        if self.taken + size > self.array.numel():
            return None
        first = self.taken
        self.taken += size
        if stream is not None:
            self.by_stream[stream] = first
        return self.array[first:]


_devices: dict[torch.device, _Counters] = {}


def counters(count: int, like: torch.Tensor) -> torch.Tensor:
    """So many int32 zeros for a launch on the current stream of the current device, where `like` was just allocated."""
    device = like.device
    taken = None
    # A FakeTensor is shapes alone, for ahead-of-time compilation. It must not meet real memory, nor outlive its mode.
    if type(like) is torch.Tensor and count <= STREAM:
        capturing = torch.cuda.is_current_stream_capturing()
        with _lock:
            if device not in _devices and not capturing:
                _devices[device] = _allocate(device)
            stream = None if capturing else torch.cuda.current_stream(device).cuda_stream
            taken = _devices[device].take(count, stream) if device in _devices else None
    return torch.zeros(count, dtype=torch.int32, device=device) if taken is None else taken


def _allocate(device: torch.device) -> _Counters:
    array = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
    torch.cuda.current_stream(device).synchronize()  # other streams, and graphs, use them without waiting for this
    return _Counters(array)
