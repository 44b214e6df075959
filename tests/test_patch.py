"""`ridgeline.patch` on small models of Hugging Face with random weights: what they compute, and what is left alone."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
from kernels.patch import OPS, attention, loss, patch, patched, unpatch
from kernels.train import TrainStep

transformers = pytest.importorskip("transformers")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    pad_token_id=0,
)
MODELS = {
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", dict(sliding_window=5)),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "gemma": ("GemmaForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", dict(sliding_window=5, num_hidden_layers=2)),
    "gemma3": ("Gemma3ForCausalLM", dict(sliding_window=5, layer_types=["sliding_attention"])),
    "phi": ("PhiForCausalLM", {}),
    "phi3": ("Phi3ForCausalLM", dict(partial_rotary_factor=0.5)),
}
LAYERS = {
    "llama": dict(norm=3, rope=1, mlp=1, attention=1, loss=1),
    "mistral": dict(norm=3, rope=1, mlp=1, attention=1, loss=1),
    "qwen2": dict(norm=3, rope=1, mlp=1, attention=1, loss=1),
    "qwen3": dict(norm=5, rope=1, mlp=1, attention=1, loss=1),
    "gemma": dict(norm=3, rope=1, mlp=1, attention=1, loss=1),
    "gemma2": dict(norm=9, rope=2, mlp=2, loss=1),  # it caps its scores
    "gemma3": dict(norm=7, rope=1, mlp=1, attention=1, loss=1),
    "phi": dict(rope=1, mlp=1, attention=1, loss=1),  # its norms have a mean
    "phi3": dict(norm=3, rope=1, mlp=1, attention=1, loss=1),
}
NEARLY_LLAMA = ("gemma", "gemma2", "qwen2")
TOKENS = torch.tensor([[7, 3, 44, 12, 5, 60, 9, 1, 33], [2, 18, 50, 27, 8, 13, 6, 21, 4]], device=DEVICE)


def made(name: str, noise: float = 0.1, **options) -> nn.Module:
    cls, own = MODELS[name]
    model_class = getattr(transformers, cls)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**{**SMALL, **own, **options})).to(DEVICE)
    for parameter in model.parameters():  # as a fresh model has them, norms and biases do nothing
        with torch.no_grad():
            parameter.add_(torch.randn_like(parameter) * noise)
    return model.eval()


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5 * max(1.0, b.abs().max().item()))


def step(model: nn.Module, **inputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss and the gradients of a step of training."""
    model.train()
    model.zero_grad()
    loss = model(input_ids=TOKENS, labels=TOKENS, **inputs).loss
    loss.backward()
    model.eval()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def same_step(a: nn.Module, b: nn.Module, **inputs) -> None:
    (loss, grads), (expected_loss, expected) = step(a, **inputs), step(b, **inputs)
    close(loss, expected_loss)
    assert grads.keys() == expected.keys()
    for name, grad in expected.items():
        similar = torch.nn.functional.cosine_similarity(grads[name].flatten(), grad.flatten(), dim=0)
        assert similar > 0.9999 or grad.norm() < 1e-6, name


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in NEARLY_LLAMA else name for name in MODELS]
)
def test_a_patched_model_computes_the_same(name: str) -> None:
    model, reference = made(name), made(name)
    assert patch(model) is model and patched(model) == LAYERS[name]
    with torch.no_grad():
        close(model(TOKENS).logits, reference(TOKENS).logits)
    same_step(model, reference)
    assert not patched(reference)
    unpatch(model)
    assert not patched(model) and type(model) is type(reference)
    assert [type(m) for m in model.modules()] == [type(m) for m in reference.modules()]
    assert model.config._attn_implementation == reference.config._attn_implementation
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, reference(TOKENS).logits)


@pytest.mark.parametrize("op", OPS)
def test_each_op_alone_and_all_but_it(op: str) -> None:
    model, reference = made("llama"), made("llama")
    others = [other for other in OPS if other != op]
    for left in ((op,), others):
        assert set(patched(patch(model, except_=left))) == set(OPS) - set(left)
        same_step(model, reference)
    assert not patched(patch(model, except_=OPS))


