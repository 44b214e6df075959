// The epilogue where the keys are one block of several (CARRY), as in ring attention. Included by forward.cu. It merges
// this block's attention with the running one, so that no separate kernel is needed:
//
//   L = log(exp(lse) + exp(lse_block))     out = out exp(lse - L) + out_block exp(lse_block - L)     lse = L
//
// For each element of out it reads 4 bytes and writes 4, or 2 with CARRY 2; the plain epilogue only writes 2. A row of
// out whose lse is -inf is not read, so it need not be initialised.
#pragma once

constexpr float LN_2 = 0.6931471805599453f, LOG2_E = 1.4426950408889634f;

struct Merge {      // of one row
    float lse;      // merged
    float block;    // factor of this block's accumulator
    float running;  // factor of the running attention; 0 if it is not to be read

    // `before`: the running lse; `lse`: this block's, -inf if the row sees none of its keys; `sum`: of its
    // probabilities.
    DEVICE Merge(float before, float lse, float sum) {
        const float top = fmaxf(before, lse);  // fmaxf of NaN and a number is the number
        const bool empty = before == NEGATIVE_INFINITY && lse == NEGATIVE_INFINITY;
        const float both = exp2_((before - top) * LOG2_E) + exp2_((lse - top) * LOG2_E);
        this->lse = empty || top == -NEGATIVE_INFINITY ? top : top + __log2f(both) * LN_2;
        block = lse == NEGATIVE_INFINITY ? 0.0f : exp2_((lse - this->lse) * LOG2_E) / sum;
        running = before == NEGATIVE_INFINITY ? 0.0f : exp2_((before - this->lse) * LOG2_E);
    }
};

// Merges rows first_row ... first_row + 15 with the running attention, except those outside the queries.
DEVICE void epilogue(const float (&o)[O_REGS], const Rows& rows, const Problem& a, int all_head, int first_row,
                     int lane) {
    const int batch = all_head / a.q_heads, head = all_head - batch * a.q_heads, quad = lane % 4;
    const float* from = a.running + batch * a.running_batch + head * a.running_head + 2 * quad;
    float* line = a.lse + all_head * a.lse_head;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = first_row + lane / 4 + 8 * r;
        const bool inside = (u32)row < (u32)a.num_q;
        const float before = inside ? line[row] : NEGATIVE_INFINITY;
        const float sum = row_sum(rows, r);
        const bool none = sum == 0.0f;  // no key was seen (a NaN sum is not 0)
        const float lse = none ? NEGATIVE_INFINITY : (rows.scaled[r] + __log2f(sum)) * LN_2;
        const Merge merge(before, lse, sum);
        __syncwarp();  // all lanes of the row have read its lse
        if (quad == 0 && inside) line[row] = merge.lse;
        float2 x[O_REGS / 4];
#pragma unroll
        for (int i = 0; i < O_REGS / 4; i++) {
            x[i] = make_float2(0.0f, 0.0f);
            if (inside && before != NEGATIVE_INFINITY) x[i] = *(const float2*)(from + row * a.running_row + i * 8);
        }
#pragma unroll
        for (int i = 0; i < O_REGS / 4; i++) {
            x[i].x = x[i].x * merge.running + (none ? 0.0f : o[4 * i + 2 * r] * merge.block);
            x[i].y = x[i].y * merge.running + (none ? 0.0f : o[4 * i + 2 * r + 1] * merge.block);
        }
#if CARRY == 1
        float* to = (float*)a.out + batch * a.out_batch + head * a.out_head + row * a.out_row + 2 * quad;
#pragma unroll
        for (int i = 0; i < O_REGS / 4; i++)
            if (inside) *(float2*)(to + i * 8) = x[i];
#else
        unsigned short* to = a.out + batch * a.out_batch + head * a.out_head + row * a.out_row + 8 * quad;
#pragma unroll
        for (int i = 0; i < O_REGS / 4; i += 4) {
            u32 w[4];
#pragma unroll
            for (int g = 0; g < 4; g++) w[g] = pack(x[i + g].x, x[i + g].y);
            uint4 vector = transpose(w[0], w[1], w[2], w[3], quad);
            if (inside) store_global4(to + i * 8, vector);
        }
#endif
    }
}
