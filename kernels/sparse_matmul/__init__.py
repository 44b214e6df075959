"""Products with weights of 2:4 structured sparsity, their compressed form, forward and backward."""

from .op import sparse_matmul
from .op_compress import Compressed, compress, decompress, prune

__all__ = ["Compressed", "compress", "decompress", "prune", "sparse_matmul"]
