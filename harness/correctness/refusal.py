"""Bad input must be rejected before any launch, by an exception that names the argument, on both paths of a call: the
fast path of plain tensors, and the one through torch.library, which an active function mode selects.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch
from torch.overrides import BaseTorchFunctionMode

from ..spec import Inputs
from .accuracy import Verdict
from .battery import Rejected, Subject
from .guard import launches
from .oracle import call

REFUSALS = (TypeError, ValueError, RuntimeError)


def refusals(s: Subject, mode: str) -> None:
    """Checks every bad input of `bad_inputs`, on both paths."""
    for what, inputs, arguments in bad_inputs(s):
        _refused(s, what, inputs, arguments)
        with BaseTorchFunctionMode():
            _refused(s, f"under a torch function mode {what}", inputs, arguments)


def _refused(s: Subject, what: str, inputs: Inputs, arguments: Sequence[str]) -> None:
    with launches() as launched:
        error = _error(s, inputs)
    if error is None:
        raise Rejected(Verdict(False, f"{what} was accepted", "accepted"))
    if launched:
        raise Rejected(Verdict(False, f"{what} was refused after {launched[0]} had been launched", "launched"))
    text = f"{type(error).__name__}: {str(error).strip()[:200]}"
    # Exactly this type: a subclass such as InterpreterError or a compilation error is no refusal.
    if type(error) not in REFUSALS:
        raise Rejected(Verdict(False, f"{what} was refused by {text}", "message"))
    if not any(re.search(rf"\b{re.escape(a)}\b", str(error)) for a in arguments):
        raise Rejected(Verdict(False, f"{what} was refused without naming the argument: {text}", "message"))


def _error(s: Subject, inputs: Inputs) -> Exception | None:
    try:
        call(s.spec, s.fn, inputs)
    except Exception as error:
        return error
    return None


def bad_inputs(s: Subject) -> Iterator[tuple[str, Inputs, list[str]]]:
    """Yields (what is wrong, the inputs, the arguments of which the message must name one).

    A wrong shape is one that the reference refuses too: some operations broadcast.
    """
    inputs = s.inputs()
    tensors = {n: t for n, t in inputs.items() if isinstance(t, torch.Tensor)}
    elsewhere = "cpu" if s.device.startswith("cuda") else "meta"
    for name, tensor in tensors.items():
        if len(tensors) > 1:
            # The message may call either of the two devices wrong.
            yield f"{name} on {elsewhere}", {**inputs, name: tensor.to(elsewhere)}, list(tensors)
        if tensor.is_floating_point():
            yield f"{name} of dtype int32", {**inputs, name: tensor.to(torch.int32)}, [name]
        for dim in range(tensor.dim()):
            shape = [n + (i == dim) * 2 for i, n in enumerate(tensor.shape)]
            wrong = {**inputs, name: torch.ones(shape, dtype=tensor.dtype, device=tensor.device)}
            if _refused_by_reference(s, wrong):
                yield f"{name} of shape {shape}", wrong, list(tensors)


def _refused_by_reference(s: Subject, inputs: Inputs) -> bool:
    try:
        call(s.spec, s.spec.reference, inputs)
    except Exception:
        return True
    return False
