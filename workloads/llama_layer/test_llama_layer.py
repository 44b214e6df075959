"""Tests specific to the layer: its parts, the module, and Hugging Face's layer with the same weights."""

from __future__ import annotations

import copy
import sys
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from harness import registry

from . import LLAMA2, FP8Weight, LayerConfig, LlamaLayer, fp8_linear, fp8_weight, llama_layer
from .bench import SPEC, _hugging_face
from .fp8_weights import pick_backend
from .layer import MATRICES, rope_tables
from .reference import llama_layer_reference
from .training import HYPER, STEP, WEIGHTS, state

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = LayerConfig(24, 4, 2, 20)
layer_module = sys.modules[LlamaLayer.__module__]


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


def test_tables_of_inference_serve_training() -> None:
    layer, x = LlamaLayer(TINY, device=DEVICE), torch.randn(2, 7, 24, device=DEVICE)
    with torch.inference_mode():
        expected = layer(x)
    out = layer(x)
    close(out, expected.clone())
    out.sum().backward()


def test_tables_of_fake_tensors_are_not_kept() -> None:
    layer, x = LlamaLayer(TINY, device=DEVICE), torch.randn(2, 7, 24, device=DEVICE)
    expected = copy.deepcopy(layer)(x)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        layer(mode.from_tensor(x))
    close(layer(x), expected)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
@pytest.mark.parametrize("fp8", [False, True])
def test_no_rows(fp8: bool, shape: tuple[int, int]) -> None:
    layer, x = LlamaLayer(LayerConfig(32, 4, 2, 48), fp8=fp8, device=DEVICE), torch.ones(*shape, 32, device=DEVICE)
    with torch.no_grad():
        assert layer(x).shape == x.shape
    layer(x.requires_grad_()).sum().backward()
    assert x.grad.shape == x.shape and all(not p.grad.any() for p in layer.parameters())


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
    with pytest.raises(ValueError, match="without biases, got self_attn.q_proj.bias"):
        ours.load_llama({**theirs.state_dict(), "self_attn.q_proj.bias": torch.ones(24)})


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
    """A layer of 7B has 202 million weights; at 4096 tokens the GEMMs have 12 times the FLOPs of attention."""
    case = SPEC.case("7b-b1-s4096-bf16")
    weights = 4 * 4096 * 4096 + 3 * 4096 * 11008
    attention = 2 * 2 * 128 * (32 * 4096 * 4097 // 2)
    assert SPEC.cost(case, "fwd").flops == {"bf16": 2 * 4096 * weights + attention}
    assert SPEC.cost(case, "fwd+bwd").flops == {"bf16": 6 * 4096 * weights + attention * 7 // 2}
    assert LLAMA2["70b"].head_dim == 128
    in_fp8 = SPEC.cost(SPEC.case("7b-b1-s4096-fp8-bf16"), "fwd")
    assert in_fp8.flops == {"fp8": 2 * 4096 * weights, "bf16": attention}


def test_it_says_what_it_cannot_take() -> None:
    given = inputs("tiny-b1-s4-fp32")
    for change, message in (
        (dict(part="head"), "part must be one of layer, attention, ffn"),
        (dict(w_o=None), "w_o must be given with part='layer'"),
        (dict(kv_heads=3), "heads must be a multiple of kv_heads"),
        (dict(w_up=given["w_up"][:15]), "w_up must be"),
        (dict(x=given["x"][0]), r"x must be \[B, S, hidden\]"),
    ):
        with pytest.raises(ValueError, match=message):
            llama_layer(**{**given, **change})


@pytest.mark.parametrize("frozen", [(), ("w_qkv",), ("x", "norm_attention")])
def test_gradients_of_slices_are_written_into_one_tensor(frozen: tuple[str, ...]) -> None:
    """In 16 bits, where attention has its own autograd function. Its result without gradients is the same."""
    given = inputs("tiny-b1-s4-fp32")
    given |= {name: t.half() for name, t in given.items() if isinstance(t, torch.Tensor) and name not in ("cos", "sin")}
    leaves = {name: given[name] for name in SPEC.grads if name not in frozen}
    for leaf in leaves.values():
        leaf.requires_grad_()
    out = llama_layer(**given)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, tuple(leaves.values()), dout)
    wide = {name: t.detach().double() if isinstance(t, torch.Tensor) else t for name, t in given.items()}
    wanted = {name: wide[name].requires_grad_() for name in leaves}
    want = torch.autograd.grad(llama_layer_reference(**wide), tuple(wanted.values()), dout.double())
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-2, atol=1e-2 * max(1.0, b.abs().max().item()))
    tolerance = dict(rtol=4e-3, atol=4e-3)
    with torch.no_grad():
        torch.testing.assert_close(llama_layer(**given), out, **tolerance)
        mapped = torch.func.vmap(lambda x: llama_layer(**{**given, "x": x}))(given["x"][None])
        torch.testing.assert_close(mapped[0], out, **tolerance)


