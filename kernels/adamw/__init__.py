"""AdamW for lists of parameters in one launch: a function and an optimizer. Also the scale that clips gradients."""

from .op import AdamW, PointerTables, adamw
from .op_clip import clip_scale

__all__ = ["AdamW", "PointerTables", "adamw", "clip_scale"]
