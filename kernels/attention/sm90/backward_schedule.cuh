// Which CTA computes which key blocks in backward.cu: -DSCHEDULE is one of these, as Schedule in configs/backward.py.
#pragma once

#define CTA_PER_BLOCK 0    // a CTA for each block of keys
#define SINGLE_BLOCK 1     // there is one block of keys, and its CTA alone sees its queries (backward_single_block.cuh)
#define CTA_PER_KV_HEAD 2  // a CTA has all blocks of keys of a head (backward_kv_head.cuh)
#define PERSISTENT 3       // one CTA per SM, which computes several blocks, one at a time (backward_persistent.cuh)
#define ROLES 4            // CTAs of one launch preprocess, multiply or postprocess (backward_roles.cuh)

#ifndef SCHEDULE
#define SCHEDULE CTA_PER_BLOCK
#endif
