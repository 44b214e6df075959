"""The sum over a batch in one launch. Each CTA adds once to a 64-bit word in global memory. The value that this atomic
addition returns tells the CTA whether it is the last one, and if so the sum.

The word of a launch, from the top:

  bit 63, 62, 61   some partial sum was −inf, +inf, or too large for the low bits; NaN sets the first two
  12 bits          number of CTAs that have arrived, so a grid has at most 4095
  49 bits          sum of the partial sums in fixed point, signed

The value returned to the last CTA plus its own addend is the sum of all: one round trip to L2, no fence, no second
read. Integer addition is associative, so the result is bit-wise repeatable. Each CTA adds 1 to the count and, in
absolute value, less than half of one count to the sum. So a negative sum borrows from the count but never from the
flags.

Precision. The partial sum of a CTA must be below 2^36 units. The unit is a power of two, chosen such that this allows
an average |log p| of 512 over the rows of a CTA, whose number is rounded up to a power of two. Fractions of a unit are
truncated. So the error of the mean is below 512 / 2^36 = 2^-27, times (sum of the rounded-up row counts) / rows: an
eighth of the rounding error of an fp32 mean between 1 and 2. If the average |log p| in a CTA is 1/16 or more, the last
bit of its fp32 partial sum is a unit or more, and nothing is lost. Adding the partial sums in fp32 would lose half a
bit each.

A larger partial sum is split into three integers of at most 48 bits, in units of 2^80, 2^32 and 2^-16, which are added
to three more words. This is exact too, as the last bit of 512 in fp32 is 2^-14.

All words are 0 before a launch, and its last CTA sets them to 0 again. A plain store suffices: no CTA arrives after the
last, and the next launch of the stream begins after this one. Launches that may overlap must not share words:

  eager   launches of one stream do not overlap, so there is a set of words for each (device, stream)
  graph   a captured launch runs again at any time, on any stream, when its graph is replayed. It gets words that no
          other launch uses; replays of one graph do not overlap. If no words are left, or none are allocated yet
          (capture must not allocate eagerly), words are allocated in the graph and zeroed by a memset node.

The words are in one array per device, zeroed once. The four words of a launch are one L2 sector.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

from .launch import raw_stream

LAUNCHES = 4096
WORDS = 4
MAX_PROGRAMS = 4095
MAX_MEAN_LOG_P = 512.0

SUM_BITS = tl.constexpr(49)
ARRIVED = tl.constexpr(1 << 49)
ARRIVED_MASK = tl.constexpr(4095)
FLAGS_AT = tl.constexpr(61)
LARGE, PLUS_INF, MINUS_INF = tl.constexpr(1 << 61), tl.constexpr(1 << 62), tl.constexpr(-1 << 63)
MAX_PARTIAL = tl.constexpr(2.0**36)
OVERFLOW_UNITS = tl.constexpr((2.0**80, 2.0**32, 2.0**-16))


def fixed_point(rows_per_cta: int) -> tuple[float, float]:
    """(units per 1, size of a unit) for CTAs that sum that many rows. Both are powers of two, exact in fp32."""
    scale = 2.0**36 / (MAX_MEAN_LOG_P * triton.next_power_of_2(rows_per_cta))
    return scale, 1 / scale


@triton.jit
def arrive(words_ptr, partial, scale, unit):
    """Adds `partial` to the sum of the launch. Returns whether this CTA is the last to arrive and, if so, the sum in
    fp32."""
    fixed = partial * scale
    fits = tl.abs(fixed) < MAX_PARTIAL
    addend = tl.where(fits, fixed, 0.0).to(tl.int64) + ARRIVED
    if not fits:
        _add_overflow(words_ptr, partial)
    packed = tl.atomic_add(words_ptr, addend, sem="relaxed", scope="gpu") + addend
    fixed_sum = (packed << (64 - SUM_BITS)) >> (64 - SUM_BITS)
    last = (((packed - fixed_sum) >> SUM_BITS) & ARRIVED_MASK) == tl.num_programs(0)
    total = fixed_sum.to(tl.float32) * unit
    if last:
        if (packed >> FLAGS_AT) == 0:
            tl.store(words_ptr, 0)
        else:
            total = _sum_with_overflow(words_ptr, fixed_sum, unit)
    return last, total


@triton.jit
def _add_overflow(words_ptr, partial):
    """Adds to the other words a partial sum that the low bits of the first cannot hold, and sets a flag. Setting LARGE
    is a release operation: the atomic additions of later CTAs continue its release sequence, and the last CTA
    acquires."""
    if tl.abs(partial) < float("inf"):
        rest = partial
        for i in tl.static_range(3):
            piece = (rest * (1 / OVERFLOW_UNITS[i])).to(tl.int64)
            tl.atomic_add(words_ptr + 1 + i, piece, sem="relaxed", scope="gpu")
            rest -= piece.to(tl.float32) * OVERFLOW_UNITS[i]
        tl.atomic_or(words_ptr, LARGE, sem="release", scope="gpu")
    else:
        flags = tl.where(partial < 0, MINUS_INF, tl.where(partial > 0, PLUS_INF, MINUS_INF | PLUS_INF))
        tl.atomic_or(words_ptr, flags, sem="relaxed", scope="gpu")


@triton.jit
def _sum_with_overflow(words_ptr, fixed_sum, unit):
    """The sum in fp32 if a flag is set: the sum over all words. Sets the words to 0."""
    packed = tl.atomic_xchg(words_ptr, tl.cast(0, tl.int64), sem="acquire", scope="gpu")
    total = fixed_sum.to(tl.float64) * unit
    for i in tl.static_range(3):
        piece = tl.atomic_xchg(words_ptr + 1 + i, tl.cast(0, tl.int64), sem="relaxed", scope="gpu")
        total += piece.to(tl.float64) * OVERFLOW_UNITS[i]
    if (packed & PLUS_INF) != 0:
        total += float("inf")
    if (packed & MINUS_INF) != 0:
        total -= float("inf")
    return total.to(tl.float32)


_lock = threading.Lock()
# Used in every call; bound once, because a dotted name costs attribute look-ups.
_capturing = torch.cuda.is_current_stream_capturing
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: 0)


@dataclass
class _Words:
    array: torch.Tensor
    taken: int = 0
    by_stream: dict[int, torch.Tensor] = field(default_factory=dict)

    def of(self, stream: int | None) -> torch.Tensor | None:
        """The words of a stream, or for stream None words that no launch uses yet. None if none are left."""
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
    """The words, all 0, for a launch on the current stream of the device on which `out` was just allocated."""
    device = out.device
    if type(out) is not torch.Tensor:
        # Ahead-of-time compilation: `out` is a FakeTensor. The words are fake too, and must not outlive the fake mode.
        return torch.zeros(WORDS, dtype=torch.int64, device=device)
    index = device.index
    if index is None:  # a CPU tensor, in the interpreter
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
    """The words of a stream, or for stream None (a capture) words that no other launch uses."""
    with _lock:
        known = _devices.get(device)
        if known is None and stream is not None:
            # In a thread of its own, as the caller's may allocate in the memory pool of CUDA graphs (the warm-up of
            # torch.compile with mode="reduce-overhead"), where nothing may remain but results.
            with ThreadPoolExecutor(1) as thread:
                known = _devices[device] = thread.submit(_allocate, device).result()
        found = None if known is None else known.of(stream)
    return torch.zeros(WORDS, dtype=torch.int64, device=device) if found is None else found


def _allocate(device: torch.device) -> _Words:
    array = torch.zeros(LAUNCHES * WORDS, dtype=torch.int64, device=device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # other streams and graphs do not wait on an event for zeros
    return _Words(array)
