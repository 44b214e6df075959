"""All-reduce of gradients in 8 or 4 bits per element, as a function and as a communication hook of DDP and FSDP2."""

from .op import (
    CompressedReduceScatter,
    CompressState,
    break_even_bandwidth,
    compress_fsdp,
    compress_hook,
    gradient_compression,
    release,
)

__all__ = [
    "CompressState",
    "CompressedReduceScatter",
    "break_even_bandwidth",
    "compress_fsdp",
    "compress_hook",
    "gradient_compression",
    "release",
]
