"""A transformer neural process, its training step and its task."""

from .attention import require_flash
from .feasibility import RATES, Feasibility, Rates, feasibility
from .mean_pooling import MeanPoolingNP
from .model import TransformerNP
from .stages import STAGES, stages
from .step import Sizes, transformer_np
from .task import KERNELS, constant_loss, sample_task

__all__ = [
    "KERNELS",
    "RATES",
    "STAGES",
    "Feasibility",
    "MeanPoolingNP",
    "Rates",
    "Sizes",
    "TransformerNP",
    "constant_loss",
    "feasibility",
    "require_flash",
    "sample_task",
    "stages",
    "transformer_np",
]
