// The problem, and the part of it that a CTA computes. Included by backward.cu.
#pragma once

struct Rows { const void* at; long long batch, head, row; };  // a tensor [B, H, S, D]; strides in elements

struct Problem {
    float* dq_sum;       // [B * Hq, m_tiles, BM * D], in the order of the consumers' accumulator fragments
    const float* lse2;   // [B * Hq, m_tiles * BM], log2(e) * lse; +inf for queries that see no key, and for padding
    const float* delta;  // same shape; 0 there. With SINGLE_BLOCK these are lse and dlse (or null), [B * Hq, queries]
    float* parts;        // [blocks - unshared, splits, 2, 128 * D]: partial dV and dK of split blocks, in that order
    int queries, keys, m_tiles, n_blocks, kv_heads, group, all_kv_heads, section, unshared, splits, alternate;
    int shift;  // with CAUSAL, query i sees keys up to i + shift
    float scale, scale_log2;
#if ACCUMULATE
    int add_keys;  // whether dk and dv are added to, or written
#endif
};

// --------------------------------------------------------------------------------------------- the work of a CTA

// The first tile of queries that sees a block of keys.
DEVICE int first_tile(const Problem& p, int first_key) {
    return CAUSAL ? max(0, first_key - p.shift) / BM : 0;
}
// The 128 keys of this CTA and the tiles of queries that see some of them, for each query head of the KV head. Without
// a mask, each block from `unshared` on, a last wave that would leave most SMs idle, is split over `splits` CTAs.
struct Work {
    int head, batch, first_key, low, begin, tiles, part;  // `part`: index in `parts` of its partial dV and dK, or -1
    int ahead;                                            // number of first tiles that are moved to the end
    bool down;                                            // from the last queries to the first

    DEVICE explicit Work(const Problem& p, int cta = blockIdx.x) {
        int index = cta, split = 0, splits = 1;
        part = -1;
        if (SCHEDULE != CTA_PER_KV_HEAD && !CAUSAL && index >= p.unshared) {
            part = index - p.unshared;
            splits = p.splits, split = part % splits, index = p.unshared + part / splits;
        }
        // Sections of heads whose queries, gradients and accumulators fit in L2; within each, the longest work comes
        // first.
        int of_section = p.section * p.n_blocks, section = index / of_section, i = index % of_section;
        int heads = min(p.section, p.all_kv_heads - section * p.section);
        int all = SCHEDULE == CTA_PER_KV_HEAD ? cta : section * p.section + i % heads;
        batch = all / p.kv_heads, head = all % p.kv_heads;
        first_key = SCHEDULE == SINGLE_BLOCK || SCHEDULE == CTA_PER_KV_HEAD ? 0 : i / heads * BN;
        low = first_tile(p, first_key);
        int of_block = (p.m_tiles - low) * p.group;
        begin = of_block * split / splits;
        tiles = of_block * (split + 1) / splits - begin;
        // CTAs that start together would all add to the accumulator of one tile at a time, which L2 serialises. So each
        // begins at a different tile and wraps around.
        ahead = CAUSAL || SCHEDULE == CTA_PER_KV_HEAD || part >= 0 ? 0 : i / heads % p.m_tiles;
        // CTAs of an even section start together, go over the queries from last to first in lockstep, and end one after
        // the other. Those of the next section start as these end, and go from first to last, also in lockstep.
        down = SCHEDULE != SINGLE_BLOCK && SCHEDULE != CTA_PER_KV_HEAD && p.alternate && section % 2 == 0;
    }
};
// The loop over tiles of queries, with all query heads of the group at each: CTAs of one KV head then read the same
// queries.
struct Tile {
    int m, all_heads, g;  // `all_heads`: index of this query head over all batches; `g`: its index in the group

    DEVICE Tile(const Work& w, const Problem& p) {
        int i = w.begin / p.group;
        m = w.down ? p.m_tiles - 1 - i : w.low + i + w.ahead;
        g = w.begin % p.group;
        all_heads = (w.batch * p.kv_heads + w.head) * p.group + g;
    }
    DEVICE void next(const Work& w, const Problem& p) {
        ++g, ++all_heads;
        if (g < p.group) return;
        g = 0, all_heads -= p.group, m += w.down ? -1 : 1;
        if (!CAUSAL && m == p.m_tiles) m = 0;
    }
};
template <int stages>
struct Ring {
    int slot = 0;
    u32 parity = 0;
    DEVICE void next() {
        if (++slot == stages) slot = 0, parity ^= 1;
    }
};
// The consumers' progress, which determines the parities of barriers. It starts at 0, except with CTA_PER_KV_HEAD in
// later key blocks.
struct Progress {
    Ring<DO_STAGES> g;
    Ring<Q_STAGES> q;
    int tiles = 0;
    u32 sums = 0;
};
