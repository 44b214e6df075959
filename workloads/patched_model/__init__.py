"""A training step of Hugging Face models on these kernels, by `ridgeline.patch`, beside the same step without."""

from .step import SIZES, Sizes, patched_model

__all__ = ["SIZES", "Sizes", "patched_model"]
