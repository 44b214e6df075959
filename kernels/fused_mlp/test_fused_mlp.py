"""What is special to fused_mlp. The rest follows from SPEC: tests/test_specs.py."""

from __future__ import annotations
