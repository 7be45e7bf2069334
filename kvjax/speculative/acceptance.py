"""Acceptance of drafted tokens, and the distribution that replaces the first rejected one.

Speculative sampling (Leviathan et al. 2023, arXiv 2211.17192, Algorithm 1; Chen et al. 2023, arXiv 2302.01318): the
resulting tokens are distributed as if the verifier had drawn each of them. Greedy decoding is the same rule for
distributions that have all their mass on one token: a token is accepted if it is the verifier's own.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from kvjax.core.types import Array, pytree
from kvjax.engine.sampling import Sampler, apply_filters
from kvjax.utils import arguments


@pytree
class Shift:
    """RAPID's shift of the verifier's logits towards a confident draft, before tokens are verified (arXiv 2502.20330).

    The numbers are arrays, so that a sweep over them does not recompile; strength 0 shifts nothing. The formulas are
    those of the authors' code, on logits after temperature and filters; there the token after a whole accepted draft
    is drawn from the model's own logits, and the strength is 1 by default.
    """

    strength: Array
    alpha: Array


def make_shift(strength: float, alpha: float) -> Shift:
    """Checks and wraps the numbers of a shift."""
    arguments.number("transfer", strength, 0, math.inf, "; 0 is lossless")
    arguments.number("alpha", alpha, 0, 1, "; RAPID uses 0.1")
    return Shift(jnp.float32(strength), jnp.float32(alpha))


def shift_logits(shift: Shift, z: Array, p: Array, q: Array) -> Array:
    """Shifts the verifier's logits: z - m (p - q) where q >= alpha max q.

    Args:
      shift: m and alpha.
      z: f32[.. V], the verifier's logits.
      p: f32[.. V], their softmax.
      q: f32[.. V], softmax of the draft's logits.
    """
    is_likely = q >= shift.alpha * q.max(-1, keepdims=True)
    return z - shift.strength * jnp.where(is_likely, p - q, 0.0)


def acceptance_probabilities(p: Array, q: Array, drafted: Array) -> Array:
    """Computes min(1, p/q), f32[B A], of tokens drafted i32[B A] under p and q f32[B A V]."""
    p, q = (jnp.take_along_axis(x, drafted[..., None], -1)[..., 0] for x in (p, q))
    return jnp.minimum(p / jnp.maximum(q, jnp.finfo(q.dtype).tiny), 1.0)


def verify(
    sampler: Sampler, shift: Shift, logits: Array, draft_logits: Array, drafted: Array, uniform: Array
) -> tuple[Array, Array]:
    """Verifies drafted tokens.

    Args:
      sampler: settings of the draws.
      shift: of the verifier's logits.
      logits: f32[B A+1 V], the verifier's at the place of each drafted token, and after the last one.
      draft_logits: f32[B A V], from which the tokens were drawn.
      drafted: i32[B A].
      uniform: f32[B A], random numbers in [0, 1).

    Returns:
      How many tokens of each sequence are accepted i32[B], and the distribution of the token after them f32[B V].
    """
    z, y = _warp(sampler, logits), _warp(sampler, draft_logits)
    p, q = _to_probabilities(sampler, z), _to_probabilities(sampler, y)
    num_draft_tokens = drafted.shape[1]
    z = z[:, :num_draft_tokens]
    shifted_z = shift_logits(shift, z, jax.nn.softmax(z, -1), jax.nn.softmax(y, -1))
    shifted_p = _to_probabilities(sampler, shifted_z)
    # The first rejection ends the accepted tokens, hence the product.
    is_accepted = jnp.cumprod(uniform < acceptance_probabilities(shifted_p, q, drafted), 1, dtype=jnp.int32)
    num_accepted = is_accepted.sum(1, dtype=jnp.int32)
    # The first rejected token is replaced by one of the residual, as in RAPID's code; without a shift that is the rule
    # of speculative sampling, max(p - q, 0), normalized.
    at, after_all = jnp.minimum(num_accepted, num_draft_tokens - 1)[:, None, None], p[:, -1]
    p, shifted_p, q = (jnp.take_along_axis(x, at, 1)[:, 0] for x in (p, shifted_p, q))
    residual = jnp.maximum(jnp.maximum(p - q, p - shifted_p), 0.0)
    total = residual.sum(-1, keepdims=True)
    # If p equals q, rounding alone can reject a token, and no residual may be left: p itself then replaces it.
    residual = jnp.where(total > 0, residual / jnp.where(total > 0, total, 1.0), p)
    return num_accepted, jnp.where((num_accepted == num_draft_tokens)[:, None], after_all, residual)


def _warp(sampler: Sampler, logits: Array) -> Array:
    """Applies the temperature and the filters to logits f32[B T V]."""
    if sampler.temperature is None:
        return logits
    return apply_filters(sampler, logits.reshape(-1, logits.shape[-1])).reshape(logits.shape)


def _to_probabilities(sampler: Sampler, logits: Array) -> Array:
    """Turns warped logits f32[.. V] into probabilities; greedy: all mass on the first of the likeliest tokens."""
    if sampler.temperature is None:
        return jax.nn.one_hot(logits.argmax(-1), logits.shape[-1], dtype=logits.dtype)
    return jax.nn.softmax(logits, -1)