def test_padding_goes_to_sdpa_and_is_right() -> None:
    model, reference = patch(made("mistral")), made("mistral")
    mask = torch.ones_like(TOKENS)
    mask[0, :4] = 0
    with torch.no_grad():
        got, expected = (m(TOKENS, attention_mask=mask).logits for m in (model, reference))
    close(got[mask.bool()], expected[mask.bool()])
    with torch.no_grad():
        close(model(TOKENS, attention_mask=torch.ones_like(mask)).logits, reference(TOKENS).logits)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_dropout_goes_to_sdpa_with_the_window(name: str) -> None:
    model, reference = (made(name, attention_dropout=0.5).train() for _ in range(2))
    patch(model)
    found = []
    for each in (model, reference):
        torch.manual_seed(1)
        found.append(each(TOKENS).logits)
    close(*found)


@pytest.mark.parametrize("use_cache", [True, False])
def test_packed_sequences(use_cache: bool) -> None:
    """Which transformers finds by their positions where there is no cache."""
    model, reference = patch(made("llama")), made("llama")
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]], device=DEVICE).expand(2, 9)
    given = dict(position_ids=positions, use_cache=use_cache)
    with torch.no_grad():
        packed = model(TOKENS, **given).logits
        close(packed, reference(TOKENS, **given).logits)
        close(packed[:, :4], model(TOKENS[:, :4]).logits)
        if not use_cache:
            close(packed[:, 4:7], model(TOKENS[:, 4:7]).logits)


@pytest.mark.parametrize("use_cache", [None, True, False])
def test_packed_sequences_with_labels(use_cache: bool | None) -> None:
    """A cache, which the model makes by default, keeps transformers from looking for them, and the loss is the same."""
    model, reference = patch(made("llama")), made("llama")
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]], device=DEVICE).expand(2, 9)
    same_step(model, reference, position_ids=positions, use_cache=use_cache)


def test_the_memory_for_logits_is_that_of_each_model(monkeypatch) -> None:
    asked, original = [], loss.linear_cross_entropy

    def spy(*tensors: torch.Tensor, scratch_bytes: int | None, **options) -> torch.Tensor:
        asked.append(scratch_bytes)
        return original(*tensors, scratch_bytes=scratch_bytes, **options)

    monkeypatch.setattr(loss, "linear_cross_entropy", spy)
    small, roomy = patch(made("llama"), loss_scratch_bytes=0), patch(made("llama"), loss_scratch_bytes=1 << 20)
    for model in (small, roomy, patch(made("llama")), copy.deepcopy(roomy)):
        same_step(model, made("llama"))
    same_step(patch(roomy), made("llama"))  # patched again, in place
    assert asked == [0, 1 << 20, None, 1 << 20, None]


class NoWait(TorchDispatchMode):
    """Raises where Python asks for the value of a tensor, for which it would wait for a GPU."""

    WAITS = frozenset({torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.masked_select})

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in self.WAITS:
            raise AssertionError(f"{func} waits for the GPU")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("use_cache", [None, False])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in (*NEARLY_LLAMA, "mistral", "phi") else name
        for name in MODELS
        if name != "gemma2"  # its attention is transformers'
    ],
)
def test_a_step_of_training_waits_for_no_value(name: str, use_cache: bool | None, monkeypatch) -> None:
    """And its attention is ours: the mask that a mode such as this one or a capture makes transformers take is none."""
    monkeypatch.setattr(attention, "_by_sdpa", None)
    model = patch(made(name)).train()
    with NoWait():
        model(input_ids=TOKENS, labels=TOKENS, use_cache=use_cache).loss.backward()
        with pytest.raises(AssertionError, match="waits"):
            bool(TOKENS.sum() > 0)


def test_training_with_labels_makes_no_cache_unless_it_is_asked_for() -> None:
    model, reference = patch(made("mistral")).train(), made("mistral").train()
    assert model(TOKENS, labels=TOKENS).past_key_values is None
    kept = model(TOKENS, labels=TOKENS, use_cache=True).past_key_values
    assert kept.get_seq_length() == reference(TOKENS, labels=TOKENS).past_key_values.get_seq_length()
    assert model.eval()(TOKENS, labels=TOKENS).past_key_values is not None


