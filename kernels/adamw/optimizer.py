"""`AdamW`, a replacement for torch.optim.AdamW."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .arguments import NAMES, check_hyperparameters, check_kind, check_seed
from .checks import FLOATS, runnable
from .memory import dense
from .plans import Update, update_of
from .tables import PointerTables, Tensors

# The entries of a parameter in `state`, all fp32. The master weight exists only with master_weights=True.
STATES = ("step", "exp_avg", "exp_avg_sq", "master_param")


TABLES_OF_A_GROUP = 8  # several, because the addresses of gradients may alternate

_NO_STATE: dict[str, Any] = {}
_address, _dense = torch.Tensor.data_ptr, torch.Tensor.is_contiguous
_size, _strides = torch.Tensor.numel, torch.Tensor.stride
_negative, _device = torch.Tensor.is_neg, torch.Tensor.get_device


@dataclass(frozen=True)
class _Exact:
    """Wraps a tensor for Optimizer.load_state_dict, which would otherwise round it to the dtype of the parameter."""

    tensor: torch.Tensor


class AdamW(torch.optim.Optimizer):
    """The AdamW optimizer, with the formula of `adamw`. For each param group and device, a step is a small launch that
    adds 1 to the steps, then one launch over all parameters.

    A drop-in replacement for torch.optim.AdamW: it supports its arguments and param_groups, closures, schedulers, lr as
    a tensor, hooks and torch.amp.GradScaler, and each loads the other's state dicts. The differences:

    - exp_avg and exp_avg_sq are fp32 for every parameter; PyTorch keeps them in the parameter's dtype.
    - Steps are counted on the device, so that the optimizer is always `capturable` and never synchronises. lr is a
      constant of a CUDA graph unless it is a tensor on the device.
    - With a GradScaler the unscaled gradients are not written back.
    - amsgrad and differentiable raise an error; foreach, fused and capturable have no effect.

    master_weights       keep an fp32 copy of every fp16 and bf16 parameter in state[p]["master_param"], made from the
                         parameter at its first step. A step updates the copy, then rounds it to the parameter.
    stochastic_rounding  round bf16 parameters to one of two neighbours with the fp32 result as expected value, so that
                         small updates are not lost, without extra memory. The random bits depend on `seed`, the step,
                         the parameter's index and the element's.

    Raises TypeError for parameters of other dtypes than fp32, fp16 and bf16, ValueError for a bad value, and in `step`
    RuntimeError for sparse gradients and for CPU parameters outside Triton's interpreter, ValueError for a gradient or
    a state of another shape or on another device than its parameter, as after `model.to(device)` between two steps.

    Source: Loshchilov and Hutter 2019, arXiv:1711.05101, alg. 2.
    """

    # With this attribute, GradScaler sets the attributes grad_scale and found_inf for the duration of `step`.
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
        """Adds a param group, as in PyTorch. Raises ValueError for options that this optimizer does not support."""
        _check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        self._tables.capacity = TABLES_OF_A_GROUP * len(self.param_groups)
        group = self.param_groups[-1]
        try:
            _check_params(group)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_tables", PointerTables())  # a pickle or a deep copy has none
        self._tables.capacity = TABLES_OF_A_GROUP * len(self.param_groups)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            _check_group(group)
            for param in group["params"]:
                own = self.state.get(param, {})
                for name in (name for name in STATES if name in own):
                    own[name] = _fp32(own[name], param.device)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict as in PyTorch, but states stay fp32 and are copies of those in `state_dict`."""
        handle = self.register_load_state_dict_pre_hook(_keep_exact)  # the last hook, after the user's
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Performs one step. Returns the result of the closure, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        first = 0
        for group in self.param_groups:
            self._update(group, first)
            first += len(group["params"])
        return loss

    @torch.compiler.disable
    def _update(self, group: dict[str, Any], first: int) -> None:
        """Performs a step of one group. `first` is the index of its first parameter among those of all groups.

        The updates are looked up by the addresses of all tensors and everything else that a table depends on. If they
        are found, nothing is built, checked or copied.
        """
        params = group["params"]
        grads = [grad for param in params if (grad := param.grad) is not None]
        chosen: tuple[int, ...] | None = None  # None: all parameters
        if len(grads) != len(params):
            chosen = tuple([index for index, param in enumerate(params) if param.grad is not None])
            params = [params[index] for index in chosen]
        if not grads:
            return
        try:
            key, written = self._key(group, params, grads)
        except (KeyError, RuntimeError):  # a parameter without its states; a sparse gradient
            self._init_states(group, params, grads)
            key, written = self._key(group, params, grads)
        key = (first, chosen, *key)
        updates = self._tables.find(key)
        if updates is not None:
            for update in updates:
                self._run(group, update)
        else:
            numbers = range(len(params)) if chosen is None else chosen
            self._first_run(group, key, params, grads, [first + index for index in numbers])
        # As for any in-place operation: a backward that needs the overwritten values must raise an error.
        torch.autograd.graph.increment_version(written)

    def _key(
        self, group: dict[str, Any], params: list[torch.Tensor], grads: list[torch.Tensor]
    ) -> tuple[tuple[Any, ...], list[torch.Tensor]]:
        """(key with everything that an update of these parameters depends on, tensors that it writes). Raises KeyError
        if a state is missing. The key omits strides if every tensor is contiguous. A gradient with the negative bit is
        replaced in `grads`: the kernel would read its values without their sign."""
        state, none, sizes = self.state, _NO_STATE, [*map(_size, params)]
        # The bit is on imaginary parts, whose strides are even. So with more elements they are copied in any case.
        if 1 in sizes and any(map(_negative, grads)):
            grads[:] = [grad.resolve_neg() for grad in grads]
        states = [state.get(param, none) for param in params]
        written = [*params, *[s["exp_avg"] for s in states], *[s["exp_avg_sq"] for s in states]]
        if group["master_weights"]:
            written += [s["master_param"] for s, p in zip(states, params, strict=True) if p.dtype != torch.float32]
        strides: tuple[Any, ...] = ()
        if not (all(map(_dense, written)) and all(map(_dense, grads))):
            strides = (*map(_strides, written), *map(_strides, grads))
        written += [s["step"] for s in states]
        key = (
            group["master_weights"],
            group["stochastic_rounding"],
            params[0].device,
            *[p.dtype for p in params],
            *[g.dtype for g in grads],
            *sizes,
            *map(_address, written),
            *map(_address, grads),
            *strides,
        )
        return key, written

    def _init_states(self, group: dict[str, Any], params: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        if any(grad.layout != torch.strided for grad in grads):
            raise RuntimeError("AdamW: params must have dense gradients, got a sparse one")
        for param in params:
            runnable("AdamW", "params", param)
        for param in params:
            _init_state(self.state[param], param, group["master_weights"])

    def _first_run(
        self,
        group: dict[str, Any],
        key: tuple[Any, ...],
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        numbers: list[int],
    ) -> None:
        """Performs the first step of a group over these tensors. Its updates are cached under `key`, unless tensors had
        to be copied to be dense, which each step must repeat."""
        of_device: dict[torch.device, list[int]] = {}
        for index, param in enumerate(params):
            of_device.setdefault(param.device, []).append(index)
        updates, copied = [], False
        for chosen in of_device.values():
            states = [self.state[params[i]] for i in chosen]
            # A parameter that has become fp32 may still have the master weight of its old dtype.
            masters = [
                state.get("master_param") if group["master_weights"] and params[i].dtype != torch.float32 else None
                for i, state in zip(chosen, states, strict=True)
            ]
            tensors = Tensors(
                [params[i] for i in chosen],
                [grads[i] for i in chosen],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                masters,
                [state["step"] for state in states],
                [numbers[i] for i in chosen],
                group["stochastic_rounding"],
            )
            _check_step(tensors)
            with dense(tensors) as given:
                update = Update(given, self._tables) if given is tensors else update_of(given, self._tables)
                self._run(group, update)
            updates.append(update)
            copied = copied or given is not tensors
        if not copied:
            self._tables.keep(key, updates)

    def _run(self, group: dict[str, Any], update: Update) -> None:
        device = update.device
        update(
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

    def _of_scaler(self, name: str, device: torch.device) -> torch.Tensor | None:
        tensor = getattr(self, name, None)
        return None if tensor is None else tensor.to(device, non_blocking=True)


def _check_group(group: dict[str, Any]) -> None:
    check_hyperparameters(group["lr"], group["betas"], group["eps"], group["weight_decay"])
    check_seed(group["seed"])
    for name in ("amsgrad", "differentiable"):
        if group[name]:
            raise ValueError(f"AdamW: {name} must be False; torch.optim.AdamW supports it")
    if group["master_weights"] and group["stochastic_rounding"]:
        raise ValueError("AdamW: master_weights and stochastic_rounding must not both be set: either is enough")


def _check_params(group: dict[str, Any]) -> None:
    for index, param in enumerate(group["params"]):
        name = f"params[{index}]"
        if is_traceable_wrapper_subclass(param):
            raise TypeError(f"AdamW: {name} must be a plain tensor, got {type(param).__name__}")
        if param.dtype not in FLOATS:
            raise TypeError(f"AdamW: {name} must be {NAMES}, got {param.dtype}")
        has_master = group["master_weights"] and param.dtype != torch.float32
        check_kind(name, param.dtype, has_master, group["stochastic_rounding"])


def _check_step(tensors: Tensors) -> None:
    """Checks the tensors of a step on one device. The kernel gets only addresses: it would read and write past the end
    of a tensor that is smaller than its parameter."""
    params, numbers = tensors.params, tensors.sequences
    if tensors.stochastic:
        for number, param in zip(numbers, params, strict=True):
            check_kind(f"params[{number}]", param.dtype, False, True)
    _check_column("", numbers, params, params, FLOATS)
    _check_column(".grad", numbers, params, tensors.grads, FLOATS)
    _check_column("'s exp_avg", numbers, params, tensors.exp_avgs, FLOATS[:1])
    _check_column("'s exp_avg_sq", numbers, params, tensors.exp_avg_sqs, FLOATS[:1])
    steps = [step.squeeze() if step.dim() else step for step in tensors.steps]  # of one element, whatever its shape
    _check_column("'s step", numbers, [params[0].new_empty(())] * len(params), steps, FLOATS[:1])
    own = [i for i, master in enumerate(tensors.masters) if master is not None]
    masters = [tensors.masters[i] for i in own]
    _check_column("'s master_param", [numbers[i] for i in own], [params[i] for i in own], masters, FLOATS[:1])


def _check_column(name: str, numbers: list[int], like: list[Any], column: list[Any], dtypes: tuple[Any, ...]) -> None:
    """Checks that each tensor has the shape and device of the one in `like`, and one of these dtypes."""
    if (
        [t.shape for t in column] == [t.shape for t in like]
        and {*map(_device, column)} == {*map(_device, like)}
        and {t.dtype for t in column}.issubset(dtypes)
    ):
        return
    for number, other, tensor in zip(numbers, like, column, strict=True):
        if tensor.dtype not in dtypes:
            names = NAMES if dtypes is FLOATS else "float32"
            raise TypeError(f"AdamW: params[{number}]{name} must be {names}, got {tensor.dtype}")
        if tensor.shape != other.shape or tensor.device != other.device:
            expected, got = f"{tuple(other.shape)} on {other.device}", f"{tuple(tensor.shape)} on {tensor.device}"
            raise ValueError(f"AdamW: params[{number}]{name} must be {expected}, got {got}")


def _init_state(state: dict[str, Any], param: torch.Tensor, master_weights: bool) -> None:
    """Adds the missing entries to a parameter's state."""
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
    for name in ("exp_avg", "exp_avg_sq"):
        if name not in state:
            state[name] = torch.zeros_like(param, dtype=torch.float32)
    if master_weights and param.dtype != torch.float32 and "master_param" not in state:
        state["master_param"] = param.detach().to(torch.float32)


def _keep_exact(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Wraps the states, after the check of the groups: an error in __setstate__ would leave the optimizer with both."""
    for group in state_dict["param_groups"]:
        _check_group({**optimizer.defaults, **group})

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
    """lr as an argument of the kernel. A CPU tensor is read on the host, which needs no synchronisation."""
    if not isinstance(lr, torch.Tensor) or lr.device == device:
        return lr
    if lr.device.type == "cpu":
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"AdamW: lr must be on {device} to be captured in a CUDA graph, got a tensor on the CPU")
        return float(lr)
    return lr.to(device, non_blocking=True)
