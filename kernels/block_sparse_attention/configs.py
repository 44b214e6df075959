"""Every choice that depends on sizes, dtype and GPU: `pick_*` functions, and the candidates that `tune` compares with
them. Pure functions; no kernels.

A section: heads whose tiles are scheduled together, so that their tensors stay in L2."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True)
class Config:
    """A CTA of `num_warps` warps loops over tiles of block_m queries by block_n keys, in `num_stages` pipeline stages.
    block_m and block_n divide the size of the mask's blocks. block_d is D padded to a power of two."""

    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class CudaConfig:
    """A team is an independent pipeline: a producer, and one consumer warp group for each 64 queries of a block. It
    computes rows of blocks of the mask, one at a time. A step (main-loop iteration) covers block_n kept keys.

    stages       of keys and values in shared memory, for each team
    teams        of a CTA
    ping_pong    the two consumers of a team issue their wgmmas alternately
    q_registers  the queries of a tile stay in registers, so that the next tile's can be loaded early
    q_buffers    with 2 they can be loaded early too, at the cost of shared memory
    """

    block_n: int
    stages: int
    ping_pong: bool
    q_registers: bool
    q_buffers: int = 1
    teams: int = 1


def pick_cuda_config(dim: int, block: int) -> CudaConfig:
    """D = 128 and blocks of 128: one team, two consumers in ping-pong, steps of 128 keys. Else steps of 64 keys and two
    teams, or four for D = 64 and blocks of 64. At D = 64 the GEMMs of a step are short, so four consumers are needed
    to hide latencies. Record: CUDA_CANDIDATES, measured in EXPERIMENTS.md (H200)."""
    if block == 64:
        if dim == 64:
            return CudaConfig(64, 2, False, False, q_buffers=2, teams=4)
        return CudaConfig(64, 3, False, True, teams=2)
    return CudaConfig(64, 6, False, False, teams=2) if dim == 64 else CudaConfig(128, 3, True, True)


# Keys and values of the heads of a section, within the 50 MB of L2 of an H100 or H200.
CUDA_SECTION_BYTES = 32e6


def pick_cuda_section(keys: int, dim: int, group: int, heads: int) -> int:
    """Query heads of a section of the forward in CUDA C++: whole groups, a power of two of them, as many as have their
    keys and values in CUDA_SECTION_BYTES. Within a section the longest lists come first."""
    fitting = CUDA_SECTION_BYTES / (4 * keys * dim)
    return min(heads, group * 2 ** int(math.log2(max(1.0, fitting))))


def pick_forward(version: str, hopper: str = "") -> str:
    """The version of the forward that runs. `hopper`: "cuda" if that supports the problem, else ""."""
    return version if version != "auto" else hopper or "portable"


def pick_backward(version: str, hopper: str = "", deterministic: bool = False) -> str:
    """The version of the backward that runs. `hopper`: "cuda" if that supports the problem, else "". `deterministic`:
    dq must be deterministic; that of "cuda" is not."""
    if version != "auto":
        return version
    return hopper if hopper and not deterministic else "portable"


@dataclass(frozen=True)
class CudaBackwardConfig:
    """The launch order of CTAs, each of which owns a block of 128 keys.

    section  KV heads whose CTAs are next to each other, those of the longest lists first
    early    so many of the longest lists of each head come before all sections. The list of a global block takes many
             times as long as the others, and would otherwise start when most heads are done
    """

    section: int
    early: int = 1


BWD_SECTION_BYTES = 24e6  # of q, dout and fp32 dQ of the heads of a section, in the 50 MB of L2 of an H100 or H200


