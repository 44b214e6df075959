// The problem, and the tile scheduler: which tile a CTA computes in each round. The launcher defines WEIGHTS, RASTER
// and CLUSTER, as products.cu explains; the block sizes are defined there.
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
    int depth;                // without WEIGHTS: K
};

struct Tile {
    int group, row, column;   // of out
    int rows;                 // rows of the tile in bounds; none or fewer if a cluster's second tile is out of bounds
    int first, terms;         // first k, and K: of both tiles of a cluster
    bool shares;              // whether it shares b with the cluster's other tile
};

DEVICE int clusters() { return gridDim.x / CLUSTER; }

// A cluster has CLUSTER vertically adjacent tiles, of which the last may be out of bounds. The number of clusters along
// M, with WEIGHTS of one group, and along N:
DEVICE int clusters_below(const Problem& a) {
    return ((WEIGHTS ? (a.rows + BLOCK_M - 1) / BLOCK_M : a.table[0]) + CLUSTER - 1) / CLUSTER;
}
DEVICE int clusters_beside(const Problem& a) { return (a.cols + BLOCK_N - 1) / BLOCK_N; }
DEVICE int places_of(const Problem& a) { return clusters_beside(a) * clusters_below(a) * (WEIGHTS ? a.groups : 1); }

// Grouped tile order: RASTER tiles (here clusters) of a column, then of the next column, so that their loads of b hit
// L2.
DEVICE void raster(int place, int tiles_m, int tiles_n, int& tile_m, int& tile_n) {
    const int band = RASTER * tiles_n, first = place / band * RASTER, height = min(tiles_m - first, RASTER);
    tile_n = place % band / height;
    tile_m = first + place % band % height;
}

// This CTA's tile. A cluster with row tiles of two groups shares nothing, but both CTAs process as many K-blocks.
DEVICE Tile find_tile(const Problem& a, int place) {
    const int clusters_m = clusters_below(a), clusters_n = clusters_beside(a);
    const int4* entries = reinterpret_cast<const int4*>(a.table) + 1;
    int tile_m, tile_n;
    Tile tile;
    if (WEIGHTS) {
        const int each = clusters_m * clusters_n;
        const int4 entry = entries[place / each];
        raster(place % each, clusters_m, clusters_n, tile_m, tile_n);
        tile.group = entry.x, tile.first = entry.y, tile.terms = entry.z - entry.y;
        tile.row = (tile_m * CLUSTER + cluster_rank()) * BLOCK_M, tile.rows = min(a.rows - tile.row, BLOCK_M);
        tile.shares = true;
    } else {
        raster(place, clusters_m, clusters_n, tile_m, tile_n);
        const int first = tile_m * CLUSTER, last = min(first + CLUSTER, a.table[0]) - 1, own = first + cluster_rank();
        const int4* row_tiles = entries + a.groups;
        const int4 entry = row_tiles[min(own, last)];
        const int first_group = row_tiles[first].x;
        tile.group = entry.x, tile.shares = first_group == row_tiles[last].x;
        tile.row = own > last ? a.rows : entry.y, tile.rows = own > last ? 0 : min(entry.z - entry.y, BLOCK_M);
        // Rows past the last offset come last, and have no GEMM. In a cluster whose first tile has one, the CTA of the
        // second releases each stage unused.
        tile.first = 0, tile.terms = first_group < 0 ? 0 : a.depth;
    }
    tile.column = tile_n * BLOCK_N;
    return tile;
}

// A tile is the same in all threads of a warp. This makes it warp-uniform for the compiler too, so that descriptors
// live in uniform registers.
DEVICE Tile uniform(Tile tile) {
    tile.group = __shfl_sync(~0u, tile.group, 0), tile.row = __shfl_sync(~0u, tile.row, 0);
    tile.column = __shfl_sync(~0u, tile.column, 0), tile.rows = __shfl_sync(~0u, tile.rows, 0);
    tile.first = 0, tile.terms = __shfl_sync(~0u, tile.terms, 0);
    return tile;
}

// The tile that a cluster computes in a round. In the weights' gradient K is the size of a group, and groups are sorted
// by it. There every other round goes through the clusters backwards, which balances their load.
DEVICE int place_of(int round) {
    const int own = blockIdx.x / CLUSTER;
    return round * clusters() + (WEIGHTS && round % 2 ? clusters() - 1 - own : own);
}
