"""compress_hook on a bucket in one process: the layout of a bucket, and the state between steps."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from . import CompressState, compress_hook, hook
from .reference import gradient_compression_reference
from .test_gradient_compression import matrix_of_rank, same

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = ((20, 30), (30,), (4, 5), (25, 40))  # the second and third are exempt
BEFORE, BEHIND = 7, 3


class Bucket:
    """The bucket that DDP passes to a hook: gradients concatenated in a flat buffer, here part of a larger one."""

    def __init__(self, *shapes: tuple[int, ...], last: bool = True, dtype: torch.dtype = torch.float32) -> None:
        self.last, self.number = last, 0
        self.of = [torch.nn.Parameter(torch.zeros(shape, device=DEVICE)) for shape in shapes]
        sizes = [parameter.numel() for parameter in self.of]
        self.memory = torch.randn(BEFORE + sum(sizes) + BEHIND, device=DEVICE).to(dtype)
        self.flat = self.memory[BEFORE:-BEHIND]
        self.parts = self.flat.split(sizes)

    def buffer(self) -> torch.Tensor:
        return self.flat

    def gradients(self) -> list[torch.Tensor]:
        return [part.view(parameter.shape) for part, parameter in zip(self.parts, self.of, strict=True)]

    def parameters(self) -> list[torch.nn.Parameter]:
        return self.of

    def index(self) -> int:
        return self.number

    def is_last(self) -> bool:
        return self.last


def called(state: CompressState, bucket: Any) -> torch.Tensor:
    """The result of the hook's future. Asserts that it is the bucket's buffer, and that nothing outside is written."""
    around = bucket.memory[:BEFORE].clone(), bucket.memory[-BEHIND:].clone()
    result = compress_hook(state, bucket).wait()
    assert result.data_ptr() == bucket.flat.data_ptr() and result.shape == bucket.flat.shape
    assert torch.equal(bucket.memory[:BEFORE], around[0]) and torch.equal(bucket.memory[-BEHIND:], around[1])
    return result


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_each_parameter_has_the_residual_of_its_own_elements(kind: str) -> None:
    """Over two steps. Exempt gradients are zero in the compressed buffer, and have no residual."""
    bucket, state = Bucket(*SHAPES), CompressState(kind=kind, min_numel=100)
    residual = torch.zeros_like(bucket.flat, dtype=torch.bfloat16)
    for _ in range(2):
        bucket.memory.normal_()
        given, exempt = bucket.flat.clone(), slice(600, 650)
        compressed = given.clone()
        compressed[exempt] = 0
        want, residual = gradient_compression_reference(compressed, residual, kind=kind)
        want[exempt] = given[exempt]
        assert same(called(state, bucket), want)
        kept = state.state_dict()["residuals"]
        assert list(kept) == [3, 2, 1, 0]
        for part, of_it in zip(residual.split([p.numel() for p in bucket.of]), kept.values(), strict=True):
            assert torch.equal(part, of_it)
    assert kept[3].any() and not kept[2].any() and not kept[1].any()


def test_a_state_finds_its_parameters_whatever_the_size_of_buckets() -> None:
    """DDP's initial buckets of two sizes, and the rebuilt ones that are seen later."""
    from torch.distributed import _compute_bucket_assignment_by_size as cut

    found = []
    for size in (2500, 6000):
        parameters = [torch.nn.Parameter(torch.zeros(20, 30 + i % 2)) for i in range(7)]
        state = CompressState(min_numel=0)
        buckets = cut(parameters, [1000, size])[0][::-1]
        for bucket in (*buckets, [5, 0, 3]):
            numbers = state.numbers.of([parameters[i] for i in bucket])
            assert numbers == [6 - i for i in bucket]
        found.append(buckets)
    assert found[0] != found[1] and max(map(len, found[1])) > 1


def test_without_error_feedback_nothing_is_kept() -> None:
    bucket, state = Bucket((20, 30)), CompressState(error_feedback=False, min_numel=100)
    want = gradient_compression_reference(bucket.flat.clone())
    assert torch.equal(called(state, bucket), want) and not state.state_dict()["residuals"]


def test_a_step_ends_with_its_last_bucket() -> None:
    state = CompressState(min_numel=100)
    for last, step in ((False, 0), (False, 0), (True, 1), (False, 1), (True, 2)):
        called(state, Bucket((20, 30), last=last))
        assert state.step == step


