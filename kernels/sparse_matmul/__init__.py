"""GEMM with weights of 2:4 structured sparsity, forward and backward, and their compressed form."""

from .op import sparse_matmul
from .op_compress import Compressed, compress, decompress, prune

__all__ = ["Compressed", "compress", "decompress", "prune", "sparse_matmul"]
