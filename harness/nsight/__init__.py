"""NVIDIA's tools: Nsight Compute and compute-sanitizer, called and read."""
