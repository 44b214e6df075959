"""What "auto" is on Hopper for each example of an op that has versions, found by running the op itself on fake tensors.

`python -m tests.hopper_choices OP…` prints JSON: op -> option -> the values that launch what "auto" launches. It is a
program of its own because nothing is compiled in a process that runs Triton's interpreter, as the tests do without a
GPU.
"""

from __future__ import annotations

import json
import sys

import torch

from harness import registry
from harness.compiling import launches, nvrtc
from kernels import selftest

HOPPER = (9, 0)


def launched(op: str, with_backward: bool, **options: str) -> list[str] | str:
    """The kernels of a call of a model's size, of the forward or of both; or why it cannot run."""
    package = nvrtc.package_of(registry.load(op))
    with launches.record(HOPPER) as seen, nvrtc.recording(package, HOPPER, seen.append):
        call = selftest.example(op, "cuda", torch.bfloat16, False)
        call = {**call, "inputs": {**call["inputs"], **options}, "grads": call["grads"] if with_backward else ()}
        try:
            selftest.outputs(selftest.function(op), call, None, True)
        except RuntimeError as reason:
            return str(reason)
    return [launch.name if isinstance(launch, nvrtc.Launch) else launch.jit for launch in seen]


def choices(op: str) -> dict[str, list[str]]:
    versions = selftest.example(op, "meta", torch.bfloat16, False)["versions"]
    found = {}
    for option, values in versions.items():
        backward = option == "backward"  # the others choose the forward, and some of them the backward too
        taken = launched(op, backward)
        found[option] = [value for value in values if launched(op, backward, **{option: value}) == taken]
    return found


if __name__ == "__main__":
    print(json.dumps({op: choices(op) for op in sys.argv[1:]}))
