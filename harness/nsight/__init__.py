"""Runs NVIDIA's tools Nsight Compute and compute-sanitizer, and parses their output."""
