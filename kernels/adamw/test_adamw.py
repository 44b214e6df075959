"""Tests specific to the function adamw; `tests/test_specs.py` checks the rest from SPEC."""

from __future__ import annotations

import copy
import gc
import itertools
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from triton.runtime import interpreter

from . import PointerTables, adamw, configs, op, tables
from .reference import adamw_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def assert_close(ours, theirs, **tolerance) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, **tolerance)


def state_of(size: int, count: int = 1, dtype=torch.float32) -> dict[str, list[torch.Tensor]]:
    return dict(
        params=[torch.randn(size, device=DEVICE).to(dtype) for _ in range(count)],
        grads=[torch.randn(size, device=DEVICE).to(dtype) for _ in range(count)],
        exp_avgs=[torch.randn(size, device=DEVICE) for _ in range(count)],
        exp_avg_sqs=[torch.rand(size, device=DEVICE) for _ in range(count)],
    )


def rounded(value: float, size: int = 4096, **options) -> torch.Tensor:
    """`size` bf16 parameters of value 1 after a step whose fp32 result is `value`."""
    params = [torch.ones(size, device=DEVICE, dtype=torch.bfloat16)]
    zeros = [torch.zeros(size, device=DEVICE) for _ in range(2)]
    decay = dict(lr=1.0, weight_decay=1.0 - value)  # no gradient: weight decay alone
    adamw(params, [torch.zeros_like(params[0])], zeros[:1], zeros[1:], **{**dict(step=1, **decay), **options})
    return params[0].float()


# Stochastic rounding.


def test_stochastic_rounding_is_right_in_the_mean():
    """The bf16 values just below 1 are 2^-8 apart."""
    for part in (0.1, 0.5, 0.9):
        result = rounded(1 - part * 2**-8, 1 << 16, stochastic_rounding=True)
        assert set(result.unique().tolist()) == {1.0, 1 - 2**-8}
        share = float((result != 1).float().mean())
        assert share == pytest.approx(part, abs=5 * (0.25 / (1 << 16)) ** 0.5)


def test_stochastic_rounding_leaves_what_is_exact_and_what_is_no_number():
    assert torch.equal(rounded(1 - 2**-8, stochastic_rounding=True), torch.full((4096,), 1 - 2**-8, device=DEVICE))
    state = state_of(4, dtype=torch.bfloat16)
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0], device=DEVICE)
    # The nan whose bits are all ones, which adding to the bits could turn into a number.
    state["params"][0].view(torch.int16).copy_(
        torch.where(special.isnan(), 0x7FFF, special.to(torch.bfloat16).view(torch.int16))
    )
    state["grads"][0].zero_()
    state["exp_avgs"][0].zero_()
    adamw(**state, step=1, lr=0.0, weight_decay=0.0, stochastic_rounding=True)
    assert torch.equal(state["params"][0].float().nan_to_num(7.0, 8.0, 9.0), special.nan_to_num(7.0, 8.0, 9.0))


def test_stochastic_rounding_depends_on_seed_step_place_and_nothing_else(monkeypatch):
    options = dict(size=5000, stochastic_rounding=True)
    first = rounded(1 - 2**-9, **options)
    assert torch.equal(first, rounded(1 - 2**-9, **options))
    assert not torch.equal(first, rounded(1 - 2**-9, seed=1, **options))
    assert not torch.equal(first, rounded(1 - 2**-9, step=2, **options))
    assert not torch.equal(first[:2048], first[2048:4096])
    one = torch.ones(5000, device=DEVICE, dtype=torch.bfloat16)
    zeros = [torch.zeros(5000, device=DEVICE) for _ in range(4)]
    pair = [one.clone(), one.clone()]
    grads = [torch.zeros_like(p) for p in pair]
    adamw(pair, grads, zeros[:2], zeros[2:], 1, lr=1.0, weight_decay=2**-9, stochastic_rounding=True)
    assert torch.equal(pair[0].float(), first)
    assert not torch.equal(pair[0], pair[1])
    # Nor do they depend on the block size.
    monkeypatch.setattr(configs, "pick_config", lambda *_: configs.Config(2048, 4, ""))
    assert torch.equal(first, rounded(1 - 2**-9, **options))


