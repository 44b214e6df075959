"""Attention forward for Hopper: TMA, wgmma and warp specialisation, in Gluon.

Estimate for one block of 128 keys and one warp group of 64 query rows, in cycles of an SM's tensor cores
(4096 FLOP a cycle, dense), its exponential units (16 a cycle) and its four schedulers (one instruction a cycle each):
  D = 128   tensor 1024   exp2 512   issue about 460
  D =  64   tensor  512   exp2 512   issue about 420
At D = 128, two warp groups in ping-pong overlap all else with the tensor cores. At D = 64 the exponential units are
busy as long as the tensor cores. Three warp groups share an SM, which also reduces the L2 traffic of keys and values to
two thirds.

A CTA is one producer warp and CONSUMERS warp groups with 64 rows of queries each. The producer loads key and value
blocks by TMA into circular buffers of STAGES stages. A consumer issues S = Q K^T of key block j together with
O += P V of block j - 1, and overlaps the softmax of block j with the latter. S, P and O stay in registers. The scheme
is FlashAttention-3's (Shah et al. 2024, sections 3.1 and 3.2).

The main loop goes from the last key block to the first. Masks are needed only for the last blocks: those that the
diagonal crosses, and the partial block at the end of the keys.

mbarriers, with their arrivals per phase. The n-th wait on a full barrier has parity n & 1, on an empty one the
opposite, so that the first wait for each empty stage returns at once.
  q_full[c] 1, q_empty[c] 1            the 64 query rows of consumer c, once a tile
  k_full[s] 1, k_empty[s] CONSUMERS    key block `it` of this CTA, counted over all its tiles, is in stage it % STAGES
  v_full[s] 1, v_empty[s] CONSUMERS    the same for blocks of values
  order<c> 1                           ping-pong: consumer c may issue its wgmmas, and then arrives at order<c + 1>.
                                       order0 starts with one arrival. The consumers of a CTA go over the same blocks,
                                       so none arrives twice in a phase
  tile_full 1, tile_empty CONSUMERS    DYNAMIC: the index of the next tile, taken from a counter
"""

from __future__ import annotations

from typing import Any

import triton

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )

    _jit = gluon.jit
    _cta_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # renamed in Triton 3.7
    NO_GLUON = None
except (ImportError, AttributeError) as error:  # the package must import without Gluon

    def _jit(function: Any = None, **options: Any) -> Any:
        return function or _jit

    NO_GLUON = f"Triton {triton.__version__} has no Gluon for Hopper: {error}"


@_jit
def _tile(index, num_m, heads, section, CAUSAL: gl.constexpr):
    """Returns head (over all batches) and row block of a tile. Without a mask the order is head by head. CAUSAL: heads
    are scheduled in sections of `section` heads, whose keys and values fit L2. Within a section the row blocks with the
    most keys come first."""
    if CAUSAL:
        first = index // (section * num_m) * section
        inside = index - first * num_m
        width = gl.minimum(section, heads - first)
        m = inside // width
        return first + inside - m * width, num_m - 1 - m
    else:  # noqa: RET505
        head = index // num_m
        return head, index - head * num_m


