"""One module for each command of `python -m harness`."""