# Memory layouts.


@pytest.mark.parametrize("which", ["grads", "exp_avgs", "params"])
def test_any_strides(which):
    shape = (6, 10)
    state = {k: [v[0].view(shape)] for k, v in state_of(60).items()}
    state[which] = [torch.randn(20, 12, device=DEVICE)[::2, ::2].t()]
    expected = adamw_reference(**state, step=3, lr=0.1)
    adamw(**state, step=3, lr=0.1)
    for name, values in zip(("params", "exp_avgs", "exp_avg_sqs"), expected, strict=False):
        assert_close(state[name], values)


def test_a_dimension_of_one_element_may_have_any_stride():
    """Such a stride does not make a tensor overlap itself."""
    state = {k: [v[0].as_strided((1, 5000), (0, 1))] for k, v in state_of(5000).items()}
    expected = adamw_reference(**state, step=3, lr=0.1)
    adamw(**state, step=3, lr=0.1)
    assert_close(state["params"], expected[0])


def test_a_call_on_plain_tensors_goes_past_torch_library(monkeypatch):
    """The op of torch.library would cost more host time than the launch."""
    monkeypatch.setattr(op, "_adamw_op", None)
    state = state_of(5000)
    expected = adamw_reference(**state, step=3, lr=0.1)
    adamw(**state, step=3, lr=0.1)
    assert_close(state["params"], expected[0])


def test_addresses_off_the_alignment_give_the_same():
    base = state_of(5001)
    aligned = {k: [v[0][:5000].clone()] for k, v in base.items()}
    shifted = {k: [torch.cat([v[0][:1], v[0][:5000]])[1:]] for k, v in base.items()}
    for state in (aligned, shifted):
        adamw(**state, step=2, lr=0.1)
    for name in ("params", "exp_avgs", "exp_avg_sqs"):
        assert_close(aligned[name], shifted[name], rtol=1e-6, atol=1e-7)


def test_nothing_behind_the_end_is_written():
    """A block of fewer elements than a vector is written by single elements."""
    for size in range(1, 10):
        state = {name: [tensors[0][:size]] for name, tensors in state_of(16).items()}
        behind = {name: tensors[0]._base[size:].clone() for name, tensors in state.items()}
        expected = adamw_reference(**state, step=3, lr=0.1)
        adamw(**state, step=3, lr=0.1)
        for name, values in zip(("params", "exp_avgs", "exp_avg_sqs"), expected, strict=False):
            assert_close(state[name], values)
        for name, tensors in state.items():
            assert torch.equal(tensors[0]._base[size:], behind[name])


@pytest.mark.skipif(torch.cuda.is_available(), reason="only the interpreter knows the number that a hint is about")
def test_what_the_compiler_is_told_of_alignment_is_true(monkeypatch):
    """A wrong hint would lead to vector accesses past the end. An aligned block has vector accesses, so hints exist."""
    told = []

    def noted(handle, name, values):
        told.append(name)
        assert not (handle.data % values[0]).any()

    monkeypatch.setattr(interpreter.TensorHandle, "set_attr", noted)
    for size, start, aligned in ((1024, 0, True), (8, 0, True), (4, 0, False), (1, 0, False), (8, 1, False)):
        told.clear()
        adamw(**{name: [tensors[0][start:]] for name, tensors in state_of(size + start).items()}, step=1, lr=0.1)
        assert bool(told) == aligned


# Launches and tables.


def test_a_call_without_tables_leaves_nothing(monkeypatch):
    """Not even objects in reference cycles, which only the garbage collector would free, at an unknown time."""
    made = []
    build = PointerTables.build

    def noted(self, *arguments):
        table = build(self, *arguments)
        made.append(weakref.ref(table))
        return table

    monkeypatch.setattr(PointerTables, "build", noted)
    gc.disable()
    try:
        adamw(**state_of(5), step=1, lr=0.1)
        assert [table() for table in made] == [None]
    finally:
        gc.enable()


