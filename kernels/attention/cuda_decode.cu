// Attention of few queries to many keys for Hopper (sm_90a): decoding. cuda_decode.py compiles and launches it.
//
// Napkin maths, H8 D64, one query, 200 000 keys: k and v are 410 MB, 96 us at the 4254 GB/s of a copy on one NVIDIA
// H200. A multiprocessor then reads 16 bytes a clock, one key and its value in 16 clocks or 62 issue slots; the
// products by mma.sync, the rows padded to 16, and the softmax take about 5 slots a key. So what counts is that reads
// are always in flight, some 36 KB for each multiprocessor, that all end at one time, and that no launch follows.
//  - Each warp is on its own: it has a ring of STAGES blocks of BLOCK_N keys and values, reads every WARPS-th block of
//    its CTA, and one of its lanes orders the next block by TMA as soon as the warp is done with one. No warp waits for
//    another before the end of a head.
//  - CTAs share out the blocks of all heads, one behind the other, so that each has the same number but for one. A head
//    is then that of one CTA or of several, whose parts are added up by the one of them that arrives last, in the order
//    of the keys: the result is the same bit for bit in each run.
//  - Keys and values are marked as first to leave L2. They are read once; what else is there may stay.
//
// A row is a query of one head of the group that shares a key head: row r is query r / group of head r % group.
//
// The fragments of mma.sync.m16n8k16: lane l has rows l / 4 and l / 4 + 8 of the 16. SHORT: there are 8 rows at most,
// so that the second of them is none.
//
// Defined by the launcher, see DecodeConfig in dispatch.py: HEAD_DIM (64, 128), FP16, SHORT, BLOCK_N, STAGES, WARPS.

#include "cuda_decode_ptx.cuh"

constexpr int PANELS = HEAD_DIM / 64;         // a row of 64 elements is the 128 bytes that TMA swizzles
constexpr int PANEL_BYTES = BLOCK_N * 128;
constexpr int TILE_BYTES = PANELS * PANEL_BYTES;
constexpr int STAGE_BYTES = 2 * TILE_BYTES;   // of keys and of values
constexpr int THREADS = 32 * WARPS;
constexpr int ROWS = SHORT ? 8 : 16;
constexpr int HALVES = SHORT ? 1 : 2;         // of the 16 rows, of which there may be some
constexpr int K_STEPS = HEAD_DIM / 16, N_TILES = BLOCK_N / 8, D_TILES = HEAD_DIM / 8;
constexpr int PITCH = HEAD_DIM + 8;           // floats from one row of a part to the next, in shared memory
constexpr int VECTOR = HEAD_DIM / 32;         // floats of a row for each lane where parts are added up
constexpr int READS = 16;                     // parts that a warp reads at a time
#define NEGATIVE_INFINITY __int_as_float(0xff800000)

constexpr int BARRIER_OFFSET = WARPS * STAGES * STAGE_BYTES;
constexpr int PART_OFFSET = BARRIER_OFFSET + 8 * WARPS * STAGES;
constexpr int PEAK_OFFSET = PART_OFFSET + 4 * WARPS * ROWS * PITCH;
constexpr int TOTAL_OFFSET = PEAK_OFFSET + 4 * WARPS * ROWS;
constexpr int LAST_OFFSET = TOTAL_OFFSET + 4 * WARPS * ROWS;  // 1 where this CTA is the last of a head's

struct Problem {
    const u16* q;
    u16* out;
    float* lse;
    long long q_batch, q_head, q_row, out_batch, out_head, out_row;  // strides in elements
    float *part, *statistics;    // [places, rows, D] sums not yet normalised; [places, rows, 2] peak and total
    u32* arrived;                // a counter for each CTA, that of the head which begins in it; 0 before and after
    float scale_log2;
    int heads, group, queries, keys, causal;  // heads: of the keys, in a batch
    int blocks, share, extra;  // blocks of a head; those of a CTA, one more for the first `extra`
};

struct Sums {  // of exp2(s - peak) v and of exp2(s - peak)
    float o[D_TILES][4];
    float peak[2], total[2];
};

// -inf - -inf would not be a number, where exp2(-inf - 0) is 0.
DEVICE float finite(float peak) { return peak == NEGATIVE_INFINITY ? 0.0f : peak; }

// ---- Shares -------------------------------------------------------------------------------------------------------

// Block n of all heads' is one of CTA owner(n), whose first one is first_block().
DEVICE int first_block(const Problem& a, int cta) { return cta * a.share + min(cta, a.extra); }
DEVICE int owner(const Problem& a, int block) {
    int larger = a.extra * (a.share + 1);
    return block < larger ? block / (a.share + 1) : a.extra + (block - larger) / a.share;
}

