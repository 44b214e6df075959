"""Tests of sm90/tiles.cuh, compiled for the host: the tiles that each CTA computes, and which clusters share b."""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from .configs import CudaConfig
from .sm90 import products

BLOCK_N = CudaConfig(stages=4, raster=8, cluster=2).block_n
TILES = Path(products.__file__).with_name("tiles.cuh")
COMPILER = shutil.which("c++") or shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler for the host")

# Substitutes for the CUDA built-ins and included functions that tiles.cuh uses, for one CTA at a time.
BEFORE = """
#define DEVICE static inline
typedef unsigned short u16;
typedef unsigned long long u64;
struct int4 { int x, y, z, w; };
struct { int x; } blockIdx, gridDim;
static int cluster_rank() { return blockIdx.x % CLUSTER; }
static int min(int a, int b) { return a < b ? a : b; }
static int __shfl_sync(unsigned, int value, int) { return value; }
"""
AFTER = """
extern "C" int tiles_of(const int* table, int groups, int rows, int cols, int depth, int grid, int block, int* out) {
    const Problem a = {table, nullptr, nullptr, 0, 0, 0, 0, groups, rows, cols, depth};
    int taken = 0;
    gridDim.x = grid, blockIdx.x = block;
    for (int round = 0; round * clusters() < places_of(a); round++) {
        if (place_of(round) >= places_of(a)) continue;
        const Tile tile = find_tile(a, place_of(round));
        const int own[] = {tile.group, tile.row, tile.column, tile.rows, tile.first, tile.terms, tile.shares};
        for (int value : own) *out++ = value;
        taken++;
    }
    return taken;
}
"""


@dataclass(frozen=True)
class Tile:
    """The struct Tile of tiles.cuh."""

    group: int
    row: int
    column: int
    rows: int
    first: int
    terms: int
    shares: int


@functools.cache
def library(weights: int, cluster: int, raster: int) -> ctypes.CDLL:
    assert COMPILER is not None
    source = BEFORE + re.sub(r"(?m)^#(include|pragma).*$", "", TILES.read_text(encoding="utf-8")) + AFTER
    defines = dict(WEIGHTS=weights, CLUSTER=cluster, RASTER=raster, BLOCK_M=products.BLOCK_M, BLOCK_N=BLOCK_N)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiles.so"
        words = [COMPILER, "-shared", "-fPIC", "-std=c++17", *(f"-D{name}={value}" for name, value in defines.items())]
        subprocess.run([*words, "-x", "c++", "-", "-o", path], input=source, text=True, check=True)
        return ctypes.CDLL(str(path))


def table(sizes: list[int], behind: int) -> list[int]:
    """The table that schedule.py writes, for tiles of BLOCK_M rows."""
    ends = [0, *itertools.accumulate(sizes)]
    spans = [(group, start, end) for group, (start, end) in enumerate(itertools.pairwise(ends))]
    row_tiles = [
        (group, row, end)
        for group, start, end in [*spans, (-1, ends[-1], ends[-1] + behind)]
        for row in range(start, end, products.BLOCK_M)
    ]
    largest_first = sorted(spans, key=lambda span: span[1] - span[2])
    entries = [number for entry in (*largest_first, *row_tiles) for number in (*entry, 0)]
    return [len(row_tiles), 0, 0, 0, *entries]


def taken(
    sizes: list[int], behind: int, rows: int, cols: int, depth: int, grid: int, *defines: int
) -> list[list[Tile]]:
    """The tiles of each CTA."""
    numbers = table(sizes, behind)
    room = (ctypes.c_int * (len(numbers) + 4))()
    start = -ctypes.addressof(room) % 16 // 4  # aligns the table to 16 bytes
    room[start : start + len(numbers)] = numbers
    own, found = (ctypes.c_int * (7 * 4096))(), []
    for block in range(grid):
        address = ctypes.c_void_p(ctypes.addressof(room) + 4 * start)
        count = library(*defines).tiles_of(address, len(sizes), rows, cols, depth, grid, block, own)
        found.append([Tile(*own[7 * i : 7 * i + 7]) for i in range(count)])
    return found


