"""Correctness of implementations: the checks of `check`, and `verify`, which `bench` calls."""
