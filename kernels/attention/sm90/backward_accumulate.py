"""The backward for Hopper in CUDA C++ where the keys are one block of several: backward.cu with ACCUMULATE. It launches
preprocess, the main kernel and postprocess, and sum_shares where blocks of the last wave are split over CTAs.

Workspace: fp32 dQ, 4·D bytes per query and head, and 8 bytes per query and head for lse and delta. Bulk reductions add
to dQ in no fixed order; dK and dV are deterministic.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..configs import backward as configs
from ..configs.backward import CUDA_BWD_KEYS as KEYS
from ..configs.backward import Schedule
from ..problem import Problem, head_stride, unexpanded
from . import cuda_driver
from .backward import DESCRIBED, NAMES, ROWS, SHARED_BYTES, Sizes, Workspace, defines_of, helper_rows, numbers_of
from .cuda_driver import tensor_map

_DESCRIBED = DESCRIBED.replace(")", "i)")  # the last integer: whether dk and dv are added to, or written
_MAIN = f"MMMM{ROWS}{ROWS}{_DESCRIBED}MM"
_PREPROCESS, _POSTPROCESS, _SUM_SHARES = "PPqPPPii", f"{ROWS}{ROWS}Piiifi", f"{ROWS}{ROWS}{_DESCRIBED}"


def accumulators_unsupported_reason(*tensors: torch.Tensor) -> str | None:
    """Returns why the kernels in CUDA C++ cannot add to these fp32 tensors [B, H, S, D], or None."""
    for x in tensors:
        if x.data_ptr() % 16 or x.stride(3) != 1 or any(stride % 4 for stride in x.stride()[:3]):
            return "it needs fp32 gradients with rows on 16-byte boundaries"
    return None


def cuda_partial_bwd_plan(
    problem: Problem,
    shift: int,
    dout: torch.Tensor,
    lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    result: torch.Tensor | None = None,
    add_dq: bool = True,
    add_dkdv: bool = True,
) -> Callable[..., None]:
    """Returns a function of (q, k, v, dout, lse, delta, dq, dk, dv, result), which must have the signatures of these.
    It adds the gradients from a block of keys, or writes them. The problem has no `cuda_unsupported_reason`. With a
    mask (problem.right is 0) query i sees keys up to i + shift, and the last query sees all. lse and delta, over all
    keys: [B, Hq, queries], rows contiguous, one head stride, the same for both; dq, dk and dv: fp32, without
    `accumulators_unsupported_reason`; result: None, or memory for the rounded dq, in q's dtype and layout."""
    q, k, v, dout = map(unexpanded, (problem.q, problem.k, problem.v, dout))
    causal, device, scale = problem.right == 0, q.device, problem.scale
    config = configs.pick_cuda_bwd_config(
        problem.queries,
        problem.keys,
        problem.dim,
        problem.all_kv_heads,
        problem.group,
        causal,
        problem.sms(),
        Schedule.CTA_PER_BLOCK,
    )
    sizes = Sizes.of(problem, config)
    work = Workspace.of(problem, config, sizes.padded)
    numbers = numbers_of(problem, config, sizes, shift)
    with torch.cuda.device_of(q):
        defines = (*defines_of(problem, config), "ACCUMULATE=1")
        handles = cuda_driver.kernels(device.index, "backward.cu", NAMES, defines, SHARED_BYTES)

    def launch(index: int, ctas: int, threads: int, shared: int, layout: str) -> cuda_driver.Launch:
        return cuda_driver.Launch(device.index, handles[index], ctas, threads, shared, layout)

    helpers = problem.all_heads * (sizes.padded // helper_rows(config.queries))
    main = launch(0, sizes.unshared + config.shared * config.splits, 384, SHARED_BYTES, _MAIN)
    preprocess, postprocess = launch(1, helpers, 256, 0, _PREPROCESS), launch(2, helpers, 256, 0, _POSTPROCESS)
    sums = config.shared * KEYS * problem.dim // (2 * 256)  # CTAs: a thread sums 4 elements of dv or of dk
    sum_shares = launch(3, sums, 256, 0, _SUM_SHARES) if config.shared else None
    q_map, do_map = (tensor_map(x, problem.queries, config.queries) for x in (q, dout))
    k_map, v_map = (tensor_map(x, problem.keys, 64) for x in (k, v))
    dq_strides, dk_strides, dv_strides = (x.stride()[:3] for x in (dq, dk, dv))
    to_strides, rounded = (dq if result is None else result).stride()[:3], int(result is not None)
    numbers = (*numbers, int(add_dkdv))
    line, counts, heads = head_stride(lse), (problem.queries, sizes.padded), problem.q.shape[1]

    def run(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dout: torch.Tensor,
        lse: torch.Tensor,
        delta: torch.Tensor,
        dq: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
        result: torch.Tensor | None,
    ) -> None:
        q, k, v, dout = map(unexpanded, (q, k, v, dout))
        room = torch.empty_strided((work.size,), (1,), dtype=torch.float32, device=device)
        base = room.data_ptr()
        lse2, delta2 = base + 4 * work.lse2, base + 4 * work.delta
        described = (base, lse2, delta2, base + 4 * work.parts, *numbers)
        q_made, do_made = q_map(q.data_ptr()), do_map(dout.data_ptr())
        dk_rows, dv_rows = (dk.data_ptr(), *dk_strides), (dv.data_ptr(), *dv_strides)
        preprocess(lse.data_ptr(), delta.data_ptr(), line, lse2, delta2, base, *counts)
        maps = (q_made, do_made, k_map(k.data_ptr()), v_map(v.data_ptr()))
        main(*maps, *dk_rows, *dv_rows, *described, q_made, do_made)  # the last two parameters are not read
        if sum_shares is not None:
            sum_shares(*dv_rows, *dk_rows, *described)
        before, to = dq.data_ptr() if add_dq else 0, (dq if result is None else result).data_ptr()
        postprocess(before, *dq_strides, to, *to_strides, base, *counts, heads, scale, rounded)

    return run