@pytest.mark.parametrize("name", ["tiny-b1-s4-adamw-fp32", "tiny-b2-s3-ffn-gelu-adamw-fp32"])
def test_a_step_of_training_is_that_of_pytorchs_optimizer(name: str) -> None:
    """Our AdamW and PyTorch's fused one, after the same backward, compared with torch.optim after the reference's."""
    case = SPEC.case(name)
    given = inputs(name)
    peer = next(baseline for baseline in SPEC.baselines if baseline.name == "torch-sdpa").load()
    made = {}
    for key, step in (("ours", SPEC.implementations["auto"]), ("torch", peer), ("reference", SPEC.reference)):
        own = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in given.items()}
        with torch.no_grad():
            made[key] = step(**own)
        if key != "reference":
            assert all(made[key][1 + i] is own[n] for i, n in enumerate(case.mutates))
    for key in ("ours", "torch"):
        for a, b in zip(made[key], made["reference"], strict=True):
            close(a, b)
    layer = {n: t for n, t in given.items() if (n != "dout" and n not in case.mutates) or n in WEIGHTS}
    leaves = {n: torch.nn.Parameter(layer[n].clone()) for n in WEIGHTS if n in layer}
    (llama_layer_reference(**{**layer, **leaves}) * given["dout"]).sum().backward()
    optimizer = torch.optim.AdamW(leaves.values(), **HYPER)
    for n, p in leaves.items():
        states = {k: given[state(n, k)].clone() for k in ("exp_avg", "exp_avg_sq")}
        optimizer.state[p] = {"step": torch.tensor(STEP - 1.0), **states}
    optimizer.step()
    for a, b in zip(made["ours"][1:], leaves.values(), strict=False):
        close(a, b.detach())


@pytest.mark.gpu
def test_a_step_in_16_bits_updates_masters_and_rounds_them() -> None:
    name = "tiny-b2-s100-adamw-bf16"
    given = inputs(name)
    steps = {b.name: b.load() for b in SPEC.baselines if b.name in ("torch-sdpa", "torch-sdpa-compile", "torch-cudnn")}
    steps["ours"] = SPEC.implementations["auto"]
    wide = {n: t.double() if isinstance(t, torch.Tensor) else t for n, t in given.items()}
    with torch.no_grad():
        want = SPEC.reference(**wide)
        for step in steps.values():
            own = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in given.items()}
            step(**own)
            for n in (n for n in WEIGHTS if n in own):
                assert torch.equal(own[n], own[state(n, "master")].to(own[n].dtype))
            for n, expected in zip(SPEC.case(name).mutates, want[1:], strict=True):
                assert relative(own[n].double() - expected, expected) < 1e-2, n


