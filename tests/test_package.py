"""What the package offers over its kernels: `python -m ridgeline info` and `selftest`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness import registry
from harness.compiling import nvrtc
from kernels import __main__, info, selftest

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = [name for name in registry.names() if registry.package(name).startswith("kernels.")]


def test_all_kernels_are_known() -> None:
    assert selftest.ops() == sorted(KERNELS)


@pytest.mark.parametrize("kernel_name", KERNELS)
def test_each_op_passes(kernel_name: str) -> None:
    found = list(selftest.run([kernel_name], DEVICE))
    assert [one.dtype for one in found][:1] == [torch.float32]
    assert all(one.status in ("ok", "skipped") for one in found), found
    assert any(one.status == "ok" for one in found) or kernel_name == "fp8", found


@pytest.mark.parametrize("kernel_name", KERNELS)
def test_the_two_sizes_of_an_example_differ_in_size_alone(kernel_name: str) -> None:
    small, large = (selftest.example(kernel_name, "meta", torch.bfloat16, one) for one in (True, False))
    assert small.keys() == large.keys() and small["inputs"].keys() == large["inputs"].keys()
    assert small["grads"] == large["grads"]
    for option, values in large.get("versions", {}).items():
        assert "auto" not in values and option not in large["inputs"]
    assert all(value in large["versions"][option] for option, value in large.get("hopper", {}).items())


def _gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate=approximate)


def _raised(error: Exception) -> torch.Tensor:
    raise error


@pytest.mark.parametrize(
    ("fn", "status"),
    [
        (_gelu, "ok"),
        (lambda x: _gelu(x) * 1.01, "wrong"),
        (lambda x: _gelu(x.detach()) + 0 * x, "wrong"),
        (lambda x: _gelu(x)[:1], "wrong"),
        (lambda x: _gelu(x) * torch.nan, "wrong"),
        (lambda x: 1 / 0, "failed"),
        (lambda x: _raised(AssertionError()), "failed"),
        (lambda x: _raised(torch.OutOfMemoryError("no room")), "failed"),
    ],
    ids=["right", "a hundredth more", "no gradient", "another shape", "NaN", "an error", "a bare assert", "memory"],
)
def test_what_is_wrong_is_told(fn, status: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(selftest, "function", lambda op: fn)
    assert selftest.report(["gelu"], "cpu") == (status != "ok")
    printed = capsys.readouterr().out
    assert printed.count(f" {status} ") == 2
    assert ("all passed" in printed) == (status == "ok")


def test_one_wrong_bit_of_an_exact_op_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    right = selftest.function("mxfp")
    assert selftest.compare("mxfp", DEVICE, torch.float32, True) == 0

    def wrong(**inputs):
        data, scales = right(**inputs)
        data[0, 0] ^= 1
        return data, scales

    monkeypatch.setattr(selftest, "function", lambda op: wrong)
    assert selftest.compare("mxfp", DEVICE, torch.float32, True) == float("inf")


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["info", "--op", "gelu"]) == 0
    printed = capsys.readouterr().out
    assert torch.__version__ in printed and "gelu" in printed and "rmsnorm" not in printed


@pytest.mark.skipif(DEVICE == "cuda", reason="says what would run elsewhere")
def test_info_without_a_gpu_says_what_hopper_runs_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["info", "--op", "rmsnorm", "--op", "fp8_matmul", "--op", "attention"]) == 0
    printed = capsys.readouterr().out
    assert 'rmsnorm\n  backend="triton"' in printed and 'fp8_matmul\n  backend="cuda"' in printed
    assert "  pick_backend: The version that runs" in printed
    assert "  pick_forward: " in printed and "  pick_backward: " in printed


WITH_VERSIONS = [name for name in KERNELS if "hopper" in selftest.example(name, "meta", torch.bfloat16, False)]


@pytest.mark.slow
@pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.MISSING)
def test_what_auto_takes_on_hopper_is_what_its_examples_say() -> None:
    """Dispatched on fake tensors, in a process without Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.hopper_choices", *WITH_VERSIONS]
    done = subprocess.run(command, cwd=registry.ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name in WITH_VERSIONS:
        said = selftest.example(name, "meta", torch.bfloat16, False)["hopper"]
        assert {option: [value] for option, value in said.items()} == found[name], name


@pytest.mark.gpu
def test_info_names_kernels_and_versions() -> None:
    assert any("gelu" in name for name in info.launched("gelu", "cuda"))
    assert dict(info.versions("rmsnorm", "cuda"))['backend="triton"'] == "selected by auto"


@pytest.mark.gpu(min_capability=(9, 0))
@pytest.mark.parametrize("kernel_name", WITH_VERSIONS)
def test_info_finds_what_auto_takes_on_hopper(kernel_name: str) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    pytest.importorskip("cupy")
    found = dict(info.versions(kernel_name, "cuda"))
    for option, value in selftest.example(kernel_name, "meta", torch.bfloat16, False)["hopper"].items():
        assert found[f'{option}="{value}"'] == "selected by auto", found
        assert [v for k, v in found.items() if k.startswith(f"{option}=")].count("selected by auto") == 1, found


def test_what_is_missing_is_told_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info.importlib.util, "find_spec", lambda name: None)
    assert info.WITHOUT_CUPY in list(info.missing()) and "pip install" in info.WITHOUT_CUPY


@pytest.mark.parametrize(
    ("command", "status", "said"), [("info", 0, "no op runs"), ("selftest", 1, "ModuleNotFoundError")]
)
def test_without_triton(command: str, status: int, said: str) -> None:
    code = "import runpy, sys; sys.modules['triton'] = None; runpy.run_module('kernels', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code, command, "--op", "gelu"],
        cwd=registry.ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == status and said in done.stdout, done.stderr


def test_from_an_empty_folder(tmp_path: Path) -> None:
    """As the installed package: under another name, without the checkout."""
    (tmp_path / "ridgeline").symlink_to(registry.ROOT / "kernels")
    command = [sys.executable, "-m", "ridgeline", "selftest", "--op", "rmsnorm", "--op", "gelu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "all passed" in done.stdout, done.stderr
    assert not done.stderr
    command[3:] = ["selftest", "--op", "nothing"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "unknown op nothing; known: adamw" in done.stderr
    command[4:] = ["rmsnorm"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "[--op NAME]" in done.stderr and "unrecognized arguments: rmsnorm" in done.stderr


def test_a_reader_that_ends_early_is_no_error() -> None:
    """As in `python -m ridgeline info | head`."""
    command = [sys.executable, "-m", "kernels", "info", "--op", "gelu"]
    with subprocess.Popen(command, cwd=registry.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as started:
        started.stdout.close()
        assert started.stderr.read() == b""
    assert started.returncode == 1
