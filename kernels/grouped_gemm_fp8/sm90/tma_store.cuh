// A copy of parts/sm90/tma_store.cuh, made by `nox -s vendor`: change it there.
// TMA stores of 4-D tensors from shared memory, which go on beside what the thread does next. It waits for its own.
#pragma once

#include "tma.cuh"

// What this thread has written into shared memory is seen by the TMA stores and wgmmas that follow a barrier.
DEVICE void fence_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// What is beyond the tensor is not written.
DEVICE void tma_store(const TensorMap* map, int column, int row, int head, int batch, u32 from) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];"
                 ::"l"(map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(from) : "memory");
}

// The thread's stores since the last commit are a group, which may be empty.
DEVICE void tma_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// All groups of the thread but the last PENDING have read shared memory, which may then be written again, or given up.
template <int PENDING> DEVICE void tma_wait_reads() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
