"""Declare, check, time, profile and report GPU kernels. Start reading at `spec.py`."""
