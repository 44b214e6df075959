"""PowerSGD: low-rank approximations of matrices (Vogels et al. 2019, arXiv:1905.13727, algorithm 1).

    P ← mean of M Q;  P ← orthonormal columns of P;  Q ← mean of Mᵀ P;  M̂ = P Qᵀ

for M [n, m] and Q [m, r], which is kept from step to step. It sends 8·r·(n + m) bytes per matrix over the link, where
an all-reduce in bf16 sends 4·n·m·(N−1)/N. Matrices of the same shape are multiplied in one batched GEMM.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from .transport import mean_in_place

SEED = 20190531  # of the initial Q, the same on every rank
SHIFT = 1e-10  # of PᵀP, relative to its trace; 1e4 times the rounding errors in fp64
EPSILON = 2.0**-52  # of a column of Q, relative to the largest: what the rounding in fp64 leaves of one


def worth_it(shape: torch.Size, rank: int) -> bool:
    """Whether the factors of a gradient of that shape are smaller than the gradient itself."""
    rows, columns = as_matrix(shape)
    return (rows + columns) * min(rank, rows, columns) < rows * columns


def as_matrix(shape: torch.Size) -> tuple[int, int]:
    """The shape as a matrix: the first dimension by the product of all others."""
    return shape[0], shape[1:].numel()


def power_sgd(
    matrices: dict[int, torch.Tensor],
    factors: dict[int, torch.Tensor],
    group: dist.ProcessGroup | None,
    rank: int,
) -> dict[int, torch.Tensor]:
    """Approximate means over the ranks of fp32 matrices, by parameter number. `factors` has the Q of each and is
    updated.

    One all-reduce for all P and one for all Q. All elements of a matrix that is not finite on some rank become NaN, and
    its Q is not changed. Nor is a column of Q of which at most rounding errors would be left, as after a gradient of
    zeros: a column of zeros would remain one in all later steps.
    """
    shapes: dict[tuple[int, ...], list[int]] = {}
    for number, matrix in matrices.items():
        shapes.setdefault(tuple(matrix.shape), []).append(number)
        if number not in factors:
            factors[number] = _first_factor(matrix, rank, number)
    stacks = {shape: torch.stack([matrices[n] for n in numbers]) for shape, numbers in shapes.items()}
    # Factors of a loaded state may be on another device.
    old = {s: torch.stack([factors[n] for n in numbers]).to(stacks[s].device) for s, numbers in shapes.items()}
    left = _means({shape: _product(m, old[shape]) for shape, m in stacks.items()}, group)
    left = {shape: orthonormal(p) for shape, p in left.items()}
    right = _means({shape: _product(m.mT, left[shape]) for shape, m in stacks.items()}, group)
    result = {}
    for shape, numbers in shapes.items():
        largest = right[shape].abs().amax(dim=1, keepdim=True)
        remains = largest > EPSILON * largest.amax(dim=2, keepdim=True)  # nowhere if an element is not finite
        kept = torch.where(remains, right[shape], old[shape])
        product = _product(left[shape], right[shape].mT)
        for place, number in enumerate(numbers):
            factors[number] = kept[place]
            result[number] = product[place]
    return result


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a · b in their dtype, also if the backward runs inside of autocast, which casts nothing where `out` is given."""
    return torch.bmm(a, b, out=a.new_empty(a.shape[0], a.shape[1], b.shape[2]))


def orthonormal(p: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis of the columns of p [batch, n, r], r small: Cholesky QR, iterated three times, in fp64.

    PᵀP = L Lᵀ, P ← P L⁻ᵀ. If columns are nearly dependent, so that L has a diagonal element which is not far above the
    rounding errors of PᵀP, or none, a multiple of the identity is added first (Fukaya et al. 2020, arXiv:1809.11085).
    Columns that depend on others then have a norm below 1 or of 0, never above 1. The choice is made on the device,
    without synchronisation. NaN and inf make all elements of a matrix NaN.
    """
    wide = p.double()
    unit = torch.eye(p.shape[2], dtype=wide.dtype, device=wide.device)
    for _ in range(3):
        gram = torch.bmm(wide.mT, wide)
        plain, info = torch.linalg.cholesky_ex(gram)
        trace = gram.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
        shifted, _ = torch.linalg.cholesky_ex(gram + (SHIFT * trace + 1e-200) * unit)
        smallest = plain.diagonal(dim1=1, dim2=2).square().amin(1)[:, None, None]
        lower = torch.where((info == 0)[:, None, None] & (smallest > SHIFT * trace), plain, shifted)
        wide = torch.linalg.solve_triangular(lower, wide.mT, upper=False).mT
    return (wide + 0 * p.double().sum(dim=(1, 2), keepdim=True)).to(p.dtype)


def _first_factor(matrix: torch.Tensor, rank: int, number: int) -> torch.Tensor:
    """A random initial Q, the same on all ranks. PyTorch's default generators are not used."""
    rows, columns = matrix.shape
    generator = torch.Generator().manual_seed(SEED + number)
    return torch.randn(columns, min(rank, rows, columns), generator=generator).to(matrix.device)


def _means(
    tensors: dict[tuple[int, ...], torch.Tensor], group: dist.ProcessGroup | None
) -> dict[tuple[int, ...], torch.Tensor]:
    """The means of the tensors over the ranks, with one all-reduce."""
    flat = torch.cat([t.reshape(-1) for t in tensors.values()])
    mean_in_place(flat, group)
    pieces = flat.split([t.numel() for t in tensors.values()])
    return {shape: piece.view(t.shape) for (shape, t), piece in zip(tensors.items(), pieces, strict=True)}