// Orders a warp's blocks. One lane has it.
struct Reader {
    int batch, head, block, left;  // the next block, and how many there are to come
    u32 to, bar, slot = 0;
    u64 policy;
    DEVICE void skip(const Problem& a, int blocks) {
        for (block += blocks; block >= a.blocks; block -= a.blocks)
            if (++head == a.heads) head = 0, batch++;
    }
    DEVICE void order(const Problem& a, const TensorMap* k_map, const TensorMap* v_map) {
        if (left <= 0) return;
        left--;
        const u32 full = bar + 8 * slot, keys = to + slot * STAGE_BYTES, values = keys + TILE_BYTES;
        bar_expect(full, STAGE_BYTES);
#pragma unroll
        for (int p = 0; p < PANELS; p++)
            tma_load_once(keys + p * PANEL_BYTES, k_map, p * 64, block * BLOCK_N, head, batch, full, policy);
#pragma unroll
        for (int p = 0; p < PANELS; p++)
            tma_load_once(values + p * PANEL_BYTES, v_map, p * 64, block * BLOCK_N, head, batch, full, policy);
        slot = slot + 1 == STAGES ? 0 : slot + 1;
        skip(a, WARPS);
    }
};

// Where CTA `cta` puts its part of a head that begins in CTA `first`: it has one such part at its end and one before.
DEVICE int place(int cta, int first) { return 2 * cta + (cta == first); }

// ---- One block ----------------------------------------------------------------------------------------------------

// The rows of a lane: where their queries lie, and how many keys they see.
struct LaneRows {
    int row[2], member[2], query[2], seen[2];
    bool here[2];
    DEVICE explicit LaneRows(const Problem& a) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            row[h] = threadIdx.x % 32 / 4 + 8 * h;
            query[h] = row[h] / a.group, member[h] = row[h] - query[h] * a.group;
            here[h] = row[h] < a.queries * a.group;
            seen[h] = a.causal && here[h] ? max(a.keys - a.queries + query[h] + 1, 0) : a.keys;
        }
    }
};

DEVICE void load_queries(const Problem& a, const LaneRows& rows, int head, u32 (&q)[K_STEPS][4]) {
    const int batch = head / a.heads, first = (head - batch * a.heads) * a.group;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u16* from = a.q + batch * a.q_batch + (first + rows.member[h]) * a.q_head + rows.query[h] * a.q_row;
#pragma unroll
        for (int k = 0; k < K_STEPS; k++)
#pragma unroll
            for (int c = 0; c < 2; c++)
                q[k][2 * c + h] = h < HALVES && rows.here[h]
                                      ? *(const u32*)(from + 16 * k + 8 * c + threadIdx.x % 4 * 2) : 0;
    }
}

// Adds a block of keys and values in shared memory to the sums. Keys from `seen` on count for nothing, which is looked
// at only if some of the block's are beyond `seen_by_all`.
DEVICE void attend(const Problem& a, const LaneRows& rows, const u32 (&q)[K_STEPS][4], Sums& sums, u32 keys,
                   int first_key, int seen_by_all) {
    const int lane = threadIdx.x % 32, row = lane % 8, matrix = lane / 8;
    float s[N_TILES][4];
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[n][i] = 0;
#pragma unroll
    for (int k = 0; k < K_STEPS; k += 2) {
        const u32 at = keys + k / 4 * PANEL_BYTES + row * 128 + ((k % 4 * 2 + matrix ^ row) << 4);
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
            u32 b[4];
            ldmatrix(b, at + n * 1024);
            mma(s[n], q[k], b[0], b[1]);
            mma(s[n], q[k + 1], b[2], b[3]);
        }
    }
    if (first_key + BLOCK_N > seen_by_all) {
#pragma unroll
        for (int n = 0; n < N_TILES; n++)
#pragma unroll
            for (int i = 0; i < 2 * HALVES; i++)
                if (first_key + 8 * n + lane % 4 * 2 + i % 2 >= rows.seen[i / 2]) s[n][i] = NEGATIVE_INFINITY;
    }
    float peak[2];
    bool higher = false;
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
        float most = fmaxf(s[0][2 * h], s[0][2 * h + 1]);
#pragma unroll
        for (int n = 1; n < N_TILES; n++) most = fmaxf(most, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        peak[h] = fmaxf(sums.peak[h], most * a.scale_log2);
        higher |= peak[h] > sums.peak[h];
    }
    if (__any_sync(~0u, higher)) {
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
            const float rescale = exp2_(sums.peak[h] - finite(peak[h]));
            sums.peak[h] = peak[h];
            sums.total[h] *= rescale;
#pragma unroll
            for (int d = 0; d < D_TILES; d++) sums.o[d][2 * h] *= rescale, sums.o[d][2 * h + 1] *= rescale;
        }
    }
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
        const float shift = finite(sums.peak[h]);
        float total[2] = {0, 0};
