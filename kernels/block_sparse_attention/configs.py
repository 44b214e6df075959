"""Every choice that depends on sizes, dtype and GPU: `pick_*` functions, and what `tune` tries in their place. Pure
functions; no kernels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True)
class Config:
    """A CTA of `num_warps` warps goes over tiles of block_m queries by block_n keys, `num_stages` of them in flight.
    Both divide the size of the mask's blocks. block_d is the head's width padded to a power of two."""

    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class CudaConfig:
    """A CTA has `teams` of one warp group for each 64 rows of a block, which go over lists of their own in steps of
    block_n keys, in rings of `stages`.

    ping_pong    the two warp groups of a team issue their products alternately
    q_registers  queries are held in registers for the length of a tile
    q_buffers    2 lets the next tile's queries arrive while a tile's are in use, as q_registers does, at the cost of
                 shared memory
    """

    block_n: int
    stages: int
    ping_pong: bool
    q_registers: bool
    q_buffers: int = 1
    teams: int = 1


def pick_cuda_config(dim: int, block: int) -> CudaConfig:
    """The fastest of what was tried (EXPERIMENTS.md). Four warp groups with D = 64: a step is short there and its
    latencies are not."""
    if block == 64:
        if dim == 64:
            return CudaConfig(64, 2, False, False, q_buffers=2, teams=4)
        return CudaConfig(64, 3, False, True, teams=2)
    return CudaConfig(64, 6, False, False, teams=2) if dim == 64 else CudaConfig(128, 3, True, True)


# What the keys and values of the heads in flight may take up of an H100's or H200's 50 MB of L2.
CUDA_SECTION_BYTES = 32e6


def pick_cuda_section(keys: int, dim: int, group: int, heads: int) -> int:
    """How many of all `heads` go at a time, of which the longest lists come first: as their keys and values fit L2."""
    fitting = CUDA_SECTION_BYTES / (4 * keys * dim)
    return min(heads, group * 2 ** int(math.log2(max(1.0, fitting))))


def pick_forward(version: str, hopper: str = "") -> str:
    """The version of the forward that runs. `hopper`: the one for Hopper if it takes the problem."""
    return version if version != "auto" else hopper or "portable"


def pick_backward(version: str, hopper: str = "", deterministic: bool = False) -> str:
    """The version of the backward that runs. `hopper`: the one for Hopper if it takes the problem, of which dq cannot
    be `deterministic`."""
    if version != "auto":
        return version
    return hopper if hopper and not deterministic else "portable"


@dataclass(frozen=True)
class CudaBackwardConfig:
    """In which order blocks of 128 keys are given to CTAs.

    section: how many key heads' CTAs run together, those of the longest lists first
    early: so many of the longest lists of each head come before all sections, for the list of a global block takes many
           times as long as the others, and would otherwise be begun when most heads are done
    """

    section: int
    early: int = 1


BWD_SECTION_BYTES = 24e6  # what q, dout and fp32 dQ of the heads in flight may take up of an H100's or H200's 50 MB


def pick_cuda_bwd_config(queries: int, dim: int, kv_heads: int) -> CudaBackwardConfig:
    """As many heads at a time as have their queries, gradients and fp32 dQ in L2 together, in sections of one size. Of
    the heads of a group one counts: CTAs take their lists one after the other. `kv_heads` of all batches."""
    fitting = int(BWD_SECTION_BYTES // (8 * dim * queries))
    section = max(1, min(kv_heads, fitting))
    while kv_heads % section:  # a smaller one at the end would leave SMs without work
        section -= 1
    return CudaBackwardConfig(section)


# What of K and V the CTAs that run at one time should read: well under the 40 to 60 MB of an A100's or H100's L2.
SECTION_BYTES = 24e6


def pick_section(heads: int, bytes_per_head: int) -> int:
    """How many heads the CTAs of a Triton kernel alternate over: as many as fit in L2 together, so that the long lists
    of them go first."""
    return max(1, min(heads, int(SECTION_BYTES // max(1, bytes_per_head))))


# The largest tiles without a register spill under Triton 3.6 and 3.7, but for a few bytes, which EXPERIMENTS.md
# counts. On Hopper eight warps have at least 128 rows, four at least 64: with fewer, groups of
# four warps compute the same scores twice. Causal kernels have a second loop, so that they may want tiles of their own.


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
    """Without tensor cores. Each thread has whole rows of both factors in registers, so wider tiles spill. The same
    tile everywhere, so that the backward rounds scores as the forward did."""
    if capability < (8, 0):
        return Config(block, block, block_d, 4, 1)  # the interpreter, where tiles cost time and registers nothing
    return Config(16, 16, block_d, 4 if block_d <= 32 else 8, 1)


def precision(dtype: torch.dtype) -> str:
    """Of matrix products: that of fp32 for fp32."""
    return "ieee" if dtype == torch.float32 else "tf32"


def padded(dim: int) -> int:
    """The width of a tile for heads of that width."""
    return max(16, triton.next_power_of_2(dim))


# What the forward for Hopper has to choose from, by head dimension and block.
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

# In which order the backward for Hopper may go over the blocks of keys.
CUDA_BWD_CANDIDATES = tuple(CudaBackwardConfig(s, early) for s in (1, 2, 3, 4, 8) for early in (0, 1, 2))


def section_candidates(group: int, heads: int) -> list[int]:
    """For `pick_cuda_section`: whole groups, up to all heads."""
    return sorted({min(heads, group * 2**n) for n in range((heads // group).bit_length() + 1)})


def tile_candidates(dim: int, block: int, warps: Iterable[int], stages: Iterable[int]) -> list[Config]:
    """Of the Triton kernels: tiles that divide a block."""
    sizes = [n for n in (32, 64, 128) if n <= block]
    return [Config(m, n, padded(dim), w, s) for m, n, w, s in itertools.product(sizes, sizes, warps, stages)]
