"""CriticalKV: spends half of a budget by the contribution of tokens to the layer's output."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax

from kvjax import method_api as kv

EPSILON = 1e-4  # added to scores, so that a token without attention may still win by its value


@dataclasses.dataclass(frozen=True)
class OutputScores(kv.SecondStageScorer):
    """Multiplies scores by the L1 norm of the value's contribution to the layer's output (CriticalKV, 2502.03805).

    The norm is the mean over the query heads of a key/value head.

    Args:
      share: fraction of a head's kept tokens that are chosen by the scorer alone.
    """

    needs_output: ClassVar[bool] = True
    share: kv.UnitFloat = 0.5

    __post_init__ = kv.check_fields

    def scores(
        self, block: kv.KVBlock, own: kv.Array, observation: kv.Observation | None, spec: kv.LayerSpec
    ) -> kv.Array:
        assert observation is not None and observation.output_projection is not None
        real = block.pos >= 0
        new = (jnp.where(real, own, 0.0) + EPSILON) * output_norms(block.clean().v, observation.output_projection)
        return jnp.where(real, new, -jnp.inf)


def output_norms(v: kv.Array, output: kv.Array, at_once: int = 64) -> kv.Array:
    """Computes the L1 norms of values after the output projection, the mean over query heads.

    Args:
      v: values [B K S H].
      output: output projection [1 K G H D].
      at_once: values whose outputs are in memory at one time, so that it grows with at_once * D and never with S * D.

    Returns:
      f32[B K S].
    """
    weight = output[0].astype(jnp.float32)

    def average_norms(v: kv.Array) -> kv.Array:
        contributions = jnp.einsum("bksh,kghd->bkgsd", v.astype(jnp.float32), weight)
        return jnp.abs(contributions).sum(-1).mean(2)

    size = min(at_once, v.shape[2])
    norms = jnp.moveaxis(lax.map(average_norms, kv.attention.split_blocks(v, 2, size)), 0, 2)
    return norms.reshape(*v.shape[:2], -1)[:, :, : v.shape[2]]


@kv.register_method(example="snapkv:budget=512 + criticalkv", family="component over a selection")
def criticalkv(share: float = 0.5) -> kv.Method:
    """Gives half of an eviction method's budget to scores weighted by the value's effect on the layer's output.

    Use it as in 'snapkv:budget=256 + criticalkv', or 'snapkv:budget=256 + adakv + criticalkv', where each of AdaKV's
    head budgets is halved. The scores must not be negative, as attention is not: a large value would lower a negative
    one.

    Formula:
      floor(n / 2) of a head's n tokens by the base score s; the rest by the largest (s + 1e-4) * mean over its query
      heads of |v W_o|_1

    Differs:
      It divides no budget: alone every head keeps the same number of tokens, as under `CriticalKVPress`; the paper's
      other variant and `CriticalAdaKVPress` are '.. + adakv:rule=kvpress + criticalkv'. `docs/divisions.md` has what
      each division keeps. Sinks and windows always stay and count in the first half, where kvpress may lose a part of
      the window in the second; over AdaKV each head's own count is halved, where kvpress also keeps AdaKV's guaranteed
      fraction.

    Args:
      share: fraction of a head's tokens, sinks and window among them, that the base scores alone select (the paper and
        kvpress: 0.5).

    Reference:
      CriticalKV, Feng et al. 2025, arXiv 2502.03805, as in kvpress' CriticalKVPress and CriticalAdaKVPress
    """
    return kv.Method(second_stage=OutputScores(share))
