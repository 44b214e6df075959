// What cuda_backward.cu, which includes this, does otherwise where a CTA stays and draws blocks of keys (TICKETS).
//
// Of a CTA for each block some tiles' time is not a product: starting it, its barriers and divisions, the first K, Q and
// scores, the last dQ, dK and dV on their way. A CTA that stays has queries of its next block in shared memory while it
// ends one, and dK and dV leave while the next K comes. What is left is the first probabilities and the last dQ with
// nothing beside them.
//
// Under a mask blocks differ in length, the longest of a section come first, and whoever is done takes the next: as the
// hardware gives out CTAs. A ticket is drawn when the last loads of a block are under way, not earlier: who draws long
// before it can begin takes the block from one who could.
#pragma once

#if TICKETS
// ticket: the next block that nobody has; the first ones are those that have the CTAs' own numbers.
DEVICE void produce_tickets(const TensorMap& q_map, const TensorMap& do_map, const TensorMap& k_map,
                            const TensorMap& v_map, const Problem& p, u32* ticket, int items, u32 base) {
    Ring<Q_STAGES> q;
    Ring<DO_STAGES> g;
    const u32 turn = base + TURN_AT;  // how many blocks there were before is kept in shared memory: registers are few
    store_pair(turn, 0, 0);
#pragma unroll 1
    for (u32 item = blockIdx.x; item < items; item = draw(ticket)) {
        const Work w(p, item);
        w.store(item_slot(base, shared_word(turn)));
        for (int part = 0; part < 2 * SLABS; part++) {  // what consumers are done with before they get it is near by then
            const int column = part / 2 * 64, row = w.first_key + part % 2 * 64;
            tma_prefetch(&k_map, column, row, w.head, w.batch), tma_prefetch(&v_map, column, row, w.head, w.batch);
        }
        produce(q_map, do_map, k_map, v_map, p, w, q, g, base, [] {});
        store_pair(turn, shared_word(turn) + 1, 0);
    }
    const u32 n = shared_word(turn);
    bar_wait(base + K_EMPTY, n & 1 ^ 1);
    store_words(item_slot(base, n), 0, 0, 0, 0);  // a block without tiles is the end
    bar_arrive(base + K_FULL);
}

// The block that consumers do next; its keys are there.
DEVICE Work next_item(const Progress& now, u32 base) {
    bar_wait(base + K_FULL, now.blocks & 1);
    return Work::load(item_slot(base, now.blocks));
}
#endif
