"""Ring attention on two to four gloo processes against one process in fp64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from .layout import LAYOUTS, even_lengths
from .schedule import ROTATIONS
from .test_world import Run, call_all, spread

WORLDS = (2, 3, 4)


def _runs(world: int) -> Iterator[tuple[str, Run]]:
    """By name: every layout and rotation, with and without a mask, even and ragged, square and rectangular."""
    for layout, rotate, causal in itertools.product(LAYOUTS, ROTATIONS, (False, True)):
        options = dict(layout=layout, rotate=rotate, causal=causal)
        even = [even_lengths(n, world, layout) for n in (23, 41, 5 * world)]
        ragged = (9, 0, 4, 1)[:world]
        others = (3, 7, 0, 6)[-world:]
        shapes = {
            "even": (even[2], even[2]),
            "wide": (even[0], even[1]),
            "tall": (even[1], even[0]),
            "ragged": (ragged, ragged),
        }
        if layout != "striped" or not causal:
            shapes["mixed"] = (ragged, others)
        for name, (queries, keys) in shapes.items():
            mask = "causal" if causal else "full"
            run = Run(queries, keys, dict(options, return_lse=name in ("wide", "ragged")), told=name != "even")
            yield f"{layout}-{rotate}-{mask}-{name}", run
    yield "auto-keys", Run((8,) * world, (8,) * world, dict(causal=True), told=False)
    yield "auto-queries", Run((2,) * world, (40,) * world, dict(scale=0.3))
    yield "half", Run((8,) * world, (8,) * world, dict(causal=True), dtype=torch.float16)
    yield "nothing", Run((0,) * world, (0,) * world, dict(causal=True))
    yield "no-keys", Run((3,) * world, (0,) * world, dict(return_lse=True))
    if world == 2:
        for rotate in ROTATIONS:
            options = dict(causal=True, rotate=rotate)
            yield f"kernels-{rotate}", Run((7, 4), (7, 4), options, batch=1, dim=16, kernels=True)


RUNS = {world: dict(_runs(world)) for world in WORLDS}


@pytest.fixture(scope="module", params=WORLDS)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """World size, and the results of each of its ranks. Starting processes takes longer than all that they compute."""
    world = request.param
    return world, spread(world, call_all, tmp_path_factory.mktemp(f"world{world}"), RUNS[world])


def test_all_ranks_together_have_what_one_process_has(results) -> None:
    world, ranks = results
    wrong = []
    for name, run in RUNS[world].items():
        found, expected = run.assembled([rank[name] for rank in ranks]), run.expected()
        for what, tensor in found.items():
            wide = dict(rtol=2e-2, atol=4e-3) if run.dtype == torch.float16 else dict(rtol=2e-5, atol=2e-5)
            if what != "lse" and tensor.dtype != run.dtype:
                wrong.append(f"{name}: {what} is {tensor.dtype}")
            if not torch.allclose(tensor.double(), expected[what], **wide):
                wrong.append(f"{name}: {what} is off by {(tensor - expected[what]).abs().max()}")
    assert not wrong, "\n".join(wrong)
