// A copy of parts/sm90/ring.cuh, made by `nox -s vendor`: change it there.
// Position in a circular buffer of STAGES pipeline stages, which the kernel defines: the stage (`slot`) and the parity
// of its mbarriers.
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
