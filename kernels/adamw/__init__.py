"""AdamW for lists of parameters in one launch: a function and an optimizer."""

from .op import AdamW, PointerTables, adamw

__all__ = ["AdamW", "PointerTables", "adamw"]