@pytest.mark.parametrize(
    ("name", "options", "asked"),
    [
        ("llama", {}, dict(is_causal=False)),
        ("gemma3", dict(use_bidirectional_attention=True), {}),
        ("mistral", dict(is_causal=False), {}),  # with a window to both sides
        ("mistral", {}, dict(is_causal=False)),  # whose window is causal nevertheless
    ],
    ids=["argument", "config", "window", "window-argument"],
)
def test_attention_to_both_sides_stays(name: str, options: dict, asked: dict) -> None:
    model, reference = patch(made(name, **options)), made(name, **options)
    with torch.no_grad():
        close(model(TOKENS, use_cache=False, **asked).logits, reference(TOKENS, use_cache=False, **asked).logits)


def test_another_attention_may_be_chosen_afterwards() -> None:
    model, reference = patch(made("qwen3")), made("qwen3")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        close(model(TOKENS).logits, reference(TOKENS).logits)


def test_an_attention_that_was_chosen_afterwards_is_neither_counted_nor_undone() -> None:
    model = patch(made("llama"))
    model.set_attn_implementation("eager")
    assert "attention" not in patched(model)
    assert unpatch(model).config._attn_implementation == "eager"


def test_weights_of_attention_that_are_asked_for_are_warned_of(monkeypatch) -> None:
    """By SDPA, as without the patch."""
    model, asked = patch(made("llama")), []
    by_sdpa = attention._by_sdpa
    monkeypatch.setattr(attention, "_by_sdpa", lambda *args, **kwargs: asked.append(kwargs) or by_sdpa(*args, **kwargs))
    with torch.no_grad():
        close(model(TOKENS, output_attentions=True).logits, made("llama")(TOKENS).logits)
    assert [kwargs["output_attentions"] for kwargs in asked] == [True]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_generation(name: str, cache: str) -> None:
    model, reference = patch(made(name)), made(name)
    options = dict(
        max_new_tokens=4, do_sample=False, cache_implementation=cache, eos_token_id=None, disable_compile=True
    )
    for tokens in (TOKENS, TOKENS[:1, :2]):
        given = dict(input_ids=tokens, attention_mask=torch.ones_like(tokens))
        assert torch.equal(model.generate(**given, **options), reference.generate(**given, **options))


@pytest.mark.parametrize("head_dim", [8, pytest.param(264, id="by-sdpa")])
def test_a_query_after_a_cache_longer_than_the_window(head_dim: int) -> None:
    """A cache made without a configuration keeps keys that the window hides."""
    model, reference = (made("mistral", head_dim=head_dim) for _ in range(2))
    found = []
    for each in (patch(model), reference):
        cache = transformers.DynamicCache()
        with torch.no_grad():
            each(TOKENS[:, :8], past_key_values=cache)
            found.append(each(TOKENS[:, 8:], past_key_values=cache).logits)
    close(*found)


def test_a_cap_that_only_the_layers_have_is_not_left_out() -> None:
    model = made("gemma2")
    model.config.attn_logit_softcapping = None  # too late for the layers
    assert patched(patch(model))["attention"] == 2
    with pytest.raises(ValueError, match="does not support `softcap`"):
        model(TOKENS)


def test_the_loss_of_several_micro_batches_of_capped_logits_and_of_shifted_labels() -> None:
    model, reference = patch(made("gemma2")), made("gemma2")
    same_step(model, reference, num_items_in_batch=torch.tensor(11, device=DEVICE))
    labels = TOKENS.roll(-1, 1)
    labels[:, -3:] = -100
    same_step(model, reference, shift_labels=labels)
    same_step(model, reference, shift_labels=labels.flatten())


