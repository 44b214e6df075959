"""A decoder layer of Llama on these kernels: attention and feed-forward, forward and backward, and forward in fp8."""

from .fp8_weights import FP8Weight, fp8_weight
from .layer import LLAMA2, LayerConfig, LlamaLayer, llama_layer

__all__ = ["LLAMA2", "FP8Weight", "LayerConfig", "LlamaLayer", "fp8_weight", "llama_layer"]
