"""The version for compute capability 9.0 (Hopper), in CUDA C++."""
