"""Regression on functions drawn from a Gaussian process, and the loss of a constant predictor as a baseline."""

from __future__ import annotations

import math

import torch

NOISE = 0.05  # standard deviation of the observation noise
RANGE = 2.0  # x is uniform in [−RANGE, RANGE]
LENGTHS = (0.25, 1.0)  # range of the length scale, drawn uniformly for each task
JITTER = 1e-5
CHOLESKY_POINTS = 2048
MATRICES = 1 << 25  # elements of covariance matrices per batch: 256 MB in fp64, enough to fill a GPU
FEATURES = 1024


def _rbf(distance: torch.Tensor) -> torch.Tensor:
    return torch.exp(-0.5 * distance**2)


def _matern32(distance: torch.Tensor) -> torch.Tensor:
    scaled = math.sqrt(3) * distance
    return (1 + scaled) * torch.exp(-scaled)


def _matern52(distance: torch.Tensor) -> torch.Tensor:
    scaled = math.sqrt(5) * distance
    return (1 + scaled + scaled**2 / 3) * torch.exp(-scaled)


def _periodic(distance: torch.Tensor) -> torch.Tensor:
    """The periodic kernel with period 1 in units of the length scale, and its own length scale of 1."""
    return torch.exp(-2 * torch.sin(math.pi * distance) ** 2)


#: Covariance of two points by their distance in units of the length scale (Rasmussen and Williams 2006, section 4.2).
KERNELS = {"rbf": _rbf, "matern32": _matern32, "matern52": _matern52, "periodic": _periodic}


def sample_task(
    batch: int,
    context: int,
    targets: int,
    kernel: str = "rbf",
    *,
    generator: torch.Generator | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, torch.Tensor]:
    """Draws `batch` functions, each observed at `context` + `targets` points. Returns (x_context [B, M, 1],
    y_context [B, M], x_target [B, N, 1], y_target [B, N]), fp32.

    Up to CHOLESKY_POINTS points the sample is exact: L z with L Lᵀ the covariance matrix, in fp64, with JITTER on its
    diagonal. For more points that matrix would not fit in memory. The function is then a sum of FEATURES random cosines
    (Rahimi and Recht 2007), evaluated in pieces; for "periodic", a series of the kernel's harmonics.

    Raises ValueError for an unknown kernel.
    """
    if kernel not in KERNELS:
        raise ValueError(f"sample_task: kernel must be one of {', '.join(KERNELS)}, got {kernel!r}")
    total = context + targets

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=device, dtype=torch.float64)

    x = RANGE * (2 * uniform(batch, total) - 1)
    length = LENGTHS[0] + (LENGTHS[1] - LENGTHS[0]) * uniform(batch, 1)
    draw = _exact if total <= CHOLESKY_POINTS else _by_features
    y = draw(x / length, kernel, generator)
    y = y + NOISE * torch.randn(y.shape, generator=generator, device=device, dtype=torch.float64)
    x, y = x.float(), y.float()
    return {
        "x_context": x[:, :context, None].contiguous(),
        "y_context": y[:, :context].contiguous(),
        "x_target": x[:, context:, None].contiguous(),
        "y_target": y[:, context:].contiguous(),
    }


def _exact(x: torch.Tensor, kernel: str, generator: torch.Generator | None) -> torch.Tensor:
    normal = torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)
    values = []
    for points, z in zip(*(t.split(max(1, MATRICES // x.shape[1] ** 2)) for t in (x, normal)), strict=True):
        covariance = KERNELS[kernel]((points[:, :, None] - points[:, None]).abs())
        covariance.diagonal(dim1=-2, dim2=-1).add_(JITTER)
        values.append(torch.linalg.cholesky(covariance) @ z[:, :, None])
    return torch.cat(values)[..., 0]


def _by_features(x: torch.Tensor, kernel: str, generator: torch.Generator | None) -> torch.Tensor:
    """√(1 / F) Σ a cos ω x + b sin ω x, with a and b normal and ω drawn from the kernel's spectral density."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=x.device, dtype=x.dtype)

    rows, features = x.shape[0], FEATURES
    if kernel == "periodic":
        omega, scale = _harmonics(x.device)
        features = omega.numel()
        amplitudes = scale * normal(rows, features), scale * normal(rows, features)
    else:
        omega = normal(rows, features)
        degrees = {"matern32": 3, "matern52": 5}.get(kernel)
        if degrees:  # Student's t with that many degrees of freedom
            chi2 = normal(rows, features, degrees).square().sum(-1)
            omega = omega * (degrees / chi2).sqrt()
        scale = (1 / features) ** 0.5
        amplitudes = scale * normal(rows, features), scale * normal(rows, features)
    omega = omega.expand(rows, features)
    values = torch.empty_like(x)
    for first in range(0, x.shape[1], CHOLESKY_POINTS):
        piece = slice(first, first + CHOLESKY_POINTS)
        angle = x[:, piece, None] * omega[:, None]
        values[:, piece] = torch.einsum("bpf,bf->bp", angle.cos(), amplitudes[0])
        values[:, piece] += torch.einsum("bpf,bf->bp", angle.sin(), amplitudes[1])
    return values


def _harmonics(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(angular frequencies, standard deviations) of the series
    exp(−2 sin²(π d)) = e⁻¹ (I₀(1) + 2 Σ Iₖ(1) cos 2π k d). A discrete Fourier transform computes the coefficients."""
    count = 64
    samples = _periodic(torch.arange(count, dtype=torch.float64) / count)
    coefficients = torch.fft.rfft(samples).real / count
    variances = coefficients[: count // 4].clamp(min=0) * 2
    variances[0] /= 2
    omega = 2 * math.pi * torch.arange(count // 4, dtype=torch.float64)
    return omega.to(device), variances.sqrt().to(device)


def constant_loss(y_target: torch.Tensor) -> torch.Tensor:
    """The baseline that a model must beat: the mean negative log-density of the targets under the single Gaussian that
    fits these targets best, a scalar on their device. It ignores x, but is fitted to the marginal distribution of y."""
    variance = y_target.double().var(unbiased=False)
    return 0.5 * torch.log(2 * math.pi * variance) + 0.5
