"""k-means over the evicted tokens: the costly baseline of KVCrush (arXiv 2503.00022, section IV-C)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax

from kvjax.cache.eviction.representatives import EvictableUnits, check_share
from kvjax.cache.method import Method
from kvjax.core.mesh import over_heads
from kvjax.core.random import draw
from kvjax.core.types import Array
from kvjax.errors import KvjaxError
from kvjax.methods.kvcrush import votes
from kvjax.methods.registry import register_method


@dataclasses.dataclass(frozen=True)
class KMeans:
    """Lloyd's iterations over a row's candidates, and of each cluster the unit nearest to its centroid.

    The paper does not say what is clustered: features "keys" are the keys of all heads and of the unit's tokens, one
    after another, "bits" those of KVCrush. Centroids start at distinct candidates drawn by (seed, index in the row).
    Distances within 0.01% are ties, which go to the lower index: the two members of a pair lie equally near to its
    centroid, and rounding must not choose. An empty cluster keeps its centroid and yields no representative.
    """

    share: float = 0.25
    iterations: int = 10
    features: str = "keys"
    seed: int = 0

    def __post_init__(self):
        check_share(self.share)
        if self.iterations < 0:
            raise KvjaxError(f"iterations must be 0 or more, got {self.iterations}")
        if self.features not in ("keys", "bits"):
            raise KvjaxError(f"features must be 'keys' or 'bits', got {self.features!r}")

    def choose(self, units: EvictableUnits, count: Array, places: int) -> Array:
        """Units -> i32[B places] as in `Representatives`; place i is that of centroid i."""
        U = units.valid.shape[1]
        if U < places:
            short = self.choose(units, count, U)
            return jnp.pad(short, [(0, 0), (0, places - U)], constant_values=-1)
        x = jnp.where(units.candidates[..., None], self._features(units), 0.0)
        index = jnp.broadcast_to(jnp.arange(U, dtype=jnp.int32)[None], units.valid.shape)
        last = (~units.candidates).astype(jnp.int32)
        start = lax.sort((last, draw(self.seed, index), index), num_keys=3)[2][:, :places]
        count = jnp.minimum(count, units.candidates.sum(-1, dtype=jnp.int32))
        used = jnp.arange(places)[None] < count[:, None]
        centroids = jnp.take_along_axis(x, start[..., None], 1)

        def lloyd(_, centroids):
            mine = _members(_distances(x, centroids), used, units.candidates)
            sums = jnp.einsum("bum,buf->bmf", mine, x, precision=lax.Precision.HIGHEST)
            n = mine.sum(1)[..., None]
            return jnp.where(n > 0, sums / jnp.maximum(n, 1.0), centroids)

        centroids = lax.fori_loop(0, self.iterations, lloyd, centroids)
        d = _distances(x, centroids)
        mine = _members(d, used, units.candidates) > 0
        return jnp.where(mine.any(1), _nearest(jnp.where(mine, d, jnp.inf), 1)[:, 0], -1)

    def _features(self, units: EvictableUnits) -> Array:
        """f32[B U F]."""
        if self.features == "bits":
            return votes(units).astype(jnp.float32)
        keys = over_heads.gather(units.keys.astype(jnp.float32))
        B, K, U, c, H = keys.shape
        return jnp.moveaxis(keys, 1, 3).reshape(B, U, c * K * H)


def _distances(x: Array, centroids: Array) -> Array:
    """Squared distances f32[B U M] of x [B U F] to centroids [B M F]."""
    dots = jnp.einsum("buf,bmf->bum", x, centroids, precision=lax.Precision.HIGHEST)
    return jnp.maximum(jnp.square(x).sum(-1)[:, :, None] - 2 * dots + jnp.square(centroids).sum(-1)[:, None], 0.0)


def _nearest(d: Array, axis: int) -> Array:
    least = d.min(axis, keepdims=True)
    return jnp.argmax(d <= least * 1.0001, axis, keepdims=True).astype(jnp.int32)


def _members(d: Array, used: Array, candidates: Array) -> Array:
    """f32[B U M]: 1 where a candidate belongs to its nearest centroid in use."""
    mine = _nearest(jnp.where(used[:, None], d, jnp.inf), 2) == jnp.arange(d.shape[2])[None, None]
    return (mine & used[:, None] & candidates[..., None]).astype(jnp.float32)


@register_method(example="snapkv:budget=512 + kmeans", family="component over a selection")
def kmeans(share: float = 0.25, iterations: int = 10, features: str = "keys", seed: int = 0) -> Method:
    """Gives a part of an eviction method's budget to representatives from k-means over the evicted tokens.

    Use it as in 'snapkv:budget=256 + kmeans'; `kvcrush` finds representatives without clustering.

    Formula:
      representatives: the token nearest to the centroid of each cluster of the evicted tokens (Lloyd's iterations over
      their keys)

    Differs:
      The paper does not say what is clustered.

    Args:
      share: as in `kvcrush`.
      iterations: Lloyd's iterations, of each sequence.
      features: "keys", or "bits", the signatures of `kvcrush`; the paper does not say which.
      seed: seed of the initial centroids.

    Reference:
      the baseline of KVCrush's Figure 6, arXiv 2503.00022, section IV-C
    """
    return Method(representatives=KMeans(share, iterations, features, seed))
