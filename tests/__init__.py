"""Tests of the harness, of the architecture, and of every SPEC."""
