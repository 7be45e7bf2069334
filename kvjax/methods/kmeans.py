"""k-means over the evicted tokens, the costly baseline of KVCrush (arXiv 2503.00022, section IV-C)."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jax import lax

from kvjax import method_api as kv
from kvjax.methods.kvcrush import unit_signatures

TIE = 1.0001  # distances within this factor of the least are equal


@dataclasses.dataclass(frozen=True)
class KMeans:
    """Clusters a sequence's candidates by Lloyd's algorithm, and keeps the unit nearest to each centroid.

    Centroids start at distinct candidates drawn by (seed, index in the sequence). Distances within 0.01% are ties,
    which go to the lower index: the two members of a pair are equally near to its centroid, and rounding must not
    decide. An empty cluster keeps its centroid and has no representative. The fields are the arguments of `kmeans`.
    """

    share: kv.UnitFloat = 0.25
    iterations: kv.NonNegativeInt = 10
    features: Literal["keys", "bits"] = "keys"
    seed: int = 0

    __post_init__ = kv.check_fields

    def choose(self, units: kv.EvictableUnits, count: kv.Array, places: int) -> kv.Array:
        """Chooses as in `Representatives`; place i is that of centroid i."""
        U = units.valid.shape[1]
        if U < places:
            chosen = self.choose(units, count, U)
            return jnp.pad(chosen, [(0, 0), (0, places - U)], constant_values=-1)
        if self.features == "bits":
            x = unit_signatures(units).astype(jnp.float32)
        else:
            keys = kv.over_heads.gather(units.keys.astype(jnp.float32))  # [B K U c H]
            x = jnp.moveaxis(keys, 1, 3).reshape(*units.valid.shape, -1)
        x = jnp.where(units.candidates[..., None], x, 0.0)
        index = jnp.broadcast_to(jnp.arange(U, dtype=jnp.int32)[None], units.valid.shape)
        is_excluded = (~units.candidates).astype(jnp.int32)
        start = lax.sort((is_excluded, kv.draw(self.seed, index), index), num_keys=3)[2][:, :places]
        count = jnp.minimum(count, units.candidates.sum(-1, dtype=jnp.int32))
        is_used = jnp.arange(places)[None] < count[:, None]
        centroids = jnp.take_along_axis(x, start[..., None], 1)

        def run_iteration(_: kv.Array, centroids: kv.Array) -> kv.Array:
            members, _ = _assign_clusters(x, centroids, is_used, units.candidates)
            sums = jnp.einsum("bum,buf->bmf", members, x, precision=lax.Precision.HIGHEST)
            size = members.sum(1)[..., None]
            return jnp.where(size > 0, sums / jnp.maximum(size, 1.0), centroids)

        centroids = lax.fori_loop(0, self.iterations, run_iteration, centroids)
        members, distance = _assign_clusters(x, centroids, is_used, units.candidates)
        nearest = _nearest(jnp.where(members > 0, distance, jnp.inf), 1)[:, 0]
        return jnp.where((members > 0).any(1), nearest, -1)


def _nearest(distance: kv.Array, axis: int) -> kv.Array:
    """Returns the first index along an axis whose distance is the least, or a tie with it."""
    least = distance.min(axis, keepdims=True)
    return jnp.argmax(distance <= least * TIE, axis, keepdims=True).astype(jnp.int32)


def _assign_clusters(
    x: kv.Array, centroids: kv.Array, is_used: kv.Array, candidates: kv.Array
) -> tuple[kv.Array, kv.Array]:
    """Marks with 1 the nearest centroid in use of each candidate.

    Args:
      x: vectors f32[B U F].
      centroids: f32[B M F].
      is_used: bool[B M].
      candidates: bool[B U].

    Returns:
      The marks f32[B U M], which sums over a cluster can be multiplied with, and all squared distances f32[B U M].
    """
    dots = jnp.einsum("buf,bmf->bum", x, centroids, precision=lax.Precision.HIGHEST)
    distance = jnp.square(x).sum(-1)[:, :, None] - 2 * dots + jnp.square(centroids).sum(-1)[:, None]
    distance = jnp.maximum(distance, 0.0)
    nearest = _nearest(jnp.where(is_used[:, None], distance, jnp.inf), 2)
    is_nearest = nearest == jnp.arange(distance.shape[2])[None, None]
    return (is_nearest & is_used[:, None] & candidates[..., None]).astype(jnp.float32), distance


@kv.register_method(example="snapkv:budget=512 + kmeans", family="component over a selection")
def kmeans(
    share: float = 0.25, iterations: int = 10, features: Literal["keys", "bits"] = "keys", seed: int = 0
) -> kv.Method:
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
      features: "keys", the keys of all heads and of a unit's tokens concatenated, or "bits", the signatures of
        `kvcrush`; the paper does not say which.
      seed: seed of the initial centroids.

    Reference:
      the baseline of KVCrush's Figure 6, arXiv 2503.00022, section IV-C
    """
    return kv.Method(representatives=KMeans(share, iterations, features, seed))
