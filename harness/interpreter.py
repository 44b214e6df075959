"""Triton's interpreter with a GPU's maxima, and its roots and powers of subnormal numbers.

`tl.maximum` and `tl.minimum` ignore NaN unless told otherwise: on a GPU the maximum of NaN and a number is the number.
Triton's interpreter returns NaN, and so hid that a kernel took a row of NaN for a row without elements, whose running
maximum is -inf too. (`tl.max` and `tl.min` over an axis ignore NaN in both.)

`tl.rsqrt`, `tl.sqrt` and `tl.exp2` of fp32 are instructions with .ftz, which take subnormal numbers for 0 and return 0
for them. The interpreter computes with subnormal numbers, and so hid that a norm of tiny numbers was inf.
"""

from __future__ import annotations

import sys
from typing import Any


def as_on_a_gpu() -> None:
    """Changes the interpreter in this process, if Triton is imported and its interpreter is on: `tl.maximum` and
    `tl.minimum` ignore NaN, and `tl.rsqrt`, `tl.sqrt` and `tl.exp2` flush subnormal numbers to 0."""
    triton = sys.modules.get("triton")
    if triton is None or not triton.knobs.runtime.interpret:
        return
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder

    def flushed(x: Any) -> Any:
        if x.dtype != np.float32:
            return x
        return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)

    InterpreterBuilder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    InterpreterBuilder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)
    InterpreterBuilder.create_rsqrt = lambda self, arg: self.unary_op(arg, lambda x: 1 / np.sqrt(flushed(x)))
    InterpreterBuilder.create_sqrt = lambda self, arg: self.unary_op(arg, lambda x: np.sqrt(flushed(x)))
    InterpreterBuilder.create_exp2 = lambda self, arg: self.unary_op(arg, lambda x: flushed(np.exp2(x)))
