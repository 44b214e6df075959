"""Attention over a sequence that is sharded over several GPUs.

    torchrun --nproc-per-node 2 -m examples.ring_attention      # from the checkout's root

Without GPUs the ranks are CPU processes over gloo, and the kernels run in Triton's interpreter.
"""

import os

import torch
import torch.distributed as dist

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported

try:
    from ridgeline.ring_attention import ring_attention, shard, unshard
except ImportError:  # in a checkout
    from kernels.ring_attention import ring_attention, shard, unshard


def main() -> None:
    if "RANK" not in os.environ:
        raise SystemExit("start this with torchrun --nproc-per-node 2 -m examples.ring_attention")
    if ON_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    device, dtype = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
    length = 65536 if ON_GPU else 48

    # The same on all ranks; each keeps its shard. A model would shard only its tokens.
    torch.manual_seed(0)
    whole = [torch.randn(1, heads, length, 64, device=device, dtype=dtype) for heads in (8, 2, 2)]
    q, k, v = (shard(x, dim=2).requires_grad_() for x in whole)

    out = ring_attention(q, k, v, causal=True)
    out.square().sum().backward()

    gathered = unshard(out, dim=2)
    if dist.get_rank() == 0:
        expected = torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
        error = (gathered - expected).abs().max().item()
        print(f"{dist.get_world_size()} ranks, {tuple(out.shape)} on each: differs from SDPA on one by {error:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
