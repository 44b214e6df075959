"""The modules of kernels/nn.py against those that they replace: same state dict, same results, same gradients."""

from __future__ import annotations

import copy
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from kernels import nn as ours

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * max(1.0, b.abs().max().item()))


def agree(mine: nn.Module, theirs: nn.Module, *inputs: torch.Tensor) -> None:
    """Loads the state of `theirs` into `mine`, and back; outputs and all gradients are the same."""
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    mine.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(mine.state_dict())
    results = []
    for module in (mine, theirs):
        leaves = [t.clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
        out = module(*leaves)
        out.square().sum().backward()
        wanted = [t for t in leaves if t.requires_grad]
        results.append([out, *(t.grad for t in wanted), *(p.grad for _, p in sorted(module.named_parameters()))])
    for a, b in zip(*results, strict=True):
        close(a, b)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_rmsnorm(affine: bool, eps: float | None) -> None:
    shared = dict(elementwise_affine=affine, device=DEVICE)
    agree(ours.RMSNorm(24, eps, **shared), nn.RMSNorm(24, eps, **shared), rand(3, 5, 24))
    small = torch.full((2, 24), 1e-2, dtype=torch.float16, device=DEVICE)
    shared["dtype"] = torch.float16
    found = [kind.RMSNorm(24, eps, **shared)(small) for kind in (ours, nn)]
    torch.testing.assert_close(*found, rtol=2e-3, atol=0)


def test_rmsnorm_begins_as_torchs_and_gemmas_do() -> None:
    assert torch.equal(ours.RMSNorm(8).weight, torch.ones(8))
    assert torch.equal(ours.RMSNorm([8], weight_offset=1.0).weight, torch.zeros(8))
    with pytest.raises(ValueError, match="one dimension"):
        ours.RMSNorm((2, 8))
    with pytest.raises(ValueError, match=r"x must be \[..., 8\]"):
        ours.RMSNorm(8)(torch.ones(2, 7))


def test_rmsnorm_adds_the_residual() -> None:
    norm, x, residual = ours.RMSNorm(16, 1e-6, device=DEVICE), rand(4, 16), rand(4, 16)
    y, h = norm(x, residual)
    close(h, x + residual)
    close(y, functional.rms_norm(h, (16,), norm.weight, 1e-6))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(approximate: str) -> None:
    agree(ours.GELU(approximate), nn.GELU(approximate), rand(3, 17))


class Gated(nn.Module):
    """LlamaMLP in PyTorch."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(12, 20, bias, DEVICE) for _ in range(2))
        self.down_proj = nn.Linear(20, 12, bias, DEVICE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("bias", [False, True])
def test_swiglu(bias: bool) -> None:
    agree(ours.SwiGLU(12, 20, bias, device=DEVICE), Gated(bias), rand(2, 3, 12))


class TwoMatrices(nn.Module):
    """PhiMLP in PyTorch."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(12, 20, bias, DEVICE), nn.Linear(20, 12, bias, DEVICE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(functional.gelu(self.fc1(x), approximate="tanh"))


@pytest.mark.parametrize("save", ["activations", "input"])
def test_fused_mlp(save: str) -> None:
    agree(ours.FusedMLP(12, 20, save=save, device=DEVICE), Gated(False), rand(2, 3, 12))
    for bias in (False, True):
        module = ours.FusedMLP(12, 20, bias, "gelu_tanh", gated=False, save=save, device=DEVICE)
        agree(module, TwoMatrices(bias), rand(2, 3, 12))
    with pytest.raises(ValueError, match="bias must be False"):
        ours.FusedMLP(12, 20, bias=True)


def rotated(x: torch.Tensor, positions: torch.Tensor, base: float) -> torch.Tensor:
    """x [B, S, heads, D] as Hugging Face's Llama rotates it."""
    dim = x.shape[-1]
    frequencies = base ** -(torch.arange(0, dim, 2, device=x.device, dtype=torch.float32) / dim)
    angles = (positions[..., None].float() * frequencies).repeat(1, 1, 2)[:, :, None]
    halves = torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), -1)
    return x * angles.cos() + halves * angles.sin()


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_rotary_embedding(layout: str) -> None:
    module, q, k = ours.RotaryEmbedding(8, 500.0, 4, layout=layout), rand(2, 5, 3, 8), rand(2, 5, 1, 8)
    assert not module.state_dict()
    positions = torch.arange(5, device=DEVICE).expand(2, 5)
    expected = rotated(q, positions, 500.0), rotated(k, positions, 500.0)
    if layout == "bhsd":
        q, k, expected = q.transpose(1, 2), k.transpose(1, 2), [t.transpose(1, 2) for t in expected]
    for found in (module(q, k), module.half().float()(q, k), copy.deepcopy(module)(q, k)):
        for a, b in zip(found, expected, strict=True):
            close(a, b)
    close(module(q), expected[0])


def test_rotary_embedding_at_given_positions_and_of_longer_sequences() -> None:
    module, q = ours.RotaryEmbedding(8, max_positions=6), rand(1, 3, 2, 8)
    ids = torch.tensor([[5, 0, 2]], device=DEVICE)
    close(module(q, position_ids=ids), rotated(q, ids, 10000.0))
    longer = rand(1, 9, 2, 8)
    close(module(longer), rotated(longer, torch.arange(9, device=DEVICE)[None], 10000.0))
    assert module.tables(q.device, 1)[0].shape == (12, 4)
    again = pickle.loads(pickle.dumps(module))
    close(again(longer), module(longer))
    for options in (dict(dim=7), dict(dim=8, max_positions=0)):
        with pytest.raises(ValueError, match="RotaryEmbedding"):
            ours.RotaryEmbedding(**options)


