"""Declare, check, time, profile and report GPU kernels. Start reading at `spec.py`.

The modules here are the declaration, what everybody needs, and one module for each command of `python -m harness`.
What the commands are made of lies in packages: `correctness`, `measure`, `compiling`, `nsight` and `reporting`.
"""
