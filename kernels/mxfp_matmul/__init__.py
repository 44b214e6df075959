"""y = alpha · x, forward and backward."""

from .op import mxfp_matmul

__all__ = ["mxfp_matmul"]