def test_rotary_tables_of_inference_serve_training_and_outlive_longer_ones() -> None:
    """The latter for CUDA graphs, which read the table with which they were captured."""
    module, q = ours.RotaryEmbedding(8, max_positions=4), rand(1, 3, 2, 8)
    with torch.inference_mode():
        module(q)
    module(q.requires_grad_()).sum().backward()
    tables = [weakref.ref(table) for table in module.tables(q.device, 3)]
    module(rand(1, 9, 2, 8))
    assert all(table() is not None for table in tables)
    assert not copy.deepcopy(module)._outgrown


def test_rotary_tables_of_fake_tensors_are_not_kept() -> None:
    module, q = ours.RotaryEmbedding(8, max_positions=4), rand(1, 3, 2, 8)
    with FakeTensorMode() as mode:
        module(mode.from_tensor(q))
    close(module(q), ours.RotaryEmbedding(8, max_positions=4)(q))


def test_rotary_tables_are_made_and_grow_in_a_compiled_graph() -> None:
    torch.compiler.reset()
    compiled = torch.compile(ours.RotaryEmbedding(8, max_positions=4), fullgraph=True, backend="aot_eager")
    for rows in (3, 9):
        q = rand(1, rows, 2, 8)
        close(compiled(q), rotated(q, torch.arange(rows, device=DEVICE)[None], 10000.0))


class Heads(nn.Module):
    """LlamaAttention in PyTorch."""

    def __init__(self, rotary: bool) -> None:
        super().__init__()
        self.rotary = rotary
        self.q_proj, self.o_proj = (nn.Linear(16, 16, False, DEVICE) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(16, 8, False, DEVICE) for _ in range(2))

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        keys = x if context is None else context
        q, k, v = (p(t).unflatten(-1, (-1, 4)) for p, t in ((self.q_proj, x), (self.k_proj, keys), (self.v_proj, keys)))
        if self.rotary:
            positions = torch.arange(x.shape[1], device=x.device)[None]
            q, k = rotated(q, positions, 10000.0), rotated(k, positions, 10000.0)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=context is None, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("case", ["causal", "rotary", "context"])
def test_attention(case: str) -> None:
    rotary = ours.RotaryEmbedding(4) if case == "rotary" else None
    module = ours.Attention(16, 4, 2, causal=case != "context", rotary=rotary, device=DEVICE)
    inputs = (rand(2, 5, 16), *([rand(2, 3, 16)] if case == "context" else []))
    agree(module, Heads(case == "rotary"), *inputs)


def test_attention_says_what_it_cannot_take() -> None:
    with pytest.raises(ValueError, match="multiple of num_kv_heads"):
        ours.Attention(16, 4, 3)
    with pytest.raises(ValueError, match="multiple of num_heads"):
        ours.Attention(18, 4)
    with pytest.raises(ValueError, match="must be at least 1"):
        ours.Attention(16, 4, 0)
    with pytest.raises(ValueError, match="rotary must have layout"):
        ours.Attention(16, 4, rotary=ours.RotaryEmbedding(4, layout="bhsd"))
    with pytest.raises(TypeError, match="ignore_indx"):
        ours.LinearCrossEntropyLoss(16, 10, ignore_indx=1)
    with pytest.raises(ValueError, match="position_ids must be None"):
        ours.Attention(16, 4)(torch.ones(1, 2, 16), position_ids=torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="context must be None with rotary"):
        ours.Attention(16, 4, rotary=ours.RotaryEmbedding(4))(torch.ones(1, 2, 16), torch.ones(1, 2, 16))


@pytest.mark.parametrize("shape", [(7,), (5, 7), (3, 7, 2)], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy(shape: tuple[int, ...], weighted: bool) -> None:
    weight = torch.rand(7, device=DEVICE) if weighted else None
    options = dict(weight=weight, ignore_index=2, reduction="sum", label_smoothing=0.1)
    target = torch.randint(0, 7, (*shape[:1], *shape[2:]) if len(shape) > 1 else (), device=DEVICE)
    agree(ours.CrossEntropyLoss(**options), nn.CrossEntropyLoss(**options), rand(*shape), target)


class Projected(nn.Linear):
    """A linear layer and its loss in PyTorch."""

    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return functional.cross_entropy(super().forward(hidden), target, label_smoothing=0.1)


@pytest.mark.parametrize("bias", [False, True])
def test_linear_cross_entropy(bias: bool) -> None:
    module = ours.LinearCrossEntropyLoss(6, 11, bias, label_smoothing=0.1, device=DEVICE)
    agree(module, Projected(6, 11, bias, DEVICE), rand(9, 6), torch.randint(0, 11, (9,), device=DEVICE))


def test_they_say_what_they_are() -> None:
    shown = repr(nn.ModuleList([ours.RMSNorm(4), ours.GELU(), ours.SwiGLU(4, 8), ours.RotaryEmbedding(4)]))
    assert "RMSNorm(4, eps=None" in shown and "activation='silu'" in shown and "base=10000.0" in shown
    shown = repr(
        nn.ModuleList(
            [
                ours.Attention(8, 2),
                ours.FusedMLP(4, 8, gated=False),
                ours.CrossEntropyLoss(),
                ours.LinearCrossEntropyLoss(4, 5),
            ]
        )
    )
    assert (
        "save='activations'" in shown
        and "kv_heads=2" in shown
        and "ignore_index=-100" in shown
        and "out_features=5" in shown
    )