@pytest.mark.parametrize("name", ["tiny-b1-s4-fp32", "tiny-b2-s4-fp8-fp32"])
def test_before_the_feed_forward_all_but_the_residual_is_free(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a gradient. A tensor that lives as long as the feed-forward's two largest ones adds to peak memory."""
    given, made = inputs(name), []

    def keeping(function):
        def call(*args, **kwargs):
            results = function(*args, **kwargs)
            made.extend(weakref.ref(t) for t in ([results] if isinstance(results, torch.Tensor) else results))
            return results

        return call

    def last(function):
        def call(up, *args, **kwargs):
            alive = [t for ref in made if (t := ref()) is not None and t.data_ptr() != given["x"].data_ptr()]
            assert [t.shape for t in alive] == [given["x"].shape]
            return function(up, *args, **kwargs)

        return call

    for function in ("rmsnorm", "rmsnorm_fp8", "self_attention", "quantised"):
        monkeypatch.setattr(layer_module, function, keeping(getattr(layer_module, function)))
    for function in ("swiglu", "swiglu_fp8"):
        monkeypatch.setattr(layer_module, function, last(getattr(layer_module, function)))
    with torch.no_grad():
        SPEC.implementations["auto"](**given)
    assert made


def test_nothing_of_the_callers_is_overwritten() -> None:
    for part in ("layer", "attention", "ffn"):
        given = {**inputs("tiny-b1-s4-fp32"), "part": part}
        before = {name: t.clone() for name, t in given.items() if isinstance(t, torch.Tensor)}
        with torch.no_grad():
            llama_layer(**given)
        assert all(torch.equal(given[name], t) for name, t in before.items())


def weights_of(given: dict) -> dict:
    return {name: fp8_weight(given[name]) for name in MATRICES}


def relative(difference: torch.Tensor, of: torch.Tensor) -> float:
    return (difference.double().square().mean() / of.double().square().mean()).sqrt().item()


@pytest.mark.parametrize("ffn", ["swiglu", "gelu"])
def test_the_rounding_to_8_bits_is_a_few_percent_of_what_the_layer_adds(ffn: str) -> None:
    """An e4m3 value has a relative error of up to 1/16, 2.6 % root mean square. A GEMM has two such operands, and that
    of W_down follows another GEMM."""
    layer = LlamaLayer(LayerConfig(128, 4, 2, 160, ffn=ffn), device=DEVICE)
    with torch.no_grad():
        for name in MATRICES:
            weight = getattr(layer, name)
            weight.normal_().mul_(weight.shape[1] ** -0.5)
        x = torch.randn(2, 24, 128, device=DEVICE)
        exact = layer(x)
        layer.fp8 = True
        assert 0.02 < relative(layer(x) - exact, exact - x) < 0.1


def test_the_parts_make_up_the_layer_in_fp8() -> None:
    given = dict(inputs("tiny-b2-s4-fp8-fp32"))
    scales = {name: given.pop(f"{name}_scale") for name in MATRICES}
    given |= {name: FP8Weight(given[name].view(torch.float8_e4m3fn), scales[name]) for name in MATRICES}
    halfway = llama_layer(**{**given, "part": "attention"})
    # A sum that a GPU's tensor cores round differently may be quantised to the adjacent fp8 value.
    torch.testing.assert_close(
        llama_layer(**{**given, "x": halfway, "part": "ffn"}), llama_layer(**given), rtol=1e-2, atol=5e-2
    )
    assert torch.equal(halfway, llama_layer(**{**given, "part": "attention"}))


def test_a_weight_in_fp8_is_kept_until_its_parameter_changes() -> None:
    layer = LlamaLayer(LayerConfig(32, 2, 1, 48), fp8=True, device=DEVICE)
    x = torch.randn(1, 5, 32, device=DEVICE)
    with torch.no_grad():
        before = layer(x)
        kept = {name: layer.quantised(name) for name in MATRICES}
        assert torch.equal(layer(x), before)
        assert all(layer.quantised(name) is kept[name] for name in MATRICES)
        layer.w_up.mul_(2)
        assert not torch.equal(layer(x), before)
        assert [name for name in MATRICES if layer.quantised(name) is not kept[name]] == ["w_up"]
        layer.w_up.mul_(0.5)
        assert torch.equal(layer(x), before)
        layer.w_o = torch.nn.Parameter(layer.w_o.flip(0))
        assert not torch.equal(layer(x), before)
        layer.w_o.data.copy_(layer.w_o.flip(0))  # does not change the tensor's version
        layer.forget_fp8()
        assert torch.equal(layer(x), before)
        assert torch.equal(copy.deepcopy(layer)(x), before)


def test_weights_in_fp8_of_inference_mode_follow_their_parameters() -> None:
    with torch.inference_mode():
        layer = LlamaLayer(LayerConfig(32, 2, 1, 48), fp8=True, device=DEVICE)
        x = torch.randn(1, 5, 32, device=DEVICE)
        before = layer(x)
        assert torch.equal(layer(x), before)
        layer.w_up.mul_(2)
        assert not torch.equal(layer(x), before)


def test_gradients_in_fp8_are_a_few_percent_off_and_the_result_is_that_without() -> None:
    layer = LlamaLayer(LayerConfig(128, 4, 2, 160), fp8=True, device=DEVICE)
    with torch.no_grad():
        for name in MATRICES:
            weight = getattr(layer, name)
            weight.normal_().mul_(weight.shape[1] ** -0.5)
    x = torch.randn(2, 24, 128, device=DEVICE, requires_grad=True)
    dout = torch.randn_like(x)
    leaves = (x, *layer.parameters())
    out = layer(x)
    found = torch.autograd.grad(out, leaves, dout)
    with torch.no_grad():
        # Quantisation in separate launches gives the same codes, but accumulation in a GPU's tensor cores differs.
        assert relative(layer(x) - out, out - x) < 0.02
    layer.fp8 = False
    exact = torch.autograd.grad(layer(x), leaves, dout)
    for a, b in zip(found, exact, strict=True):
        assert 0.02 < relative(a - b, b) < 0.12


def test_sizes_in_fp8_are_multiples_of_16() -> None:
    given = inputs("tiny-b1-s4-fp32")
    with pytest.raises(ValueError, match="rows and columns of w_qkv must be multiples of 16"):
        llama_layer(**given, fp8=True)
    layer = LlamaLayer(LayerConfig(32, 2, 1, 48), fp8=True, device=DEVICE)
    x = torch.randn(1, 5, 32, device=DEVICE)
    with pytest.raises(ValueError, match=r"fp8_linear: weight must be \[N, K\] with both multiples of 16"):
        fp8_linear(x, layer.w_qkv[:7])
    for name in MATRICES:
        getattr(layer, name).requires_grad_(False)
    assert layer(x).requires_grad  # only the norms require a gradient


def test_rows_that_are_made_up_with_zeros_change_nothing() -> None:
    x, dy = torch.randn(32, 48, device=DEVICE), torch.randn(32, 16, device=DEVICE)
    x[19:], dy[19:] = 0, 0
    weight = torch.randn(16, 48, device=DEVICE, requires_grad=True)
    made = []
    for rows in (19, 32):
        leaf = x[:rows].clone().requires_grad_()
        y = fp8_linear(leaf, weight)
        dx, dw = torch.autograd.grad(y, (leaf, weight), dy[:rows])
        made.append((y[:19], dx[:19], dw))
    for a, b in zip(*made, strict=True):
        close(a, b)


def test_with_weights_in_fp8_a_gradient_is_refused() -> None:
    given = inputs("tiny-b2-s4-fp8-fp32")
    with pytest.raises(RuntimeError, match="x must not require grad"):
        SPEC.implementations["auto"](**{**given, "x": given["x"].requires_grad_()})


def test_what_is_wrong_with_weights_in_fp8_is_said() -> None:
    given = {**inputs("tiny-b1-s4-fp32")}
    wide = LlamaLayer(LayerConfig(32, 2, 1, 48), device=DEVICE)
    x, (cos, sin) = torch.randn(1, 4, 32, device=DEVICE), wide.angles(torch.device(DEVICE), 4)
    good = dict(wide.named_parameters()) | dict(cos=cos, sin=sin, heads=2, kv_heads=1)
    quantised = weights_of(good)
    with torch.no_grad():
        llama_layer(x, **good | quantised)
        for change, error, message in (
            (dict(w_o=good["w_o"]), TypeError, "must all be in fp8 or none, got w_qkv, w_up, w_down"),
            (dict(w_o=quantised["w_o"]._replace(scale=torch.ones(()))), ValueError, r"w_o.scale must be \[32, 1\]"),
            (
                dict(w_o=quantised["w_o"]._replace(scale=torch.ones(32, 1).half())),
                TypeError,
                "w_o.scale must be float32",
            ),
            (dict(w_up=FP8Weight(good["w_up"], quantised["w_up"].scale)), TypeError, "w_up.data must be float8_e4m3fn"),
            (dict(w_o=quantised["w_up"]), ValueError, "w_o must be"),
            (dict(backend="cutlass"), ValueError, "backend must be one of auto, cublas, fp8_matmul"),
        ):
            with pytest.raises(error, match=message):
                llama_layer(x, **good | quantised | change)
        with pytest.raises(RuntimeError, match='backend="cublas" cannot run here'):
            llama_layer(x, **good | quantised, backend="cublas")
    with pytest.raises(ValueError, match="backend must be 'auto' unless the weights are fp8"):
        llama_layer(**given, backend="fp8_matmul")
    with pytest.raises(ValueError, match=r"weight must be \[N, K\] with both multiples of 16, got \[32, 40\]"):
        fp8_weight(torch.empty(32, 40, device=DEVICE))


def test_cublas_multiplies_bf16_on_hopper_and_fp8_matmul_the_rest() -> None:
    assert pick_backend("auto", possible=True) == pick_backend("cublas", possible=False) == "cublas"
    assert pick_backend("auto", possible=False) == pick_backend("fp8_matmul", possible=True) == "fp8_matmul"


@pytest.mark.slow
def test_in_fp8_it_compiles_to_the_same() -> None:
    given = inputs("tiny-b2-s4-fp8-fp32")
    op = SPEC.implementations["auto"]
    assert torch.equal(torch.compile(op, fullgraph=True, backend="aot_eager")(**given), op(**given))


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("ffn", ["swiglu", "gelu"])
def test_both_products_in_fp8_agree_in_bf16(ffn: str) -> None:
    layer = LlamaLayer(LayerConfig(512, 4, 2, 1376, ffn=ffn), fp8=True, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():
        for name in MATRICES:
            weight = getattr(layer, name)
            weight.normal_().mul_(weight.shape[1] ** -0.5)
        x = torch.randn(2, 300, 512, device=DEVICE, dtype=torch.bfloat16)
        cos, sin = layer.angles(x.device, 300)
        given = dict(layer.named_parameters()) | dict(cos=cos, sin=sin, heads=4, kv_heads=2)
        quantised = weights_of(given)
        ours, theirs = (llama_layer(x, **given | quantised, backend=b) for b in ("fp8_matmul", "cublas"))
        exact = llama_layer(x, **given)
    assert torch.equal(theirs, layer(x))
    assert relative(ours.float() - theirs.float(), exact.float() - x.float()) < 0.02
    assert relative(ours.float() - exact.float(), exact.float() - x.float()) < 0.1


@pytest.mark.gpu
def test_in_fp32_it_is_within_1e_4_of_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TF32, compares the layer and its gradients with fp64."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    layer = LlamaLayer(LayerConfig(512, 4, 2, 1376), device=DEVICE)
    x = torch.randn(2, 200, 512, device=DEVICE, requires_grad=True)
    cos, sin = layer.angles(x.device, 200)
    wide = {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}
    x64 = x.detach().double().requires_grad_()
    want = llama_layer_reference(x64, **wide, cos=cos.double(), sin=sin.double(), heads=4, kv_heads=2)
    out, dout = layer(x), torch.randn(2, 200, 512, device=DEVICE)
    names, leaves = zip(*layer.named_parameters(), strict=True)
    ours = torch.autograd.grad(out, (x, *leaves), dout)
    grads = torch.autograd.grad(want, (x64, *(wide[name] for name in names)), dout.double())
    for found, expected in zip((out, *ours), (want, *grads), strict=True):
        assert (found - expected).abs().max() < 1e-4 * max(1.0, expected.abs().max().item())


def test_it_is_found() -> None:
    assert "llama_layer" in registry.names()
