"""The forward in CUDA C++: when it runs and its parameters (on any machine), and its results (on Hopper)."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from . import block_sparse_attention, configs, index, versions
from . import problem as problems
from .configs import CUDA_CANDIDATES
from .reference import block_sparse_attention_reference
from .sm90 import backward, cuda_driver, forward
from .test_block_sparse_attention import DEVICE, SMALL, everything, normal, random_mask, tensors

DIMS, BLOCKS = (64, 128), (64, 128)


def test_which_version_runs():
    assert configs.pick_forward("auto") == "portable"
    assert configs.pick_forward("auto", "cuda") == "cuda"
    assert configs.pick_forward("portable", "cuda") == "portable"
    assert configs.pick_forward("cuda", "cuda") == "cuda"


def test_what_cuda_does_not_take_runs_in_the_portable_version(monkeypatch):
    ran, original = [], versions.portable_fwd
    monkeypatch.setattr(versions, "portable_fwd", lambda *arguments: ran.append(1) or original(*arguments))
    for version in ("auto", "portable"):
        block_sparse_attention(*tensors(70, 130, dim=24), random_mask(2, 3), forward=version, **SMALL)
    assert len(ran) == 2


@pytest.fixture
def hopper(monkeypatch):
    """Makes queries report a GPU of compute capability 9.0 with 4 SMs, and a compiler."""
    monkeypatch.setattr(problems.Problem, "capability", lambda self: (9, 0))
    monkeypatch.setattr(problems.Problem, "sms", lambda self: 4)
    monkeypatch.setattr(cuda_driver, "no_compiler", lambda: None)


def problem_of(q, k, v, mask, block: int = 64, bias: torch.Tensor | None = None) -> problems.Problem:
    table = index.make_table(mask[None], q.shape[2], k.shape[2], block, False)
    return problems.Problem(q, k, v, table, bias, 0.1, block, False)


def test_unsupported_reasons(hopper, monkeypatch):
    mask = random_mask(1, 2, 3)

    def reason(dim: int = 64, dtype: torch.dtype = torch.float16, change=lambda t: t) -> str | None:
        q, k, v = (change(t.to(dtype)) for t in tensors(70, 130, dim=dim))
        return forward.cuda_unsupported_reason(problem_of(q, k, v, mask), problems.empty_like(q))

    for dim, dtype in itertools.product(DIMS, (torch.float16, torch.bfloat16)):
        assert reason(dim, dtype) is None
    assert reason(change=lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)) is None  # [B, S, H, D]
    assert reason(dim=80) == "it supports head dimensions 64 and 128, not 80"
    assert reason(dtype=torch.float32) == "it supports float16 and bfloat16, not torch.float32"
    unaligned = "it requires rows, heads and batches on 16-byte boundaries, for TMA"
    assert reason(change=lambda t: F.pad(t, (0, 3))[..., :64]) == unaligned
    assert reason(change=lambda t: torch.cat((t.flatten()[:1], t.flatten()))[1:].view(t.shape)) == unaligned
    problem = problem_of(*(t.half() for t in tensors(70, 130, dim=64)), mask)
    for scale in (1e-39, 1e39):
        assert "from 1e-30 to 1e30" in str(forward.cuda_unsupported_reason(dataclasses.replace(problem, scale=scale)))
    monkeypatch.setattr(cuda_driver, "no_compiler", lambda: "it is compiled by NVRTC through CuPy")
    assert reason() == "it is compiled by NVRTC through CuPy"
    monkeypatch.setattr(problems.Problem, "capability", lambda self: (10, 0))
    assert reason() == "it needs a GPU of compute capability 9.0 (Hopper)"


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dim", DIMS)
def test_configurations_fit(dim, block):
    assert configs.pick_cuda_config(dim, block) in CUDA_CANDIDATES[dim, block]
    for config in CUDA_CANDIDATES[dim, block]:
        assert forward.shared_bytes(dim, block, config) <= 232_448
        assert block % config.block_n == 0
        assert 2 <= config.teams * block // forward.ROWS <= 4  # warp groups for which there are registers
        assert not config.ping_pong or block == 128


def members(source: str) -> tuple[str, list[str]]:
    """Returns the layout letters and the member names of the struct that is a kernel's Problem."""
    text = (Path(cuda_driver.__file__).parent / source).read_text(encoding="utf-8")
    struct = re.search(r"struct Problem \{(.*?)\n\};", text, re.S)
    assert struct
    letters, names = "", []
    for line in filter(str.strip, re.sub(r"//.*", "", struct[1]).split(";")):
        kind, _, rest = re.sub(r"^const |unsigned |long (?=long)", "", line.strip()).replace("* ", " *").partition(" ")
        declared = rest.split(", ")
        letters += "P" if "*" in rest else {"u64": "q", "long": "q", "int": "i", "float": "f"}[kind] * len(declared)
        names += [name.strip("* ") for name in declared]
    return letters, names


