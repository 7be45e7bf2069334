"""CriticalKV: half of a budget goes by what tokens add to the layer's output."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax

from kvjax.cache.eviction.representatives import check_share
from kvjax.cache.eviction.rescoring import SecondStageScorer
from kvjax.cache.method import Method
from kvjax.cache.protocol import LayerSpec
from kvjax.cache.readers.base import split_blocks
from kvjax.core.attention_mass import Observation
from kvjax.core.types import Array, KVBlock
from kvjax.methods.registry import register_method

EPSILON = 1e-4  # a token that nothing attends to may still win by its value


@dataclasses.dataclass(frozen=True)
class ByOutput(SecondStageScorer):
    """A token's score, times the L1 norm of what its value adds to the layer's output (CriticalKV, 2502.03805).

    The norm is the mean over the query heads of a key/value head. share: of the tokens that a head keeps, those that go
    by the scorer alone.
    """

    needs_output: ClassVar[bool] = True
    share: float = 0.5

    def __post_init__(self):
        check_share(self.share)

    def scores(self, block: KVBlock, own: Array, observation: Observation | None, spec: LayerSpec) -> Array:
        assert observation is not None and observation.output_projection is not None
        real = block.pos >= 0
        new = (jnp.where(real, own, 0.0) + EPSILON) * added(block.clean().v, observation.output_projection)
        return jnp.where(real, new, -jnp.inf)


def added(v: Array, output: Array, at_once: int = 64) -> Array:
    """f32[B K S]: the L1 norm of values [B K S H] after the output projection [1 K G H D], mean over G.

    Memory grows with `at_once` x D, never with S x D.
    """
    weight = output[0].astype(jnp.float32)

    def of_some(v: Array) -> Array:
        changes = jnp.einsum("bksh,kghd->bkgsd", v.astype(jnp.float32), weight)
        return jnp.abs(changes).sum(-1).mean(2)

    size = min(at_once, v.shape[2])
    norms = jnp.moveaxis(lax.map(of_some, split_blocks(v, 2, size)), 0, 2)
    return norms.reshape(*v.shape[:2], -1)[:, :, : v.shape[2]]


@register_method(example="snapkv:budget=512 + criticalkv", family="component over a selection")
def criticalkv(share: float = 0.5) -> Method:
    """Gives half of an eviction method's budget to scores weighted by the value's effect on the layer's output.

    Use it as in 'snapkv:budget=256 + criticalkv', or 'snapkv:budget=256 + adakv + criticalkv', where each of AdaKV's
    head budgets is halved. The scores must not be negative, as attention is not: a large value would lower a negative
    one.

    Formula:
      floor(n / 2) of a head's n tokens by the base score s; the rest by the largest (s + 1e-4) * mean over its query
      heads of |v W_o|_1

    Differs:
      It divides no budget: alone every head keeps the same number of tokens, as under `CriticalKVPress`; the paper's
      other variant and `CriticalAdaKVPress` are '.. + adakv:rule=kvpress + criticalkv'. `docs/results.md` has what each
      division keeps. Sinks and windows always stay and count in the first half, where kvpress may lose a part of the
      window in the second; over AdaKV each head's own count is halved, where kvpress also keeps AdaKV's guaranteed
      fraction.

    Args:
      share: fraction of a head's tokens, sinks and window among them, that the base scores alone select (the paper and
        kvpress: 0.5).

    Reference:
      CriticalKV, Feng et al. 2025, arXiv 2502.03805, as in kvpress' CriticalKVPress and CriticalAdaKVPress
    """
    return Method(second_stage=ByOutput(share))
