"""GPU kernels, one folder each: `from ridgeline.rmsnorm import rmsnorm` (in a checkout, `from kernels.rmsnorm …`).

Nothing is imported here, so that asking for one kernel does not load the others.
"""

__version__ = "0.1.0"