#pragma unroll
        for (int n = 0; n < N_TILES; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float& x = s[n][2 * h + i];
                x = exp2_(__fmaf_rn(x, a.scale_log2, -shift));
                total[i] += x;
            }
        sums.total[h] += total[0] + total[1];
    }
    const u32 values = keys + TILE_BYTES + (matrix % 2 * 8 + row) * 128;
#pragma unroll
    for (int k = 0; k < BLOCK_N / 16; k++) {
        const float(&left)[4] = s[2 * k];
        const float(&right)[4] = s[2 * k + 1];
        const u32 p[4] = {pack(left[0], left[1]), HALVES == 2 ? pack(left[2], left[3]) : 0,
                          pack(right[0], right[1]), HALVES == 2 ? pack(right[2], right[3]) : 0};
#pragma unroll
        for (int d = 0; d < D_TILES; d += 2) {
            u32 b[4];
            ldmatrix_transposed(b, values + d / 8 * PANEL_BYTES + k * 2048 + ((d % 8 + matrix / 2 ^ row) << 4));
            mma(sums.o[d], p, b[0], b[1]);
            mma(sums.o[d + 1], p, b[2], b[3]);
        }
    }
}

// ---- Adding up ----------------------------------------------------------------------------------------------------

// Where each warp's part lies in shared memory.
struct Parts {
    float *sums, *peak, *total;  // [WARPS, ROWS, PITCH], [WARPS, ROWS]
    u32* last;
    DEVICE explicit Parts(char* shared)
        : sums((float*)(shared + PART_OFFSET)), peak((float*)(shared + PEAK_OFFSET)),
          total((float*)(shared + TOTAL_OFFSET)), last((u32*)(shared + LAST_OFFSET)) {}
};

DEVICE void put(const Problem& a, const LaneRows& rows, Sums& sums, const Parts& parts) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
        float total = sums.total[h] + __shfl_xor_sync(~0u, sums.total[h], 1);
        total += __shfl_xor_sync(~0u, total, 2);
        if (!rows.here[h]) continue;
        const int at = warp * ROWS + rows.row[h];
        if (lane % 4 == 0) parts.peak[at] = sums.peak[h], parts.total[at] = total;
#pragma unroll
        for (int d = 0; d < D_TILES; d++)
            *(float2*)(parts.sums + at * PITCH + 8 * d + lane % 4 * 2) = {sums.o[d][2 * h], sums.o[d][2 * h + 1]};
    }
}

// Adds up the parts of `count` warps. WHOLE: they are all of a head, whose output this is; else a part of it.
template <bool WHOLE> DEVICE void add(const Problem& a, int head, int place, int count, const Parts& parts) {
    const int rows = a.queries * a.group, lane = threadIdx.x % 32;
    for (int r = threadIdx.x / 32; r < rows; r += WARPS) {
        float peak = NEGATIVE_INFINITY, total = 0, x[VECTOR] = {};
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            if (w < count) peak = fmaxf(peak, parts.peak[w * ROWS + r]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            if (w >= count) break;
            const float weight = exp2_(parts.peak[w * ROWS + r] - finite(peak));
            total += parts.total[w * ROWS + r] * weight;
            const float* from = parts.sums + (w * ROWS + r) * PITCH + lane * VECTOR;
#pragma unroll
            for (int i = 0; i < VECTOR; i++) x[i] += from[i] * weight;
        }
        if (WHOLE) {
            const int batch = head / a.heads, query = r / a.group, member = r - query * a.group;
            const int own = (head - batch * a.heads) * a.group + member;
            const float scale = total == 0 ? 1 : 1 / total;
            u32* to = (u32*)(a.out + batch * a.out_batch + own * a.out_head + query * a.out_row + lane * VECTOR);
#pragma unroll
            for (int i = 0; i < VECTOR; i += 2) to[i / 2] = pack(x[i] * scale, x[i + 1] * scale);
            const float lse = (peak + log2_(total == 0 ? 1 : total)) * 0.6931471805599453f;
            if (lane == 0) a.lse[((long long)head * a.group + member) * a.queries + query] = lse;
        } else {
            const int at = place * rows + r;
            float* to = a.part + at * HEAD_DIM + lane * VECTOR;
#pragma unroll
            for (int i = 0; i < VECTOR; i += 2) *(float2*)(to + i) = {x[i], x[i + 1]};
            if (lane == 0) *(float2*)(a.statistics + 2 * at) = {peak, total};
        }
    }
}

