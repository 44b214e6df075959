// dq of cuda_backward.cu, which includes this, where consumers hand it over (HANDED): one lane of a warp adds it to the
// fp32 sum, and two warps cast the sums that are complete. Nothing zeros a sum before and no kernel reads it after.
//
// A tile of dq has a word, its turn: 0, untouched; 1, a CTA is storing its addend; 1 + n, n addends have arrived. Who
// finds 0 stores the whole tile; all others add to it from 2 on. Who brings it to 1 + the number of the blocks of keys
// that see the tile puts it into the queue, from which the casting warps of all CTAs take: under a mask the CTA with
// the longest work is the last at most tiles, and its two warps would be slower than its tensor cores.
// A writer waits for a claim that another one made. That one has half of the tile already and waits for the other half
// alone, from consumers that wait for nothing outside their CTA: nobody who holds a claim waits for one, so no waits
// form a ring. Whoever claims is running; nobody waits for a CTA that is not.
//
// Clocks of the writer a tile, of the 2560 or 3200 that the tensor cores need: two bulk operations of half a tile until
// shared memory is read, ~500 each, one reading and one adding to a turn, ~700 each. So the reading is done half a tile
// ahead, and an addition is counted when the next is under way, when it has long been completed.
// The casting warps take half a tile each. With 64 queries it is 16 KB: twice 8 KB into shared memory (~1000 clocks)
// and 16 kilobytes to cast (~100 each), and ~1400 to take it from the queue, ~5000 in all. With 80 there is no shared
// memory left and 24 registers hold one kilobyte of a round trip to L2: 20 of ~900 clocks, ~19 000. A tile is cast once
// for as many visits as blocks of keys see it, which the queue spreads evenly: so 80 are for long sequences alone.
#pragma once

#ifndef DISCARD  // 1: lines of a sum that has been read are dropped from L2 and not written back to memory
#define DISCARD 1
#endif
#if HANDED
constexpr u32 HALF_BYTES = 4 * PIECE_BYTES;  // of a tile of dq: what a group of consumers makes, 64 of 128 columns
constexpr u32 READY = 2;                     // a turn from which on addends are added

// How many blocks of keys see some query of tile m.
DEVICE int blocks_of_tile(const Problem& p, int m) {
    return CAUSAL ? min(p.n_blocks, ((m + 1) * BM + p.keys - p.queries + BN - 1) / BN) : p.n_blocks;
}

// Adds this CTA's addends to dq's sums, tile by tile, each group's half as soon as it is there: one lane.
DEVICE void add_tiles(const Problem& p, const Work& w, u32 base) {
    // One addend more has arrived. Who adds the last one acquires what all others released.
    auto count = [&](int place) { return (int)add_release(p.turns + place, 1); };
    auto push = [&](int place, int before) {
        anew(place);
        if (before != blocks_of_tile(p, place % p.m_tiles)) return;
        fence_gpu();
        store_release(p.queue + 2 + add_relaxed(p.queue, 1), place + 1);
    };
    const Tile tile(w, p);
    int uncounted = -1, next = tile.all_heads * p.m_tiles + tile.m, g = tile.g;
    u32 turn = load_acquire(p.turns + next);
#pragma unroll 1
    for (int t = 0; t < w.tiles; t++) {
        const int place = next;
        bool first = false;
#pragma unroll 1
        for (int half = 0; half < 2; half++) {
            u32 bar = base + 8 * half, from = base + DQ_AT + half * HALF_BYTES;
            bar_wait(bar + DQ_FULL, t & 1);
            if (half == 0) {
                if (turn == 0) turn = exchange(p.turns + place, 0, 1), first = turn == 0;
                if (!first)
                    while (turn < READY) turn = load_acquire(p.turns + place);
                fence_async_global();
            }
            u32 which = 2 * place + half;
            anew(which);
            float* to = p.dq_sum + (long long)which * (BM * D / 2);
            if (first) store_bulk(to, from, HALF_BYTES);
            else reduce_bulk(to, from, HALF_BYTES);
            bulk_commit();
            bulk_wait_read();
            bar_arrive(bar + DQ_EMPTY);
            if (half == 0) {
                int before = 0;
                if (uncounted >= 0) bulk_wait<1>(), before = count(uncounted);
                next += p.m_tiles;  // as Tile goes on
                if (++g == p.group) {
                    next += (w.down ? -1 : 1) - g * p.m_tiles;
                    g = 0;
                }
                if (t + 1 < w.tiles) turn = load_acquire(p.turns + next);
                if (uncounted >= 0) push(uncounted, before);  // the answer comes while the next turn does
            }
        }
        uncounted = place;
        if (first) bulk_wait<0>(), push(place, count(place)), uncounted = -1;
    }
    if (uncounted >= 0) bulk_wait<0>(), push(uncounted, count(uncounted));
    bar_arrive(base + DQ_ENDED);
}

