"""Which GPU is meant, and which commit is measured."""

from __future__ import annotations

import pytest
import torch

from harness import environment, registry, roofline


def test_without_a_gpu_the_name_picks_the_roofline_to_plan_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert environment.target("auto") == (torch.device("cpu"), "h200")
    assert environment.target("a100-80") == (torch.device("cpu"), "a100-80")
    with pytest.raises(ValueError, match="no CUDA device"):
        environment.target("auto", "cuda")


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="h200.*h100.*a100-80"):
        environment.target("h20")


def test_with_a_gpu_another_name_is_an_error_that_says_what_was_found(monkeypatch):
    class Properties:
        name, total_memory = "NVIDIA H200", 141 * 2**30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    assert environment.target("auto") == (torch.device("cuda", 0), "h200")
    assert environment.target("h200")[1] == "h200"
    with pytest.raises(ValueError, match="NVIDIA H200.*h200"):
        environment.target("h100")
    assert environment.target("h100", "cpu") == (torch.device("cpu"), "h100")


def test_a_copy_can_be_told_its_commit(monkeypatch, tmp_path):
    monkeypatch.setenv("RIDGELINE_COMMIT", "abc")
    assert environment.commit() == {"commit": "abc", "dirty": None}
    monkeypatch.setattr(registry, "ROOT", tmp_path)
    monkeypatch.delenv("RIDGELINE_COMMIT", raising=False)
    assert environment.commit() == {"commit": None, "dirty": None}
    monkeypatch.setenv("RIDGELINE_COMMIT", "abc")
    assert environment.commit()["commit"] == "abc"


def test_every_key_of_the_table_can_be_planned_for():
    for key in roofline.table():
        assert environment.target(key, "cpu")[1] == key
