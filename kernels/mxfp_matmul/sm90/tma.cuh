// A copy of parts/sm90/tma.cuh, made by `nox -s vendor`: change it there.
// TMA loads of 4-D tensors into shared memory; an mbarrier counts their bytes.
#pragma once

#include "types.cuh"

struct alignas(64) TensorMap { char bytes[128]; };  // CUtensorMap

DEVICE void tma_load(u32 to, const TensorMap* map, int column, int row, int head, int batch, u32 bar) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2,%3,%4,%5}], [%6];"
                 ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(bar) : "memory");
}
// Proxy fence between a thread's accesses to shared memory (generic proxy) and those of TMA or wgmma (async proxy).
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