// Words of a quad as a matrix, turned: lane i gets word i of all four.
DEVICE void turn_quad(u32 (&x)[4]) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i & step) continue;
            bool odd = threadIdx.x & step;
            u32 got = __shfl_xor_sync(~0u, odd ? x[i] : x[i + step], step);
            if (odd) x[i] = got;
            else x[i + step] = got;
        }
}

// dq = scale * its sum, of 64 columns of a tile: one warp. A kilobyte of a piece, two blocks of 8 x 16 or 16 x 8
// numbers in the order of the consumers' registers, becomes 16 bytes of a row a lane.
DEVICE void cast_half(const Problem& p, int place, int half, [[maybe_unused]] u32 base) {
    // Of 80 queries, pieces have columns for rows: 16 columns, of two blocks of 8 queries a step. Else 16 queries, of
    // two blocks of 8 columns.
    constexpr int STEPS = HALF_BYTES / 1024, OF_PIECE = STEPS / 4, AHEAD = STEPS / 2;
    const int lane = threadIdx.x % 32, heads = p.kv_heads * p.group, head = place / p.m_tiles;
    const float* from = p.dq_sum + (long long)place * (BM * D) + half * (BM * D / 2);
    int row = place % p.m_tiles * BM + lane / 4 + (TURNED ? lane % 4 / 2 : lane % 2) * 8;
    u16* to = (u16*)chunk(p.dq, head / heads, head % heads, row, half * 64 + (TURNED ? lane % 2 : lane % 4 / 2) * 8);
    auto thread = [] {  // what depends on it is computed where it is used: there are 24 registers
        int i = threadIdx.x;
        anew(i);
        return i;
    };
#pragma unroll 1
    for (int step = 0; step < STEPS; step++) {
        Float4 x[2];
        if constexpr (STAGED_BYTES) {
            const u32 warp = thread() / 32 % 2, bar = base + STAGED_FULL + 8 * warp, i = step % AHEAD;
            const u32 at = base + STAGED_AT + warp * STAGED_BYTES;
            if (i == 0) {
                if (lane == 0) {
                    fence_async_global(), fence_async();  // behind what was acquired, and read here before
                    bar_expect(bar, STAGED_BYTES), load_row(from, at, bar, STAGED_BYTES);
                }
                bar_wait(bar, step / AHEAD & 1);  // two of a half
            }
            for (int j = 0; j < 2; j++) x[j] = shared_four(at + i * 1024 + j * 512 + lane * 16);
        } else {
            for (int j = 0; j < 2; j++) x[j] = load_four(from + j * 128 + lane * 4);
        }
        u32 y[4];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            y[2 * j] = pack(x[j].x * p.scale, x[j].y * p.scale);
            y[2 * j + 1] = pack(x[j].z * p.scale, x[j].w * p.scale);
            if (TURNED) y[2 * j] = turn_matrix(y[2 * j]), y[2 * j + 1] = turn_matrix(y[2 * j + 1]);
        }
        turn_quad(y);
        if (row < p.queries) store_four(to, y);
        const bool next_piece = (step + 1) % OF_PIECE == 0;
        if (TURNED) row += 16, to += 16 * p.dq.row;
        else to += 16;
        if (next_piece && TURNED) row -= BM, to += 16 - BM * p.dq.row;
        else if (next_piece) row += 16, to += 16 * p.dq.row - 64;
        __syncwarp();
        if (DISCARD && lane < 8) discard(from + thread() % 32 * 32);  // 128 bytes
        from += 256;
    }
}

// Casts halves of complete tiles, whoever completed them, until this CTA has added all its addends and the queue is
// empty: what comes later is another's, which is there to take it.
DEVICE void cast_tiles(const Problem& p, u32 base) {
    bool ended = false;
    for (;;) {
        u32 found = 0;  // 1: there is no more; above: 2 * (place + 1) + half
        if (threadIdx.x % 32 == 0) {
            for (;;) {
                Pair now = load_pair(p.queue);
                if (now.y >= 2 * now.x) break;
                if (exchange(p.queue + 1, now.y, now.y + 1) != now.y) continue;
                do found = 2 * load_acquire(p.queue + 2 + now.y / 2);
                while (found == 0);
                found += now.y % 2;
                break;
            }
            if (found == 0 && ended) found = 1;
            else if (found == 0) ended = bar_wait_for(base + DQ_ENDED, 0, 1000);  // and look once more
        }
        found = __shfl_sync(~0u, found, 0);
        if (found == 1) return;
        if (found) cast_half(p, found / 2 - 1, found % 2, base);
    }
}
#endif
