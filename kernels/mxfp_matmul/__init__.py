"""Products with weights of 4 bits, MXFP4 and NVFP4, and the layout in which they are read."""

from .op import mxfp_matmul, mxfp_pack

__all__ = ["mxfp_matmul", "mxfp_pack"]
