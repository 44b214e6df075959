"""Tests of narrow.cu, GEMMs of small K with an activation: supported operands, compilation, constants that host and
device share, and on a GPU the results."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
import torch

from harness.compiling import nvrtc, sass

from . import bench, configs
from .activation import ACTIVATIONS
from .launch import forget
from .op import fused_mlp
from .sm90 import cuda_driver, narrow
from .test_fused_mlp import agrees, gradients, operands, same_places

SOURCE = Path(narrow.__file__).with_name("narrow.cu")
EPILOGUES = ("ACT", "GATE", "DACT", "DGATE")


@pytest.fixture
def compiler() -> None:
    if reason := cuda_driver.no_compiler():
        pytest.skip(reason)


def test_which_operands_it_takes() -> None:
    a, b = torch.zeros(64, 40).half(), torch.zeros(24, 40).half()
    assert narrow.takes(a, b) and narrow.takes(a, b, b) and narrow.takes(a, b.mT.contiguous().mT)
    assert narrow.takes(a[:, 8:], b[:, 8:]) and narrow.takes(a[:1], b)
    wide = torch.zeros(64, 513).half()[:, :512]
    for x in (a.mT.contiguous().mT, a[:, 1:33], a[:, ::2], a[:1].expand(64, 40), a[:0], a[:, :0], wide):
        assert not narrow.takes(x, b)
    assert not narrow.takes(a, b, b.mT.contiguous().mT)
    long = torch.zeros(8, 520).half()
    assert narrow.takes(long[:, :512], long[:, :512]) and not narrow.takes(long, long)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it may run here")
def test_where_it_cannot_run() -> None:
    with pytest.raises(RuntimeError, match='backend="narrow" cannot run here: it needs a GPU'):
        fused_mlp(torch.zeros(2, 8), torch.zeros(8, 8), torch.zeros(8, 8), backend="narrow")


# Epilogue, activation, B_TRANS, BIAS, tensors that are stored, TAIL, K, FP16, and COLUMNS if not as picked.
VARIANTS = (
    ("DACT", "silu", 1, 0, 3, 96, 512, 0),
    ("ACT", "silu", 0, 0, 1, 96, 512, 0),
    ("ACT", "gelu", 0, 1, 3, 96, 512, 0),
    ("ACT", "gelu_tanh", 1, 1, 2, 32, 72, 1),
    ("GATE", "silu", 0, 1, 7, 32, 512, 0),
    ("GATE", "relu", 1, 0, 1, 64, 512, 1),
    ("DACT", "gelu", 0, 0, 1, 128, 512, 1),
    ("DGATE", "silu", 1, 0, 7, 32, 512, 0),
    ("DGATE", "silu", 1, 0, 3, 96, 512, 0),
    ("DGATE", "gelu", 1, 0, 5, 64, 512, 0, 64),
    ("ACT", "silu", 0, 1, 1, 32, 512, 0, 64),
    ("DACT", "silu", 1, 0, 3, 32, 512, 0, 64),
)


@pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.MISSING)
@pytest.mark.parametrize(
    "variant",
    [pytest.param(v, id="-".join(map(str, v)), marks=[pytest.mark.slow] if i else []) for i, v in enumerate(VARIANTS)],
)
def test_it_compiles_and_does_not_spill(variant: tuple) -> None:
    name, activation, b_trans, bias, stores, tail, terms, fp16, *columns = variant
    epilogue, steps = getattr(narrow, name), -(-terms // narrow.BLOCK_K)
    config = configs.pick_narrow_config(11_000, steps, *narrow.sizes_of(epilogue, stores))
    if columns:
        config = replace(config, columns=columns[0])
    defines = (
        f"EPILOGUE={epilogue}",
        f"ACTIVATION={ACTIVATIONS.index(activation)}",
        f"FP16={fp16}",
        f"STEPS={steps}",
        f"STAGES={config.stages}",
        f"A_STAGES={config.a_stages}",
        f"CLUSTER={config.cluster}",
        f"COLUMNS={config.columns}",
        f"B_TRANS={b_trans}",
        f"BIAS={bias}",
        f"STORES={stores}",
        f"TAIL={tail}",
    )
    usage = sass.inspect(nvrtc.compiled(SOURCE, "sm_90a", defines), "fused_mlp_narrow")
    assert usage.spills == 0 and usage.stack == 0
    # No warp releases a stage before its reads are complete: TMA of this CTA or of the other overwrites the stage.
    assert usage.early_arrivals == 0 and usage.early_own_reads == {}
    # One wait for each K-block but those still in flight, and one for these: ptxas has added none between wgmmas.
    in_flight = min(steps, 128 // (narrow.sizes_of(epilogue, stores)[0] * config.columns))
    assert usage.mma == {"HGMMA": 2 * 4 * steps} and usage.wgmma_waits == 2 * (steps - in_flight + 1)


def test_host_and_device_agree() -> None:
    text = SOURCE.with_name("narrow_layout.cuh").read_text(encoding="utf-8")
    blocks = re.search(r"BLOCK_M = (\d+), BLOCK_K = (\d+), CONSUMERS = (\d+),", text)
    assert blocks is not None
    assert [int(n) for n in blocks.groups()] == [narrow.BLOCK_M, narrow.BLOCK_K, narrow.BLOCK_M // narrow.ROWS]
    assert f"THREADS == {narrow.THREADS}" in text
    epilogues = re.search(r"enum Epilogue { (.*) };", text)
    assert epilogues is not None and tuple(epilogues[1].split(", ")) == EPILOGUES
    assert [getattr(narrow, name) for name in EPILOGUES] == list(range(4))
    loaded = re.search(r"LOADED = EPILOGUE == DACT \? (\d+) : EPILOGUE == DGATE \? (\d+) : 0;", text)
    assert loaded is not None
    for name, epilogue in zip(EPILOGUES, range(4), strict=True):
        assert narrow.LOADED[epilogue] == {"DACT": int(loaded[1]), "DGATE": int(loaded[2])}.get(name, 0)


@pytest.mark.parametrize("epilogue", range(4))
def test_it_fits_into_shared_memory(epilogue: int) -> None:
    gated = epilogue in (narrow.GATE, narrow.DGATE)
    for rows, steps, stores in product((1, 205_000), range(1, 9), range(1, 8 if gated else 4)):
        weights, tensors = narrow.sizes_of(epilogue, stores)
        config = configs.pick_narrow_config(rows, steps, weights, tensors)
        assert config.stages >= steps and weights * config.columns in (64, 128)
        assert configs.narrow_bytes(config, weights, tensors) <= 227 << 10
    for config in bench._narrow_candidates(bench.NARROW[0]):
        assert configs.narrow_bytes(config, 1, 2) <= 227 << 10 and config.stages >= 8


def test_its_clusters_run_at_once() -> None:
    """Clusters of 4 CTAs use 120 of 132 SMs. 33 clusters would take two waves, the second with 3 clusters."""
    assert [configs.clusters_at_once(132, size) for size in (1, 2, 4)] == [132, 66, 30]


def test_columns_of_the_last_block() -> None:
    assert [narrow.tail_of(p, 128) for p in (16, 32, 112, 128, 144, 1376)] == [32, 32, 128, 128, 32, 96]
    assert [narrow.tail_of(p, 64) for p in (16, 64, 1376)] == [32, 64, 32]


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("names", ["x w1 w2", "x w1 w2 b1 b2", "x w1 w2 b1 b2 w_gate"])
@pytest.mark.parametrize(
    ("rows", "dim", "hidden", "dim_out"),
    [(1, 8, 8, 8), (64, 64, 128, 64), (129, 72, 136, 40), (1031, 512, 1365, 512), (3000, 264, 683, 392)],
)
def test_it_is_right(
    compiler: None, rows: int, dim: int, hidden: int, dim_out: int, names: str, dtype: torch.dtype
) -> None:
    tensors = operands(rows, dim, hidden, dim_out, names, dtype)
    for save in ("activations", "input"):
        agrees(tensors, backend="narrow", save=save)


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(compiler: None, activation: str) -> None:
    for names in ("x w1 w2 b1", "x w1 w2 w_gate"):
        agrees(operands(300, 128, 200, 136, names, torch.bfloat16), backend="narrow", activation=activation)


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("names", ["x w1 w2 b1", "x w1 w2 w_gate"])
def test_clusters_and_rings(compiler: None, names: str) -> None:
    """There are more blocks than clusters, and ranges of blocks that begin within a row tile. Repeated runs agree bit
    for bit, for all cluster sizes."""
    tensors = operands(20_011, 512, 1365, 512, names, torch.bfloat16)
    agrees(tensors, backend="narrow")
    first, picked = gradients(fused_mlp, tensors, backend="narrow"), configs.pick_narrow_config
    for cluster in (1, 2, 4):

        def other(*arguments: int, cluster: int = cluster) -> configs.NarrowConfig:
            config = picked(*arguments)
            return replace(config, columns=64, stages=max(arguments[1], config.stages - 1), a_stages=2, cluster=cluster)

        with mock.patch.object(configs, "pick_narrow_config", other):
            forget()
            for _ in range(2):
                again = gradients(fused_mlp, tensors, backend="narrow")
                assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu(min_capability=(9, 0))
def test_both_ways_to_save_give_the_same_bits(compiler: None) -> None:
    for names in ("x w1 w2 b1", "x w1 w2 b1 w_gate"):
        tensors = operands(5000, 512, 1365, 512, names, torch.bfloat16)
        kept, again = (gradients(fused_mlp, tensors, save=s, backend="narrow") for s in ("activations", "input"))
        assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


@pytest.mark.gpu(min_capability=(9, 0))
def test_each_gradient_alone(compiler: None) -> None:
    """The backward's epilogue stores only the tensors that are needed. For w2 alone the first GEMM computes the hidden,
    from pre before it is rounded."""
    tensors = operands(700, 128, 200, 136, "x w1 w2 b1 w_gate", torch.bfloat16)
    for names in ("x w1 w2 b1", "x w1 w2 b1 w_gate"):
        given = {name: tensors[name] for name in names.split()}
        together = dict(zip(given, gradients(fused_mlp, given, backend="narrow")[1:], strict=True))
        for save, name in product(("activations", "input"), given):
            leaf = given[name].clone().requires_grad_()
            y = fused_mlp(**{**given, name: leaf}, save=save, backend="narrow")
            dy = torch.linspace(-1, 1, y.numel(), device="cuda").view(y.shape).to(y.dtype)
            grad = torch.autograd.grad(y, leaf, dy)[0]
            bound = 1e-2 * together[name].abs().max().item() if name == "w2" else 0
            torch.testing.assert_close(grad, together[name], rtol=0, atol=bound)


@pytest.mark.gpu(min_capability=(9, 0))
def test_layouts(compiler: None) -> None:
    """Each GEMM with an operand that TMA cannot read uses another version."""
    tensors = operands(300, 128, 200, 136, "x w1 w2 w_gate", torch.bfloat16)
    for name, t in tensors.items():
        wide = torch.randn(t.shape[0], 256, device="cuda", dtype=torch.bfloat16) * t.shape[1] ** -0.5
        for strided in (t.mT.contiguous().mT, wide[:, 16 : 16 + t.shape[1]], wide[:, 3 : 3 + t.shape[1]]):
            agrees({**tensors, name: strided}, backend="narrow")
    both = {n: t.mT.contiguous().mT if n in ("w1", "w_gate", "w2") else t for n, t in tensors.items()}
    agrees(both, backend="narrow")


@pytest.mark.gpu(min_capability=(9, 0))
def test_what_is_not_finite_stays_in_its_row(compiler: None) -> None:
    tensors = operands(300, 128, 203, 136, "x w1 w2 b1 w_gate", torch.bfloat16)
    want = fused_mlp(**tensors, backend="narrow")
    tensors["x"][77] = torch.inf
    others = torch.arange(300, device="cuda") != 77
    y = fused_mlp(**tensors, backend="narrow")
    assert torch.equal(y[others], want[others]) and not y[77].isfinite().any()


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_what_is_not_finite_is_where_pytorch_has_it(compiler: None, activation: str) -> None:
    for names in ("x w1 w2 b1", "x w1 w2 w_gate"):
        same_places(operands(300, 128, 203, 136, names, torch.bfloat16), activation, backend="narrow")