def test_a_call_without_tables_takes_nobody_elses(monkeypatch):
    """Nor the tables of the first handle."""
    monkeypatch.setattr(tables, "_by_handle", weakref.WeakValueDictionary())
    monkeypatch.setattr(tables, "_handles", itertools.count(1))
    others = [PointerTables() for _ in range(3)]
    adamw(**state_of(5), step=1, lr=0.1)
    assert [(len(kept), kept.built) for kept in others] == [(0, 0)] * 3


def test_a_table_keeps_what_each_of_its_copies_reads(monkeypatch):
    """Uploads are emulated as during the capture of a CUDA graph, whose replays copy from the host again."""
    sources, made = [], []
    build = PointerTables.build

    def upload(host, device):
        sources.append(host)
        return host.to(device, copy=True), host

    def noted(self, *arguments):
        made.append(build(self, *arguments))
        return made[-1]

    monkeypatch.setattr(tables, "_upload", upload)
    monkeypatch.setattr(PointerTables, "build", noted)
    adamw(**state_of(5), step=1, lr=0.1)
    ((rows, cta_rows),) = (table.pinned for table in made)
    assert rows is sources[0] and cta_rows is sources[1]


def test_a_table_that_a_graph_reads_is_kept(monkeypatch):
    """With mocks of a capture on the first GPU."""
    tables, device = PointerTables(), SimpleNamespace(type="cuda", index=0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    table = SimpleNamespace(rows=SimpleNamespace(device=device))
    tables.use(table)
    assert list(tables._in_graphs.values()) == [table]


def test_no_more_tables_are_kept_than_the_capacity():
    tables = PointerTables(capacity=2)
    states = [state_of(16) for _ in range(4)]
    for state in states:
        adamw(**state, step=1, lr=0.1, tables=tables)
    assert (len(tables), tables.built) == (2, 4)
    adamw(**states[-1], step=1, lr=0.1, tables=tables)
    assert tables.built == 4


@pytest.mark.parametrize("step", ["tensor", "list"])
def test_the_step_may_lie_on_the_device(step):
    state, other = state_of(100, count=2), None
    other = copy.deepcopy(state)
    steps = [torch.tensor(float(n), device=DEVICE) for n in ((3, 3) if step == "tensor" else (3, 7))]
    adamw(**state, step=steps[0] if step == "tensor" else steps, lr=torch.tensor(0.1, device=DEVICE))
    for index, number in enumerate(steps):
        adamw(**{k: v[index : index + 1] for k, v in other.items()}, step=int(number), lr=0.1)
    for name in ("params", "exp_avgs", "exp_avg_sqs"):
        assert_close(state[name], other[name], rtol=1e-6, atol=1e-7)


def test_nothing_to_do_is_no_error():
    adamw([], [], [], [], 1, lr=0.1)
    adamw(**state_of(0), step=1, lr=0.1)


@pytest.mark.parametrize("beta", [0.0, 0.9, 0.999, 0.9999999])
@pytest.mark.parametrize("step", [1, 2, 7, 100, 10_000, 5_000_000])
def test_the_bias_correction_is_exact_to_fp32(beta, step):
    """With m = v = 1 and no gradient the parameter changes by the bias corrections alone."""
    one = torch.ones(1, device=DEVICE)
    params, v = [torch.zeros(1, device=DEVICE)], [one.clone()]
    grads, m = [torch.zeros(1, device=DEVICE)], [one / 0.9 * 0.9]
    adamw(params, grads, m, v, step, lr=1.0, betas=(0.5, beta) if beta else (0.5, 0.0), eps=1.0, weight_decay=0.0)
    bias1, bias2 = 1 - 0.5**step, 1 - beta**step
    expected = -0.5 / bias1 / ((beta / bias2) ** 0.5 + 1)
    assert float(params[0]) == pytest.approx(expected, rel=5e-7)


def test_with_fp32_masters_fp16_may_be_asked_to_round_stochastically():
    """A copy of a master is rounded to nearest, whatever is asked for."""
    given = state_of(8)
    master = torch.randn(8, device=DEVICE)
    given |= {"params": [master.half()], "grads": [g.half() for g in given["grads"]], "master_params": [master]}
    adamw(**given, step=1, lr=0.1, stochastic_rounding=True)
    assert torch.equal(given["params"][0], master.half())


# Refusals.


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (dict(grads=[]), ValueError, "grads must have as many"),
        (dict(params=torch.zeros(3)), TypeError, "params must be a list"),
        (dict(grads=lambda t: t.double()), TypeError, r"grads\[0\] must be"),
        (dict(exp_avgs=lambda t: t.half()), TypeError, r"exp_avgs\[0\] must be"),
        (dict(exp_avg_sqs=lambda t: t[:-1]), ValueError, r"exp_avg_sqs\[0\] must have"),
        (dict(grads=lambda t: t.to("meta")), ValueError, r"grads\[0\] must be on"),
        (dict(exp_avgs=lambda t: t[:1].expand(8)), ValueError, r"exp_avgs\[0\] must not overlap"),
        (dict(exp_avgs=lambda t: t[:1].expand(2)), ValueError, r"exp_avgs\[0\] must not overlap"),
        (dict(master_params=[torch.zeros(8)]), ValueError, "entry of master_params must be None"),
        (dict(step=0), ValueError, "step must be at least 1"),
        (dict(step="1"), TypeError, "step must be"),
        (dict(step=torch.tensor(1)), TypeError, "step must be a tensor of float32"),
        (dict(lr=-1.0), ValueError, "lr must be"),
        (dict(lr=torch.ones(2)), ValueError, "lr must have one"),
        (dict(betas=(0.9, 1.0)), ValueError, r"betas\[1\]"),
        (dict(eps=float("nan")), ValueError, "eps must be"),
        (dict(weight_decay=None), TypeError, "weight_decay must be"),
        (dict(seed=-1), ValueError, "seed must be"),
        (dict(seed=True), ValueError, "seed must be"),
        (dict(found_inf=torch.zeros((), dtype=torch.int32)), TypeError, "found_inf must be"),
        (dict(tables={}), TypeError, "tables must be"),
    ],
)
def test_bad_input_raises_an_error_that_names_it(change, error, words):
    given = {**state_of(8), "step": 1, "lr": 0.1}
    for name, value in change.items():
        given[name] = [value(t) for t in given[name]] if callable(value) else value
    with pytest.raises(error, match=words):
        adamw(**given)