@pytest.mark.parametrize(
    ("shapes", "options", "averaged"),
    [
        (SHAPES, dict(min_numel=100), [50]),  # the exempt gradients
        (SHAPES, dict(min_numel=10**6), [1650]),  # the entire bucket, if all are exempt
        (SHAPES, dict(min_numel=0, warmup_steps=1), [1650]),
        (((20, 30), (25, 40)), dict(min_numel=100), []),
        (((20,), (600,)), dict(min_numel=0), [620]),  # of one dimension
        (((20, 30), (3, 3)), dict(min_numel=0, kind="powersgd"), [9]),  # factors would not be smaller
        (((10, 10), (99, 1)), dict(min_numel=100), [99]),  # 100 elements are not fewer than 100
    ],
)
def test_what_is_averaged_in_full_is_averaged_in_fp32_at_once(
    shapes: tuple, options: dict[str, Any], averaged: list[int]
) -> None:
    bucket = Bucket(*shapes, dtype=torch.bfloat16)
    seen = []
    with mock.patch.object(hook, "mean_in_place", lambda flat, group: seen.append((flat.numel(), flat.dtype))):
        called(CompressState(**options), bucket)
    assert seen == [(numel, torch.float32) for numel in averaged]


def test_warmup_steps_are_counted() -> None:
    state = CompressState(min_numel=0, warmup_steps=2)
    for step in range(3):
        bucket = Bucket((20, 30))
        given = bucket.flat.clone()
        assert torch.equal(called(state, bucket), given) == (step < 2)


def test_top_k_takes_its_share_of_what_is_compressed() -> None:
    bucket, state = Bucket(*SHAPES), CompressState(kind="topk", ratio=0.1, min_numel=100)
    given = bucket.flat.clone()
    first, *exempt, last = called(state, bucket).split([p.numel() for p in bucket.of])
    assert first.count_nonzero() + last.count_nonzero() == 160
    assert torch.equal(torch.cat(exempt), given[600:650])
    kept = torch.cat(list(state.state_dict()["residuals"].values()))
    sent = torch.cat((first, *exempt, last)) == given
    assert sent.sum() == 210 and not kept[sent].any()
    torch.testing.assert_close(kept[~sent], given[~sent].bfloat16())


def test_power_sgd_keeps_what_its_factors_lose() -> None:
    bucket, state = Bucket(*SHAPES), CompressState(kind="powersgd", rank=3, min_numel=100)
    exact = matrix_of_rank(2, 20, 30)
    for _ in range(3):
        bucket.gradients()[0].copy_(exact)
        bucket.gradients()[3].normal_()
        before = state.state_dict()["residuals"].get(0, torch.zeros(1000, device=DEVICE)).float()
        given = bucket.flat.clone()
        result = called(state, bucket)
        kept = state.state_dict()["residuals"]
        torch.testing.assert_close(kept[0].float(), given[650:] + before - result[650:], rtol=1e-2, atol=1e-4)
    torch.testing.assert_close(bucket.gradients()[0], exact, rtol=1e-2, atol=1e-2)
    assert torch.linalg.matrix_rank(bucket.gradients()[3]) == 3 and kept[0].any()
    assert torch.equal(result[600:650], given[600:650])
    assert {number: tuple(factor.shape) for number, factor in state.factors.items()} == {3: (30, 3), 0: (40, 3)}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int8", "topk", "powersgd"])
def test_a_loaded_state_is_read_before_its_memory_is_used_again(kind: str) -> None:
    """The hook's stream is behind the current one, which gets the memory of what the hook has freed, and writes it."""
    bucket, first = Bucket(*SHAPES), CompressState(kind=kind, rank=3, min_numel=100)
    called(first, bucket)
    saved, given, found = first.state_dict(), torch.randn_like(bucket.memory), []
    for waits in (False, True):
        torch.cuda.synchronize()
        state = CompressState(kind=kind, rank=3, min_numel=100)
        state.load_state_dict(saved)
        bucket.memory.copy_(given)
        if waits:
            with torch.cuda.stream(state.stream(bucket.memory.device)):
                torch.cuda._sleep(10**8)
        done = compress_hook(state, bucket)
        loaded = [*saved["residuals"].values(), *saved["factors"].values()]
        others = [torch.full_like(tensor, torch.nan) for tensor in loaded for _ in range(4 * waits)]
        result = done.wait().clone()
        found.append([result, *state.state_dict()["residuals"].values()])
        torch.cuda.synchronize()
        del others
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
