// The problem, and which tile a CTA takes in a round. The launcher defines WEIGHTS, RASTER and CLUSTER: see products.cu,
// which has the blocks.
#pragma once

#include "cluster.cuh"
#include "types.cuh"

struct Problem {
    const int* table;         // schedule.py
    u16* out;
    const u16* bias;          // or null
    u64 out_row, out_group;   // strides in elements; the columns of out are contiguous
    u64 bias_group, bias_column;
    int groups, rows, cols;   // of out, or with WEIGHTS of each of its matrices
    int depth;                // without WEIGHTS: terms of a sum
};

struct Tile {
    int group, row, column;   // of out
    int rows;                 // how many of BLOCK_M are there, none or less of a cluster's second tile beyond the end
    int first, terms;         // of the sum
    bool shares;              // b with the CTA below or above
};

// A cluster has CLUSTER_M tiles below each other and CLUSTER_N beside each other, of which the last may be beyond the
// end. This CTA's place in it, and the CTAs below and beside each other that it belongs to:
DEVICE int rank_m() { return CLUSTER_M > 1 ? cluster_rank() % CLUSTER_M : 0; }
DEVICE int rank_n() { return CLUSTER_N > 1 ? cluster_rank() / CLUSTER_M : 0; }
DEVICE u16 mask_m() { return ((1 << CLUSTER_M) - 1) << rank_n() * CLUSTER_M; }
DEVICE u16 mask_n() { return (CLUSTER_N > 1 ? 1 | 1 << CLUSTER_M : 1) << rank_m(); }
DEVICE int clusters() { return gridDim.x / CLUSTER; }

// Tiles of clusters, in each direction.
DEVICE int tiles_below(const Problem& a) { return (a.rows + CLUSTER_M * BLOCK_M - 1) / (CLUSTER_M * BLOCK_M); }
DEVICE int tiles_beside(const Problem& a) { return (a.cols + CLUSTER_N * BLOCK_N - 1) / (CLUSTER_N * BLOCK_N); }
DEVICE int tiles_of(const Problem& a) {
    return tiles_beside(a) * (WEIGHTS ? a.groups * tiles_below(a) : (a.table[0] + CLUSTER_M - 1) / CLUSTER_M);
}

// RASTER tiles of a column, then the next column, so that what they read of b is in L2.
DEVICE void raster(int place, int tiles_m, int tiles_n, int& tile_m, int& tile_n) {
    const int band = RASTER * tiles_n, first = place / band * RASTER, height = min(tiles_m - first, RASTER);
    tile_n = place % band / height;
    tile_m = first + place % band % height;
}

DEVICE Tile find_tile(const Problem& a, int place) {
    const int tiles_n = tiles_beside(a);
    const int4* entries = reinterpret_cast<const int4*>(a.table) + 1;
    int tile_m, tile_n;
    Tile tile;
    if (WEIGHTS) {
        const int tiles_m = tiles_below(a), each = tiles_m * tiles_n;
        const int4 entry = entries[place / each];
        raster(place % each, tiles_m, tiles_n, tile_m, tile_n);
        tile.group = entry.x, tile.first = entry.y, tile.terms = entry.z - entry.y;
        tile.shares = true;
        tile.row = (tile_m * CLUSTER_M + rank_m()) * BLOCK_M, tile.rows = min(a.rows - tile.row, BLOCK_M);
    } else {
        raster(place, (a.table[0] + CLUSTER_M - 1) / CLUSTER_M, tiles_n, tile_m, tile_n);
        const int4* pair = entries + a.groups + tile_m * CLUSTER_M;
        const int left = a.table[0] - tile_m * CLUSTER_M, rank = min(rank_m(), left - 1);
        const int4 entry = pair[rank];
        const int other = CLUSTER_M == 1 ? entry.x : pair[min(1 - rank_m(), left - 1)].x;
        tile.group = entry.x, tile.shares = other == entry.x;
        tile.row = rank_m() < left ? entry.y : a.rows, tile.rows = rank_m() < left ? min(entry.z - entry.y, BLOCK_M) : 0;
        // Rows behind the last offset come last. Below a tile with terms one of them passes these without a product.
        tile.first = 0, tile.terms = (rank_m() ? other : entry.x) < 0 ? 0 : a.depth;
    }
    tile.column = (tile_n * CLUSTER_N + rank_n()) * BLOCK_N;
    return tile;
}

// Of a tile that all threads of a warp know, so that the compiler knows it too: descriptors then live in uniform
// registers.
DEVICE Tile uniform(Tile tile) {
    tile.group = __shfl_sync(~0u, tile.group, 0), tile.row = __shfl_sync(~0u, tile.row, 0);
    tile.column = __shfl_sync(~0u, tile.column, 0), tile.rows = __shfl_sync(~0u, tile.rows, 0);
    tile.first = 0, tile.shares = false, tile.terms = __shfl_sync(~0u, tile.terms, 0);
    return tile;
}

// The tile that a cluster takes in a round. Sums of the weights' gradient are as long as their groups are large, and
// sorted by that: there every other round goes through the clusters backwards, which evens them out.
DEVICE int place_of(int round) {
    const int own = blockIdx.x / CLUSTER;
    return round * clusters() + (WEIGHTS && round % 2 ? clusters() - 1 - own : own);
}
