# A copy of parts/mixture.py, made by `nox -s vendor`: change it there.
"""Log-density of a Gaussian mixture and its gradients: JIT functions on tuples of tiles [BLOCK_M, HOLD] (see `tiles`).

A component requires three exponentials: 1/sigma, the weight and the joint density. log_softmax and logsumexp are
combined in

    log p = ln 2 · (m + log2(Σ_k 2^(j_k − m) / Σ_k 2^(a_k))) − ½ ln 2π
    a_k   = log2(e) · (logits_k − max logits),   j_k = a_k − log2(e) · (log_sigma_k + ½ z_k²),   m = max_k j_k
"""

# ruff: noqa: RUF005 (JIT functions concatenate tuples: Triton does not compile a starred element)
# mypy: disable-error-code="assignment, misc"
# The tuples grow while their loops are unrolled, which mypy reports as a change of type.

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _inverse_sigma(log_sigma, RESIDUAL: tl.constexpr):
    """exp(−log_sigma). The rounding of log_sigma · log2(e) alone causes an error of 20 ulp at log_sigma = 30. Adding
    its rounding error, the residual, corrects that.

    RESIDUAL  "fma"; "fp64" in the interpreter, whose fma rounds the product and so would lose the residual; "none" for
              16-bit dtypes, whose own rounding error is larger
    """
    power = log_sigma * -LOG2_E
    inverse = tl.exp2(power)
    if RESIDUAL != "none":
        if RESIDUAL == "fma":
            residual = tl.fma(power, LN_2, log_sigma)
        else:
            residual = (power.to(tl.float64) * LN_2 + log_sigma.to(tl.float64)).to(tl.float32)
        # For a larger |power|, inverse may be 0 or inf, and its product with the residual NaN.
        inverse = tl.where(tl.abs(power) < 126.0, inverse - inverse * residual, inverse)
    return inverse


@triton.jit
def mixture(logits, mu, log_sigma, y, COUNT: tl.constexpr, RESIDUAL: tl.constexpr):
    """The part that forward and backward share. Takes tuples of tiles and returns tuples of 2^a, 2^(j − m), 1/sigma and
    z, then m, Σ 2^a and Σ 2^(j − m) of each row."""
    top = logits[0]
    for i in tl.static_range(1, COUNT):
        top = tl.maximum(top, logits[i])
    top = tl.max(top, 1)[:, None]
    weights, joints, inverses, zs = (), (), (), ()
    for i in tl.static_range(0, COUNT):
        a = (logits[i] - top) * LOG2_E
        inverse = _inverse_sigma(log_sigma[i], RESIDUAL)
        z = (y - mu[i]) * inverse
        joint = tl.fma(z * (-0.5 * LOG2_E), z, tl.fma(log_sigma[i], -LOG2_E, a))
        weights, joints, inverses, zs = weights + (tl.exp2(a),), joints + (joint,), inverses + (inverse,), zs + (z,)
    m = joints[0]
    weight_sum = weights[0]
    for i in tl.static_range(1, COUNT):
        m = tl.maximum(m, joints[i])
        weight_sum += weights[i]
    m = tl.max(m, 1)
    m = tl.where(m == float("-inf"), 0.0, m)  # a density of 0 gives −inf, not −inf − −inf = NaN
    densities = (tl.exp2(joints[0] - m[:, None]),)
    density_sum = densities[0]
    for i in tl.static_range(1, COUNT):
        density = tl.exp2(joints[i] - m[:, None])
        density_sum += density
        densities = densities + (density,)
    return weights, densities, inverses, zs, m, tl.sum(weight_sum, 1), tl.sum(density_sum, 1)


@triton.jit
def gradients(parts, grad, COUNT: tl.constexpr):
    """Gradients from the results of `mixture` and the incoming gradient [BLOCK_M]: three tuples of tiles, and d_y.

    With the posterior r = softmax(j) and the weights w = softmax(logits), times the incoming gradient:
    d_logits = r − w,   d_mu = r z / sigma,   d_log_sigma = r (z² − 1),   d_y = −Σ_k d_mu_k
    """
    weights, densities, inverses, zs, _, weight_sum, density_sum = parts
    per_weight = (grad / weight_sum)[:, None]
    per_density = (grad / density_sum)[:, None]
    d_logits, d_mu, d_log_sigma = (), (), ()
    d_y = tl.zeros_like(zs[0])
    for i in tl.static_range(0, COUNT):
        posterior = densities[i] * per_density
        # (r z) z instead of r z²: a component far from y has r = 0, and its z² may be inf.
        rz = posterior * zs[i]
        d_logits = d_logits + (posterior - weights[i] * per_weight,)
        d_mu = d_mu + (rz * inverses[i],)
        d_log_sigma = d_log_sigma + (rz * zs[i] - posterior,)
        d_y -= d_mu[i]
    return d_logits, d_mu, d_log_sigma, tl.sum(d_y, 1)
