"""What is special to the layer: its parts, the module, and Hugging Face's layer with the same weights."""

from __future__ import annotations

import copy

import pytest
import torch

from harness import registry

from . import LLAMA2, LayerConfig, LlamaLayer, llama_layer
from .bench import SPEC, _hugging_face
from .layer import rope_tables

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = LayerConfig(24, 4, 2, 20)


def inputs(name: str) -> dict:
    return SPEC.make_inputs(SPEC.case(name), DEVICE, torch.Generator(DEVICE).manual_seed(0))


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5 * max(1.0, b.abs().max().item()))


def test_the_parts_make_up_the_layer() -> None:
    given = inputs("tiny-b1-s4-fp32")
    halfway = llama_layer(**{**given, "part": "attention"})
    close(llama_layer(**{**given, "x": halfway, "part": "ffn"}), llama_layer(**given))


@pytest.mark.parametrize("ffn", ["swiglu", "gelu"])
def test_the_module_is_the_function_of_its_weights(ffn: str) -> None:
    config = LayerConfig(24, 4, 2, 20, ffn=ffn)
    layer, x = LlamaLayer(config, device=DEVICE), torch.randn(2, 7, 24, device=DEVICE)
    cos, sin = rope_tables(7, 6, 10000.0, DEVICE)
    weights = dict(layer.named_parameters())
    out = layer(x)
    close(out, llama_layer(x, cos=cos, sin=sin, heads=4, kv_heads=2, **weights))
    out.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    close(copy.deepcopy(layer)(x), out)
    with pytest.raises(ValueError, match="ffn must be 'swiglu' or 'gelu'"):
        LlamaLayer(LayerConfig(24, 4, 2, 20, ffn="relu"))


def test_hugging_faces_layer_has_the_same_result_and_gradients() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = transformers.LlamaConfig(
        hidden_size=24, num_attention_heads=4, num_key_value_heads=2, intermediate_size=20, rms_norm_eps=1e-5
    )
    config._attn_implementation = "sdpa"
    theirs, ours = LlamaDecoderLayer(config, 0).to(DEVICE), LlamaLayer(TINY, device=DEVICE)
    ours.load_llama(theirs.state_dict())
    x = torch.randn(2, 9, 24, device=DEVICE)
    angles = tuple(torch.cat((t, t), -1)[None] for t in rope_tables(9, 6, 10000.0, DEVICE))
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    mine, other = ours(a), theirs(b, position_embeddings=angles)
    close(mine, other)
    mine.square().sum().backward()
    other.square().sum().backward()
    close(a.grad, b.grad)
    close(ours.w_down.grad, theirs.mlp.down_proj.weight.grad)
    close(ours.w_qkv.grad[:24], theirs.self_attn.q_proj.weight.grad)


@pytest.mark.parametrize("name", ["torch-sdpa", "hugging-face"])
def test_peers_agree(name: str) -> None:
    if name == "hugging-face":
        pytest.importorskip("transformers")
    given = inputs("tiny-b1-s4-fp32")
    peer = next(baseline for baseline in SPEC.baselines if baseline.name == name)
    close(peer.load()(**given), SPEC.reference(**given))


def test_the_row_of_the_plain_layer_has_nothing_of_ligers() -> None:
    pytest.importorskip("transformers")
    from transformers.models.llama import modeling_llama

    before, seen = dict(vars(modeling_llama)), []

    def patch() -> None:
        from transformers.models.llama import modeling_llama

        modeling_llama.apply_rotary_pos_emb = lambda q, k, cos, sin, unsqueeze_dim=1: seen.append(1) or (q, k)

    given = inputs("tiny-b1-s4-fp32")
    plain, changed = _hugging_face()(), _hugging_face(patch)()
    close(plain(**given), SPEC.reference(**given))
    assert not seen
    changed(**given)
    assert seen and vars(modeling_llama) == before


def test_costs_are_those_of_the_published_sizes() -> None:
    """202 million weights of a layer of 7B; at 4096 tokens the products have 12 times the FLOPs of attention."""
    case = SPEC.case("7b-b1-s4096-bf16")
    weights = 4 * 4096 * 4096 + 3 * 4096 * 11008
    attention = 2 * 2 * 128 * (32 * 4096 * 4097 // 2)
    assert SPEC.cost(case, "fwd").flops == {"bf16": 2 * 4096 * weights + attention}
    assert SPEC.cost(case, "fwd+bwd").flops == {"bf16": 6 * 4096 * weights + attention * 7 // 2}
    assert LLAMA2["70b"].head_dim == 128


def test_it_says_what_it_cannot_take() -> None:
    given = inputs("tiny-b1-s4-fp32")
    for change, message in (
        (dict(part="head"), "part must be one of layer, attention, ffn"),
        (dict(w_o=None), "'layer' needs w_o"),
        (dict(kv_heads=3), "heads must be a multiple of kv_heads"),
        (dict(w_up=given["w_up"][:15]), "w_up must be"),
        (dict(x=given["x"][0]), r"x must be \[B, S, hidden\]"),
    ):
        with pytest.raises(ValueError, match=message):
            llama_layer(**{**given, **change})


def test_it_is_found() -> None:
    assert "llama_layer" in registry.names()
