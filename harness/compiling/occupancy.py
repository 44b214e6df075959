"""Theoretical occupancy: how many CTAs of a kernel are resident on one SM, and which resource limits them.

The rules are those of CUDA's own calculator (cuda_occupancy.h). Registers are allocated per warp in units of 256, and
each of the four sub-partitions has a quarter of them; shared memory per CTA is rounded up to the allocation unit, and
since capability 8.0 the driver reserves 1 KiB per CTA.
Limits: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
"""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024


@dataclass(frozen=True)
class Limits:
    """The resources of one SM. `shared_per_cta` is the maximum for one CTA (opt-in), in bytes."""

    warps: int
    ctas: int
    shared: int
    shared_per_cta: int
    reserved_shared: int = KIB
    shared_unit: int = 128
    registers: int = 65536
    registers_unit: int = 256
    registers_per_thread: int = 255
    sub_partitions: int = 4
    warp_size: int = 32
    warps_per_cta: int = 32


_LIMITS = {
    (7, 5): Limits(warps=32, ctas=16, shared=64 * KIB, shared_per_cta=64 * KIB, reserved_shared=0, shared_unit=256),
    (8, 0): Limits(warps=64, ctas=32, shared=164 * KIB, shared_per_cta=163 * KIB),
    (8, 6): Limits(warps=48, ctas=16, shared=100 * KIB, shared_per_cta=99 * KIB),
    (8, 9): Limits(warps=48, ctas=24, shared=100 * KIB, shared_per_cta=99 * KIB),
    (9, 0): Limits(warps=64, ctas=32, shared=228 * KIB, shared_per_cta=227 * KIB),
    (10, 0): Limits(warps=64, ctas=32, shared=228 * KIB, shared_per_cta=227 * KIB),
}


@dataclass(frozen=True)
class Occupancy:
    """`ctas` per SM, their warps as a percentage of the maximum, and which resource limits them:
    "warps", "ctas", "registers" or "shared"."""

    ctas: int
    percent: float
    limit: str


def limits(capability: tuple[int, int]) -> Limits:
    """The limits of that compute capability. ValueError lists the known ones."""
    if capability not in _LIMITS:
        known = ", ".join("{}.{}".format(*key) for key in _LIMITS)
        raise ValueError(f"no occupancy limits for compute capability {capability}; known: {known}")
    return _LIMITS[capability]


def calculate(capability: tuple[int, int], threads: int, registers: int, shared: int) -> Occupancy:
    """Occupancy of a kernel with that many threads per CTA, registers per thread and bytes of shared memory per CTA.

    A kernel that cannot be launched has 0 CTAs; `limit` names the resource whose limit it exceeds.
    """
    sm = limits(capability)
    warps = -(-threads // sm.warp_size)
    per_warp = _round_up(registers * sm.warp_size, sm.registers_unit)
    warps_by_registers = sm.sub_partitions * (sm.registers // sm.sub_partitions // per_warp) if per_warp else sm.warps
    if registers > sm.registers_per_thread:
        warps_by_registers = 0
    fits = {
        "warps": sm.warps // warps if warps <= sm.warps_per_cta else 0,
        "ctas": sm.ctas,
        "registers": warps_by_registers // warps,
        "shared": _by_shared(sm, shared),
    }
    limit = min(fits, key=lambda name: fits[name])
    return Occupancy(fits[limit], 100 * fits[limit] * warps / sm.warps, limit)


def _by_shared(sm: Limits, shared: int) -> int:
    if shared > sm.shared_per_cta:
        return 0
    each = _round_up(shared + sm.reserved_shared, sm.shared_unit)
    return sm.shared // each if each else sm.ctas


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
