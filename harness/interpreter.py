"""Triton's interpreter with what a GPU computes otherwise: maxima, roots and powers of subnormal numbers, masked loads.

`tl.maximum` and `tl.minimum` ignore NaN unless told otherwise: on a GPU the maximum of NaN and a number is the number.
Triton's interpreter returns NaN, and so hid that a kernel took a row of NaN for a row without elements, whose running
maximum is -inf too. (`tl.max` and `tl.min` over an axis ignore NaN in both.)

`tl.rsqrt`, `tl.sqrt` and `tl.exp2` of fp32 are instructions with .ftz, which take subnormal numbers for 0 and return 0
for them. The interpreter computes with subnormal numbers, and so hid that a norm of tiny numbers was inf.

What a masked `tl.load` without `other` returns where the mask is False is undefined: on a GPU whatever was in the
register. Triton's interpreter returns zeros, which would hide that a kernel uses it.
"""

from __future__ import annotations

import sys
from typing import Any

NAN_BITS = {"bf16": 0x7FC0, "fp8e4nv": 0x7F, "fp8e5": 0x7F}  # of types that the interpreter holds as unsigned integers


def as_on_a_gpu() -> None:
    """Changes the interpreter in this process, if Triton is imported and its interpreter is on: `tl.maximum` and
    `tl.minimum` ignore NaN, `tl.rsqrt`, `tl.sqrt` and `tl.exp2` flush subnormal numbers to 0, and elements that a load
    masks and gives no value are NaN, or -2 in integers."""
    triton = sys.modules.get("triton")
    if triton is None or not triton.knobs.runtime.interpret:
        return
    import numpy as np
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    load = InterpreterBuilder.create_masked_load
    if load.__name__ == "spoiled_load":  # called before
        return

    def flushed(x: Any) -> Any:
        if x.dtype != np.float32:
            return x
        return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)

    def spoiled_load(self: Any, ptrs: Any, mask: Any, other: Any, *options: Any) -> Any:
        # Of a single element Triton's own code takes `other=0` for no value: it asks whether it is true.
        if other is None and ptrs.data.size > 1 and not mask.data.all():
            kind = ptrs.get_element_ty()
            dtype = np.dtype(interpreter._get_np_dtype(kind))
            # Not all bits, with which memory around tensors is filled to find writes to it.
            value = np.nan if dtype.kind == "f" else NAN_BITS.get(str(kind), np.array(-2).astype(dtype))
            other = TensorHandle(np.full(ptrs.data.shape, value, dtype), kind)
        return load(self, ptrs, mask, other, *options)

    InterpreterBuilder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    InterpreterBuilder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)
    InterpreterBuilder.create_rsqrt = lambda self, arg: self.unary_op(arg, lambda x: 1 / np.sqrt(flushed(x)))
    InterpreterBuilder.create_sqrt = lambda self, arg: self.unary_op(arg, lambda x: np.sqrt(flushed(x)))
    InterpreterBuilder.create_exp2 = lambda self, arg: self.unary_op(arg, lambda x: flushed(np.exp2(x)))
    InterpreterBuilder.create_masked_load = spoiled_load