@_jit
def _blocks(m, num_q, num_keys, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Returns (end, full): a row block sees key blocks 0 … end - 1, and blocks 0 … full - 1 need no mask.

    `end` is at least 1 even if no row sees a key: the masked block gives such rows out 0 and lse -inf without a branch.
    """
    last = num_keys
    first = num_keys
    if CAUSAL:
        shift = num_keys - num_q + m * BLOCK_M
        last = gl.minimum(num_keys, shift + BLOCK_M)
        first = gl.minimum(num_keys, gl.maximum(shift + 1, 0))
    return gl.maximum((last + BLOCK_N - 1) // BLOCK_N, 1), first // BLOCK_N


@_jit
def _load(desc, batch, head, row, slot, full):
    mbarrier.expect(full, desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [batch, head, row, 0], full, slot)


@_jit
def _produce(args, next_tile_ptr, CAUSAL: gl.constexpr, DYNAMIC: gl.constexpr):
    """The producer warp: takes tiles from the scheduler, and loads their queries, keys and values."""
    descs, tiles, bufs, bars, shape, _, _ = args
    q_desc, k_desc, v_desc, _ = descs
    q_smem, k_smem, v_smem, _, tile_smem = bufs
    q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_full, tile_empty = bars
    num_tiles, num_m, section = tiles
    batches, q_heads, group, num_q, num_keys = shape
    CONSUMERS: gl.constexpr = q_smem.shape[0]
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_M: gl.constexpr = 64 * CONSUMERS
    BLOCK_N: gl.constexpr = k_smem.shape[3]
    it = 0
    tile_count = 0
    tile = gl.program_id(0)
    while tile < num_tiles:
        head, m = _tile(tile, num_m, batches * q_heads, section, CAUSAL)
        batch = head // q_heads
        head -= batch * q_heads
        end, _full = _blocks(m, num_q, num_keys, CAUSAL, BLOCK_M, BLOCK_N)
        for c in gl.static_range(CONSUMERS):
            mbarrier.wait(q_empty.index(c), (tile_count & 1) ^ 1)
            _load(q_desc, batch, head, m * BLOCK_M + c * 64, q_smem.index(c), q_full.index(c))
        for j in range(end):
            slot = it % STAGES
            phase = (it // STAGES & 1) ^ 1
            row = (end - 1 - j) * BLOCK_N
            mbarrier.wait(k_empty.index(slot), phase)
            _load(k_desc, batch, head // group, row, k_smem.index(slot), k_full.index(slot))
            mbarrier.wait(v_empty.index(slot), phase)
            _load(v_desc, batch, head // group, row, v_smem.index(slot), v_full.index(slot))
            it += 1
        if DYNAMIC:
            # The first tile of each CTA is its blockIdx, so the counter, which starts at 0, is offset by the grid's
            # size.
            tile = gl.atomic_add(next_tile_ptr, 1) + gl.num_programs(0)
            mbarrier.wait(tile_empty, (tile_count & 1) ^ 1)
            tile_smem.store(gl.full([1], tile, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
            _cta_barrier()
            mbarrier.arrive(tile_full)
        else:
            tile += gl.num_programs(0)
        tile_count += 1


@_jit
def _arrive(bar):
    """Arrives with one thread. Around mbarrier.arrive the compiler inserts two barriers of the warp group, because it
    assumes an access to all of shared memory. Expecting 0 bytes is an arrival too, for which it inserts none."""
    mbarrier.expect(bar, 0)


@_jit
def _release(slot):
    """Arrives once for the warp group, after a barrier, as a warp's wait for wgmma covers that warp only."""
    _cta_barrier()
    _arrive(slot)


@_jit
def _scores(q, k_smem, slot):
    """Issues q kᵀ for the key block in stage `slot`."""
    BLOCK_N: gl.constexpr = k_smem.shape[3]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    k = k_smem.index(slot).reshape([BLOCK_N, k_smem.shape[4]]).permute([1, 0])
    zero = gl.zeros([64, BLOCK_N], gl.float32, layout)
    return warpgroup_mma(q, k, zero, use_acc=False, is_async=True)


@_jit
def _values(p, v_smem, slot, o):
    """Issues o + p v for the block of values in stage `slot`."""
    return warpgroup_mma(p, v_smem.index(slot).reshape([v_smem.shape[3], v_smem.shape[4]]), o, is_async=True)


@_jit
def _mask(s, limit, first_key):
    key = first_key + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    return gl.where(gl.expand_dims(key, 0) < gl.expand_dims(limit, 1), s, float("-inf"))


@_jit
def _rows_of(x, like):
    """Returns x, one value per row, as a column in the layout of `like`. No data moves between threads."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, like.type.layout)), 1)


@_jit
def _softmax(s, m, total, scale_log2):
    """Returns probabilities of a block of scores, new row maximum and sum, and the rescaling factor of earlier sums.

    m is the maximum of the scaled scores, rounded, and what probabilities are relative to. So a row whose maximum stays
    has the factor 1. Were m the maximum of the scores, m · scale_log2 - scaled would be compiled to an FMA, and the
    factor be 2 to the power of the product's rounding error, in each block of keys again.

    The sum [64, 4] is over each thread's columns. The four sums of a row are added at the end of the tile.
    """
    new_m = gl.maximum(m, gl.max(s, 1) * scale_log2)
    # 0 for a row that has seen no key yet, as -inf - -inf would be NaN.
    scaled = gl.where(new_m == float("-inf"), 0.0, new_m)
    alpha = gl.exp2(m - scaled)
    p = gl.exp2(s * scale_log2 - gl.expand_dims(scaled, 1))
    part = gl.sum(gl.sum(gl.reshape(p, [64, p.shape[1] // 8, 4, 2]), 3), 1)
    total = total * _rows_of(alpha, total) + gl.convert_layout(part, total.type.layout)
    return p, new_m, total, alpha


@_jit
def _step(
    state, q, bufs, bars, my_order, next_order, scale_log2, limit, first_key, masked,
    CAUSAL: gl.constexpr, PING_PONG: gl.constexpr,
):  # fmt: skip
    """Computes scores and softmax of block `it`, overlapped with P V of the previous block."""
    o, p, m, total, it, order_phase = state
    _, k_smem, v_smem, _, _ = bufs
    _, _, k_full, k_empty, v_full, v_empty, _, _ = bars
    STAGES: gl.constexpr = k_smem.shape[0]
    slot = it % STAGES
    last = (it - 1) % STAGES
    mbarrier.wait(k_full.index(slot), it // STAGES & 1)
    if PING_PONG:
        mbarrier.wait(my_order, order_phase)
    s = _scores(q, k_smem, slot)
    o = _values(p, v_smem, last, o)
    if PING_PONG:
        _arrive(next_order)
    s = warpgroup_mma_wait(1, [s])
    _release(k_empty.index(slot))
    if CAUSAL:  # noqa: SIM102 (known at compile time, unlike `masked`)
        if masked:
            s = _mask(s, limit, first_key)
    x, m, total, alpha = _softmax(s, m, total, scale_log2)
    # The block of values is needed in the next iteration only. The wait is here as a fence for the compiler: ptxas
    # would move the wait for the second wgmma before the softmax, as no register connects the two, but it moves nothing
    # across the loop of this wait.
    mbarrier.wait(v_full.index(slot), it // STAGES & 1)
    o = warpgroup_mma_wait(0, [o])
    _release(v_empty.index(last))
    o = o * _rows_of(alpha, o)
    p = gl.convert_layout(x.to(k_smem.dtype), p.type.layout)
    return o, p, m, total, it + 1, order_phase ^ 1


@_jit
def _consume(
    args, my_order, next_order, C: gl.constexpr, CAUSAL: gl.constexpr, DYNAMIC: gl.constexpr,
    PING_PONG: gl.constexpr, SHARE: gl.constexpr,
):  # fmt: skip
    """Runs consumer C, which computes rows 64 · C … 64 · C + 63 of each tile."""
    descs, tiles, bufs, bars, shape, lse_ptr, scale_log2 = args
    q_smem, k_smem, v_smem, o_smem, tile_smem = bufs
    q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_full, tile_empty = bars
    num_tiles, num_m, section = tiles
    batches, q_heads, _group, num_q, all_keys = shape
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_M: gl.constexpr = 64 * q_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[3]
    D: gl.constexpr = k_smem.shape[4]
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    rows: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16]))
    # The accumulators' layout of rows: a quad of lanes for each row, two rows to a lane.
    quads: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
    q = q_smem.index(C).reshape([64, D])
    it = 0
    tile_count = 0
    order_phase = 0
    tile = gl.program_id(0)
    while tile < num_tiles:
        head, m_block = _tile(tile, num_m, batches * q_heads, section, CAUSAL)
        # A volatile copy: else the compiler hoists the last block's mask out of the loop over tiles, and spills it.
        num_keys = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [all_keys], gl.int32, is_pure=False, pack=1)
        end, full = _blocks(m_block, num_q, num_keys, CAUSAL, BLOCK_M, BLOCK_N)
        first_row = m_block * BLOCK_M + C * 64
        limit = gl.full([64], num_keys, gl.int32, rows)
        if CAUSAL:
            limit = gl.minimum(limit, first_row + num_keys - num_q + 1 + gl.arange(0, 64, rows))
        # The last block is peeled, as there is no P V of an earlier block to overlap with.
        slot = it % STAGES
        mbarrier.wait(q_full.index(C), tile_count & 1)
        mbarrier.wait(k_full.index(slot), it // STAGES & 1)
        s = warpgroup_mma_wait(0, [_scores(q, k_smem, slot)])
        _release(k_empty.index(slot))
        m = gl.full([64], float("-inf"), gl.float32, rows)
        total = gl.zeros([64, 4], gl.float32, quads)
        x, m, total, _alpha = _softmax(_mask(s, limit, (end - 1) * BLOCK_N), m, total, scale_log2)
        p = gl.convert_layout(x.to(k_smem.dtype), gl.DotOperandLayout(0, o_layout, 2))
        mbarrier.wait(v_full.index(slot), it // STAGES & 1)
        state = (gl.zeros([64, D], gl.float32, o_layout), p, m, total, it + 1, order_phase)
        for j in range(1, end):
            block = end - 1 - j
            state = _step(state, q, bufs, bars, my_order, next_order, scale_log2, limit, block * BLOCK_N, block >= full,
                          CAUSAL, PING_PONG)  # fmt: skip
        o, p, m, total, it, order_phase = state
        if not SHARE:
            _release(q_empty.index(C))
        last = (it - 1) % STAGES
        o = _values(p, v_smem, last, o)
        # lse, overlapped with the last P V. A row that sees no key has the sum 0. That of a row of NaN is NaN, although
        # its maximum is -inf as well: a maximum leaves NaN out.
        total = gl.convert_layout(gl.sum(total, 1), rows)
        total = gl.where((total == 0.0) & (m != float("-inf")), float("nan"), total)  # scaled scores over fp32's range
        lse = gl.where(total == 0.0, float("-inf"), (m + gl.log2(total)) * 0.6931471805599453)
        row = first_row + gl.arange(0, 64, rows)
        gl.store(lse_ptr + head.to(gl.int64) * num_q + row, lse, mask=row < num_q)
        tma.store_wait(0)  # the previous tile's store has then read o_smem; the barrier in _release covers all threads
        o = warpgroup_mma_wait(0, [o])
        _release(v_empty.index(last))
        o = gl.where(_rows_of(total, o) == 0.0, 0.0, o * _rows_of(1.0 / total, o))
        o_smem.index(C).reshape([64, D]).store(o.to(k_smem.dtype))
        fence_async_shared()
        _cta_barrier()
        batch = head // q_heads
        tma.async_copy_shared_to_global(descs[3], [batch, head - batch * q_heads, first_row, 0], o_smem.index(C))
        if SHARE:
            tma.store_wait(0)
            _release(q_empty.index(C))
        if DYNAMIC:
            mbarrier.wait(tile_full, tile_count & 1)
            tile = gl.max(tile_smem.load(gl.BlockedLayout([1], [32], [4], [0])), 0)
            _release(tile_empty)
        else:
            tile += gl.num_programs(0)
        tile_count += 1
    tma.store_wait(0)


@_jit
def _barriers(count: gl.constexpr, arrivals: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(bars.index(i), arrivals)
    return bars


# One compiled kernel for all lengths: specialising for these arguments does not help.
@_jit(do_not_specialize=["num_tiles", "num_m", "section", "batches", "q_heads", "group", "num_q", "num_keys"])
def _attention_gluon_fwd_kernel(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, next_tile_ptr, scale_log2,
    num_tiles, num_m, section, batches, q_heads, group, num_q, num_keys,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, DYNAMIC: gl.constexpr,
    PING_PONG: gl.constexpr, SHARE: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    BLOCK_N: gl.constexpr = k_desc.block_shape[2]
    D: gl.constexpr = k_desc.block_shape[3]
    q_smem = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, 64, D], q_desc.layout)
    o_smem = q_smem
    if not SHARE:
        o_smem = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, 64, D], o_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, D], v_desc.layout)
    tile_smem = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = _barriers(CONSUMERS, 1)
    q_empty = _barriers(CONSUMERS, 1)
    k_full = _barriers(STAGES, 1)
    k_empty = _barriers(STAGES, CONSUMERS)
    v_full = _barriers(STAGES, 1)
    v_empty = _barriers(STAGES, CONSUMERS)
    # Separate allocations: between accesses to one allocation the compiler inserts barriers of the warp group.
    order0 = _barriers(1, 1).index(0)
    order1 = _barriers(1, 1).index(0)
    order2 = _barriers(1, 1).index(0)
    tile_full = _barriers(1, 1).index(0)
    tile_empty = _barriers(1, CONSUMERS).index(0)
    fence_async_shared()
    mbarrier.arrive(order0)
    descs = (q_desc, k_desc, v_desc, o_desc)
    tiles = (num_tiles, num_m, section)
    bufs = (q_smem, k_smem, v_smem, o_smem, tile_smem)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_full, tile_empty)
    shape = (batches, q_heads, group, num_q, num_keys)
    args = (descs, tiles, bufs, bars, shape, lse_ptr, scale_log2)
    # Consumer 0 is the default partition. It gets the registers per thread that the other partitions leave of 504 or
    # 512 for all warp groups together. The producer's one warp counts as a warp group.
    # fmt: off
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (args, order0, order1, 0, CAUSAL, DYNAMIC, PING_PONG, SHARE)),
                (_consume, (args, order1, order0, 1, CAUSAL, DYNAMIC, PING_PONG, SHARE)),
                (_produce, (args, next_tile_ptr, CAUSAL, DYNAMIC)),
            ],
            [4, 1], [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (args, order0, order1, 0, CAUSAL, DYNAMIC, PING_PONG, SHARE)),
                (_consume, (args, order1, order2, 1, CAUSAL, DYNAMIC, PING_PONG, SHARE)),
                (_consume, (args, order2, order0, 2, CAUSAL, DYNAMIC, PING_PONG, SHARE)),
                (_produce, (args, next_tile_ptr, CAUSAL, DYNAMIC)),
            ],
            [4, 4, 1], [REGISTERS, REGISTERS, 24],
        )
    # fmt: on
