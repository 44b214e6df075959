"""The kernels in CUDA C++ for one block of keys of several: forward.cu with CARRY, backward.cu with ACCUMULATE."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from .problem import Problem
from .sm90.backward_accumulate import cuda_partial_bwd_plan
from .sm90.forward import cuda_partial_fwd_plan
from .test_attention import hide_a_key

pytestmark = pytest.mark.gpu(min_capability=(9, 0))
DTYPES = (torch.bfloat16, torch.float16)


def _positions(layout: str, queries: int, blocks: list[int]) -> tuple[list[int], int]:
    """Returns the shift of each block (query 0 is aligned with its key `shift`), and the shift over all keys."""
    starts = list(itertools.accumulate(blocks, initial=0))[:-1]
    first = {"last": sum(blocks) - queries, "middle": blocks[0] + 5}[layout]
    return [first - start for start in starts], first


def _oracle(q, k, v, dout, first, causal):
    """Returns out, lse, dq, dk, dv in fp64. Query i sees keys up to first + i."""
    q, k, v, dout = (x.double().requires_grad_() for x in (q, k, v, dout))
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
    s = q @ keys.transpose(2, 3) / math.sqrt(q.shape[3])
    if causal:
        seen = torch.arange(k.shape[2], device=q.device) <= first + torch.arange(q.shape[2], device=q.device)[:, None]
        s = s.masked_fill(~seen, -math.inf)
    lse = s.logsumexp(3)
    out = torch.exp(s - lse.masked_fill(lse == -math.inf, 0)[..., None]) @ values
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout.detach())
    return out.detach(), lse.detach(), dq, dk, dv


def _trimmed(shift: int, queries: int, keys: int) -> tuple[int, int, int]:
    """Returns the first query that sees a key, the number of visible keys, and the shift counted from that query."""
    start = max(0, -shift)
    return start, min(keys, queries + shift), shift + start


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", (64, 128))
@pytest.mark.parametrize("layout", ("full", "last", "middle"))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries", "blocks"),
    ((4, 4, 700, [513, 200, 129]), (8, 2, 1100, [900, 64, 333]), (4, 1, 3000, [1500, 1501]), (64, 64, 300, [300, 40])),
)
def test_blocks_of_keys_add_up(dtype, dim, layout, heads, kv_heads, queries, blocks):
    torch.manual_seed(dim + queries)
    device, causal = "cuda", layout != "full"
    q = torch.randn(2, queries, heads, dim, device=device, dtype=dtype).transpose(1, 2)
    k, v = (torch.randn(2, kv_heads, sum(blocks), dim, device=device, dtype=dtype) for _ in range(2))
    dout = torch.randn_like(q)
    shifts, first = _positions("last" if layout == "full" else layout, queries, blocks)
    want = _oracle(q, k, v, dout, first, causal)
    scale = 1 / math.sqrt(dim)
    # Two more rows on each side, so that strides differ from those of the problem.
    wide = torch.full((2, heads, queries + 4, dim), math.nan, device=device)
    out, lse = wide[:, :, 2:-2], torch.full((2, heads, queries + 4), -math.inf, device=device)[:, :, 2:-2]
    result = torch.full_like(q, math.nan)
    steps = list(zip(k.split(blocks, 2), v.split(blocks, 2), shifts, strict=True))
    live = []
    for keys, values, shift in steps:
        start, seen, rest = _trimmed(shift, queries, keys.shape[2]) if causal else (0, keys.shape[2], 0)
        if start < queries and seen > 0:
            live.append((keys, values, start, seen, rest))
    for number, (keys, values, start, seen, rest) in enumerate(live):
        whole = number == len(live) - 1 and start == 0
        target = result if whole else None
        problem = Problem(q[:, :, start:], keys, values, scale, -1, 0 if causal else -1, seen)
        given = problem.q, keys, values, out[:, :, start:], lse[:, :, start:], target
        cuda_partial_fwd_plan(problem, rest, *given[3:])(*given)
    got = result if whole else out
    merged = torch.where(lse[..., None] == -math.inf, 0, got.double())
    assert torch.equal(lse == -math.inf, want[1] == -math.inf)
    torch.testing.assert_close(lse.double(), want[1], atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(merged, want[0], atol=2e-2, rtol=2e-2)
    assert wide[:, :, :2].isnan().all() and wide[:, :, -2:].isnan().all()

    out16 = merged.to(dtype)
    delta = torch.full((2, heads, queries + 4), math.nan, device=device)[:, :, 2:-2]
    delta.copy_((dout.float() * out16.float()).sum(3))
    sums = [torch.ones(x.shape, device=device) for x in (q, k, v)]
    dq, dk, dv = sums
    for (keys, values, start, seen, rest), dkeys, dvalues in zip(
        live, dk.split(blocks, 2), dv.split(blocks, 2), strict=False
    ):
        problem = Problem(q[:, :, start:], keys, values, scale, -1, 0 if causal else -1, seen)
        outer = [x[:, :, start:] for x in (dout, lse, delta, dq)]
        plan = cuda_partial_bwd_plan(problem, rest, outer[0], outer[1], outer[3], dkeys, dvalues)
        plan(problem.q, keys, values, *outer, dkeys, dvalues, None)
    for name, mine, right in zip(("dq", "dk", "dv"), sums, want[2:], strict=True):
        error = ((mine.double() - 1 - right).norm() / right.norm()).item()
        assert error < (1e-2 if dtype == torch.bfloat16 else 2e-3), f"{name}: {error}"


@pytest.mark.parametrize("dim", (64, 128))
def test_infinite_and_nan_scores_reach_the_running_attention(dim):
    """inf and NaN of one block appear in exactly the rows that see them, for any order of blocks. lse is NaN in both
    rows, as that of `attention`."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 256, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    q[0, 0, 3, 0], q[0, 1, 7, 1] = math.nan, math.inf
    out = torch.full((1, 2, 256, dim), math.nan, device="cuda")
    lse = torch.full((1, 2, 256), -math.inf, device="cuda")
    for keys, values in zip(k.split(128, 2), v.split(128, 2), strict=True):
        problem = Problem(q, keys, values, 0.1, -1, -1, 128)
        cuda_partial_fwd_plan(problem, 0, out, lse, None)(q, keys, values, out, lse, None)
    bad = torch.zeros(1, 2, 256, dtype=torch.bool, device="cuda")
    bad[0, 0, 3] = bad[0, 1, 7] = True
    assert torch.equal(out.isfinite().all(3), ~bad)
    assert torch.equal(lse.isnan(), bad) and lse[~bad].isfinite().all()


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("queries", (40, 70))
@pytest.mark.parametrize("dim", (64, 128))
def test_a_bias_of_minus_infinity_in_a_column_of_k(dim, queries, causal):
    """A key that no query sees has gradients of 0, also where queries pad a tile: 0 · inf would be NaN."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, dim, device="cuda", dtype=torch.bfloat16) for n in (queries, 300, 300))
    hide_a_key(q, k, 7)
    dout = torch.randn_like(q)
    out, lse, *want = _oracle(q, k, v, dout, 300 - queries, causal)
    lse, delta = lse.float(), (dout.double() * out).sum(3).float()
    sums = [torch.zeros(x.shape, device="cuda") for x in (q, k, v)]
    problem = Problem(q, k, v, 1 / math.sqrt(dim), -1, 0 if causal else -1, 300)
    plan = cuda_partial_bwd_plan(problem, 300 - queries, dout, lse, *sums)
    plan(q, k, v, dout, lse, delta, *sums, None)
    for name, mine, right in zip(("dq", "dk", "dv"), sums, want, strict=True):
        assert torch.equal(mine.isnan(), right.isnan()), name
        error = ((mine.double() - right).nan_to_num().norm() / right.nan_to_num().norm()).item()
        assert error < 1e-2, f"{name}: {error}"
