"""The state of error feedback between steps: one flat residual per DDP bucket, whose parts belong to its parameters.

DDP rebuilds its buckets after the first step, in the order in which gradients became ready. A residual that belonged to
a bucket would then be added to other parameters' gradients, so each parameter's part moves with the parameter.
Parameters are numbered when they are first seen, in the initial buckets. These are cut from the model's parameters in
order, and the last one comes first. Numbered from the last to the first of each bucket, parameters have the reverse of
the model's order, wherever the cuts are. So a state that is loaded into a new process, or a copy of the model, finds
the same numbers. The cuts matter only with several dtypes and find_unused_parameters: `bucket_cap_mb` must then stay.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Place = tuple[int, int, int]  # a parameter's number, its offset in the bucket, its number of elements


class Numbers:
    """Numbers parameters in the order in which they are first seen, those of a bucket from the last to the first."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, torch.Tensor]] = {}

    def of(self, bucket: Sequence[torch.Tensor]) -> list[int]:
        """The numbers of a bucket's parameters."""
        for parameter in reversed(bucket):
            # The tensor is kept alive with its number, so that no later tensor has the same id.
            self._known.setdefault(id(parameter), (len(self._known), parameter))
        return [self._known[id(parameter)][0] for parameter in bucket]


class Residuals:
    """The residuals of all buckets, in `dtype`, zero at first."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._buckets: dict[int, tuple[tuple[Place, ...], torch.Tensor]] = {}
        self._parts: dict[int, torch.Tensor] = {}

    def of(self, bucket: int, places: Sequence[Place], buffer: torch.Tensor) -> torch.Tensor:
        """The flat residual of a bucket with these parameters, in the shape of its buffer."""
        layout = tuple(places)
        known = self._buckets.get(bucket)
        if known is not None and known[0] == layout and known[1].device == buffer.device:
            return known[1]
        flat = torch.zeros(buffer.numel(), dtype=self._dtype, device=buffer.device)
        # Other buckets that had one of these parameters are no longer, and would hold its old residual if they came
        # back: a second DistributedDataParallel of a model begins with the initial buckets again.
        here = {number for number, _, _ in layout}
        for other, (others, _) in list(self._buckets.items()):
            if any(number in here for number, _, _ in others):
                del self._buckets[other]
        for number, begin, count in layout:
            part = flat[begin : begin + count]
            if (earlier := self._parts.get(number)) is not None:
                part.copy_(earlier)
            self._parts[number] = part
        self._buckets[bucket] = layout, flat
        return flat

    def parts(self) -> list[torch.Tensor]:
        """The residuals of all parameters, not copied."""
        return list(self._parts.values())

    def state_dict(self) -> dict[int, torch.Tensor]:
        """Copies of the residuals by parameter number."""
        return {number: part.clone() for number, part in self._parts.items()}

    def load_state_dict(self, parts: dict[int, torch.Tensor]) -> None:
        """Loads residuals; those that are not given become zero, as before a parameter's first compressed step. Raises
        ValueError if one has another number of elements than the present one, and then loads none."""
        for number, part in parts.items():
            here = self._parts.get(number)
            if here is not None and here.numel() != part.numel():
                sizes = f"{here.numel()} elements, got {part.numel()}"
                raise ValueError(f"CompressState: residual {number} must have {sizes}")
        for number, here in self._parts.items():
            if number not in parts:
                here.zero_()
        for number, part in parts.items():
            if (here := self._parts.get(number)) is None:
                self._parts[number] = part.detach().clone()
            else:
                here.copy_(part)
