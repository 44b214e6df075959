"""Kernels that are wrong on purpose, each in one way, and others that are right in different ways.

A checker is worth what it rejects. `test_wrong.py` runs every one of these through `harness.commands.check`: each
wrong one must be rejected, by the check and for the cause that its entry names, and each control accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.spec import Op


@dataclass(frozen=True)
class Wrong:
    """`fn` must be rejected first by `check`, for `cause`; `case` is where that is tried, and all that is tried.

    `on_gpu` is the (check, cause) that may come first there, where the arithmetic, the random numbers, the tensors'
    addresses or what can be launched are other than in the interpreter. `gpus` is how many it needs, of those that are
    tried on a GPU alone. `fatal`: CUDA cannot be used any more in the process that has tried it.
    """

    name: str
    fn: Op
    case: str
    check: str
    cause: str
    on_gpu: tuple[str, str] | None = None
    gpus: int = 1
    fatal: bool = False
