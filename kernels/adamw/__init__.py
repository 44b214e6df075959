"""AdamW for lists of parameters in one launch: a function and an optimizer; and the scale that clips gradients."""

from .clip import clip_scale
from .op import AdamW, PointerTables, adamw

__all__ = ["AdamW", "PointerTables", "adamw", "clip_scale"]
