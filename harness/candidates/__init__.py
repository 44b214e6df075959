"""Your own functions and modules under the harness's checks and clocks. Start at `benchmark.py`."""

from .baselines import compiled, eager, flash, hugging_face
from .benchmark import Benchmark, bench
from .results import Result, Results, Statistics

__all__ = ["Benchmark", "Result", "Results", "Statistics", "bench", "compiled", "eager", "flash", "hugging_face"]