@pytest.mark.parametrize("name", ["params", "grads", "exp_avgs", "exp_avg_sqs", "master_params"])
def test_a_stack_is_no_list_even_of_tensors_that_were_taken(name):
    given = {**state_of(8, count=2, dtype=torch.float16), "step": 1, "lr": 0.1}
    given["master_params"] = [param.float() for param in given["params"]]
    adamw(**given)
    with pytest.raises(TypeError, match=f"{name} must be a list"):
        adamw(**{**given, name: torch.stack(given[name])})


@pytest.mark.parametrize("elements", [0, 1, 10**6, 10**10])
def test_configurations_are_sensible(elements):
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0)):
        config = configs.pick_config(elements, capability)
        # Four elements per thread, or a multiple: one 128-bit random number, one vector of 16 bytes.
        assert config.block % (4 * 32 * config.num_warps) == 0


def test_works_elsewhere(tmp_path: Path):
    """The folder is copied under another name and imported in a process that has only torch and triton."""
    folder = tmp_path / "elsewhere" / "optimizers"
    shutil.copytree(Path(__file__).parent, folder, ignore=shutil.ignore_patterns("bench.py", "test_*.py"))
    code = (
        "import os, sys, torch\n"
        "cuda = torch.cuda.is_available()\n"
        "os.environ['TRITON_INTERPRET'] = '0' if cuda else '1'\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from elsewhere.optimizers import AdamW, adamw\n"
        "a, b = (torch.nn.Parameter(torch.ones(9, device='cuda' if cuda else 'cpu')) for _ in range(2))\n"
        "a.grad, b.grad = torch.arange(9.0).to(a), torch.arange(9.0).to(a)\n"
        "AdamW([a], lr=0.1).step()\n"
        "torch.optim.AdamW([b], lr=0.1).step()\n"
        "torch.testing.assert_close(a, b)\n"
        "adamw([a.detach()], [a.grad], [torch.zeros_like(a)], [torch.zeros_like(a)], 1, lr=0.1)\n"
        "print(list(torch.ops.elsewhere_optimizers))\n"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code, tmp_path], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "adamw" in done.stdout


