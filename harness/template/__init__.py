"""y = alpha · x, forward and backward."""

from .op import TEMPLATE

__all__ = ["TEMPLATE"]
