"""The launch plan of a step over given tensors: their table of addresses on the device, and the launches."""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
import triton

from . import configs
from .kernel import _adamw_kernel, _adamw_step_kernel
from .launch import Launch, signature
from .tables import PointerTables, Tensors

MAX_LAUNCHES = 16  # per table; they differ in which of lr, step, grad_scale, found_inf are tensors


class Update:
    """A step over dense tensors on one device. Built once per set of tensors, called with the hyperparameters."""

    def __init__(self, tensors: Tensors, tables: PointerTables) -> None:
        first = tensors.params[0]
        self.device = first.device
        # In the interpreter, the capability of an sm_80 GPU.
        capability = torch.cuda.get_device_capability(first.device) if first.is_cuda else (8, 0)
        self._config = configs.pick_config(sum(t.numel() for t in tensors.params), capability)
        self._tables = tables
        with torch.cuda.device_of(first):
            self._table = tables.build(tensors, self._config.block)
        self._rows, self._ctas = len(self._table.rows), len(self._table.cta_rows)
        self._launches: dict[Hashable, Launch] = {}

    def __call__(
        self,
        step: float | None,
        lr: float | torch.Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        maximize: bool,
        seed: int,
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
        advance: bool = False,
    ) -> None:
        """Updates all parameters in one launch. With `advance` another launch before it adds 1 to their steps. If
        `step` is None, the kernel reads it from the tensors in the table. `op` must have checked the arguments."""
        if self.device.type == "cuda":
            self._tables.use(self._table)
        rows, cta_rows = self._table.rows, self._table.cta_rows
        if advance:
            self._count_launch(found_inf)(rows, found_inf)
        if not self._ctas:
            return
        lr = lr if isinstance(lr, torch.Tensor) else float(lr)
        beta1, beta2 = betas
        self._step_launch(step, lr, weight_decay, maximize, grad_scale, found_inf)(
            rows,
            cta_rows,
            lr,
            step,
            grad_scale,
            found_inf,
            float(beta1),
            float(beta2),
            1.0 - beta1,
            1.0 - beta2,
            math.log(beta1) if beta1 else -math.inf,
            math.log(beta2) if beta2 else -math.inf,
            float(eps),
            float(weight_decay),
            seed,
        )

    def _step_launch(
        self,
        step: float | None,
        lr: float | torch.Tensor,
        weight_decay: float,
        maximize: bool,
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> Launch:
        rate = signature(lr) if isinstance(lr, torch.Tensor) else None
        key = (step is None, rate, weight_decay != 0, maximize, signature(grad_scale), signature(found_inf))
        launch = self._launches.get(key)
        if launch is None:
            launch = Launch(
                _adamw_kernel,
                (self._ctas,),
                self.device,
                (),
                KINDS=self._table.kinds,
                LR_IN_MEMORY=rate is not None,
                STEP_IN_TABLE=step is None,
                DECAY=weight_decay != 0,
                MAXIMIZE=maximize,
                BLOCK=self._config.block,
                SMALL=32 * self._config.num_warps,
                EVICTION=self._config.eviction,
                num_warps=self._config.num_warps,
            )
            self._keep(key, launch)
        return launch

    def _count_launch(self, found_inf: torch.Tensor | None) -> Launch:
        key = ("counting", signature(found_inf))
        launch = self._launches.get(key)
        if launch is None:
            block = configs.STEP_BLOCK
            grid = (triton.cdiv(self._rows, block),)
            launch = Launch(_adamw_step_kernel, grid, self.device, (self._rows,), BLOCK=block)
            self._keep(key, launch)
        return launch

    def _keep(self, key: Hashable, launch: Launch) -> None:
        if len(self._launches) >= MAX_LAUNCHES:
            self._launches.clear()
        self._launches[key] = launch


def update_of(tensors: Tensors, tables: PointerTables) -> Update:
    """The update of these tensors, cached in `tables`, built if missing."""
    key = tensors.key()
    update = tables.find(key)
    if update is None:
        update = Update(tensors, tables)
        tables.keep(key, update)
    return update
