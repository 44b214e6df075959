"""The forward in e4m3 for Hopper, in CUDA C++ (fp8.cu): which problems it supports, and its launch.

Two steps, which can be used separately: `quantise` converts fp16 or bf16 to e4m3 operands with scales, and `fp8_attend`
computes attention from them.
"""

from __future__ import annotations

import math

import torch

from ..configs import forward as configs
from ..configs.forward import ROWS, Fp8Config
from ..problem import LOG2_E, Problem, hopper_unsupported_reason
from . import cuda_driver
from .cuda_driver import address, tensor_map
from .quantise import Operands, quantise

# A row's maximum is not updated while no score exceeds it by more than SLACK, a base-2 logarithm. A probability is
# 2^OFFSET where the score is the maximum, and 2^(SLACK + OFFSET) is just below 448, e4m3's largest value.
SLACK, OFFSET = 3.0, math.log2(448) - 0.001 - 3.0


# Three tensor maps and fp8.cu's Problem: lse, out, three scales, out's strides, the counter, three floats, integers.
_LAYOUT = "MMM(PPPPPqqqPfffiiiiiiiiiiii)"


def fp8_unsupported_reason(problem: Problem) -> str | None:
    """Returns why the forward in e4m3 cannot run a problem, or None."""
    if problem.dim > 128:
        return f"it supports head dimensions up to 128, not {problem.dim}"
    return hopper_unsupported_reason(problem) or cuda_driver.no_compiler()


def fp8_fwd(problem: Problem, out: torch.Tensor, lse: torch.Tensor, exact_lse: bool) -> None:
    """Writes out and lse of a problem without `fp8_unsupported_reason`."""
    config = configs.pick_fp8_config(problem.dim, exact_lse)
    q, k, v, to = problem.q, problem.k, problem.v, out
    missing = -problem.dim % 8  # stores require rows of 16-byte multiples, and loads are fastest with them
    if missing:
        q, k, v = (torch.nn.functional.pad(t, (0, missing)) for t in (q, k, v))
        to = torch.empty_like(q)
    operands = quantise(q, k, v, problem.keys, config.block_n, config.section)
    fp8_attend(operands, to, lse, problem.scale, problem.right == 0, config)
    if missing:
        out.copy_(to[..., : problem.dim])


def fp8_attend(
    x: Operands, out: torch.Tensor, lse: torch.Tensor, scale: float, causal: bool, config: Fp8Config
) -> None:
    """Writes out = softmax(scale · q kᵀ) v of e4m3 operands made for `config`, and lse, the log of the softmax's sum.

    out [B, Hq, Sq, D], fp16 or bf16: stride 1 in D, other strides and the address multiples of 16 bytes. lse
    [B, Hq, Sq], fp32, contiguous. Accumulation is in fp32 over sections, in about 14 bits within one.
    Shah et al. 2024, FlashAttention-3, section 3.3.
    """
    batches, heads, num_q, width = x.q.shape
    group = heads // x.k.shape[1]
    num_m = -(-num_q // (ROWS * config.consumers))
    num_tiles = batches * heads * num_m
    shared = shared_bytes(width, config)
    with torch.cuda.device_of(out):
        sms = torch.cuda.get_device_properties(out.device).multi_processor_count
        counter = torch.zeros(1, dtype=torch.int32, device=out.device) if num_tiles > sms else None
        described = (
            *(t.data_ptr() for t in (lse, out, x.q_scale, x.k_scale, x.v_scale)),
            *out.stride()[:3],
            address(counter),
            scale * LOG2_E,
            SLACK,
            OFFSET,
            num_tiles,
            num_m,
            configs.pick_section(x.num_keys, 2 * width, group, batches * heads),
            batches * heads,
            heads,
            group,
            num_q,
            x.num_keys,
            x.q_scale.shape[2],
            x.k_scale.shape[2],
            x.v_scale.shape[2],
            out.shape[3],
        )
        defines = defines_of(width, causal, out.dtype, config)
        (kernel,) = cuda_driver.kernels(out.device.index, "fp8.cu", ("attention_fp8_fwd",), defines, shared)
        boxes = ((x.q, num_q, ROWS), (x.k, x.num_keys, config.block_n), (x.v, width, width))
        columns = (width, width, math.gcd(config.block_n, 128))
        maps = [tensor_map(*box, count)(box[0].data_ptr()) for box, count in zip(boxes, columns, strict=True)]
        ctas, threads = min(sms, num_tiles), 128 * (config.consumers + 1)
        launch = cuda_driver.Launch(out.device.index, kernel, ctas, threads, shared, _LAYOUT)
        launch(*maps, *described)


def defines_of(width: int, causal: bool, dtype: torch.dtype, config: Fp8Config) -> tuple[str, ...]:
    return (
        f"HEAD_DIM={width}",
        f"CAUSAL={int(causal)}",
        f"FP16={int(dtype == torch.float16)}",
        f"BLOCK_N={config.block_n}",
        f"STAGES={config.stages}",
        f"CONSUMERS={config.consumers}",
        f"PING_PONG={int(config.ping_pong)}",
        f"Q_REGISTERS={int(config.q_registers)}",
        f"SECTION={config.section}",
        f"POLYNOMIAL={config.polynomial}",
        f"EXACT_LSE={int(config.exact_lse)}",
    )


def shared_bytes(width: int, config: Fp8Config) -> int:
    """Returns the shared memory of a CTA: queries, fp32 totals, circular buffers of keys and of values with rows of
    ones, mbarriers, and the index of the next tile."""
    rows, barriers = ROWS * config.consumers, 2 * config.consumers + 4 * config.stages + 2
    return rows * width * 5 + config.stages * config.block_n * (2 * width + 8) + 8 * barriers + 8
