"""What `false_alarms` of the SPECs say of compute-sanitizer, shown on programs of a few lines that are right."""

from __future__ import annotations

import sys

import pytest

from harness.nsight import sanitizer

# Warp 0, or a bulk copy, writes 32 numbers; warp 1 reads them, four times. Each waits for the other.
HANDOVER = r"""
import sys, cupy

CODE = '''
__device__ unsigned at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ void arrive(void* bar) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(at(bar)) : "memory"); }
__device__ void wait(void* bar, int parity) {
    asm volatile("{ .reg .pred p;\\nagain: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\\n@!p bra again; }"
                 :: "r"(at(bar)), "r"(parity) : "memory");
}
extern "C" __global__ void handover(const int* in, int* out) {
    __shared__ __align__(128) int told[32];
    __shared__ unsigned long long full, empty;
    const int lane = threadIdx.x % 32;
    if (threadIdx.x == 0)
        asm volatile("mbarrier.init.shared.b64 [%0], 1;\\nmbarrier.init.shared.b64 [%1], 1;\\n"
                     "fence.mbarrier_init.release.cluster;" :: "r"(at(&full)), "r"(at(&empty)) : "memory");
    __syncthreads();
    for (int i = 0; i < 4; i++) {
        if (threadIdx.x < 32) {
            if (BARRIERS) wait(&empty, i & 1 ^ 1);
            if (!BULK) told[lane] = in[i * 32 + lane];
            __syncwarp();
            if (BULK && lane == 0)
                asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%2], 128;\\n"
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 128, [%2];"
                    :: "r"(at(told)), "l"(in + i * 32), "r"(at(&full)) : "memory");
            else if (BARRIERS && lane == 0) arrive(&full);
        }
        if (THREADS) __syncthreads();
        if (threadIdx.x >= 32) {
            if (BARRIERS) wait(&full, i & 1);
            out[i * 32 + lane] = told[31 - lane];
            __syncwarp();
            if (BARRIERS && lane == 0) arrive(&empty);
        }
        if (THREADS) __syncthreads();
    }
}
'''
defines = tuple("-D" + word for word in sys.argv[1:])
numbers, out = cupy.arange(128, dtype=cupy.int32), cupy.full(128, -1, dtype=cupy.int32)
cupy.RawKernel(CODE, "handover", ("-std=c++17", *defines))((1,), (64,), (numbers, out))
print("right" if (out.reshape(4, 32)[:, ::-1].ravel() == numbers).all() else "wrong")
"""


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize(
    ("threads", "barriers", "bulk", "finds"),
    [(0, 0, 0, True), (1, 0, 0, False), (0, 1, 0, True), (0, 1, 1, True)],
    ids=["a race", "__syncthreads", "mbarriers", "a bulk copy"],
)
def test_racecheck_does_not_know_what_waits_for_mbarriers(threads, barriers, bulk, finds):
    """A race is found and __syncthreads() is known; behind mbarriers, in order as well, it finds races."""
    pytest.importorskip("cupy", reason="CuPy is not installed")
    try:
        tool = sanitizer.find()
    except FileNotFoundError:
        pytest.skip("compute-sanitizer is not installed")
    program = [sys.executable, "-c", HANDOVER, f"THREADS={threads}", f"BARRIERS={barriers}", f"BULK={bulk}"]
    _, output = sanitizer.run(sanitizer.command(tool, "racecheck", ["handover"], program))
    assert bool(sanitizer.parse(output, ["handover"]).ours) == finds, output
    if threads or barriers:
        assert "right" in output.splitlines()
