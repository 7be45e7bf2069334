"""KVCrush: a part of the budget goes to tokens that represent the evicted ones (arXiv 2503.00022)."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jax import lax

from kvjax import method_api as kv


@dataclasses.dataclass(frozen=True)
class KVCrush:
    """Chooses representatives by the Hamming distance of each unit's signature to one anchor (III-A and III-B).

    The paper puts each token into the bucket "with the lowest Hamming distance" and keeps a random one of each bucket,
    but a single anchor has fewer distances than there are buckets. `rule` has the three readings of it.

    Random draws depend on the seed and the bucket (for "bins" on the unit's index in its sequence), and on nothing
    else, so all layers draw alike and padding changes nothing.

    Args:
      share: fraction of the kept units that are representatives.
      anchor: "random", by seed and bit; "alternate", 0101..; "zeros"; "ones"; or "mean", the majority of the sequence's
        evictable units. For single tokens "mean" equals "zeros", as no head votes for more than half of them.
      rule: "buckets", units in the order of (distance, index) cut into buckets of equal count, a random member of each:
        the default, as it alone has the paper's number of buckets, its random choice, and every unit in some bucket.
        "stride", every n-th unit in that order (OpenVINO). "bins", buckets of equal width in distance, a random member
        of each; the places of empty ones go round the others again.
      bits: "heads", one bit per token and query head, set for the better half of the sequence's evictable tokens of
        that head (the paper); "positions", one bit per token, set for the better half by the mean score of all heads
        (OpenVINO). The bits of a unit's tokens follow one another.
      seed: seed of "random" anchors and of the random member of a bucket.
    """

    share: kv.UnitFloat = 0.25
    anchor: Literal["random", "mean", "alternate", "zeros", "ones"] = "random"
    rule: Literal["buckets", "stride", "bins"] = "buckets"
    bits: Literal["heads", "positions"] = "heads"
    seed: int = 0

    __post_init__ = kv.check_fields

    def choose(self, units: kv.EvictableUnits, count: kv.Array, places: int) -> kv.Array:
        return self.choose_by_signature(unit_signatures(units, self.bits), units, count, places)

    def choose_by_signature(
        self, signatures: kv.Array, units: kv.EvictableUnits, num_wanted: kv.Array, max_wanted: int
    ) -> kv.Array:
        """Chooses i32[B max_wanted] as in `Representatives`, by given signatures bool[B U bits]."""
        num_bits = signatures.shape[-1]
        distance = hamming_distance(pack_bits(signatures), pack_bits(self._anchor(signatures, units.valid)))
        num_candidates = units.candidates.sum(-1, dtype=jnp.int32)
        num_wanted = jnp.minimum(num_wanted, num_candidates)
        if self.rule == "bins":
            chosen = self._order_by_bins(distance, num_bits, units.candidates, num_wanted, max_wanted)
        else:
            U = distance.shape[1]
            index = jnp.arange(U, dtype=jnp.int32)[None]
            # One sort key for (distance, index); what is no candidate is farther than any distance.
            order = jnp.sort(jnp.where(units.candidates, distance, num_bits + 1) * U + index, -1) % U
            rank = self._bucket_members(num_candidates[:, None], num_wanted[:, None], max_wanted)
            chosen = jnp.take_along_axis(order, jnp.clip(rank, 0, U - 1), 1)
        return jnp.where(jnp.arange(max_wanted)[None] < num_wanted[:, None], chosen, -1)

    def _anchor(self, signatures: kv.Array, valid: kv.Array) -> kv.Array:
        """Returns the signature that all units are compared with, bool[B|1 1 bits]."""
        bit = jnp.arange(signatures.shape[-1], dtype=jnp.int32)[None, None]
        if self.anchor == "mean":
            num_valid = valid.sum(-1, dtype=jnp.int32)[:, None, None]
            return 2 * signatures.sum(1, keepdims=True, dtype=jnp.int32) > num_valid
        if self.anchor == "random":
            return kv.draw(self.seed, jnp.zeros_like(bit), bit) % 2 == 1
        return {"alternate": bit % 2 == 1, "zeros": bit < 0, "ones": bit >= 0}[self.anchor]

    def _bucket_members(self, num_candidates: kv.Array, num_buckets: kv.Array, max_buckets: int) -> kv.Array:
        """Picks a member of each bucket, i32[B max_buckets]: its rank in the order of distances."""
        bucket = jnp.arange(max_buckets, dtype=jnp.int32)[None]
        num_buckets = jnp.maximum(num_buckets, 1)
        if self.rule == "stride":
            return bucket * (num_candidates // num_buckets)
        # The remainder goes to the first buckets, one unit each.
        size, remainder = num_candidates // num_buckets, num_candidates % num_buckets
        start = bucket * size + jnp.minimum(bucket, remainder)
        size = jnp.maximum(size + (bucket < remainder).astype(jnp.int32), 1)
        return start + (kv.draw(self.seed, bucket) % size.astype(jnp.uint32)).astype(jnp.int32)

    def _order_by_bins(
        self, distance: kv.Array, num_bits: int, candidates: kv.Array, num_bins: kv.Array, max_bins: int
    ) -> kv.Array:
        """Orders units i32[B max_bins]: a random member of each bin, then a second one of each, and so on."""
        B, U = distance.shape
        index = jnp.broadcast_to(jnp.arange(U, dtype=jnp.int32)[None], (B, U))
        no_bin = U + 1
        bins = jnp.where(candidates, distance * jnp.maximum(num_bins, 1)[:, None] // (num_bits + 1), no_bin)
        bins, _, member = lax.sort((bins, kv.draw(self.seed, index), index), num_keys=3)
        # A unit's turn is its rank in its own bin, by its distance from where the bin begins.
        is_first = jnp.pad(bins[:, 1:] != bins[:, :-1], [(0, 0), (1, 0)], constant_values=True)
        turn = index - lax.cummax(jnp.where(is_first, index, 0), 1)
        turn = jnp.where(bins == no_bin, no_bin, turn)
        order = lax.sort((turn, bins, member), num_keys=2)[2]
        return jnp.pad(order, [(0, 0), (0, max(max_bins - U, 0))])[:, :max_bins]


def unit_signatures(units: kv.EvictableUnits, bits: str = "heads") -> kv.Array:
    """Computes units' signatures: bool[B U size * N] for "heads", bool[B U size] for "positions"; see `KVCrush`."""
    B, _, _, U, size = units.scores.shape
    scores = kv.over_heads.gather(units.scores)
    if bits == "positions":
        scores = scores.mean((1, 2), keepdims=True)
    scores = scores.reshape(B, -1, U * size)
    allowed = jnp.repeat(units.valid, size, -1)[:, None]
    better_half = kv.top_k_mask(scores, allowed, allowed[:, 0].sum(-1, dtype=jnp.int32) // 2)
    return jnp.moveaxis(better_half.reshape(B, -1, U, size), 1, 3).reshape(B, U, -1)


def pack_bits(bits: kv.Array) -> kv.Array:
    """Packs bool[... n] into uint32[... words], the first bit lowest."""
    bits = jnp.pad(bits, [(0, 0)] * (bits.ndim - 1) + [(0, -bits.shape[-1] % 32)])
    words = bits.reshape(*bits.shape[:-1], -1, 32).astype(jnp.uint32)
    shift = jnp.arange(32, dtype=jnp.uint32).reshape(*(1,) * bits.ndim, 32)
    return (words << shift).sum(-1, dtype=jnp.uint32)


def hamming_distance(a: kv.Array, b: kv.Array) -> kv.Array:
    """Counts the bits in which packed uint32[B U words] and uint32[B|1 1 words] differ, i32[B U]."""
    return lax.population_count(a ^ b).astype(jnp.int32).sum(-1, dtype=jnp.int32)


@kv.register_method(example="snapkv:budget=512 + kvcrush", family="component over a selection")
def kvcrush(
    share: float = 0.25,
    anchor: Literal["random", "mean", "alternate", "zeros", "ones"] = "random",
    rule: Literal["buckets", "stride", "bins"] = "buckets",
    bits: Literal["heads", "positions"] = "heads",
    seed: int = 0,
) -> kv.Method:
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
    return kv.Method(representatives=KVCrush(share, anchor, rule, bits, seed))
