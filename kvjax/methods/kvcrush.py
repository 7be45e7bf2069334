"""KVCrush: a part of the budget goes to tokens that stand for the evicted ones (arXiv 2503.00022)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax

from kvjax.cache.eviction.representatives import EvictableUnits, check_share
from kvjax.cache.method import Method
from kvjax.core.mesh import over_heads
from kvjax.core.random import draw
from kvjax.core.top_k import top_k_mask
from kvjax.core.types import Array
from kvjax.errors import KvjaxError
from kvjax.methods.registry import register_method


@dataclasses.dataclass(frozen=True)
class KVCrush:
    """Representatives by one distance: each unit's bits against one anchor (sections III-A and III-B).

    bits: "heads", one per token and query head, set for the better half of the row's evictable tokens of that head
    (the paper); "positions", one per token, set for the better half by the mean score of all heads (OpenVINO's
    production code). A unit's bits are its tokens' bits one after another.
    anchor: "random" (by seed and bit), "alternate" (0101..), "zeros", "ones", or "mean", the majority of the row's
    evictable units; for single tokens that is zeros, since no head votes for more than half of them.
    rule: the paper puts each token in the bucket "with the lowest Hamming distance" and keeps a random one of each
    bucket, but a single anchor has fewer distances than there are buckets. "buckets": tokens in the order of
    (distance, index), cut into buckets of equal count, a random member of each: the default, as it alone has the
    paper's number of buckets, its random pick, and every token in some bucket. "stride": the same order, every
    n-th token (OpenVINO). "bins": buckets of equal width in distance, a random member of each; the places of empty
    ones go round the others again.
    Draws depend on the seed and the bucket (for "bins": the unit's index in its row), so all layers draw alike.
    """

    share: float = 0.25
    anchor: str = "random"
    rule: str = "buckets"
    bits: str = "heads"
    seed: int = 0

    def __post_init__(self):
        check_share(self.share)
        known = {
            "anchor": ("random", "mean", "alternate", "zeros", "ones"),
            "rule": ("buckets", "stride", "bins"),
            "bits": ("heads", "positions"),
        }
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise KvjaxError(f"{name} must be one of {', '.join(values)}, got {getattr(self, name)!r}")

    def choose(self, units: EvictableUnits, count: Array, places: int) -> Array:
        """Section III-B, and Units -> i32[B places] as in `Representatives`."""
        return self.by_signature(votes(units, self.bits), units, count, places)

    def by_signature(self, bits: Array, units: EvictableUnits, count: Array, places: int) -> Array:
        """The same, from the units' signatures bool[B U n]."""
        d = hamming(pack(bits), pack(self._anchor(bits, units.valid)))
        count = jnp.minimum(count, units.candidates.sum(-1, dtype=jnp.int32))
        if self.rule == "bins":
            return self._bins(d, bits.shape[-1], units.candidates, count, places)
        U, last = d.shape[1], bits.shape[-1] + 1
        index = jnp.arange(U, dtype=jnp.int32)[None]
        order = jnp.sort(jnp.where(units.candidates, d, last) * U + index, -1) % U  # by (distance, index)
        i = jnp.arange(places, dtype=jnp.int32)[None]
        m, r = jnp.maximum(count, 1)[:, None], units.candidates.sum(-1, keepdims=True, dtype=jnp.int32)
        if self.rule == "stride":
            at = i * (r // m)
        else:  # the first r % m buckets have one token more
            size = jnp.maximum(r // m + (i < r % m).astype(jnp.int32), 1)
            at = i * (r // m) + jnp.minimum(i, r % m)
            at = at + (draw(self.seed, i) % size.astype(jnp.uint32)).astype(jnp.int32)
        return _first(jnp.take_along_axis(order, jnp.clip(at, 0, U - 1), 1), count)

    def _anchor(self, bits: Array, valid: Array) -> Array:
        """bool[B|1 1 n]."""
        i = jnp.arange(bits.shape[-1], dtype=jnp.int32)[None, None]
        if self.anchor == "mean":
            return 2 * bits.sum(1, keepdims=True, dtype=jnp.int32) > valid.sum(-1, dtype=jnp.int32)[:, None, None]
        if self.anchor == "random":
            return draw(self.seed, jnp.zeros_like(i), i) % 2 == 1
        return {"alternate": i % 2 == 1, "zeros": i < 0, "ones": i >= 0}[self.anchor]

    def _bins(self, d: Array, n: int, candidates: Array, count: Array, places: int) -> Array:
        U = d.shape[1]
        index = jnp.broadcast_to(jnp.arange(U, dtype=jnp.int32)[None], d.shape)
        bin_ = jnp.where(candidates, d * jnp.maximum(count, 1)[:, None] // (n + 1), U + 1)
        bin_, _, index = lax.sort((bin_, draw(self.seed, index), index), num_keys=3)
        at = jnp.broadcast_to(jnp.arange(U, dtype=jnp.int32)[None], d.shape)
        starts = jnp.pad(bin_[:, 1:] != bin_[:, :-1], [(0, 0), (1, 0)], constant_values=True)
        rounds = at - lax.cummax(jnp.where(starts, at, 0), 1)
        rounds = jnp.where(bin_ > U, U + 1, rounds)
        order = lax.sort((rounds, bin_, index), num_keys=2)[2]
        return _first(jnp.pad(order, [(0, 0), (0, max(places - U, 0))])[:, :places], count)


def votes(units: EvictableUnits, kind: str = "heads") -> Array:
    """bool[B U n]: each unit's bits, n = c tokens x query heads ("heads") or c tokens ("positions")."""
    B, _, _, U, c = units.scores.shape
    s = over_heads.gather(units.scores)
    s = s.mean((1, 2), keepdims=True) if kind == "positions" else s
    s = s.reshape(B, -1, U * c)
    allowed = jnp.repeat(units.valid, c, -1)[:, None]
    ones = top_k_mask(s, allowed, allowed[:, 0].sum(-1, dtype=jnp.int32) // 2)
    return jnp.moveaxis(ones.reshape(B, -1, U, c), 1, 3).reshape(B, U, -1)


def pack(bits: Array) -> Array:
    """bool[... n] -> uint32[... words], the first bit lowest."""
    bits = jnp.pad(bits, [(0, 0)] * (bits.ndim - 1) + [(0, -bits.shape[-1] % 32)])
    words = bits.reshape(*bits.shape[:-1], -1, 32).astype(jnp.uint32)
    place = jnp.arange(32, dtype=jnp.uint32).reshape(*(1,) * bits.ndim, 32)
    return (words << place).sum(-1, dtype=jnp.uint32)


def hamming(a: Array, b: Array) -> Array:
    """Packed bits uint32[B U words] and uint32[B|1 1 words] -> differing bits i32[B U]."""
    return lax.population_count(a ^ b).astype(jnp.int32).sum(-1, dtype=jnp.int32)


def _first(idx: Array, count: Array) -> Array:
    return jnp.where(jnp.arange(idx.shape[1])[None] < count[:, None], idx, -1)


@register_method(example="snapkv:budget=512 + kvcrush", family="component over a selection")
def kvcrush(
    share: float = 0.25, anchor: str = "random", rule: str = "buckets", bits: str = "heads", seed: int = 0
) -> Method:
    """Gives a part of an eviction method's budget to tokens that represent the evicted ones.

    Use it as in 'snapkv:budget=256 + kvcrush'.

    Formula:
      bit_h(s) = whether token s is in head h's better half; representatives: one of each bucket of equal count in the
      order of the Hamming distance to an anchor

    Differs:
      The paper's rule for buckets cannot be followed with a single anchor (fewer distances than buckets); the three
      readings of it are given, and OpenVINO's is rule=stride with bits=positions.

    Args:
      share: fraction of the budget, sinks and recent tokens aside, for representatives (the paper: 0.25 on LongBench,
        0.2 to 0.5 best).
      anchor: "random", "mean", "alternate", "zeros" or "ones", see `KVCrush`.
      rule: "buckets", "stride" (OpenVINO) or "bins", see `KVCrush`.
      bits: "heads" (the paper) or "positions" (OpenVINO), see `KVCrush`.
      seed: seed of the random anchor and the random member of a bucket.

    Reference:
      KVCrush, Jha et al. 2025, arXiv 2503.00022, sections III-A to III-C
    """
    return Method(representatives=KVCrush(share, anchor, rule, bits, seed))