def pick_cuda_bwd_config(queries: int, dim: int, kv_heads: int) -> CudaBackwardConfig:
    """Sections of as many KV heads as have q, dout and fp32 dQ in BWD_SECTION_BYTES, all of one size. Only one query
    head of a group counts, as a CTA processes them one after the other. `kv_heads` of all batches. Record: the launch
    orders in EXPERIMENTS.md (H200)."""
    fitting = int(BWD_SECTION_BYTES // (8 * dim * queries))
    section = max(1, min(kv_heads, fitting))
    while kv_heads % section:  # a smaller section at the end would leave SMs idle
        section -= 1
    return CudaBackwardConfig(section)


# Bytes that the heads of a section read, for the Triton kernels: well under the 40 to 60 MB of L2 of an A100 or H100.
SECTION_BYTES = 24e6


def pick_section(heads: int, bytes_per_head: int) -> int:
    """Heads of a section of a Triton kernel: as many as fit SECTION_BYTES. Within a section the longest lists come
    first."""
    return max(1, min(heads, int(SECTION_BYTES // max(1, bytes_per_head))))


# Tiles of the Triton kernels: the largest without a register spill under Triton 3.6 and 3.7, except for a few bytes
# that EXPERIMENTS.md lists. On Hopper eight warps need at least 128 rows, four at least 64: with fewer, two warp groups
# compute the same scores. `causal` kernels have a second loop, with a mask, and may need other tiles.


def pick_fwd_config(dim: int, block: int, causal: bool, dtype: torch.dtype, capability: tuple[int, int]) -> Config:
    block_d, hopper = padded(dim), capability >= (9, 0)
    if dtype == torch.float32:
        return _fp32(block_d, block, capability)
    if block_d == 256:
        return Config(128, 32, block_d, 8, 3) if hopper and block == 128 else Config(64, 64, block_d, 8, 2)
    if block == 64:
        return Config(64, 64, block_d, 4, 3 if hopper or block_d < 128 else 2)
    if block_d == 128:
        return Config(128, 64 if hopper else 32, block_d, 8, 3)
    return Config(128, 128 if block_d <= 32 else 64, block_d, 8, 3)


def pick_dkdv_config(dim: int, block: int, causal: bool, dtype: torch.dtype, capability: tuple[int, int]) -> Config:
    block_d, hopper = padded(dim), capability >= (9, 0)
    if dtype == torch.float32:
        return _fp32(block_d, block, capability)
    if block_d == 256:
        return Config(32, 32, block_d, 8, 2)
    if block_d == 128:
        if not hopper:
            return Config(64, 64, block_d, 8, 2)
        return Config(32, 128, block_d, 8, 2) if block == 128 else Config(32, 64, block_d, 4, 2)
    block_m = 64 if hopper else 32
    return Config(block_m, 128, block_d, 8, 2) if block == 128 else Config(block_m, 64, block_d, 4, 2)


def pick_dq_config(dim: int, block: int, causal: bool, dtype: torch.dtype, capability: tuple[int, int]) -> Config:
    block_d, hopper = padded(dim), capability >= (9, 0)
    if dtype == torch.float32:
        return _fp32(block_d, block, capability)
    if not hopper:
        if block_d >= 128:
            return Config(64, 64 if block_d == 128 else 32, block_d, 8, 2)
        if block_d <= 32:
            return Config(64, 32, block_d, 4, 2)
    block_n = 32 if block_d == 256 else 64
    return Config(128, block_n, block_d, 8, 2) if block == 128 else Config(64, block_n, block_d, 4, 2)


def _fp32(block_d: int, block: int, capability: tuple[int, int]) -> Config:
    """On the FMA units, without tensor cores. A thread holds entire rows of both operands in registers, so wider tiles
    spill. All kernels have the same tile, so that the backward rounds scores as the forward did."""
    if capability < (8, 0):
        return Config(block, block, block_d, 4, 1)  # the interpreter: fewer tiles take less time
    return Config(16, 16, block_d, 4 if block_d <= 32 else 8, 1)


def precision(dtype: torch.dtype) -> str:
    """`input_precision` of tl.dot: "ieee" for fp32, which TF32 would round."""
    return "ieee" if dtype == torch.float32 else "tf32"


def padded(dim: int) -> int:
    """block_d: the width of a tile for head dimension `dim`."""
    return max(16, triton.next_power_of_2(dim))


# For `pick_cuda_config`, by (head dimension, block size).
CUDA_CANDIDATES = {
    (128, 128): (
        CudaConfig(128, 3, True, True),
        CudaConfig(128, 3, False, True),
        CudaConfig(128, 3, True, False),
        CudaConfig(128, 2, True, False, q_buffers=2),
        CudaConfig(64, 6, True, True),
    ),
    (64, 128): (
        CudaConfig(64, 6, False, False, teams=2),
        CudaConfig(64, 5, False, False, q_buffers=2, teams=2),
        CudaConfig(128, 6, False, True),
        CudaConfig(128, 6, True, True),
    ),
    (128, 64): (
        CudaConfig(64, 3, False, True, teams=2),
        CudaConfig(64, 2, False, False, q_buffers=2, teams=2),
    ),
    (64, 64): (
        CudaConfig(64, 2, False, False, q_buffers=2, teams=4),
        CudaConfig(64, 4, False, True, teams=3),
    ),
}

# For `pick_cuda_bwd_config`.
CUDA_BWD_CANDIDATES = tuple(CudaBackwardConfig(s, early) for s in (1, 2, 3, 4, 8) for early in (0, 1, 2))


def section_candidates(group: int, heads: int) -> list[int]:
    """For `pick_cuda_section`: whole groups, up to all heads."""
    return sorted({min(heads, group * 2**n) for n in range((heads // group).bit_length() + 1)})


def tile_candidates(dim: int, block: int, warps: Iterable[int], stages: Iterable[int]) -> list[Config]:
    """For the Triton kernels: tiles that divide a block."""
    sizes = [n for n in (32, 64, 128) if n <= block]
    return [Config(m, n, padded(dim), w, s) for m, n, w, s in itertools.product(sizes, sizes, warps, stages)]
