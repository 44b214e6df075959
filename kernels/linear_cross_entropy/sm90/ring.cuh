// A copy of parts/sm90/ring.cuh, made by `nox -s vendor`: change it there.
// The place in a ring of STAGES steps, which the kernel defines, and the parity of its barriers there.
#pragma once

#include "types.cuh"

struct Ring {
    int slot = 0;
    u32 phase = 0;
    DEVICE void next() {
        if (++slot == STAGES) slot = 0, phase ^= 1;
    }
    DEVICE void skip(int steps) {
        slot += steps;
        phase ^= slot / STAGES & 1;
        slot %= STAGES;
    }
};
