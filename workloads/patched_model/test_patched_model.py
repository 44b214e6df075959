"""Tests that the models are those of transformers, peers do not change other models, and stand-ins detect faults."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from harness import execute, registry
from harness.correctness.stand_in import checked

from . import SIZES, patched_model
from .bench import HOST, SMALL, SPEC, STAND_IN_LAYERS, TINY, make_inputs, sizes_of, stand_in
from .peers import compiled, liger, plain
from .reference import loss_and_norms, of_norms, patched_model_reference
from .step import FAMILIES, loss_of, made, patched, places, views

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY_CASES = [case for case in SPEC.cases if case.name.startswith("tiny")]


@pytest.fixture(autouse=True)
def _has_transformers() -> None:
    pytest.importorskip("transformers")


def inputs_of(case, seed: int = 0) -> dict:
    return make_inputs(case, DEVICE, torch.Generator(DEVICE).manual_seed(seed))


@pytest.mark.parametrize("sizes", [*SIZES.values(), *TINY.values(), HOST], ids=lambda s: f"{s.family}-{s.hidden_size}")
def test_parameters_are_those_of_the_model(sizes) -> None:
    model = made(sizes, torch.device("cpu"))
    assert {name: shape for name, _, shape in places(sizes)[0]} == {
        n: tuple(p.shape) for n, p in model.named_parameters()
    }
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.training
    assert not model.model.rotary_emb.inv_freq.is_meta


def test_the_sizes_are_the_published_ones() -> None:
    """The models have 1.24 and 0.60 billion parameters."""
    counts = {name: sum(torch.Size(shape).numel() for _, _, shape in places(s)[0]) for name, s in SIZES.items()}
    assert counts == {"llama-1b": 1_235_814_400, "qwen3-0.6b": 596_049_920}


@pytest.mark.parametrize("case", TINY_CASES, ids=lambda case: case.name)
def test_the_model_as_it_is_agrees_with_the_reference(case) -> None:
    given = inputs_of(case)
    expected = patched_model_reference(**given)
    sizes = given["sizes"]
    loss, norms_avg = loss_and_norms(given["tokens"], given["weights"], of_norms(given["exp_avg"], sizes), sizes=sizes)
    with torch.no_grad():
        found = patched_model(**given, loss_fn=plain)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(loss, expected[0])
    torch.testing.assert_close(norms_avg, of_norms(expected[2], sizes))
    assert found[1] is given["weights"] and given["step"] == 11


def test_a_library_that_changes_a_module_changes_its_own_copy() -> None:
    pytest.importorskip("liger_kernel")
    from transformers.models.llama import modeling_llama

    before = modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaRMSNorm

    def apply(fused_linear_cross_entropy: bool) -> None:
        from transformers.models.llama import modeling_llama

        modeling_llama.apply_rotary_pos_emb = lambda q, k, cos, sin, unsqueeze_dim=1: (q, k)

    case = TINY_CASES[0]
    losses = {}
    for name, loss_fn in (("changed", liger({"llama": apply})), ("patched", patched), ("plain", plain)):
        with torch.no_grad():
            losses[name] = patched_model(**inputs_of(case), loss_fn=loss_fn)[0]
    assert (modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaRMSNorm) == before
    torch.testing.assert_close(losses["patched"], losses["plain"])
    assert not torch.allclose(losses["changed"], losses["plain"], rtol=1e-6)


@pytest.mark.parametrize("case", TINY_CASES, ids=lambda case: case.name)
def test_the_compiled_model_has_the_attention_of_the_one_that_is_not(case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Causal, without a mask in memory or copies of k and v: otherwise PyTorch could not choose flash attention."""
    seen: list[dict] = []

    def traced(graph: torch.fx.GraphModule, inputs: list):
        seen.extend(node.kwargs for node in graph.graph.nodes if node.target is F.scaled_dot_product_attention)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=traced))
    given = inputs_of(case)
    loss = compiled.__wrapped__(given["sizes"], given["tokens"].device)(
        given["tokens"], views(given["weights"], given["sizes"])
    )
    assert len(seen) == given["sizes"].num_hidden_layers
    assert all(kwargs["is_causal"] and kwargs["attn_mask"] is None and kwargs["enable_gqa"] for kwargs in seen)
    torch.testing.assert_close(loss.float(), SPEC.reference(**given)[0].float(), rtol=1e-4, atol=1e-5)


def test_cost_counts_what_a_model_multiplies() -> None:
    """A plain model computes all pairs of tokens, and also the logits of each row's last token."""
    case = TINY_CASES[0]
    given, sizes, d = inputs_of(case), sizes_of(case), case.dims
    leaves = {name: p.detach().requires_grad_() for name, p in views(given["weights"], sizes).items()}
    model = made(sizes, torch.device(DEVICE))
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        loss_of(model)(given["tokens"], leaves).backward()
    more_logits = 3 * 2 * d["batch"] * sizes.vocab_size * sizes.hidden_size
    pairs = d["batch"] * sizes.num_attention_heads * d["length"]
    attended = 4 * sizes.num_hidden_layers * sizes.head_dim * pairs
    # With the scores in memory no GEMM is repeated: three times the forward's, not three and a half times.
    more_attended = 3 * attended * d["length"] - 3.5 * attended * (d["length"] + 1) / 2
    assert SPEC.cost(case, "train").total_flops + more_logits + more_attended == pytest.approx(
        counter.get_total_flops(),
        rel=1e-4,  # the rotary angles are a GEMM in some versions of transformers
    )


