"""NVTX ranges, in the registered domain `ridgeline`, named kernel.mode.case.implementation, and of stages within them.

They tell a profiler what to look at. The timed path has none: a range costs about as much as a short kernel.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import nvtx

DOMAIN = "ridgeline"
STAGES = "ridgeline.stages"


def range_name(kernel: str, mode: str, case: str, implementation: str) -> str:
    """The name of one measurement in a profiler, the report and the record."""
    return f"{kernel}.{mode}.{case}.{implementation}"


def range(name: str) -> AbstractContextManager[object]:
    """A push/pop range in the domain. Its cost is not measurable when no profiler is attached."""
    return nvtx.annotate(message=name, domain=DOMAIN)


def stage(name: str) -> AbstractContextManager[object]:
    """A push/pop range of a stage of a call, in a separate domain: only the other domain selects launches for ncu."""
    return nvtx.annotate(message=name, domain=STAGES)
