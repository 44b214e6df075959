"""The small examples run as a reader runs them, at their small sizes."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch

TINY = ("--size", "tiny")
NOTEBOOK = Path(__file__).parent.parent / "examples" / "llm_demo.ipynb"


def printed(name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *words: str) -> str:
    monkeypatch.setattr(sys, "argv", [name, *words])
    importlib.import_module(f"examples.{name}").main()
    return capfd.readouterr().out


@pytest.mark.parametrize("installed", [True, False])
def test_llama_block(installed, monkeypatch, capfd) -> None:
    if installed:
        pytest.importorskip("transformers")
    else:
        monkeypatch.setitem(sys.modules, "transformers.models.llama", None)
    found = re.search(r"(\w+) and LlamaBlock differ by (\S+) of", printed("llama_block", monkeypatch, capfd, *TINY))
    assert found and found[1] == ("HuggingFaceLayer" if installed else "PlainBlock") and float(found[2]) < 2e-2


def test_patch_a_model(monkeypatch, capfd) -> None:
    pytest.importorskip("transformers")
    text = printed("patch_a_model", monkeypatch, capfd, *TINY, "--steps", "4")
    found = re.search(r"losses (\S+) to (\S+), at most (\S+) from", text)
    assert found and float(found[2]) < float(found[1]) and float(found[3]) < 2e-2
    assert "3 × norm" in text and "patched after unpatch: 0" in text


def test_decode(monkeypatch, capfd) -> None:
    words = (*TINY, "--layers", "1", "--prompt", "5", "--tokens", "4")
    found = re.search(r"(\d+) % of 4 tokens", printed("decode", monkeypatch, capfd, *words))
    # In bfloat16 two tokens may be as likely as each other.
    assert found and int(found[1]) >= (75 if torch.cuda.is_available() else 100)


def test_the_notebook(monkeypatch, capfd) -> None:
    """Its cells run one after the other, at small sizes without a GPU, and say what its outputs say, where it has been
    run."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "path", [*sys.path])
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    kept = ["".join("".join(output.get("text", "")) for output in cell["outputs"]) for cell in cells]
    was_run = any(cell["execution_count"] for cell in cells)
    assert [cell["execution_count"] for cell in cells] == [1 + i if was_run else None for i in range(len(cells))]
    names: dict[str, object] = {}
    for cell, there in zip(cells, kept, strict=True):
        exec("".join(cell["source"]), names)
        here = capfd.readouterr().out
        assert here and (not was_run or cell is cells[0] or _subjects(here) <= _subjects(there))


def _subjects(text: str) -> set[str]:
    return {line.split(":")[0] for line in text.splitlines()}
