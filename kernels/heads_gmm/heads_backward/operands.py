# A copy of parts/heads_backward/operands.py, made by `nox -s vendor`: change it there.
"""Properties of operands and device on which the launches of heads depend."""

from __future__ import annotations

import torch


def device_of(tensor: torch.Tensor) -> tuple[tuple[int, int], int]:
    """Compute capability and number of SMs; in the interpreter those of an sm_80 with 2 SMs."""
    if not tensor.is_cuda:
        return (8, 0), 2
    properties = torch.cuda.get_device_properties(tensor.device)
    return (properties.major, properties.minor), properties.multi_processor_count


def whole_vectors(tensor: torch.Tensor) -> bool:
    """Whether all rows are contiguous and start on 16-byte boundaries."""
    per_vector = 16 // tensor.element_size()
    return (
        tensor.stride(-1) == 1
        and tensor.data_ptr() % 16 == 0
        and all(stride % per_vector == 0 for stride in tensor.stride()[:-1])
    )
