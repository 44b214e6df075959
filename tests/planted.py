"""Runs every kernel of tests/wrong through the battery and writes down which check rejects it, for reports/faults.md.

`python -m tests.planted FILE [KERNEL …]` writes a JSON list. A fault is `rejected_by` the first check that fails, by ""
where all pass, and by null where it takes a GPU and there is none.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before the zoo is imported

from . import test_wrong


def faults(kernels: tuple[str, ...]) -> list[dict[str, Any]]:
    """Every planted fault of these kernels, with the check that rejects it."""
    found = []
    for kernel in kernels:
        zoo = test_wrong.ZOO[kernel]
        for wrong in test_wrong.every(kernel):
            rejected_by = None
            if wrong not in zoo.ON_A_GPU:
                outcome = test_wrong.first_failure(test_wrong.spec_with(kernel, "wrong", wrong.fn), wrong.case)
                rejected_by = outcome.item.check if outcome else ""
            elif test_wrong.DEVICE == "cuda" and torch.cuda.device_count() >= wrong.gpus:
                failure = test_wrong.failure_on_a_gpu(kernel, wrong.name)
                rejected_by = failure[0] if failure else ""
            fault = {"kernel": kernel, "name": wrong.name, "check": wrong.check, "cause": wrong.cause}
            found.append({**fault, "rejected_by": rejected_by})
            print(f"{kernel}: {wrong.name}: {rejected_by}", flush=True)
    return found


def main(path: str, *kernels: str) -> None:
    found = faults(kernels or test_wrong.KERNELS)
    Path(path).write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
