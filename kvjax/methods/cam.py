"""CaM: spreads the values of evicted tokens over the kept tokens that follow them."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax import method_api as kv
from kvjax.cache.eviction.merging import gather_at_slots


@dataclasses.dataclass(frozen=True)
class ValueSpread:
    """Adds the value of an evicted token in equal parts to the next `window` kept ones, or drops it, at random.

    The probability of a merge is the evicted token's score over the mean score of the following kept ones, at most 1.
    The selection's scores stand for the attention received, so they should be attention: `accumulated`, `snapkv`.
    Where fewer tokens follow, these take all parts.

    Args:
      window: following kept tokens that share a value.
      seed: seed of the draws, which also depend on layer, head and position.
      layer: index of the layer, set by `at`.
    """

    window: kv.PositiveInt = 32
    seed: int = 0
    layer: int = 0

    __post_init__ = kv.check_fields

    def at(self, spec: kv.LayerSpec) -> ValueSpread:
        return dataclasses.replace(self, layer=spec.index)

    def __call__(self, block: kv.KVBlock, kept: kv.KVBlock, choice: kv.SelectedSlots, spec: kv.LayerSpec) -> kv.KVBlock:
        block, kept = block.clean(), kept.clean()
        lost, n = kv.evicted_mask(block, choice), kept.k.shape[2]
        is_used = jnp.broadcast_to(choice.slots >= 0, kept.k.shape[:3])
        following = jnp.cumsum((block.pos >= 0) & ~lost, 2, dtype=jnp.int32)  # the first kept slot after each token
        # For each kept slot, the used slots among it and the `window - 1` after it, and the mean of their scores.
        ahead = (0, self.window - 1)
        number = _sum_window(is_used.astype(jnp.float32), self.window, ahead)
        mean = _sum_window(kv.scores_of_kept(kept, choice), self.window, ahead) / jnp.maximum(number, 1.0)
        number, mean = gather_at_slots(number, following), gather_at_slots(mean, following)
        # A product instead of a quotient: where the mean is 0, any attention is enough.
        is_merged = _draw_uniform(self.seed, self.layer, block.pos, lost.shape) * mean < choice.scores.per_kv_head
        fraction = block.v.astype(jnp.float32) / jnp.maximum(number, 1.0)[..., None]
        incoming = kv.scatter_add(fraction, jnp.where(lost & is_merged & (number > 0), following, n), n)
        # Each part was left at the first slot of its window, so a slot gets those of itself and the slots before it.
        added = _sum_window(incoming, self.window, (self.window - 1, 0))
        v = kept.v.astype(jnp.float32) + jnp.where(is_used[..., None], added, 0.0)
        return dataclasses.replace(kept, v=v.astype(kept.v.dtype))


def _sum_window(x: kv.Array, window: int, pad: tuple[int, int]) -> kv.Array:
    """Sums f32[B K n ...] at each slot over a window of slots around it, pad[0] before and pad[1] after it."""
    size, edges = [1] * x.ndim, [(0, 0)] * x.ndim
    size[2], edges[2] = window, pad
    return lax.reduce_window(x, np.float32(0), lax.add, size, [1] * x.ndim, edges)


def _draw_uniform(seed: int, layer: int, pos: kv.Array, shape: tuple[int, ...]) -> kv.Array:
    """Draws numbers in [0, 1) by layer, head and position: f32[B K T]."""
    head = kv.over_heads.first_head(shape[1]) + jnp.arange(shape[1], dtype=jnp.int32)[None, :, None]
    coordinates = jnp.full(shape, layer, jnp.int32), jnp.broadcast_to(head, shape), jnp.broadcast_to(pos, shape)
    bits = kv.draw(seed, *coordinates) >> 8  # 24 bits, which float32 holds exactly
    return bits.astype(jnp.float32) * np.float32(2**-24)


@kv.register_method(example="accumulated:budget=256,recent=64 + cam", family="component over a selection")
def cam(window: int = 32, seed: int = 0) -> kv.Method:
    """Spreads the values of evicted tokens, at random by their attention, over the kept tokens that follow them.

    Use it as in 'accumulated:budget=256,recent=64 + cam', whose scores are the attention of the paper. Keys stay as
    they are.

    Formula:
      p_i = min(A_i / mean of A over the next m kept tokens, 1); with probability p_i: v_j <- v_j + v_i / m for each of
      them

    Differs:
      The authors merge one token a step while decoding, and take the mean over all recent tokens; here all tokens that
      the selection evicts from the prompt are merged at once, each into its own window, as kvpress does for the newest
      of them.

    Args:
      window: kept tokens among which a value is divided (the authors: 32).
      seed: seed of the draws, which depend on layer, head and position.

    Reference:
      CaM, Zhang et al. 2024, ICML, openreview LCTmppB165; in the windows of kvpress' CAMPress
    """
    return kv.Method(merge=ValueSpread(window, seed))
