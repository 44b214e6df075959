"""Mutation score: small faults written into a kernel's own source, and how many of them the checks reject."""
