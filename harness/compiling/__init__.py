"""Ahead-of-time compilation for a GPU that need not be present, and the analysis of the machine code."""