def test_logits_are_there_where_somebody_wants_them() -> None:
    model = patch(made("llama"))
    assert model(TOKENS, labels=TOKENS).logits is not None
    model.train()
    assert model(TOKENS, labels=TOKENS).logits is None and model(TOKENS).logits is not None
    loss, *_ = model(TOKENS, labels=TOKENS, return_dict=False)
    assert loss.dim() == 0
    model.loss_function = lambda logits, labels, **_: logits.sum()
    assert model(TOKENS, labels=TOKENS).logits is not None


def half_as_much(head: nn.Linear) -> None:
    head.forward = lambda x: nn.functional.linear(x * 0.5, head.weight, head.bias)


def pruned(head: nn.Linear) -> None:
    prune.l1_unstructured(head, "weight", 0.5)  # a hook before each call computes the weight


def with_another_gradient(head: nn.Linear) -> None:
    head.register_full_backward_hook(lambda module, grads, _: (grads[0].flip(-1),))


@pytest.mark.parametrize("change", [half_as_much, pruned, with_another_gradient])
def test_a_head_whose_call_does_more_is_called(change) -> None:
    model, reference = patch(made("llama")), made("llama")
    for each in (model, reference):
        change(each.lm_head)
    same_step(model, reference)
    same_step(model, reference)


class LowRank(nn.Module):
    """A LoRA layer as PEFT's: the linear layer with a product of two small matrices beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.a = nn.Parameter(torch.randn(2, base.in_features, device=DEVICE) * 0.3)
        self.b = nn.Parameter(torch.randn(base.out_features, 2, device=DEVICE) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + x @ self.a.t() @ self.b.t()


def test_lora_layers_are_left_alone() -> None:
    model = made("llama")
    for layer in model.model.layers:
        layer.mlp.gate_proj, layer.self_attn.q_proj = LowRank(layer.mlp.gate_proj), LowRank(layer.self_attn.q_proj)
    model.lm_head = LowRank(model.lm_head)
    reference = copy.deepcopy(model)
    wrapped = nn.ModuleDict({"base_model": model})
    patch(wrapped)
    assert patched(wrapped) == LAYERS["llama"]
    same_step(model, reference)
    assert model.train()(TOKENS, labels=TOKENS).logits is not None  # its head is more than a linear layer


class Wrapper(nn.Module):
    """Has the attributes of the model inside, as PEFT's and torch.compile's wrappers have."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model"), name)


@pytest.mark.parametrize("first", ["patch", "wrap"])
def test_a_wrapper_with_the_attributes_of_the_model(first: str) -> None:
    model = made("llama")
    if first == "patch":
        wrapped = Wrapper(Wrapper(patch(model)))
    else:
        wrapped = patch(Wrapper(Wrapper(model)))
    assert patched(wrapped) == LAYERS["llama"]
    assert not patched(unpatch(wrapped)) and model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_gradient_checkpointing(name: str) -> None:
    model, reference = patch(made(name)), made(name)
    model.gradient_checkpointing_enable()
    same_step(model, reference, use_cache=False)