// Adds up what `count` CTAs from `begun` on have written of a head: `groups` warps to a row, each every groups-th part
// of it, in order.
DEVICE void gather(const Problem& a, int begun, int count, int groups, const Parts& parts) {
    const int rows = a.queries * a.group, lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = warp % groups;
    for (int r = warp / groups; r < rows; r += WARPS / groups) {
        float x[VECTOR] = {}, peak = NEGATIVE_INFINITY, total = 0;
        for (int first = own; first < count; first += groups * READS) {
            float its[READS][VECTOR], of[READS][2];
#pragma unroll
            for (int i = 0; i < READS; i++) {  // what is beyond the last one is read, but counts for nothing
                const int at = place(begun + min(first + i * groups, count - 1), begun) * rows + r;
                load_l2(of[i], a.statistics + 2 * at);
                load_l2(its[i], a.part + at * HEAD_DIM + lane * VECTOR);
            }
            float higher = peak;
#pragma unroll
            for (int i = 0; i < READS; i++) {
                if (first + i * groups >= count) of[i][0] = NEGATIVE_INFINITY;
                higher = fmaxf(higher, of[i][0]);
            }
            const float before = exp2_(peak - finite(higher));
            peak = higher, total *= before;
#pragma unroll
            for (int v = 0; v < VECTOR; v++) x[v] *= before;
#pragma unroll
            for (int i = 0; i < READS; i++) {
                const float weight = exp2_(of[i][0] - finite(higher));
                total += of[i][1] * weight;
#pragma unroll
                for (int v = 0; v < VECTOR; v++) x[v] += its[i][v] * weight;
            }
        }
        const int at = own * ROWS + r;
        if (lane == 0) parts.peak[at] = peak, parts.total[at] = total;
#pragma unroll
        for (int v = 0; v < VECTOR; v++) parts.sums[at * PITCH + lane * VECTOR + v] = x[v];
    }
}

// After the last block of a head in this CTA. The CTA's blocks of other heads are on their way meanwhile.
DEVICE void finish(const Problem& a, const LaneRows& rows, int head, Sums& sums, const Parts& parts) {
    const int first = owner(a, head * a.blocks), count = owner(a, (head + 1) * a.blocks - 1) - first + 1;
    put(a, rows, sums, parts);
    __syncthreads();
    if (count == 1) {
        add<true>(a, head, 0, WARPS, parts);
    } else {
        add<false>(a, head, place(blockIdx.x, first), WARPS, parts);
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence();
            *parts.last = arrive(a.arrived + first, count - 1) == count - 1;
            __threadfence();
        }
        __syncthreads();
        if (*parts.last) {
            int groups = WARPS;  // to a row: as many as leave a warp for each, and one where there are not enough
            while (groups > 1 && WARPS / groups < a.queries * a.group) groups /= 2;
            gather(a, first, count, groups, parts);
            __syncthreads();
            add<true>(a, head, 0, groups, parts);
        }
    }
    __syncthreads();  // before the parts of the next head
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_cuda_decode(const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
                      const __grid_constant__ Problem a) {
    extern __shared__ __align__(1024) char shared[];
    const u32 smem = (u32)__cvta_generic_to_shared(shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int begin = first_block(a, blockIdx.x), end = first_block(a, blockIdx.x + 1);
    const u32 ring = smem + warp * STAGES * STAGE_BYTES, bars = smem + BARRIER_OFFSET + 8 * warp * STAGES;
    const Parts parts(shared);

    int head = begin / a.blocks;
    Reader reader;
    if (lane == 0) {
        for (int i = 0; i < STAGES; i++) bar_init(bars + 8 * i, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        reader.batch = head / a.heads, reader.head = head % a.heads, reader.block = begin - head * a.blocks;
        reader.skip(a, warp);
        reader.left = (end - begin - warp + WARPS - 1) / WARPS;
        reader.to = ring, reader.bar = bars, reader.policy = first_to_leave();
        for (int i = 0; i < STAGES; i++) reader.order(a, &k_map, &v_map);
    }
    __syncwarp();

    const LaneRows rows(a);
    // The first query of a causal problem sees the fewest keys.
    const int seen_by_all = a.causal ? min(a.keys, max(a.keys - a.queries + 1, 0)) : a.keys;
    u32 slot = 0, phase = 0;
    int next = begin + warp;
    for (int start = begin; start < end; head++) {
        const int before = head * a.blocks, stop = min(end, before + a.blocks);
        u32 q[K_STEPS][4];
        load_queries(a, rows, head, q);
        Sums sums = {};
        sums.peak[0] = sums.peak[1] = NEGATIVE_INFINITY;
#pragma unroll 1
        for (; next < stop; next += WARPS) {
            bar_wait(bars + 8 * slot, phase);
            attend(a, rows, q, sums, ring + slot * STAGE_BYTES, (next - before) * BLOCK_N, seen_by_all);
            __syncwarp();
            if (lane == 0) reader.order(a, &k_map, &v_map);
            if (++slot == STAGES) slot = 0, phase ^= 1;
        }
        finish(a, rows, head, sums, parts);
        start = stop;
    }
}
