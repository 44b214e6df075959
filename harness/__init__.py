"""Declare, check, time, profile and report GPU kernels. Start reading at `spec.py`.

The modules at this level are the declaration and what the packages share. `commands` has one module for each command of
`python -m harness`, built from `correctness`, `measure`, `compiling`, `nsight` and `reporting`.
"""

import os

# Streams that share one of the GPU's hardware queues run in the order in which they were filled, and so may seem to
# have waited for one another. By default there are 8 queues. Read when CUDA starts, so before anything asks for a GPU.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
