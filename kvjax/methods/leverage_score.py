"""Leverage scores: keeps the tokens whose keys before RoPE are hardest to make of the other keys."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from kvjax import method_api as kv
from kvjax.core.matmul import eigh

RIDGE = 1e-2  # kvpress' least, added to the Gram matrix


@dataclasses.dataclass(frozen=True)
class LeverageScore(kv.Scorer):
    """Scores a token by the statistical leverage of its key before RoPE (Chari & Van Durme 2025, 2507.08143).

    The mean key is subtracted, and a Gaussian matrix takes the H channels to `sketch`. Scores are standardized over all
    heads of the layer. The fields are arguments of `leverage_score`; tokens that always stay take no part, and score 0.
    """

    sketch: kv.PositiveInt = 48
    seed: int = 0
    sinks: kv.NonNegativeInt = 0
    recent: kv.NonNegativeInt = 0

    __post_init__ = kv.check_fields

    def scores(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> kv.Scores:
        is_scored = mask_evictable(block, self.sinks, self.recent)
        keys = jnp.where(is_scored[..., None], spec.rope.unrotate(block.clean().k, block.pos), 0.0)
        count = jnp.maximum(is_scored.sum(2, keepdims=True, dtype=jnp.int32), 1).astype(jnp.float32)
        deviations = jnp.where(is_scored[..., None], keys - keys.sum(2, keepdims=True) / count[..., None], 0.0)
        sketch = draw_sketch(self.seed, keys.shape[1], keys.shape[3], self.sketch)
        sketched = jnp.einsum("bksh,khd->bksd", deviations, sketch)
        scores = quadratic_forms(sketched, jnp.einsum("bksd,bkse->bkde", sketched, sketched), RIDGE)
        return kv.token_scores(standardize(scores, is_scored), block)


def mask_evictable(block: kv.KVBlock, sinks: int, recent: int) -> kv.Array:
    """bool[B 1|K S]: the tokens between the first `sinks` and the last `recent` ones; sequences left-aligned."""
    return kv.pre_window_mask(block, recent) & (jnp.arange(block.pos.shape[2]) >= sinks)[None, None]


def draw_sketch(seed: int, num_heads: int, H: int, width: int) -> kv.Array:
    """Draws the Gaussian matrices f32[K H width] of this device's heads, of variance 1 / width."""
    head = kv.over_heads.first_head(num_heads) + jnp.arange(num_heads, dtype=jnp.int32)
    place = jnp.arange(2 * H * width, dtype=jnp.int32)
    bits = kv.draw(seed, jnp.broadcast_to(head[:, None], (num_heads, len(place))), place[None])
    # Box and Muller: two uniform numbers make a normal one. Those in (0, 1] have a logarithm.
    uniform = ((bits >> 8).astype(jnp.float32) + 1.0) * np.float32(2**-24)
    radius, angle = uniform.reshape(num_heads, 2, H, width).swapaxes(0, 1)
    return jnp.sqrt(-2.0 * jnp.log(radius)) * jnp.cos(2 * np.pi * angle) * np.float32(width**-0.5)


def quadratic_forms(x: kv.Array, gram: kv.Array, ridge: float) -> kv.Array:
    """Computes x_s (gram + ridge I)^-1 x_s of every vector of x f32[B K S d], for gram f32[B K d d]: f32[B K S].

    By eigenvectors: Cholesky's method fails where rounding leaves a long prompt's matrix an eigenvalue below 0.
    """
    values, vectors = eigh(gram)
    squares = jnp.square(jnp.einsum("bksd,bkde->bkse", x, vectors))
    return (squares / (jnp.maximum(values, 0.0) + ridge)[:, :, None]).sum(-1)


def standardize(scores: kv.Array, is_scored: kv.Array) -> kv.Array:
    """Standardizes f32[B K S] over the scored tokens of all heads of a layer; 0 for the other tokens."""
    is_scored = jnp.broadcast_to(is_scored, scores.shape)
    count = kv.over_heads.sum(is_scored.sum(2, keepdims=True, dtype=jnp.int32)).astype(jnp.float32)
    mean = kv.over_heads.sum(jnp.where(is_scored, scores, 0.0).sum(2, keepdims=True)) / jnp.maximum(count, 1.0)
    deviations = jnp.where(is_scored, scores - mean, 0.0)
    variance = kv.over_heads.sum(jnp.square(deviations).sum(2, keepdims=True)) / jnp.maximum(count - 1.0, 1.0)
    return deviations / jnp.maximum(jnp.sqrt(variance), 1e-6)


@kv.register_method(example="leverage_score:budget=512", family="eviction after the prompt")
def leverage_score(
    budget: kv.TokenBudget = 1024,
    sketch: int = 48,
    sinks: int = 0,
    recent: int = 0,
    seed: int = 0,
    unit: str = "token",
    per: kv.Scope = "head",
) -> kv.Method:
    """Keeps the prompt tokens whose keys before RoPE stand out from the others; it needs no queries.

    It is one half of Compactor ('compactor'), whose paper does not use it alone.

    Formula:
      score_s = x_s (X^T X + I / 100)^-1 x_s, X = (K - mean K) P with K the keys before RoPE and P Gaussian

    Differs:
      kvpress (LeverageScorePress) draws P from torch's generator anew for every sequence; here its numbers go by seed,
      key/value head and place, so that they depend neither on a batch nor on padding. Where Cholesky's method fails,
      kvpress raises the 1 / 100; eigenvectors do not fail.

    Args:
      budget, unit, per: as in `make_selection`.
      sketch: columns of P (kvpress: 48).
      sinks, recent: as in `make_selection`; they are left out of all statistics.
      seed: seed of P.

    Reference:
      Compactor, Chari & Van Durme 2025, arXiv 2507.08143; constants of its press in kvpress
    """
    scorer = LeverageScore(sketch, seed, sinks, recent)
    return kv.Method(select=kv.make_selection(scorer, budget, sinks, recent, unit, per))