SIZES = {
    "of a tile each": [128] * 5,
    "odd and even numbers of tiles": [300, 100, 513, 1, 256, 384],
    "empty ones": [0, 300, 0, 0, 129, 0],
    "one": [0, 0, 1000, 0],
    "none": [0, 0, 0],
    "one row": [1],
}


@pytest.mark.parametrize("behind", [0, 1, 128, 300])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("cluster", "raster"), [(1, 8), (2, 8), (2, 3), (2, 1)])
@pytest.mark.parametrize(("cols", "clusters"), [(8, 1), (264, 3), (1408, 5), (1408, 66)])
def test_row_tiles(sizes: str, behind: int, cluster: int, raster: int, cols: int, clusters: int) -> None:
    """Each row of each column of tiles is in exactly one tile. CTAs of a cluster process equally many K-blocks, and
    share b if their tiles belong to one group, or the second is out of bounds."""
    own, depth = SIZES[sizes], 200
    rows, height = sum(own) + behind, products.BLOCK_M
    ctas = taken(own, behind, rows, cols, depth, cluster * clusters, 0, cluster, raster)
    stored = [tile for cta in ctas for tile in cta if tile.rows > 0]
    ends = [0, *itertools.accumulate((*own, behind))]
    want = Counter(
        (group if group < len(own) else -1, row, column, min(end - row, height))
        for group, (start, end) in enumerate(itertools.pairwise(ends))
        for row in range(start, end, height)
        for column in range(0, cols, BLOCK_N)
    )
    assert Counter((tile.group, tile.row, tile.column, tile.rows) for tile in stored) == want
    assert all(tile.terms == depth for tile in stored if tile.group >= 0)
    assert all(tile.rows > 0 or (tile.rows == 0 and tile.row == rows) for cta in ctas for tile in cta)
    for first in range(0, len(ctas), cluster):
        for tiles in zip(*ctas[first : first + cluster], strict=True):
            assert len({(tile.column, tile.first, tile.terms, tile.shares) for tile in tiles}) == 1
            assert tiles[0].shares == (len({tile.group for tile in tiles}) == 1)
            assert tiles[0].rows > 0 and (tiles[0].group >= 0 or tiles[0].terms == 0)
            below = {tile.row - tiles[0].row for tile in tiles[1:] if tile.rows > 0 and tile.shares}
            assert below <= {height}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("cluster", "raster"), [(1, 8), (2, 8), (2, 3)])
@pytest.mark.parametrize(
    ("height", "cols", "clusters"), [(8, 8, 1), (264, 136, 3), (1408, 512, 5), (1408, 264, 66), (4096, 8, 7)]
)
def test_tiles_of_a_gradient(sizes: str, cluster: int, raster: int, height: int, cols: int, clusters: int) -> None:
    """Each tile of each group is computed once. CTAs of a cluster have the same K and columns."""
    own = SIZES[sizes]
    ctas = taken(own, 77, height, cols, 0, cluster * clusters, 1, cluster, raster)
    ends = [0, *itertools.accumulate(own)]
    stored = Counter((t.group, t.row, t.column, t.rows, t.first, t.terms) for cta in ctas for t in cta if t.rows > 0)
    assert stored == Counter(
        (group, row, column, min(height - row, products.BLOCK_M), start, end - start)
        for group, (start, end) in enumerate(itertools.pairwise(ends))
        for row in range(0, height, products.BLOCK_M)
        for column in range(0, cols, BLOCK_N)
    )
    for first in range(0, len(ctas), cluster):
        for tiles in zip(*ctas[first : first + cluster], strict=True):
            assert len({(tile.group, tile.column, tile.first, tile.terms, tile.shares) for tile in tiles}) == 1
            assert tiles[0].shares and [tile.row - tiles[0].row for tile in tiles] == [
                index * products.BLOCK_M for index in range(cluster)
            ]
