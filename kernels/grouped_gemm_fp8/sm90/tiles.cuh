// The problem, and the tile scheduler: which tile a CTA computes in each wave (here a round). The launcher defines
// WEIGHTS, BLOCK_N, CLUSTER and RASTER; products.cu defines BLOCK_M and BLOCK_K.
#pragma once

#include "cluster.cuh"
#include "types.cuh"

struct Problem {
    const int* table;  // schedule.py
    char* out;
    const float* scale_a;
    const float* scale_b;
    u64 scale_a_row, scale_a_block, scale_b_group, scale_b_row, scale_b_block;  // strides in elements
    int groups, rows, cols;  // of out, or with WEIGHTS of each of its matrices
    int depth;               // K, without WEIGHTS
};

struct Tile {
    int group, row, column;  // of out
    int rows;                // how many of BLOCK_M are there
    int first, end;          // of the tile along K
};

// A column of tiles is a column of clusters: CLUSTER horizontally adjacent tiles, of which the last may lie past the
// last column.
DEVICE int columns_of(const Problem& a) { return (a.cols + CLUSTER * BLOCK_N - 1) / (CLUSTER * BLOCK_N); }
DEVICE int tiles_of(const Problem& a) {
    const int columns = columns_of(a);
    return WEIGHTS ? a.groups * ((a.rows + BLOCK_M - 1) / BLOCK_M) * columns : a.table[0] * columns;
}

// Grouped tile order: RASTER tiles of a column, then of the next column, so that their columns of b are in L2.
DEVICE void raster(int place, int tiles_m, int tiles_n, int& tile_m, int& tile_n) {
    const int band = RASTER * tiles_n, first = place / band * RASTER, height = min(tiles_m - first, RASTER);
    tile_n = place % band / height;
    tile_m = first + place % band % height;
}

// A tile whose sum is empty has first = end = 0.
DEVICE Tile find_tile(const Problem& a, int place) {
    const int tiles_n = columns_of(a);
    const int4* entries = reinterpret_cast<const int4*>(a.table) + 1;
    int tile_m, tile_n;
    Tile tile;
    if (WEIGHTS) {
        const int tiles_m = (a.rows + BLOCK_M - 1) / BLOCK_M, each = tiles_m * tiles_n;
        const int4 entry = entries[place / each];
        raster(place % each, tiles_m, tiles_n, tile_m, tile_n);
        const bool empty = entry.y >= entry.z;
        tile.group = entry.x, tile.first = empty ? 0 : entry.y, tile.end = empty ? 0 : entry.z;
        tile.row = tile_m * BLOCK_M, tile.rows = min(a.rows - tile.row, BLOCK_M);
    } else {
        raster(place, a.table[0], tiles_n, tile_m, tile_n);
        const int4 entry = entries[a.groups + tile_m];
        tile.group = entry.x, tile.row = entry.y, tile.rows = min(entry.z - entry.y, BLOCK_M);
        tile.first = 0, tile.end = entry.x < 0 ? 0 : a.depth;
    }
    tile.column = (tile_n * CLUSTER + cluster_rank()) * BLOCK_N;
    return tile;
}

// Where the first K-block of a tile begins.
DEVICE int first_step(const Tile& tile) { return tile.first & -BLOCK_K; }

DEVICE int clusters() { return gridDim.x / CLUSTER; }

// The tile, or pair of tiles, that a cluster computes in a wave. In the weights' gradient K is the size of the group,
// and groups are sorted by it. There every other wave assigns tiles to clusters in reverse order, which balances the
// load.
DEVICE int place_of(int round) {
    const int own = blockIdx.x / CLUSTER;
    return round * clusters() + (WEIGHTS && round % 2 ? clusters() - 1 - own : own);
}
