"""Counters with which the programs of a launch find out who is last: zero before each launch, zero again after it.

The forward adds up a whole batch in one launch: each program stores its partial sum and then adds one to a counter; the
program that finds all others there sums the partials in a fixed order and sets the counter back to 0. Two launches that
may overlap must not share a counter:

  eager   launches of one stream run one after the other, so a counter belongs to a (device, stream)
  graph   a captured launch runs again whenever, and on whatever stream, its graph is replayed. It gets a counter of its
          own that no other launch ever uses; replays of one graph never overlap themselves. Where no counter can be had
          without allocating eagerly, or they have run out, a fresh one is zeroed inside the graph, by a memset node.

Counters come from one array per device, zeroed once, 32 bytes apart so that no two share a sector of L2.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

COUNTERS = 4096
SPACING = 8  # int32

_lock = threading.Lock()


@dataclass
class _Counters:
    array: torch.Tensor
    taken: int = 0
    by_stream: dict[int, int] = field(default_factory=dict)

    def index(self, stream: int | None) -> int | None:
        """The stream's counter, or one never used before where `stream` is None; None when there is none left."""
        if stream in self.by_stream:
            return self.by_stream[stream]
        if self.taken == COUNTERS:
            return None
        index = self.taken
        self.taken += 1
        if stream is not None:
            self.by_stream[stream] = index
        return index


_devices: dict[torch.device, _Counters] = {}


def counter(partials: torch.Tensor) -> torch.Tensor:
    """An int32 zero for a launch on the current stream of the current device, where `partials` was just allocated."""
    device = partials.device
    if type(partials) is not torch.Tensor:
        # A FakeTensor: shapes alone, for ahead-of-time compilation. It must not meet real memory, nor outlive its mode.
        return torch.zeros(1, dtype=torch.int32, device=device)
    on_gpu = device.type == "cuda"
    capturing = on_gpu and torch.cuda.is_current_stream_capturing()
    with _lock:
        counters = _devices.get(device)
        if counters is None and not capturing:
            counters = _devices[device] = _allocate(device)
        stream = torch.cuda.current_stream(device).cuda_stream if on_gpu else 0
        index = None if counters is None else counters.index(None if capturing else stream)
    if counters is None or index is None:
        return torch.zeros(1, dtype=torch.int32, device=device)
    return counters.array[index * SPACING :]


def _allocate(device: torch.device) -> _Counters:
    array = torch.zeros(COUNTERS * SPACING, dtype=torch.int32, device=device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # other streams, and graphs, use them without waiting for this
    return _Counters(array)
