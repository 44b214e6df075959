"""Attention in blocks of keys: merged forward, accumulated gradients."""

from __future__ import annotations

import math

import pytest
import torch

from . import attention, attention_delta, attention_partial, attention_partial_backward, op_partial
from .op_blocks import attention_in_blocks
from .problem import MOST_STRIDE
from .reference import attention_reference


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _inputs(device, dtype, heads, kv_heads, queries, keys, dim):
    """Returns q, k, v and dout. q and dout are transposed from [B, S, H, D], as in a model."""
    q, dout = (torch.randn(2, queries, heads, dim, device=device).to(dtype).transpose(1, 2) for _ in range(2))
    k, v = (torch.randn(2, kv_heads, keys, dim, device=device).to(dtype) for _ in range(2))
    return q, k, v, dout


def _oracle(q, k, v, dout, first, causal):
    """Returns out, lse, dq, dk, dv in fp64. Query i is aligned with key i + first."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = q @ keys.transpose(2, 3) / math.sqrt(q.shape[3])
    if causal:
        place = first + torch.arange(q.shape[2], device=q.device)[:, None]
        s = s.masked_fill(torch.arange(k.shape[2], device=q.device) > place, -math.inf)
    lse = s.logsumexp(3)
    out = torch.exp(s - lse.masked_fill(lse == -math.inf, 0)[..., None]) @ values
    return out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), dout.double())


def _merged(q, k, v, blocks, **options):
    """Returns out and lse over the blocks of keys. The last block writes the result."""
    out = torch.full(q.shape, math.nan, device=q.device)
    lse = torch.full(q.shape[:3], -math.inf, device=q.device)
    result, start = torch.full_like(q, math.nan), 0
    for number, size in enumerate(blocks):
        block = slice(start, start + size)
        last = result if number == len(blocks) - 1 else None
        attention_partial(q, k[:, :, block], v[:, :, block], out, lse, k_offset=start, result=last, **options)
        start += size
    return result, lse


def _summed(dout, q, k, v, out, lse, blocks, delta=None, **options):
    dq, dk, dv = (torch.zeros(x.shape, device=q.device) for x in (q, k, v))
    start = 0
    for size in blocks:
        block = slice(start, start + size)
        parts = (x[:, :, block] for x in (k, v))
        sums = (x[:, :, block] for x in (dk, dv))
        attention_partial_backward(dout, q, *parts, out, lse, dq, *sums, delta=delta, k_offset=start, **options)
        start += size
    return dq, dk, dv


def _written(dout, q, k, v, lse, delta, blocks, version="auto", **options):
    """Computes the same as `_summed`, but accumulators are not zeroed, and the last block writes the rounded dq."""
    dq, dk, dv = (torch.full(x.shape, math.nan, device=q.device) for x in (q, k, v))
    result, start = torch.full_like(q, math.nan), 0
    for number, size in enumerate(blocks):
        parts = (x[:, :, start : start + size] for x in (k, v, dk, dv))
        keys, values, dkeys, dvalues = parts
        last = result if number == len(blocks) - 1 else None
        rest = dict(add_dq=number > 0, add_dkdv=False, result=last, k_offset=start, version=version)
        attention_partial_backward(dout, q, keys, values, None, lse, dq, dkeys, dvalues, delta=delta, **rest, **options)
        start += size
    return result, dk, dv


def _close(name, mine, right, dtype):
    scale = right.abs().max().item() or 1.0
    error = (mine.double() - right).abs().max().item() / scale
    assert error < {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype], f"{name}: {error}"


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries", "blocks", "dim", "first"),
    (
        (2, 2, 37, (20, 17), 16, None),  # no mask
        (4, 2, 33, (1, 0, 31, 9), 24, None),
        (2, 1, 40, (13, 17, 10), 32, 0),  # causal, square
        (2, 2, 23, (16, 16), 16, 9),  # the last query sees the last key
        (1, 1, 30, (10, 10), 16, -7),  # the first queries see none
        (2, 1, 9, (8, 8, 8), 80, 4),  # no query sees the last keys
        (1, 1, 12, (5, 40), 128, 100),  # the mask hides nothing
    ),
)
def test_blocks_of_keys_add_up(device, dtype, heads, kv_heads, queries, blocks, dim, first):
    q, k, v, dout = _inputs(device, dtype, heads, kv_heads, queries, sum(blocks), dim)
    options = {} if first is None else {"causal": True, "q_offset": first}
    want = _oracle(q, k, v, dout, first, first is not None)
    out, lse = _merged(q, k, v, blocks, **options)
    assert torch.equal(lse == -math.inf, want[1] == -math.inf)
    torch.testing.assert_close(lse.double(), want[1], atol=1e-5 if dtype == torch.float32 else 2e-3, rtol=1e-5)
    _close("out", out, want[0], dtype)
    for delta in (None, attention_delta(dout, out)):
        gradients = _summed(dout, q, k, v, out, lse, blocks, delta, **options)
        for name, mine, right in zip(("dq", "dk", "dv"), gradients, want[2:], strict=True):
            _close(name, mine, right, dtype)
    gradients = _written(dout, q, k, v, lse, attention_delta(dout, out), blocks, **options)
    for name, mine, right in zip(("dq", "dk", "dv"), gradients, want[2:], strict=True):
        _close(name, mine, right, dtype)


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize("version", ("portable", "cuda"))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries", "blocks", "dim", "first"),
    (
        (4, 2, 700, (513, 200, 129), 64, None),
        (8, 8, 1100, (900, 333), 128, None),
        (4, 4, 3000, (1500, 1500), 128, 0),
        (8, 1, 1111, (640, 471, 100), 64, 100),
        (4, 2, 900, (500, 350), 128, -33),
    ),
)
def test_blocks_of_keys_add_up_on_hopper(device, dtype, version, heads, kv_heads, queries, blocks, dim, first):
    q, k, v, dout = _inputs(device, dtype, heads, kv_heads, queries, sum(blocks), dim)
    options = {"version": version} | ({} if first is None else {"causal": True, "q_offset": first})
    want = _oracle(q, k, v, dout, first, first is not None)
    out, lse = _merged(q, k, v, blocks, **options)
    _close("out", out, want[0], dtype)
    delta = attention_delta(dout, out)
    summed = _summed(dout, q, k, v, out, lse, blocks, delta, **options)
    for gradients in (summed, _written(dout, q, k, v, lse, delta, blocks, **options)):
        for name, mine, right in zip(("dq", "dk", "dv"), gradients, want[2:], strict=True):
            _close(name, mine, right, dtype)


@pytest.mark.parametrize(
    ("queries", "keys", "causal"), ((37, 29, True), (29, 37, True), (20, 33, False), (5, 1, False))
)
def test_attention_in_blocks_is_attention(device, queries, keys, causal):
    q, k, v, dout = _inputs(device, torch.float32, 4, 2, queries, keys, 16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention_in_blocks(*leaves, causal=causal, scale=0.3, blocks=3)
    want = attention_reference(*leaves, causal=causal, scale=0.3)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    found, right = (torch.autograd.grad(x, leaves, dout) for x in (out, want))
    for mine, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_rows_of_a_larger_tensor(device):
    """The later half of the queries, as in the zigzag layout: slices of out, lse and the gradients."""
    q, k, v, dout = _inputs(device, torch.float32, 2, 2, 24, 16, 16)
    want = _oracle(q[:, :, 8:], k, v, dout[:, :, 8:], 0, False)
    out = torch.full(q.shape, 3.0, device=device)
    lse = torch.full(q.shape[:3], -math.inf, device=device)
    attention_partial(q[:, :, 8:], k, v, out[:, :, 8:], lse[:, :, 8:])
    assert (out[:, :, :8] == 3).all() and (lse[:, :, :8] == -math.inf).all()
    _close("out", out[:, :, 8:], want[0], torch.float32)
    dq, dk, dv = (torch.zeros(x.shape, device=device) for x in (q, k, v))
    rows = [x[:, :, 8:] for x in (dout, q)]
    attention_partial_backward(*rows, k, v, out[:, :, 8:], lse[:, :, 8:], dq[:, :, 8:], dk, dv)
    assert not dq[:, :, :8].any()
    for name, mine, right in zip(("dq", "dk", "dv"), (dq[:, :, 8:], dk, dv), want[2:], strict=True):
        _close(name, mine, right, torch.float32)


def test_queries_in_pieces_give_the_bits_of_the_whole(device):
    """In the interpreter tl.dot is a NumPy matmul, which calls OpenBLAS. Its AVX2 kernel sums a row in an order that
    depends on the position of the row in the matrix, and on the number of threads among which rows are divided. With
    OPENBLAS_CORETYPE=Haswell and OMP_NUM_THREADS=1, as on such a machine in a worker of xdist, rows 32 to 63 of a tile
    of random values have other bits than the same rows at 0 to 31. So inputs there make every sum of products exact in
    fp32, in any order: scores are integers, at most 64 apart in a row, p is a multiple of 2^-16 in [2^-6, 1], and a sum
    of 40 of them, each with a sign, has 22 bits."""
    q, k, v, _ = _inputs(device, torch.float16, 2, 1, 64, 40, 32)
    if not q.is_cuda:
        q, k, v = (x.sign() for x in (q, k, v))
    whole, _ = _merged(q, k, v, (40,), scale=1 / 16)
    pieces = torch.cat([_merged(q[:, :, i : i + 32], k, v, (40,), scale=1 / 16)[0] for i in (0, 32)], 2)
    assert torch.equal(whole, pieces)


def test_one_block_is_attention(device):
    q, k, v, _ = _inputs(device, torch.float32, 2, 1, 33, 20, 24)
    out, lse = _merged(q, k, v, (20,), causal=True, q_offset=-13)
    want, want_lse = attention(q, k, v, causal=True, return_lse=True)
    torch.testing.assert_close(out, want, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse, want_lse, atol=1e-6, rtol=1e-5)
    assert torch.equal(out[lse == -math.inf], torch.zeros_like(out[lse == -math.inf]))


def test_dlse_is_part_of_delta(device):
    q, k, v, dout = _inputs(device, torch.float32, 2, 2, 12, 10, 16)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = attention_reference(*(x.double() for x in leaves), return_lse=True)
    dlse = torch.randn_like(lse, dtype=torch.float32)
    want = torch.autograd.grad((out, lse), leaves, (dout.double(), dlse.to(lse.dtype)))
    out, lse = _merged(q, k, v, (10,))
    for mine, right in zip(
        _summed(dout, q, k, v, None, lse, (4, 6), attention_delta(dout, out, dlse)), want, strict=True
    ):
        _close("gradient", mine, right.double(), torch.float32)


@pytest.mark.parametrize("first", (None, 3, -7))
def test_gradients_that_are_not_needed(device, first):
    q, k, v, dout = _inputs(device, torch.float32, 2, 1, 12, 10, 16)
    _without_some(q, k, v, dout, {} if first is None else {"causal": True, "q_offset": first})


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("first", (None, 300, -700))
def test_gradients_that_are_not_needed_on_hopper(device, first):
    q, k, v, dout = _inputs(device, torch.bfloat16, 4, 2, 1600, 1500, 64)
    _without_some(q, k, v, dout, {"version": "cuda"} | ({} if first is None else {"causal": True, "q_offset": first}))


def _without_some(q, k, v, dout, options):
    keys = k.shape[2]
    out, lse = _merged(q, k, v, (keys,), **options)
    delta = attention_delta(dout, out)
    whole = _summed(dout, q, k, v, out, lse, (keys,), delta, **options)
    for kept in range(3):
        sums = [torch.zeros(x.shape, device=q.device) if i == kept else None for i, x in enumerate((q, k, v))]
        attention_partial_backward(dout, q, k, v, None, lse, *sums, delta=delta, **options)
        torch.testing.assert_close(sums[kept], whole[kept], atol=1e-4, rtol=1e-4)  # dq is accumulated with atomics


@pytest.mark.parametrize("version", ("portable", pytest.param("cuda", marks=pytest.mark.gpu(min_capability=(9, 0)))))
def test_nan_and_inf_of_one_block_of_keys_stay(device, version):
    """For any order of blocks, whether or not the others are finite."""
    dtype = torch.float16
    q, k, v, _ = _inputs(device, dtype, 2, 2, 33, 40, 64)
    k[0, 0, 3], k[1, 1, 5] = math.nan, math.inf
    for blocks in ((20, 20), (40,)):
        for flipped in (False, True):
            keys, values = (x.flip(2) if flipped else x for x in (k, v))
            out, lse = _merged(q, keys, values, blocks, version=version)
            assert out[0, 0].isnan().all() and lse[0, 0].isnan().all()
            assert not out[1, 1].isfinite().any(1).any()
            assert out[0, 1].isfinite().all() and out[1, 0].isfinite().all()


def test_stripes_and_a_result_of_queries_that_see_nothing(device):
    """Striped layout, positions i·N + r: a query of a lower rank sees one key less, and its first query sees none."""
    q, k, v, _ = _inputs(device, torch.float32, 2, 1, 16, 16, 16)
    want, _ = attention(q[:, :, 1:], k[:, :, :-1], v[:, :, :-1], causal=True, return_lse=True)
    out, lse = _merged(q, k, v, (16,), causal=True, q_offset=-1)
    torch.testing.assert_close(out[:, :, 1:], want, atol=1e-6, rtol=1e-5)
    assert not out[:, :, 0].any() and (lse[:, :, 0] == -math.inf).all()


@pytest.mark.gpu(min_capability=(9, 0))
def test_deterministic_mode_gives_the_same_bits(device):
    q, k, v, dout = _inputs(device, torch.bfloat16, 4, 4, 1024, 1024, 128)
    out, lse = _merged(q, k, v, (1024,))
    torch.use_deterministic_algorithms(True)
    try:
        runs = [_summed(dout, q, k, v, out, lse, (512, 512), attention_delta(dout, out)) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def test_opcheck(device):
    q, k, v, dout = _inputs(device, torch.float32, 2, 1, 12, 10, 16)
    q, dout = q.contiguous(), dout.contiguous()
    lse, options = torch.full(q.shape[:3], -math.inf, device=device), (False, 0.25, 0, "auto")
    for result in (None, torch.zeros_like(q)):
        torch.library.opcheck(op_partial._fwd_op, (q, k, v, torch.zeros_like(q), lse.clone(), result, *options))
    out, lse = _merged(q, k, v, (10,))
    torch.library.opcheck(op_partial._delta_op, (dout, out, None))
    sums = [torch.zeros_like(x) for x in (q, k, v)]
    delta = attention_delta(dout, out)
    for result in (None, torch.zeros_like(q)):
        given = (dout, q, k, v, lse, *(x.clone() for x in sums), delta, result, *options, False, True)
        torch.library.opcheck(op_partial._bwd_op, given)


@pytest.mark.parametrize(("queries", "keys"), ((0, 4), (4, 0), (0, 0)))
def test_nothing(device, queries, keys):
    q, k, v, dout = _inputs(device, torch.float32, 2, 1, queries, keys, 16)
    out, lse = _merged(q, k, v, (keys,))
    assert torch.equal(out, torch.zeros_like(q)) and (lse == -math.inf).all()
    assert not any(x.any() for x in _summed(dout, q, k, v, out, lse, (keys,)))
    assert attention_delta(dout, out).shape == q.shape[:3]


@torch.no_grad()
def test_nothing_may_have_any_strides(device):
    q, k = torch.empty(1, 2, 0, 16, device=device), torch.empty(1, 1, 4, 16, device=device)
    expanded, strided = torch.empty(1, 1, 0, 16, device=device).expand(1, 2, 0, 16), torch.empty(1, 2, 0, 32)[..., ::2]
    for out in (expanded, strided.to(device)):
        attention_partial(q, k, k, out, torch.empty(2, 0, 1, device=device).permute(2, 0, 1))


@torch.no_grad()
def test_an_infinite_lse_stays(device):
    """log(exp(inf) + ...) is inf, and other rows are not affected."""
    q, k, v, _ = _inputs(device, torch.float32, 2, 1, 9, 10, 16)
    _, want = _merged(q, k, v, (10,))
    out, lse = torch.zeros(q.shape, device=device), torch.full(q.shape[:3], -math.inf, device=device)
    lse[0, 1, 3] = want[0, 1, 3] = math.inf
    attention_partial(q, k, v, out, lse)
    torch.testing.assert_close(lse, want)


def test_compiled_without_a_graph_break(device):
    q, k, v, dout = _inputs(device, torch.float32, 2, 1, 12, 10, 16)

    def step(q, k, v, dout):
        out = torch.zeros_like(q)
        lse = torch.full(q.shape[:3], -math.inf, device=q.device)
        attention_partial(q, k, v, out, lse)
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        attention_partial_backward(dout, q, k, v, out, lse, dq, dk, dv)
        attention_partial_backward(dout, q, k, v, None, lse, dq, dk, dv, delta=attention_delta(dout, out))
        return out, lse, dq, dk, dv

    q, dout = q.contiguous(), dout.contiguous()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for mine, right in zip(compiled(q, k, v, dout), step(q, k, v, dout), strict=True):
        torch.testing.assert_close(mine, right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    (
        (dict(out=torch.float16), TypeError, "out must be a tensor of float32"),
        (dict(lse=torch.float64), TypeError, "lse must be a tensor of float32"),
        (dict(result=torch.float32), TypeError, "result must be a tensor of q's dtype"),
        (dict(k=torch.float32), TypeError, "k must be a tensor of q's dtype"),
    ),
)
def test_wrong_dtypes(device, change, error, words):
    q, k, v, _ = _inputs(device, torch.float16, 2, 1, 6, 5, 16)
    tensors = dict(q=q, k=k, v=v, out=torch.zeros(q.shape, device=device), lse=torch.zeros(q.shape[:3], device=device))
    tensors["result"] = torch.zeros_like(q)
    for name, dtype in change.items():
        tensors[name] = tensors[name].to(dtype)
    with pytest.raises(error, match=words):
        attention_partial(**tensors)


def test_what_is_rejected(device):
    q, k, v, dout = _inputs(device, torch.float32, 2, 1, 6, 5, 16)
    out, lse = torch.zeros(q.shape, device=device), torch.zeros(q.shape[:3], device=device)
    with pytest.raises(ValueError, match="out must have shape"):
        attention_partial(q, k, v, out[:, :, 1:], lse)
    with pytest.raises(ValueError, match="lse must be contiguous"):
        attention_partial(q, k, v, out, lse.transpose(0, 1).contiguous().transpose(0, 1))
    with pytest.raises(ValueError, match="scale must be a positive number"):
        attention_partial(q, k, v, out, lse, scale=0.0)
    with pytest.raises(TypeError, match="must be integers, got 1.5"):
        attention_partial(q, k, v, out, lse, causal=True, q_offset=1.5)
    with pytest.raises(ValueError, match="not expanded"):
        attention_partial(q, k, v, out[:, :1].expand_as(out), lse)
    with pytest.raises(ValueError, match="lse must not be expanded"):
        attention_partial(q[:1], k[:1], v[:1], out[:1], lse[:1, :1].expand_as(lse[:1]))
    with pytest.raises(ValueError, match="result must have contiguous rows, not expanded"):
        attention_partial(q, k, v, out, lse, result=torch.empty_like(q[:, :1]).expand_as(q))
    apart = torch.empty(2 * out.numel() + 5 * MOST_STRIDE, device=device)
    apart = apart.as_strided(out.shape, (32, 16, MOST_STRIDE + 1, 1))
    with pytest.raises(ValueError, match="contiguous rows"):
        attention_partial(q, k, v, apart, lse)
    with pytest.raises(ValueError, match="version must be one of"):
        attention_partial(q, k, v, out, lse, version="triton")
    with pytest.raises(ValueError, match="dq must be given with result, got None"):
        attention_partial_backward(dout, q, k, v, out, lse, None, None, None, result=torch.zeros_like(q))
    with pytest.raises(TypeError, match="result must be a tensor of q's dtype"):
        attention_partial_backward(dout, q, k, v, out, lse, out, None, None, result=out.half())
    with pytest.raises(RuntimeError, match="q must not require grad"):
        attention_partial(q.requires_grad_(), k, v, out, lse)
    with pytest.raises(RuntimeError, match="out must not require grad"):
        attention_delta(dout, q)
    q = q.detach()
    with pytest.raises(TypeError, match="out must be a tensor of q's dtype"):
        attention_partial_backward(dout, q, k, v, None, lse, None, None, None)
    with pytest.raises(ValueError, match="dk must have shape"):
        attention_partial_backward(dout, q, k, v, out, lse, None, torch.zeros_like(q), None)
    with pytest.raises(ValueError, match="dlse must have shape"):
        attention_delta(dout, out, lse[:1])
