"""Every choice that depends on sizes, dtype and GPU: `pick_*` functions and their frozen dataclasses. No kernels."""
