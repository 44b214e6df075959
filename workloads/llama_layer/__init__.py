"""A decoder layer of Llama on these kernels: attention and feed-forward, forward and backward, also in fp8."""

from .fp8_linear import fp8_linear
from .fp8_weights import FP8Weight, fp8_weight
from .layer import LLAMA2, LayerConfig, LlamaLayer, llama_layer

__all__ = ["LLAMA2", "FP8Weight", "LayerConfig", "LlamaLayer", "fp8_linear", "fp8_weight", "llama_layer"]