def test_what_stands_in_has_all_sizes_but_the_layers() -> None:
    for case in SPEC.cases:
        found = stand_in(case)
        assert (found is not None) == case.bench
        if found is not None:
            assert found.case.dims == {**case.dims, "num_hidden_layers": STAND_IN_LAYERS}
            assert found.case.params == case.params and not found.case.bench


def by(change):
    """patched_model with another loss, or with changed results: (call, inputs) -> results. Attention is PyTorch's
    formula in fp32, as in the reference: its fused kernels in fp32 have larger errors on a GPU."""

    def run(**given):
        with sdpa_kernel(SDPBackend.MATH):
            return change(partial(patched_model, loss_fn=plain), given)

    return run


def _other_loss(call, given):
    loss, *rest = call(**given)
    return loss * 1.01, *rest


def _a_layer_less(call, given):
    """A fault: the gradient of the first layer's norm is missing."""
    at = next(at for name, at, _ in places(given["sizes"])[0] if name.endswith("layers.0.input_layernorm.weight"))
    before = given["exp_avg"][at].clone()
    found = call(**given)
    found[2][at] = before
    return found


def _not_a_number(call, given):
    found = call(**given)
    found[3][0] = torch.nan
    return found


def _other_tokens(call, given):
    found = call(**given)
    given["tokens"][0, 0] = (given["tokens"][0, 0] + 1) % given["sizes"].vocab_size
    return found


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda call, given: call(**given), ""),
        (_other_loss, "output 0 of the part that is checked of the whole: the relative error is 0.01"),
        (_a_layer_less, "output 1 of the part that is checked of the whole"),
        (_not_a_number, "output 3 has nan or inf"),
        (_other_tokens, "tokens was changed in place"),
    ],
)
def test_on_what_is_timed_faults_are_found(change, reason: str) -> None:
    """Faults that the smaller case cannot show: they need a model of two layers, and the smaller case has one."""
    case = TINY_CASES[0]
    one_layer = dataclasses.replace(case, name="one", dims={**case.dims, "num_hidden_layers": 1})
    declared = stand_in(dataclasses.replace(case, bench=True))
    assert declared is not None
    spec = dataclasses.replace(SPEC, stand_in=lambda case: dataclasses.replace(declared, case=one_layer))
    fn = by(lambda call, given: change(call, given) if given["sizes"].num_hidden_layers == 2 else call(**given))
    verdict = checked(spec, case, "train", inputs_of(case), fn, None)
    assert verdict.ok == (not reason) and reason in verdict.reason, verdict.reason


def test_on_the_smaller_case_faults_are_found() -> None:
    case = dataclasses.replace(TINY_CASES[0], bench=True)
    verdict = checked(SPEC, case, "train", inputs_of(case), by(_a_layer_less), None)
    assert not verdict.ok and verdict.reason.startswith(f"on {case.name}-2-layers: output 2")


def test_a_peer_without_its_package_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    imported = builtins.__import__

    def without(name, *arguments, **options):
        if name.startswith("liger_kernel"):
            raise ImportError(f"No module named {name!r}")
        return imported(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(execute.Unavailable, match="liger is not installed"):
        execute.load(SPEC, "liger", TINY_CASES[0], "train")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert SPEC.skip_reason("patched", TINY_CASES[0], "train") == "transformers is not installed"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda g: dict(tokens=g["tokens"].int()), TypeError, "tokens must be int64"),
        (lambda g: dict(tokens=g["tokens"][:, :1]), ValueError, r"tokens must be \[B, S\] with S > 1"),
        (lambda g: dict(exp_avg=g["exp_avg"].half()), TypeError, "exp_avg must be of weights' dtype"),
        (lambda g: dict(weights=g["weights"][:-1]), ValueError, "weights must be"),
        (lambda g: dict(step=g["step"][None]), ValueError, "step must be a scalar"),
    ],
)
def test_it_says_what_it_cannot_take(change, error, message: str) -> None:
    given = inputs_of(TINY_CASES[0])
    with pytest.raises(error, match=message):
        patched_model(**{**given, **change(given)})


def test_it_is_found() -> None:
    assert registry.package("patched_model") == "workloads.patched_model"
    assert patched_model.__name__ == SPEC.name and {s.family for s in SIZES.values()} == set(FAMILIES)


@pytest.mark.gpu(min_capability=(8, 0))
@pytest.mark.parametrize("name", SMALL)
def test_a_captured_step_is_the_eager_one(name: str) -> None:
    """The patched model in TrainStep, captured in one CUDA graph."""
    from kernels.patch import patch
    from kernels.train import TrainStep

    case = next(case for case in SPEC.cases if case.name.startswith(name))
    given, losses = inputs_of(case), []
    for capture in (True, False):
        model = patch(made(SMALL[name], torch.device(DEVICE)))
        model.load_state_dict(
            {n: p.clone() for n, p in views(given["weights"], SMALL[name]).items()}, strict=False, assign=True
        )
        model.tie_weights()
        for parameter in model.parameters():
            parameter.requires_grad_()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        step = TrainStep(model, optimizer, capture)
        for _ in range(12):
            step(input_ids=given["tokens"], labels=given["tokens"])
        assert step.captured == capture, step.reason
        losses.append(step.losses())
    torch.testing.assert_close(*losses, rtol=1e-2, atol=1e-2)
    assert losses[0][-1] < losses[0][0]