# On a GPU.


@pytest.mark.gpu
def test_the_function_alone_in_a_cuda_graph():
    """A call without tables builds one. The graph copies from its host memory at each replay."""
    state = state_of(5000, count=3)
    other = copy.deepcopy(state)
    step, options = torch.ones((), device="cuda"), dict(lr=0.1)
    adamw(**copy.deepcopy(state), step=step, **options)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        adamw(**state, step=step, **options)
    for number in (1, 2, 3):
        [torch.full((size,), 7, dtype=torch.int64, pin_memory=True) for size in (8, 30, 64, 512)]
        step.fill_(number)
        graph.replay()
        adamw(**other, step=number, **options)
    for name in ("params", "exp_avgs", "exp_avg_sqs"):
        assert_close(state[name], other[name], rtol=1e-6, atol=1e-7)


@pytest.mark.gpu
def test_no_host_memory_is_given_back_during_a_capture():
    """Tables are destroyed while their stream is captured; pinned memory can still be allocated afterwards."""
    stream = torch.cuda.Stream()
    state, tables = state_of(5000, count=3), PointerTables()
    x = torch.zeros(8, device="cuda")
    with torch.cuda.stream(stream):
        adamw(**state, step=1, lr=0.1, tables=tables)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        x.add_(1)
        del tables
        gc.collect()
    del graph
    gc.collect()
    for size in (8, 30, 64, 512):
        torch.empty(size, dtype=torch.int64, pin_memory=True)
    adamw(**state, step=2, lr=0.1)


@pytest.mark.gpu
def test_new_tables_while_the_gpu_is_busy():
    """The host is ahead of the GPU: tables are replaced, and their memory freed, before the GPU has read them."""
    state = state_of(10_000, count=8)
    other = copy.deepcopy(state)
    tables = PointerTables(capacity=1)
    grads = [[torch.randn_like(g) for g in state["grads"]] for _ in range(20)]
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    for number, given in enumerate(grads, start=1):
        adamw(**{**state, "grads": given}, step=number, lr=0.1, tables=tables)
        [torch.full((64,), 7, dtype=torch.int64, device="cuda") for _ in range(8)]  # would overwrite freed tables
    for number, given in enumerate(grads, start=1):
        torch.cuda.synchronize()
        adamw(**{**other, "grads": given}, step=number, lr=0.1)
    for name in ("params", "exp_avgs", "exp_avg_sqs"):
        assert_close(state[name], other[name], rtol=0, atol=0)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    """Offsets are 64 bits wide: the last elements are out of reach of 32-bit offsets."""
    size = 2**31 + 1029
    params = [torch.zeros(size, device="cuda", dtype=torch.bfloat16)]
    state = dict(
        grads=[torch.ones(size, device="cuda", dtype=torch.bfloat16)],
        exp_avgs=[torch.zeros(size, device="cuda")],
        exp_avg_sqs=[torch.zeros(size, device="cuda")],
    )
    adamw(params, **state, step=1, lr=0.5, eps=0.0)
    for part in (slice(0, 3), slice(2**31 - 2, 2**31 + 2), slice(-3, None)):
        assert set(params[0][part].tolist()) == {-0.5}
