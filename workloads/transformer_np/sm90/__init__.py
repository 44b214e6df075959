"""The layers for few rows on compute capability 9.0 (Hopper), in CUDA C++."""
