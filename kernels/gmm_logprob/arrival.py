"""The sum over a batch within one launch: one addition to a 64-bit word tells each program who is last, and the sum.

The word of a launch, from the top:

  bit 63, 62, 61   a partial sum was −inf, +inf, too large for the low bits; NaN sets the first two
  12 bits          programs that have arrived, so a grid has at most 4095
  49 bits          sum of the partial sums in fixed point, signed

What the last program gets back from its addition, with what it added itself, is the sum of all: one round trip to L2,
no fence, no second read. Integers add up to the same in any order, so repeats agree bit for bit. Each addition brings 1
to the count and less than half a count to the sum, so a negative sum borrows from the count, never from the flags.

A program may bring 2^36 units, and the unit is such that this is an average |log p| of 512 over the rows it has room
for, rounded up to a power of two. Fractions of a unit are cut off. So the mean is off by less than 512 / 2^36 = 2^-27,
times the room over the rows: an eighth of what the rounding to fp32 may cost a mean between 1 and 2. Where the average
in a program is 1/16 or more, the last bit of its partial sum is a unit or more, and nothing is lost; partial sums added
in fp32 would lose half a bit each.

A larger one goes in three pieces of at most 48 bits to three more words, in units of 2^80, 2^32 and 2^-16. Nothing is
lost there either, for the last bit of 512 is 2^-14. These too are integers that add up in any order.

All words are 0 before a launch, and its last program leaves them so. A plain store does, for none comes after the last,
and the next launch of the stream begins when this one has ended. Two launches that may overlap must not share words:

  eager   launches of one stream run one after the other, so words belong to a (device, stream)
  graph   a captured launch runs again whenever, and on whatever stream, its graph is replayed. It gets words of its own
          that no other launch ever uses; replays of one graph never overlap themselves. Where none can be had without
          allocating eagerly, or they have run out, fresh ones are zeroed inside the graph, by a memset node.

Words come from one array per device, zeroed once; the four of a launch are a sector of L2.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

from .launch import raw_stream

LAUNCHES = 4096
WORDS = 4
MAX_PROGRAMS = 4095
MOST_PER_ROW = 512.0

SUM_BITS = tl.constexpr(49)
ARRIVED = tl.constexpr(1 << 49)
ARRIVED_MASK = tl.constexpr(4095)
FLAGS_AT = tl.constexpr(61)
LARGE, PLUS_INF, MINUS_INF = tl.constexpr(1 << 61), tl.constexpr(1 << 62), tl.constexpr(-1 << 63)
SHARE = tl.constexpr(2.0**36)
PIECES = tl.constexpr((2.0**80, 2.0**32, 2.0**-16))


def fixed_point(rows_per_program: int) -> tuple[float, float]:
    """Units in 1, and 1 unit, where a program sums that many rows. Both are powers of two, exact in fp32."""
    scale = 2.0**36 / (MOST_PER_ROW * triton.next_power_of_2(rows_per_program))
    return scale, 1 / scale


@triton.jit
def arrive(words_ptr, partial, scale, unit):
    """Adds `partial` to the sum of the launch. Returns whether this program is the last and, if so, the sum in fp32."""
    fixed = partial * scale
    fits = tl.abs(fixed) < SHARE
    mine = tl.where(fits, fixed, 0.0).to(tl.int64) + ARRIVED
    if not fits:
        _set_aside(words_ptr, partial)
    packed = tl.atomic_add(words_ptr, mine, sem="relaxed", scope="gpu") + mine
    fixed_sum = (packed << (64 - SUM_BITS)) >> (64 - SUM_BITS)
    last = (((packed - fixed_sum) >> SUM_BITS) & ARRIVED_MASK) == tl.num_programs(0)
    total = fixed_sum.to(tl.float32) * unit
    if last:
        if (packed >> FLAGS_AT) == 0:
            tl.store(words_ptr, 0)
        else:
            total = _with_what_was_set_aside(words_ptr, fixed_sum, unit)
    return last, total


@triton.jit
def _set_aside(words_ptr, partial):
    """What the low bits of the word cannot hold. The release publishes the pieces: what is added to the word after it
    reads what it wrote, up to the last program, which acquires."""
    if tl.abs(partial) < float("inf"):
        rest = partial
        for i in tl.static_range(3):
            piece = (rest * (1 / PIECES[i])).to(tl.int64)
            tl.atomic_add(words_ptr + 1 + i, piece, sem="relaxed", scope="gpu")
            rest -= piece.to(tl.float32) * PIECES[i]
        tl.atomic_or(words_ptr, LARGE, sem="release", scope="gpu")
    else:
        flags = tl.where(partial < 0, MINUS_INF, tl.where(partial > 0, PLUS_INF, MINUS_INF | PLUS_INF))
        tl.atomic_or(words_ptr, flags, sem="relaxed", scope="gpu")


@triton.jit
def _with_what_was_set_aside(words_ptr, fixed_sum, unit):
    """The sum in fp32; leaves the words at 0."""
    packed = tl.atomic_xchg(words_ptr, tl.cast(0, tl.int64), sem="acquire", scope="gpu")
    total = fixed_sum.to(tl.float64) * unit
    for i in tl.static_range(3):
        piece = tl.atomic_xchg(words_ptr + 1 + i, tl.cast(0, tl.int64), sem="relaxed", scope="gpu")
        total += piece.to(tl.float64) * PIECES[i]
    if (packed & PLUS_INF) != 0:
        total += float("inf")
    if (packed & MINUS_INF) != 0:
        total -= float("inf")
    return total.to(tl.float32)


_lock = threading.Lock()
# By a name each, for they are asked in every call.
_capturing = torch.cuda.is_current_stream_capturing
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: 0)


@dataclass
class _Words:
    array: torch.Tensor
    taken: int = 0
    by_stream: dict[int, torch.Tensor] = field(default_factory=dict)

    def of(self, stream: int | None) -> torch.Tensor | None:
        """The stream's words, or some never used before where `stream` is None; None when there are none left."""
        if stream in self.by_stream:
            return self.by_stream[stream]
        if self.taken == LAUNCHES:
            return None
        found = self.array[self.taken * WORDS :]
        self.taken += 1
        if stream is not None:
            self.by_stream[stream] = found
        return found


_devices: dict[torch.device, _Words] = {}


def words(out: torch.Tensor) -> torch.Tensor:
    """Zeros for a launch on the current stream of the device on which `out` was just allocated."""
    device = out.device
    if type(out) is not torch.Tensor:
        # A FakeTensor: shapes alone, for ahead-of-time compilation. It must not meet real memory, nor outlive its mode.
        return torch.zeros(WORDS, dtype=torch.int64, device=device)
    index = device.index
    if index is None:  # the interpreter's
        return _taken(device, 0)
    if index != _current_device():
        with torch.cuda.device(index):
            return words(out)
    if _capturing():
        return _taken(device, None)
    stream, known = raw_stream(index), _devices.get(device)
    found = None if known is None else known.by_stream.get(stream)
    return _taken(device, stream) if found is None else found


def _taken(device: torch.device, stream: int | None) -> torch.Tensor:
    """The stream's words, or where `stream` is None, because it is being captured, some that no other launch uses."""
    with _lock:
        known = _devices.get(device)
        if known is None and stream is not None:
            known = _devices[device] = _allocate(device)
        found = None if known is None else known.of(stream)
    return torch.zeros(WORDS, dtype=torch.int64, device=device) if found is None else found


def _allocate(device: torch.device) -> _Words:
    array = torch.zeros(LAUNCHES * WORDS, dtype=torch.int64, device=device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # other streams, and graphs, use them without waiting for this
    return _Words(array)
