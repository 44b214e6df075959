"""The hardware and software of a measurement: the `environment` of a record."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from datetime import datetime, timezone
from typing import Any

import torch

from . import git, registry, roofline

# Packages whose version may change a figure.
PACKAGES = (
    "torch", "triton", "numpy", "liger-kernel", "quack-kernels", "flash-attn-4", "nvidia-cutlass-dsl",
    "flash-attn-3", "flash-attn", "humming-kernels", "torchao", "sgl-deep-gemm", "ring-flash-attn",
    "cupy-cuda13x", "cupy-cuda12x", "nvidia-cudnn-cu13", "nvidia-cublas", "cupti-python", "nvtx",
)  # fmt: skip
#: Prefixes of environment variables that control communication between GPUs.
VARIABLES = ("NCCL_", "TORCH_NCCL_", "TORCH_SYMM_MEM_", "TORCH_SYMMMEM")
CPU = "CPU"


def capture(device: torch.device) -> dict[str, Any]:
    """The `environment` object of a run line. For a CPU, which is timed if ranks run without GPUs, it says so."""
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)}
    return {
        "gpu": gpu(device) if device.type == "cuda" else {"key": None, "name": CPU},
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        **commit(),
        "os": f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
        **({"variables": variables} if variables else {}),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def gpu(device: torch.device) -> dict[str, Any]:
    """The card: name, table key or None, UUID, sizes, driver, highest clock and power limit."""
    import pynvml

    from .measure.gpu_state import handle

    properties = torch.cuda.get_device_properties(device)
    card = handle(device)
    return {
        "key": roofline.identify(properties.name, properties.total_memory),
        "name": properties.name,
        "uuid": str(properties.uuid),
        "capability": [properties.major, properties.minor],
        "sms": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "sm_clock_max_mhz": pynvml.nvmlDeviceGetMaxClockInfo(card, pynvml.NVML_CLOCK_SM),
        "power_limit_w": round(pynvml.nvmlDeviceGetPowerManagementLimit(card) / 1000),
    }


def target(name: str, device: str | None = None) -> tuple[torch.device, str | None]:
    """The device to use, and the key of the GPU to measure or plan for, from --gpu and --device.

    With a GPU the key is that of the card found (None for one that is not in the table), and naming another is a
    ValueError that says what was found. Without a GPU it is the given name, h200 for auto.
    """
    if name != "auto":
        roofline.get(name)
    if device == "cpu" or (device is None and not torch.cuda.is_available()):
        return torch.device("cpu"), "h200" if name == "auto" else name
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: no CUDA device was found")
    chosen = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(chosen)
    found = roofline.identify(properties.name, properties.total_memory)
    if name not in ("auto", found):
        raise ValueError(f"--gpu {name}: the GPU found is {properties.name!r} ({found or 'not in harness/gpus.toml'})")
    return chosen, found


def commit() -> dict[str, Any]:
    """The commit of this checkout and whether it has changes. In a copy whose history is missing or belongs to other
    files, the variable RIDGELINE_COMMIT gives the commit, and whether there are changes is unknown."""
    if told := os.environ.get("RIDGELINE_COMMIT"):
        return {"commit": told, "dirty": None}

    head = git.output(registry.ROOT, "rev-parse", "HEAD")
    if head is None:
        return {"commit": None, "dirty": None}
    # Reports are written by the runs themselves, so they do not count as changes of the measured code.
    looked_at = ("--untracked-files=no", "--", ".", ":!reports", ":!README.md")
    return {"commit": head.strip(), "dirty": bool(git.output(registry.ROOT, "status", "--porcelain", *looked_at))}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
