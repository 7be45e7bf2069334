"""XAttention: tiles of a prompt's queries read the tiles of keys with the largest antidiagonal sums."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp

from kvjax import method_api as kv


@dataclasses.dataclass(frozen=True)
class AntidiagonalTiles(kv.TileChoosing):
    """Chooses tiles of keys up to a fraction of the weight that sums along antidiagonals estimate.

    Args:
      threshold: fraction of the estimated weight of a tile of queries.
      stride: queries, and keys, whose dot products are summed along an antidiagonal.
      tile: queries and keys of a tile.
      rule: the layer's window, from `at`.
    """

    threshold: Annotated[float, kv.Within("(0, 1]")]
    stride: kv.PositiveInt
    tile: kv.PositiveInt
    rule: kv.attention.Rule = kv.attention.PLAIN

    def __post_init__(self):
        kv.check_fields(self)
        if self.tile % self.stride:
            raise kv.KvjaxError(
                f"a tile of {self.tile} tokens has no whole number of strides of {self.stride}; give a tile that is a "
                "multiple of the stride"
            )

    def at(self, spec: kv.LayerSpec) -> AntidiagonalTiles:
        return dataclasses.replace(self, rule=spec.rule)

    def choose_keys(
        self, q: kv.Array, k: kv.Array, start: kv.Array | int, lengths: kv.Array
    ) -> Callable[[kv.Array, kv.Array], kv.ChosenKeys]:
        (B, K, S, H), per_tile = k.shape, self.tile // self.stride
        num_tiles = -(-S // self.tile)
        # A group that the prompt ends in counts with zeros in place of what is behind.
        k = jnp.where(jnp.arange(S)[None, None, :, None] < lengths[:, None, None, None], k, 0)
        k = jnp.pad(k, [(0, 0), (0, 0), (0, num_tiles * self.tile - S), (0, 0)])
        groups = k.reshape(B, K, -1, self.stride * H)
        group = jnp.arange(groups.shape[2], dtype=jnp.int32)[None, None, None, None]
        length = lengths[:, None, None, None, None]

        def choose(q: kv.Array, first: kv.Array) -> kv.ChosenKeys:
            G = q.shape[2]
            is_real = first + jnp.arange(self.tile, dtype=jnp.int32)[None] < lengths[:, None]
            q = jnp.where(is_real[:, None, None, :, None], q, 0)
            # Query i of a group meets key stride - 1 - i: an antidiagonal of the square of their dot products.
            rows = q.reshape(B, K, G, per_tile, self.stride, H)[..., ::-1, :].reshape(B, K, G, per_tile, -1)
            logits = jnp.einsum("bkgrc,bksc->bkgrs", rows, groups, preferred_element_type=jnp.float32)
            row = (first // self.stride + jnp.arange(per_tile, dtype=jnp.int32))[None, None, None, :, None]
            is_visible = (group <= row) & (group * self.stride < length)
            if self.rule.window is not None:  # what it hides would count as weight that is read
                is_visible &= (group + 1) * self.stride > row * self.stride - self.rule.window + 1
            weights = jax.nn.softmax(jnp.where(is_visible, logits * (H**-0.5 / self.stride), kv.MASKED_LOGIT))
            weights = jnp.where(row * self.stride < length, weights, 0.0)
            mass = weights.sum(3).reshape(B, K, G, num_tiles, per_tile).sum(4)
            tile, own = jnp.arange(num_tiles, dtype=jnp.int32)[None, None, None], first // self.tile
            is_always = (tile == 0) | (tile == own)
            others = jnp.where(is_always, 0.0, mass)
            falling = jnp.concatenate(
                [jnp.where(is_always, mass, 0.0).sum(-1, keepdims=True), -jnp.sort(-others, axis=-1)], -1
            )
            is_needed = kv.covering_mask(falling, self.threshold)[..., 1:]
            return kv.ChosenKeys(is_always | (jnp.take_along_axis(is_needed, kv.rank(others), -1) & (tile < own)))

        return choose


@kv.register_method(example="xattention:stride=4,tile=16", family="sparse reading")
def xattention(threshold: Annotated[float, kv.Within("(0, 1]")] = 0.9, stride: int = 8, tile: int = 128) -> kv.Method:
    """Leaves out of the prompt's attention the tiles of keys of least estimated weight; decoding reads all.

    Each query head chooses for itself, a tile of queries at a time. Nothing leaves the cache. What a layer's sliding
    window hides has no weight.

    Formula:
      weight of tile j for a tile of queries = sum over its groups a of `stride` queries and j's groups b of keys of
      softmax_b(sum_i q_{a, stride - 1 - i} k_{b, i} / (stride sqrt(H))); first tile, own tile, and the others of most
      weight until `threshold` of the sum over all is reached

    Differs:
      The authors' code gives each head of one model a threshold of its own, from a table; here all have one.

    Args:
      threshold: fraction of the estimated weight that is read (the authors' code: 0.9); 1 reads everything.
      stride: tokens of a group (the authors: 8 and 16). The estimate costs a stride-th of all dot products.
      tile: queries, and keys, that are read or left out together (the authors' kernel: 128). Chunks of a prompt must be
        multiples of it.

    Reference:
      XAttention, Xu et al. 2025, arXiv 2503.16428, section 2; its public code, mit-han-lab/x-attention
    """
    return kv.Method(attend=AntidiagonalTiles(threshold, stride, tile))
