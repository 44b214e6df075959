"""Checks and timing by the harness for functions and modules of your own. Start at `benchmark.py`."""

from .baselines import compiled, eager, flash, hugging_face
from .benchmark import Benchmark, bench
from .results import Result, Results, Statistics

__all__ = ["Benchmark", "Result", "Results", "Statistics", "bench", "compiled", "eager", "flash", "hugging_face"]
