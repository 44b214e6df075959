"""The peers that need no package: what a PyTorch user would write gives the reference's result on the CPU, and what a
peer does not take it says before it is run."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest
import torch

from harness import execute, registry
from harness.registry import ROOT
from harness.spec import FROM_REFERENCE, Case, KernelSpec, Peer, Yardstick
from kernels.attention import bench as attention
from kernels.block_sparse_attention import bench as block_sparse
from kernels.cross_entropy import bench as cross_entropy
from kernels.linear_cross_entropy import bench as linear_cross_entropy

#: Elements of the inputs of a case that is run here.
MOST = 200_000


def _runnable(spec: KernelSpec, name: str) -> list[tuple[Case, str]]:
    """The cases in fp32 that a baseline takes, small enough for a CPU."""
    baseline = next(b for b in spec.baselines if b.name == name)
    small = [c for c in spec.cases if c.dtype == torch.float32 and not c.bench and c.world_size == 1]
    small = [c for c in small if "extreme" not in c.params]  # where torch.distributions has infinities
    return [(c, mode) for c in small for mode in spec.modes_of(c) if baseline.supports(c, mode) is None]


def _pytorch() -> list:
    found = []
    for kernel in registry.names():
        spec = registry.load(kernel)
        for name in spec.pytorch:
            if name in FROM_REFERENCE or kernel in ("adamw", "gradient_compression", "ring_attention", "mxfp"):
                continue  # the reference itself; fused, of CUDA; of several GPUs; a package
            found += [
                pytest.param(spec, name, c, mode, id=f"{kernel}-{c.name}-{mode}") for c, mode in _runnable(spec, name)
            ]
    return found


@pytest.mark.parametrize(("spec", "name", "case", "mode"), _pytorch())
def test_what_a_pytorch_user_would_write_gives_the_references_result(
    spec: KernelSpec, name: str, case: Case, mode: str
) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = spec.make_inputs(case, "cpu", generator)
    if sum(t.numel() for t in inputs.values() if isinstance(t, torch.Tensor)) > MOST:
        pytest.skip("too large for a CPU")
    grads = execute.out_grads(spec, case, spec.reference, inputs, mode, generator)
    fn = execute.load(spec, name, case, mode)
    copies = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in inputs.items()}
    got = execute.bind(spec, fn, copies, mode, grads)()
    want = execute.bind(spec, spec.reference, inputs, mode, grads)()
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        # A number may be rounded to its neighbour in 8 bits.
        near = 0.07 if a.itemsize == 1 else 1e-4
        torch.testing.assert_close(a.float(), b.float(), rtol=near, atol=near, equal_nan=True)


@pytest.mark.parametrize("kernel", [k for k in registry.names() if registry.load(k).pytorch != ("eager",)])
def test_every_bench_case_says_of_every_peer_whether_it_takes_it(kernel: str) -> None:
    spec = registry.load(kernel)
    for baseline in spec.baselines:
        reasons = [baseline.supports(c, mode) for c in spec.cases if c.bench for mode in spec.modes_of(c)]
        assert all(reason is None or reason for reason in reasons)
        if isinstance(baseline, Peer):
            assert all(callable(load) for load in baseline.configurations.values())


def test_quacks_one_pass_is_for_the_cases_in_place() -> None:
    supports = {b.name: b.supports for b in cross_entropy.SPEC.baselines}
    in_place, alone = cross_entropy.IN_PLACE[0], cross_entropy.ALONE[0]
    assert supports["quack-one-pass"](in_place, "fwd") is supports["quack-two-pass"](in_place, "fwd") is None
    assert supports["quack-one-pass"](alone, "fwd") and supports["quack"](in_place, "fwd")
    assert supports["quack"](alone, "fwd") is None


def test_ligers_kernels_for_hopper_take_whole_tiles_of_bf16() -> None:
    supports = {b.name: b.supports for b in linear_cross_entropy.SPEC.baselines}["liger-sm90"]
    taken = {c.name for c in linear_cross_entropy.CASES if supports(c, "fwd") is None}
    assert taken == {c.name for c in linear_cross_entropy.CASES if c.bench}


@pytest.mark.parametrize("name", ["1-h1-q100-k120-d24-kept50-block64", "b1-h2-q150-k200-d16-kept50-block64"])
def test_masked_sdpa_is_block_sparse_attention(name: str) -> None:
    spec = block_sparse.SPEC
    case = next(c for c in spec.cases if name in c.name)
    inputs = spec.make_inputs(case, "cpu", torch.Generator().manual_seed(1))
    got, want = block_sparse._masked_sdpa()(**inputs), spec.reference(**inputs)
    torch.testing.assert_close(got.nan_to_num(), want, rtol=1e-4, atol=1e-4)  # a row without keys is NaN in PyTorch


def test_each_peer_has_its_recipe() -> None:
    text = (ROOT / "docs" / "PEERS.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w-]+)`", text))
    for kernel in registry.names():
        for baseline in registry.load(kernel).baselines:
            of_torch = baseline.name.startswith("torch-") or baseline.name.endswith("_hook")
            if not isinstance(baseline, Yardstick):
                assert of_torch or baseline.name in named, f"{kernel}'s peer {baseline.name} is not in docs/PEERS.md"


def test_flash_attention_3_is_given_e4m3_with_a_scale_for_each_head_of_k(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that computes in fp32 what it is given."""

    def flash_attn_func(q, k, v, *, q_descale, k_descale, v_descale, causal, **_):
        def wide(x, descale):
            heads = descale.repeat_interleave(x.shape[2] // descale.shape[1], 1)
            return (x.float() * heads[:, None, :, None]).transpose(1, 2)

        assert q.dtype == k.dtype == v.dtype == torch.float8_e4m3fn
        q, k, v = wide(q, q_descale), wide(k, k_descale), wide(v, v_descale)
        return attention.attention_reference(q, k, v, causal=causal).transpose(1, 2)

    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace(flash_attn_func=flash_attn_func))
    monkeypatch.setattr(torch, "compile", lambda fn, dynamic: fn)
    q, k, v = (torch.randn(2, heads, 33, 16) for heads in (4, 2, 2))
    v *= 1000
    got, want = attention._fa3()(q, k, v, fp8=True), attention.attention_reference(q, k, v)
    assert (got - want).abs().max() < 0.1 * want.abs().max()


def test_quacks_one_pass_gives_the_gradient_of_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in by QuACK's rule: losses and the gradient of their sum, each row times the weight of its class."""

    def cross_entropy_fwd(x, target, *, weight, return_dx, inplace_backward):
        assert return_dx and inplace_backward
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            losses = torch.nn.functional.cross_entropy(leaf, target, weight, reduction="none")
            (dx,) = torch.autograd.grad(losses.sum(), leaf)
        return losses.detach(), x.copy_(dx)

    stand_in = SimpleNamespace(cross_entropy_fwd=cross_entropy_fwd)
    monkeypatch.setitem(sys.modules, "quack", SimpleNamespace(cross_entropy=stand_in))
    monkeypatch.setitem(sys.modules, "quack.cross_entropy", stand_in)
    logits, target = torch.randn(9, 40), torch.randint(0, 40, (9,))
    target[[2, 5]] = -100
    loss, gradient = cross_entropy._quack_one_pass()(logits.clone(), target, with_grad=True)
    want = cross_entropy.SPEC.reference(logits, target, with_grad=True)
    torch.testing.assert_close((loss, gradient), want[:2])
