// A copy of parts/sm90/cluster.cuh, made by `nox -s vendor`: change it there.
// Thread block clusters of CLUSTER CTAs, which the launcher defines: ranks, barriers, multicast loads.
#pragma once

#include "mbarrier.cuh"
#include "tma.cuh"

// This CTA's rank in its cluster.
DEVICE int cluster_rank() {
    if (CLUSTER == 1) return 0;
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Barrier of all threads of a cluster: before a CTA writes to the shared memory of another, and before one exits whose
// shared memory others write to.
DEVICE void cluster_sync() {
    if (CLUSTER > 1) asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// The same without release semantics, before exit: earlier writes need not be visible to other CTAs, and each thread
// has used what it read from them, so that they may exit. For the release of cluster_sync() ptxas puts a GPU-wide fence
// in front, which waits for all stores. Use it only where each arrival, store and load into another CTA was waited for
// there: this barrier does not wait for those in flight.
DEVICE void cluster_leave() {
    if (CLUSTER > 1)
        asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// A TMA multicast load to the same shared memory offset in every CTA of the cluster. The mbarrier at the same offset in
// each CTA counts the bytes.
DEVICE void tma_multicast(u32 to, const TensorMap* map, int column, int row, u32 bar, int head = 0) {
    if (CLUSTER == 1) return tma_load(to, map, column, row, head, 0, bar);
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2,%3,%4,%5}], [%6], %7;"
                 ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(head), "r"(0), "r"(bar),
                   "h"((u16)((1 << CLUSTER) - 1))
                 : "memory");
}

// This warp arrives once on the same mbarrier in every CTA of the cluster. Without a scope qualifier: for
// .release.cluster ptxas puts a GPU-wide fence in front, which takes as long as a K-block of a GEMM. So the warp must
// have waited for the wgmmas that read the stage, or called fence_reads() after reads into registers.
DEVICE void arrive_at_all(u32 bar) {
    const u32 lane = threadIdx.x % 32;
    if (CLUSTER == 1) {
        if (lane == 0) bar_arrive(bar);
    } else if (lane < CLUSTER) {
        asm volatile("{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;\n"
                     "mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(bar), "r"(lane) : "memory");
    }
}
