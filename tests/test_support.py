"""docs/SUPPORT.md is what the SPECs say, and says so of what they change."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from harness import cli, registry
from harness.commands import support
from harness.roofline import Cost
from harness.spec import Case, KernelSpec


def _op(x):
    return x


def _case(name: str, dtype: torch.dtype = torch.float32, **settings) -> Case:
    return Case(name, dims={}, dtype=dtype, bench=True, **settings)


SPEC = KernelSpec(
    name="alpha",
    implementations={"auto": _op, "cuda": _op},
    reference=_op,
    make_inputs=lambda case, device, generator: {},
    cost=lambda case, mode: Cost(flops=0, bytes=1),
    cases=(_case("a"), _case("b", torch.float16), _case("c", torch.bfloat16, modes=("fwd",))),
    grads=("x",),
    unit="rows",
    items=lambda case: 1,
    fuzz={},
    determinism={"fwd": "run-to-run"},
    min_capability={"cuda": (9, 0)},
)


@pytest.fixture(autouse=True)
def _in_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    found = registry.package
    monkeypatch.setattr(
        registry, "package", lambda name: f"kernels.{name}" if name in ("alpha", "beta") else found(name)
    )


def rows(spec: KernelSpec) -> list[str]:
    return [line for line in support.page_text([spec]).splitlines() if line.startswith("| [alpha]")]


def test_the_committed_page_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["support", "--check"]) == 0, capsys.readouterr().out


def test_dtypes_with_the_same_cells_share_a_row() -> None:
    assert rows(SPEC) == [
        "| [alpha](../kernels/alpha/) | bfloat16, float16, float32 | forward | `auto` | `auto`, `cuda` | run-to-run |",
        "| [alpha](../kernels/alpha/) | float16, float32 | backward | `auto` | `auto`, `cuda` | none |",
    ]


def test_what_is_not_taken_is_counted_and_has_its_reason() -> None:
    spec = dataclasses.replace(
        SPEC,
        modes=("fwd",),
        cases=(_case("a"), _case("b"), _case("hopper", min_capability=(9, 0))),
        unsupported_reason=lambda name, case, mode: "too narrow" if (name, case.name) == ("cuda", "a") else None,
        alias_reason=lambda name, case, mode: "the same once more",  # so it runs there
    )
    (row,) = rows(spec)
    assert "| `auto` 2 of 3 | `auto`, `cuda` 2 of 3 |" in row
    text = support.page_text([spec])
    assert "- alpha `auto`, sm_80, 1 of 3 cases (hopper): needs sm_90.\n" in text
    assert "- alpha `cuda`, sm_90, 1 of 3 cases (a): too narrow.\n" in text
    assert "`cuda`, sm_80" not in text


def test_many_cases_are_named_by_their_options() -> None:
    several = tuple(_case(f"c{i}", params={"fp8": True, "n": i} if i else {"fp8": True}) for i in range(9))
    spec = dataclasses.replace(SPEC, cases=several, unsupported_reason=lambda name, case, mode: "too new")
    assert "- alpha `auto`, sm_80, 9 of 9 cases (all with fp8): too new.\n" in support.page_text([spec])
    assert all(" | – | – | " in row for row in rows(spec))


def test_a_gpu_that_a_kernel_is_not_built_for_has_a_dash() -> None:
    older = dataclasses.replace(SPEC, name="beta")
    text = support.page_text([dataclasses.replace(SPEC, compile_targets=((9, 0),)), older])
    assert "| forward | – | `auto`, `cuda` |" in text
    assert "None." in text


def test_check_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "ROOT", tmp_path)
    monkeypatch.setattr(registry, "names", lambda: ["alpha"])
    monkeypatch.setattr(registry, "load", lambda name: SPEC)
    page = tmp_path / support.PAGE
    assert cli.main(["support", "--check"]) == 1
    assert not page.exists()
    assert cli.main(["support"]) == cli.main(["support", "--check"]) == 0
    page.write_text(page.read_text() + "typed by hand\n")
    assert cli.main(["support", "--check"]) == 1
    assert "typed by hand" in page.read_text()