@pytest.fixture
def driver(hopper, monkeypatch):
    """Returns lists that record compilations and launches, which are not run: handle, grid, threads, shared memory and
    values, checked against the layout. A tensor map is recorded as its arguments and address."""
    compiled, launched = [], []

    def kernels(*arguments):
        compiled.append(arguments)
        return arguments[2]

    class Launch:
        def __init__(self, device, name, grid, threads, shared, layout) -> None:
            self.told, self.letters = (name, grid, threads, shared), layout.replace("(", "").replace(")", "")

        def __call__(self, *values) -> None:
            kinds = "".join("M" if isinstance(v, tuple) else "f" if isinstance(v, float) else "n" for v in values)
            assert kinds == re.sub("[Piq]", "n", self.letters)
            launched.append((*self.told, values))

    def tensor_map(x, *shape):
        return lambda address: (*shape, address)

    monkeypatch.setattr(cuda_driver, "kernels", kernels)
    monkeypatch.setattr(cuda_driver, "Launch", Launch)
    for module in (forward, backward):
        monkeypatch.setattr(module, "tensor_map", tensor_map)
    return compiled, launched


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dim", DIMS)
def test_parameters(dim, block, shared, driver):
    """Launches are recorded, not run: sizes, lists that are shared or not, the bias, and a counter for many rows."""
    compiled, launched = driver
    queries, keys = 20 * block - 3, 1100
    rows, columns = 20, -(-keys // block)
    q, k, v = (t.half() for t in tensors(queries, keys, heads=6, kv_heads=2, dim=dim))
    bias = normal(1, 1, rows, columns).expand(1, 6, rows, columns) if shared else None
    problem = problem_of(q, k, v, random_mask(1 if shared else 6, rows, columns), block, bias)
    out, lse = problems.empty_like(q), torch.empty(1, 6, queries, device=DEVICE)
    forward.cuda_fwd_plan(problem, out)(q, k, v, problem.table, bias, out, lse)
    ((_, _, names, defines, room),), ((_, grid, threads, shared_bytes, values),) = compiled, launched
    maps, values = values[:3], values[3:]
    letters, fields = members("forward.cu")
    assert f"MMM({letters})" == forward._LAYOUT
    told = SimpleNamespace(**dict(zip(fields, values, strict=True)))
    config = configs.pick_cuda_config(dim, block)
    assert names == ("block_sparse_attention_cuda_fwd",)
    assert {f"HEAD_DIM={dim}", f"BLOCK={block}", f"BIAS={int(shared)}", "CAUSAL=0", "FP16=1"} <= set(defines)
    assert room == shared_bytes == forward.shared_bytes(dim, block, config)
    assert (grid, threads) == (4, 128 * (config.teams * block // 64 + 1))
    assert [made[:2] for made in maps] == [(queries, 64), (keys, config.block_n), (keys, config.block_n)]
    assert [made[2] for made in maps] == [t.data_ptr() for t in (q, k, v)]
    assert (told.lse, told.out) == (lse.data_ptr(), out.data_ptr())
    assert (told.num_tiles, told.rows, told.columns) == (6 * rows, rows, columns)
    assert (told.heads, told.q_heads, told.group, told.num_q, told.num_keys) == (6, 6, 3, queries, keys)
    assert (told.table, told.table_head) == (problem.table.data_ptr(), 0 if shared else problem.table.stride(1))
    assert told.bias == (bias.data_ptr() if bias is not None else 0)
    assert (told.bias_head, told.bias_row, told.bias_column) == ((0, columns, 1) if shared else (0, 0, 0))
    assert told.section % 3 == 0  # whole groups
    assert told.next_tile  # 120 rows of the mask, for 12 teams at the most, of more keys than SHORT


def on_hopper(dim: int, block: int, dtype: torch.dtype, bias: bool = False) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns tensors (the fourth is the bias) and a mask, with partial blocks, more rows of the mask than teams,
    [B, S, H, D] in memory, grouped heads, and rows that keep nothing."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0 (Hopper)")
    if reason := cuda_driver.no_compiler():
        pytest.skip(reason)
    sizes = (1333, 16), (1717, 8), (1717, 8)
    leaves = [normal(3, rows, heads, dim, dtype=dtype).transpose(1, 2) for rows, heads in sizes]
    shape = (16, -(-1333 // block), -(-1717 // block))
    mask = random_mask(*shape, kept=0.4)
    mask[:, ::4] = False
    return [*leaves, normal(*shape)] if bias else leaves, mask


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dim", DIMS)
def test_agrees_with_the_portable_version(dim, block, causal, dtype, bias):
    """The gradients agree too, computed from out and lse of either version."""
    leaves, mask = on_hopper(dim, block, dtype, bias)
    options = dict(block_size=block, causal=causal, backward="portable")  # which is deterministic
    out, lse, *grads = everything(block_sparse_attention, leaves, mask, forward="cuda", **options)
    other, other_lse, *other_grads = everything(block_sparse_attention, leaves, mask, forward="portable", **options)
    assert out.stride() == leaves[0].stride()
    assert not out[:, :, :block].any() and (lse[:, :, :block] == -math.inf).all()
    # Both round p to the dtype, relative to different running maxima, and some queries see few keys.
    torch.testing.assert_close(out, other, rtol=2e-2, atol=4 * torch.finfo(dtype).eps)
    torch.testing.assert_close(lse, other_lse, rtol=1e-5, atol=1e-4)
    for mine, theirs in zip(grads, other_grads, strict=True):
        assert (mine.double() - theirs.double()).norm() <= 2e-2 * theirs.double().norm()
    again = everything(block_sparse_attention, leaves, mask, forward="cuda", **options)
    assert all(torch.equal(a, b) for a, b in zip(again, (out, lse, *grads), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dim", DIMS)
def test_in_a_fixed_order_and_by_a_counter(dim, block, monkeypatch):
    leaves, mask = on_hopper(dim, block, torch.bfloat16)
    results = []
    for short in ((0, 0), (10**6, 10**6)):
        monkeypatch.setattr(forward, "SHORT", short)
        results.append(block_sparse_attention(*leaves, mask, forward="cuda", block_size=block, return_lse=True))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("config", [(key, c) for key, chosen in CUDA_CANDIDATES.items() for c in chosen], ids=str)
def test_every_configuration(config, monkeypatch):
    (dim, block), chosen = config
    leaves, mask = on_hopper(dim, block, torch.bfloat16, bias=True)
    monkeypatch.setattr(configs, "pick_cuda_config", lambda *_: chosen)
    options = dict(block_bias=leaves[3], block_size=block, causal=True)
    out, other = (block_sparse_attention(*leaves[:3], mask, forward=f, **options) for f in ("cuda", "portable"))
    torch.testing.assert_close(out, other, rtol=2e-2, atol=4 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.gpu
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("kind", ["rising", "falling", "in one column", "negative", "infinite", "not a number"])
def test_scores_that_a_kept_maximum_could_get_wrong(kind, dim, block):
    """The kernel keeps a maximum while no score exceeds it by much, and computes it with integer comparisons. NaN must
    appear in the right places."""
    leaves, mask = on_hopper(dim, block, torch.bfloat16)
    q, k, v = (t.clone() for t in leaves)
    ramp = torch.linspace(-30, 30, k.shape[2], device=DEVICE).to(k.dtype)[:, None]
    if kind in ("rising", "falling"):
        q[..., :1], k[..., :1] = 20, ramp if kind == "rising" else -ramp
    elif kind == "in one column":  # of 16, another one in each head; probabilities overflow if it is overlooked
        q[..., 0], k[..., 0] = 64, 0
        for head in range(24):
            k[head // 8, head % 8, head % 16 :: 16, :1] = -ramp[head % 16 :: 16]
    elif kind == "negative":
        q[..., 0], k[..., 0] = 8, -60
    else:
        q[0, 1, 500, 3] = math.inf if kind == "infinite" else math.nan
        k[..., 3] = k[..., 3].abs() + 0.1
    options = dict(block_size=block, return_lse=True)
    out, lse = block_sparse_attention(q, k, v, mask, forward="cuda", **options)
    want, want_lse = block_sparse_attention_reference(*(t.double() for t in (q, k, v)), mask, **options)
    torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=3e-2, equal_nan=True)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-3, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("version", ["portable", "cuda"])
def test_scaled_scores_over_the_range_of_fp32_are_nan(version, dim):
    """They must not pass for a row that keeps no block, though all its probabilities are 0: in one FMA, s · c − inf is
    −inf."""
    leaves, mask = on_hopper(dim, 128, torch.bfloat16)
    q, k, v = (t.clone() for t in leaves)
    q.zero_()[:, :, 3:100], k[:] = 1e10, 1e10
    options = dict(block_size=128, scale=1e30, return_lse=True, forward=version)
    out, lse = block_sparse_attention(q, k, v, torch.ones_like(mask), **options)
    bad = torch.zeros_like(lse, dtype=torch.bool)
    bad[:, :, 3:100] = True
    assert out[bad].isnan().all() and lse[bad].isnan().all()
    assert out[~bad].isfinite().all() and lse[~bad].isfinite().all()
