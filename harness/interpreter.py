"""Triton's interpreter with the GPU's maxima and masked loads.

`tl.maximum` and `tl.minimum` ignore NaN unless told otherwise: on a GPU the maximum of NaN and a number is the number.
Triton's interpreter returns NaN, and so hid that a kernel took a row of NaN for a row without elements, whose running
maximum is -inf too. (`tl.max` and `tl.min` over an axis ignore NaN in both.)

What a masked `tl.load` without `other` returns where the mask is False is undefined: on a GPU whatever was in the
register. Triton's interpreter returns zeros, which would hide that a kernel uses it.
"""

from __future__ import annotations

import sys
from typing import Any


def ignore_nan() -> None:
    """Changes the interpreter in this process, if Triton is imported and its interpreter is on: `tl.maximum` and
    `tl.minimum` ignore NaN."""
    if not _interprets():
        return
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder

    InterpreterBuilder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    InterpreterBuilder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)


def spoil_masked() -> None:
    """Changes the interpreter in this process, if Triton is imported and its interpreter is on: elements that a load
    masks and gives no value have all bits set, NaN as a float and -1 as an integer."""
    if not _interprets():
        return
    import numpy as np
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    load = InterpreterBuilder.create_masked_load
    if load.__name__ == "spoiled_load":
        return

    def spoiled_load(self: Any, ptrs: Any, mask: Any, other: Any, *options: Any) -> Any:
        if other is None and not mask.data.all():
            kind = np.dtype(interpreter._get_np_dtype(ptrs.get_element_ty()))
            ones = np.full(ptrs.data.size * kind.itemsize, 0xFF, np.uint8)
            other = TensorHandle(ones.view(kind).reshape(ptrs.data.shape), ptrs.get_element_ty())
        return load(self, ptrs, mask, other, *options)

    InterpreterBuilder.create_masked_load = spoiled_load


def _interprets() -> bool:
    triton = sys.modules.get("triton")
    return triton is not None and triton.knobs.runtime.interpret
