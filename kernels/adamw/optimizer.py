"""`AdamW`, in the place of torch.optim.AdamW."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .checks import DTYPES, NAMES, check_hyperparameters, check_kind, check_seed
from .kernel import adamw_step
from .memory import dense
from .tables import PointerTables, Tensors

# What a parameter has in `state`, all of it fp32 whatever its own dtype. A master weight only where it was asked for.
STATES = ("step", "exp_avg", "exp_avg_sq", "master_param")


@dataclass(frozen=True)
class _Exact:
    """A tensor on its way through Optimizer.load_state_dict, which would round it to the dtype of the parameter."""

    tensor: torch.Tensor


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101, alg. 2; the formula is at `adamw`), for each param group and
    device one launch over all parameters after a small one that counts the steps.

    A drop-in for torch.optim.AdamW: its arguments and param_groups, closures, schedulers, lr as a tensor, hooks,
    torch.amp.GradScaler, and state dicts that either loads from the other. The differences:

    - exp_avg and exp_avg_sq are fp32 for every parameter; PyTorch keeps them in the parameter's dtype.
    - Steps are counted on the device, so that the optimizer is always `capturable`, and never waits for the GPU. lr is
      a constant of a CUDA graph unless it is a tensor on the device.
    - With a GradScaler the gradients are not written back unscaled.
    - amsgrad and differentiable are refused; foreach, fused and capturable change nothing.

    master_weights       keep an fp32 copy of every fp16 and bf16 parameter in state[p]["master_param"], made from the
                         parameter at its first step; that is what is updated, and the parameter is its rounded copy.
    stochastic_rounding  round bf16 parameters to a neighbour at random, so that the mean is right: no update is lost
                         for being small, at no memory at all. Fixed by `seed`, the step and the parameter's place.

    Raises TypeError for parameters of other dtypes than fp32, fp16 and bf16, ValueError for a bad value, and in `step`
    RuntimeError for sparse gradients and for CPU parameters outside Triton's interpreter.
    """

    # GradScaler then leaves the scale and the infinity it found to `step`, in attributes that it removes afterwards.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        self._tables = PointerTables()
        defaults = dict(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            master_weights=master_weights,
            stochastic_rounding=stochastic_rounding,
            seed=seed,
        )
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Like PyTorch's; refuses what this optimizer cannot do."""
        _check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_params(group)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_tables", PointerTables())  # of a pickle or a deep copy
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            _check_group(group)
            for param in group["params"]:
                own = self.state.get(param, {})
                for name in (name for name in STATES if name in own):
                    own[name] = _fp32(own[name], param.device)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Like PyTorch's, but states stay fp32, and are copies of those in `state_dict`."""
        handle = self.register_load_state_dict_pre_hook(_keep_exact)  # the last, after the user's
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step; returns what the closure, if there is one, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        first = 0
        for group in self.param_groups:
            for device, tensors in self._with_grads(group, first).items():
                self._update(group, device, tensors)
            first += len(group["params"])
        return loss

    def _with_grads(self, group: dict[str, Any], first: int) -> dict[torch.device, Tensors]:
        """What of a group is to be updated, by device. `first` is the number of its first parameter."""
        master_weights = group["master_weights"]
        found: dict[torch.device, list[int]] = {}
        params, grads = group["params"], [param.grad for param in group["params"]]
        for index, grad in enumerate(grads):
            if grad is None:
                continue
            if grad.is_sparse:
                raise RuntimeError("AdamW: params must have dense gradients, got a sparse one")
            found.setdefault(params[index].device, []).append(index)
        tensors = {}
        for device, chosen in found.items():
            states = [self.state[params[i]] for i in chosen]
            for i, state in zip(chosen, states, strict=True):
                if len(state) < 3 or (master_weights and "master_param" not in state):
                    _begin(state, params[i], master_weights)
            tensors[device] = Tensors(
                [params[i] for i in chosen],
                [grads[i] for i in chosen],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [state.get("master_param") for state in states] if master_weights else [None] * len(states),
                [state["step"] for state in states],
                [first + i for i in chosen],
                group["stochastic_rounding"],
            )
        return tensors

    def _of_scaler(self, name: str, device: torch.device) -> torch.Tensor | None:
        tensor = getattr(self, name, None)
        return None if tensor is None else tensor.to(device, non_blocking=True)

    @torch.compiler.disable
    def _update(self, group: dict[str, Any], device: torch.device, tensors: Tensors) -> None:
        written = [*tensors.params, *tensors.exp_avgs, *tensors.exp_avg_sqs, *tensors.steps]
        written += [t for t in tensors.masters if t is not None]
        with dense(tensors) as given:
            adamw_step(
                given,
                self._tables,
                None,
                _lr_on(group["lr"], device),
                group["betas"],
                group["eps"],
                group["weight_decay"],
                group["maximize"],
                group["seed"],
                self._of_scaler("grad_scale", device),
                self._of_scaler("found_inf", device),
                advance=True,
            )
        # As any operation in place does: autograd then refuses a backward through what was there before.
        torch.autograd.graph.increment_version(written)


def _check_group(group: dict[str, Any]) -> None:
    check_hyperparameters(group["lr"], group["betas"], group["eps"], group["weight_decay"])
    check_seed(group["seed"])
    for name in ("amsgrad", "differentiable"):
        if group[name]:
            raise ValueError(f"AdamW: {name} must be False; torch.optim.AdamW has it")
    if group["master_weights"] and group["stochastic_rounding"]:
        raise ValueError("AdamW: master_weights and stochastic_rounding must not both be set: either is enough")


def _check_params(group: dict[str, Any]) -> None:
    for index, param in enumerate(group["params"]):
        name = f"params[{index}]"
        if is_traceable_wrapper_subclass(param):
            raise TypeError(f"AdamW: {name} must be a plain tensor, got {type(param).__name__}")
        if param.dtype not in DTYPES:
            raise TypeError(f"AdamW: {name} must be {NAMES}, got {param.dtype}")
        has_master = group["master_weights"] and param.dtype != torch.float32
        check_kind(name, param.dtype, has_master, group["stochastic_rounding"])


def _begin(state: dict[str, Any], param: torch.Tensor, master_weights: bool) -> None:
    """Adds what a parameter's state lacks."""
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
    for name in ("exp_avg", "exp_avg_sq"):
        if name not in state:
            state[name] = torch.zeros_like(param, dtype=torch.float32)
    if master_weights and param.dtype != torch.float32 and "master_param" not in state:
        state["master_param"] = param.detach().to(torch.float32)


def _keep_exact(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    def wrapped(state: Any) -> Any:
        if not isinstance(state, dict):
            return state
        exact = {n: _Exact(t) for n, t in state.items() if n in STATES and isinstance(t, torch.Tensor)}
        return {**state, **exact}

    return {**state_dict, "state": {key: wrapped(state) for key, state in state_dict["state"].items()}}


def _fp32(value: Any, device: torch.device) -> torch.Tensor:
    if isinstance(value, _Exact):
        return value.tensor.detach().to(device, torch.float32, copy=True)
    return torch.as_tensor(value, dtype=torch.float32, device=device)


def _lr_on(lr: float | torch.Tensor, device: torch.device) -> float | torch.Tensor:
    """lr as the kernel can take it. That of a CPU tensor is read, which waits for nothing."""
    if not isinstance(lr, torch.Tensor) or lr.device == device:
        return lr
    if lr.device.type == "cpu":
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"AdamW: lr must be on {device} to be captured in a CUDA graph, got a tensor on the CPU")
        return float(lr)
    return lr.to(device, non_blocking=True)
