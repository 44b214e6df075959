// A copy of parts/sm90/cluster.cuh, made by `nox -s vendor`: change it there.
// Clusters of CLUSTER CTAs, which the launcher defines: their numbers, barriers, and loads that all of them get.
#pragma once

#include "mbarrier.cuh"
#include "tma.cuh"

// This CTA's number in its cluster.
DEVICE int cluster_rank() {
    if (CLUSTER == 1) return 0;
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// All threads of all CTAs wait for each other: before a CTA writes into another, and before one ends that is written to.
DEVICE void cluster_sync() {
    if (CLUSTER > 1) asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// The same where the other CTAs see nothing that was written before it: each thread has used what it read of them, so
// that they may end. cluster_sync() releases, before which ptxas puts a fence of the whole GPU that waits for all stores.
// Only where each arrival, store and load into another CTA was waited for there: this does not wait for those under way.
DEVICE void cluster_leave() {
    if (CLUSTER > 1)
        asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// A load of TMA into the same place of every CTA of the cluster, whose barriers at the same place count its bytes.
DEVICE void tma_multicast(u32 to, const TensorMap* map, int column, int row, u32 bar, int head = 0) {
    if (CLUSTER == 1) return tma_load(to, map, column, row, head, 0, bar);
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2,%3,%4,%5}], [%6], %7;"
                 ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(head), "r"(0), "r"(bar),
                   "h"((u16)((1 << CLUSTER) - 1))
                 : "memory");
}

// One arrival of this warp at the same barrier of every CTA of the cluster. Without a scope of its own: with
// .release.cluster ptxas puts a fence of the whole GPU before it, which takes as long as a step of a product. So what
// the warp has read by then was read by a wgmma that was waited for, or into registers and then fence_reads().
DEVICE void arrive_at_all(u32 bar) {
    const u32 lane = threadIdx.x % 32;
    if (CLUSTER == 1) {
        if (lane == 0) bar_arrive(bar);
    } else if (lane < CLUSTER) {
        asm volatile("{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;\n"
                     "mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(bar), "r"(lane) : "memory");
    }
}
