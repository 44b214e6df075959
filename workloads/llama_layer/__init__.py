"""A decoder layer of Llama on these kernels: attention and feed-forward, forward and backward."""

from .layer import LLAMA2, LayerConfig, LlamaLayer, llama_layer

__all__ = ["LLAMA2", "LayerConfig", "LlamaLayer", "llama_layer"]
