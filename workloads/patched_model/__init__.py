"""A training step of Hugging Face models on these kernels, by `ridgeline.patch`, and the same step without them."""

from .step import SIZES, Sizes, patched_model

__all__ = ["SIZES", "Sizes", "patched_model"]
