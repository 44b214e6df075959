"""CompressState: the options of the communication hook of DDP, and its state between steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .chunks import KINDS
from .residuals import Numbers, Residuals
from .transport import TRANSPORTS

OTHER_KINDS = ("topk", "powersgd")
OF_BITS = {8: "int8", 4: "int4"}


class CompressState:
    """Options and state of `compress_hook`, one per DDP model and rank.

        ddp.register_comm_hook(CompressState(group, bits=8), compress_hook)

    group           the process group of the DDP model, by default the world
    bits            8 or 4: int8 or int4, if `kind` is None
    kind            "int8", "fp8" or "int4" (`gradient_compression`), "topk", "powersgd"; None: determined by `bits`
    error_feedback  add the compression error to the next step's gradient. Needs 2 bytes per parameter. With DDP's
                    find_unused_parameters, the error of a parameter that no rank uses in the next step is lost.
    min_numel       gradients of fewer elements, and those of at most one dimension, as of norms and biases, are exempt:
                    they are averaged in fp32, with one all-reduce per bucket
    ratio           for "topk": the share of elements that each rank sends
    rank            for "powersgd": rank of the approximation. Matrices that would not become smaller are exempt.
    warmup_steps    number of initial steps that are averaged in fp32 without compression
    transport       as in `gradient_compression`

    A checkpoint needs `state_dict()` of every rank, since residuals differ between ranks; restore it with
    `load_state_dict` before the next step.

    Raises ValueError for an unknown kind or transport, or a number out of range.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        bits: int = 8,
        kind: str | None = None,
        error_feedback: bool = True,
        min_numel: int = 2048,
        ratio: float = 0.01,
        rank: int = 4,
        warmup_steps: int = 0,
        transport: str = "auto",
    ) -> None:
        if bits not in OF_BITS:
            raise ValueError(f"CompressState: bits must be 8 or 4, got {bits!r}")
        self.kind = OF_BITS[bits] if kind is None else kind
        for name, option, known in (("kind", self.kind, (*KINDS, *OTHER_KINDS)), ("transport", transport, TRANSPORTS)):
            if option not in known:
                raise ValueError(f"CompressState: {name} must be one of {', '.join(known)}, got {option!r}")
        if not 0 < ratio <= 1:
            raise ValueError(f"CompressState: ratio must be in (0, 1], got {ratio}")
        if rank < 1 or warmup_steps < 0 or min_numel < 0:
            numbers = f"rank {rank}, warmup_steps {warmup_steps}, min_numel {min_numel}"
            raise ValueError(
                f"CompressState: rank must be at least 1, warmup_steps and min_numel at least 0, got {numbers}"
            )
        self.group, self.transport = group, transport
        self.error_feedback, self.min_numel = error_feedback, min_numel
        self.ratio, self.rank, self.warmup_steps = ratio, rank, warmup_steps
        self.step = 0
        self.numbers = Numbers()
        self.residuals = Residuals(torch.bfloat16)
        self.factors: dict[int, torch.Tensor] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The stream of the hook on that GPU, overlapped with the backward."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def state_dict(self) -> dict[str, Any]:
        """Copies of this rank's state, on their devices."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        return {
            "kind": self.kind,
            "step": self.step,
            "residuals": self.residuals.state_dict(),
            "factors": {number: factor.clone() for number, factor in self.factors.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a state. Raises ValueError for the state of another kind, or residuals of another model."""
        if state["kind"] != self.kind:
            raise ValueError(f"CompressState: state_dict must be of kind {self.kind!r}, got {state['kind']!r}")
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        self.residuals.load_state_dict(state["residuals"])
        self.factors = {number: factor.detach().clone() for number, factor in state["factors"].items()}
        # The copies belong to the current stream, and the hook's frees them while its kernels may still read them.
        for tensor in (*self.residuals.parts(), *self.factors.values()):
            if tensor.is_cuda:
                tensor.record_stream(self.stream(tensor.device))
        self.step = state["step"]
