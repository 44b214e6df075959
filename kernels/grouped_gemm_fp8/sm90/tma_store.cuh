// A copy of parts/sm90/tma_store.cuh, made by `nox -s vendor`: change it there.
// Stores of results through shared memory: stmatrix, a warpgroup barrier, and TMA stores.
#pragma once

#include "tma.cuh"

// Four 8 x 8 blocks of 16-bit elements: lane i has the address of row i % 8 of block i / 8.
DEVICE void store_blocks(u32 address, const u32 (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}

// A named barrier of the warps of a warpgroup.
DEVICE void warpgroup_sync(int barrier) { asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory"); }

// TMA store of a box, by one thread, after all threads that wrote the box passed fence_async() and a barrier; its
// commit; and the wait until the boxes of this thread's stores have been read.
DEVICE void tma_store(const TensorMap* map, u32 from, int column, int row, int head) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2,%3,%4,%5}], [%1];"
                 ::"l"(map), "r"(from), "r"(column), "r"(row), "r"(head), "r"(0) : "memory");
}
DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
DEVICE void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
