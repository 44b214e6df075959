"""Triton's interpreter with the GPU's maxima.

`tl.maximum` and `tl.minimum` ignore NaN unless told otherwise: on a GPU the maximum of NaN and a number is the number.
Triton's interpreter returns NaN, and so hid that a kernel took a row of NaN for a row without elements, whose running
maximum is -inf too. (`tl.max` and `tl.min` over an axis ignore NaN in both.)
"""

from __future__ import annotations

import sys


def ignore_nan() -> None:
    """Changes the interpreter in this process, if Triton is imported and its interpreter is on: `tl.maximum` and
    `tl.minimum` ignore NaN."""
    triton = sys.modules.get("triton")
    if triton is None or not triton.knobs.runtime.interpret:
        return
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder

    InterpreterBuilder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    InterpreterBuilder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)
