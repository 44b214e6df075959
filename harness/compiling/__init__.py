"""Kernels compiled for a GPU that is not there, and what ptxas made of them."""