@pytest.mark.parametrize("left", [(), "rope", "norm"])
def test_autocast(left: str | tuple) -> None:
    """Norms and rotations of transformers, in fp32, give q and k another dtype than v's."""
    model, reference = patch(made("qwen3"), except_=left), made("qwen3")
    found = []
    for each in (model.train(), reference.train()):
        with torch.autocast(DEVICE, dtype=torch.float16):
            loss = each(TOKENS, labels=TOKENS).loss
        loss.backward()
        found.append([loss.detach(), each.model.layers[0].self_attn.q_proj.weight.grad])
    torch.testing.assert_close(found[0], found[1], rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_fullgraph_compile(name: str, backend: str, monkeypatch) -> None:
    """Llama, and Qwen 3, which has norms of q and k. Attention is ours, without a mask."""
    monkeypatch.setattr(attention, "_by_sdpa", None)
    torch.compiler.reset()
    model, reference = patch(made(name)), made(name)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        close(compiled(TOKENS, use_cache=False).logits, reference(TOKENS).logits)
    model.train()
    loss = compiled(TOKENS, labels=TOKENS, use_cache=False).loss
    loss.backward()
    expected_loss, expected = step(reference)
    close(loss.detach(), expected_loss)
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for parameter, grad in expected.items():
        similar = torch.nn.functional.cosine_similarity(found[parameter].flatten(), grad.flatten(), dim=0)
        assert similar > 0.9999 or grad.norm() < 1e-6, parameter


def test_copies_and_what_is_saved(tmp_path) -> None:
    model, reference = patch(made("qwen3")), made("qwen3")
    twin = copy.deepcopy(model)
    assert patched(twin) == patched(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
        close(model(TOKENS).logits, reference(TOKENS).logits)
    assert model.state_dict().keys() == reference.state_dict().keys()
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).to(DEVICE)
    with torch.no_grad():
        close(again(TOKENS).logits, reference(TOKENS).logits)


def test_it_is_called_as_a_function_of_the_package() -> None:
    model = made("llama")
    kernels.patch(model, except_="loss")
    assert patched(model).keys() == {"norm", "rope", "mlp", "attention"}
    assert not patched(kernels.unpatch(model))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        kernels.nothing  # noqa: B018


def test_it_says_what_it_cannot_take() -> None:
    with pytest.raises(ValueError, match="except_ must name ops among norm, rope, mlp, attention, loss, got 'norms'"):
        patch(made("llama"), except_=["norms"])
    with pytest.raises(ValueError, match="a layer that patch can replace, got Linear"):
        patch(nn.Linear(2, 2))
    unpatch(nn.Linear(2, 2))


def test_an_activation_that_no_kernel_has_stays() -> None:
    model, reference = (made("llama", hidden_act="quick_gelu") for _ in range(2))
    assert "mlp" not in patched(patch(model))
    same_step(model, reference)


@pytest.mark.parametrize("how", ["config", "layer"])
def test_the_activation_is_that_of_the_layer(how: str) -> None:
    """Not of a second name in Gemma's configuration, nor the one that was replaced in the layer."""
    name, options = (
        ("gemma", dict(hidden_act="relu", hidden_activation="gelu_pytorch_tanh")) if how == "config" else ("llama", {})
    )
    models = [made(name, **options) for _ in range(2)]
    if how == "layer":
        for each in models:
            each.model.layers[0].mlp.act_fn = nn.ReLU()
    assert patched(patch(models[0]))["mlp"] == 1
    same_step(*models)


@pytest.mark.parametrize("change", ["hook", "forward", "exchange"])
@pytest.mark.parametrize(("name", "layer"), [("llama", "act_fn"), ("phi", "activation_fn"), ("phi3", "activation_fn")])
def test_an_activation_that_is_changed_after_the_patch(name: str, layer: str, change: str) -> None:
    model, reference = patch(made(name)), made(name)
    for each in (model, reference):
        mlp = each.model.layers[0].mlp
        activation = getattr(mlp, layer)
        if change == "hook":
            activation.register_forward_hook(lambda module, args, output: output * 0.5)
        elif change == "forward":
            activation.forward = torch.sin
        else:
            setattr(mlp, layer, nn.Softplus())
    same_step(model, reference)


class Twice(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def test_a_class_derived_from_a_patched_one_is_left_alone() -> None:
    model, reference = patch(made("llama")), made("llama")
    for each in (model, reference):
        parametrize.register_parametrization(each.model.norm, "weight", Twice())
    assert patched(unpatch(model)) == dict(norm=1)
    with torch.no_grad():
        close(model(TOKENS).logits, reference(TOKENS).logits)
    parametrize.remove_parametrizations(model.model.norm, "weight")
    assert not patched(unpatch(model))


def test_models_that_share_a_configuration() -> None:
    first = made("llama")
    second = type(first)(first.config)
    for each in (first, second):
        patch(each)
    for each in (first, second):
        unpatch(each)
    assert first.config._attn_implementation == "sdpa" and not patched(first) and not patched(second)


@pytest.mark.slow
def test_500_steps_of_training_have_the_same_loss() -> None:
    model, reference = patch(made("llama")), made("llama")
    curves = []
    for each in (model, reference):
        optimizer = torch.optim.AdamW(each.train().parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(3)
        losses = []
        for _ in range(500):
            start = torch.randint(0, 61, (4, 1), generator=generator)
            tokens = ((start + 7 * torch.arange(8)) % 61).to(DEVICE)
            loss = each(tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        curves.append(torch.tensor(losses))
    ours, theirs = curves
    assert theirs[-1] < theirs[0] / 2
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.01)


WIDE = dict(
    vocab_size=1000,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    max_position_embeddings=512,
)


@pytest.mark.gpu(min_capability=(8, 0))
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_in_bf16_it_is_as_near_to_fp32_as_the_model_as_it_is(name: str) -> None:
    """At most twice the error of PyTorch's model in bf16, of the logits and of each parameter's gradient. Both are held
    against the same weights in fp32, so that the error is the arithmetic's alone.

    There is no fixed bound on the two models' distance from each other: it has the errors of both, which are about 1 %
    of a gradient with these weights, and 8 % of Llama's with four times their noise, where scores are large.
    """
    own = dict(layer_types=["sliding_attention", "full_attention"]) if name == "gemma3" else {}
    # Products of rows four times as long, and as large as those of the small models.
    plain = made(name, noise=0.1 * (SMALL["hidden_size"] / WIDE["hidden_size"]) ** 0.5, **WIDE, **own).bfloat16()
    exact, ours = copy.deepcopy(plain).float(), patch(copy.deepcopy(plain))
    tokens = torch.randint(0, 1000, (4, 257), generator=torch.Generator().manual_seed(5)).to(DEVICE)
    with torch.no_grad():
        expected = exact(tokens).logits
        errors = [(each(tokens).logits.float() - expected).abs() for each in (plain, ours)]
    rounding = 2**-8 * expected.abs().max()
    assert errors[1].max() <= 2 * errors[0].max() + rounding
    assert errors[1].square().mean() <= 4 * errors[0].square().mean() + rounding**2
    for each in (exact, plain, ours):
        each.train()(tokens, labels=tokens).loss.backward()
    of_plain, of_ours = (dict(each.named_parameters()) for each in (plain, ours))
    for parameter, value in exact.named_parameters():
        ours_off, plain_off = ((p[parameter].grad.float() - value.grad).norm() for p in (of_ours, of_plain))
        assert plain_off < 0.05 * value.grad.norm(), parameter  # else twice as much says nothing
        assert ours_off <= 2 * plain_off, parameter


@pytest.mark.gpu(min_capability=(8, 0))
@pytest.mark.parametrize("use_cache", [None, False])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gemma3", "phi3"])
def test_a_step_of_training_is_one_cuda_graph(name: str, use_cache: bool | None, monkeypatch) -> None:
    """With our attention in it, and the losses of the same steps without a graph."""
    monkeypatch.setattr(attention, "_by_sdpa", None)
    losses = []
    for capture in (True, False):
        model = patch(made(name)).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        step = TrainStep(model, optimizer, capture)
        for _ in range(8):
            step(input_ids=TOKENS, labels=TOKENS, use_cache=use_cache)
        assert step.captured == capture, step.reason
        losses.append(step.losses())
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-4)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.slow
@pytest.mark.gpu(min_capability=(8, 0))
def test_500_steps_in_bf16_have_the_same_loss_curve() -> None:
    """The curves differ as rounding does: means over 50 steps are compared."""
    exact, curves = made("llama", **WIDE), []
    for change in (patch, lambda model: model):
        model = change(copy.deepcopy(exact)).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        generator, losses = torch.Generator().manual_seed(3), []
        for _ in range(500):
            start = torch.randint(0, 1000, (8, 1), generator=generator)
            tokens = ((start + 7 * torch.arange(128)) % 1000).to(DEVICE)
            half = {name: p.bfloat16() for name, p in model.named_parameters()}
            given = {"input_ids": tokens, "labels": tokens}
            loss = torch.func.functional_call(model, half, (), given).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        curves.append(torch.stack(losses).float().view(10, 50).mean(1).cpu())
    assert curves[1][-1] < curves[1][0] / 2
    torch.testing.assert_close(*curves, rtol=0.05, atol=0.02)
