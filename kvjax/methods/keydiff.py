"""KeyDiff: the tokens whose keys point elsewhere than most."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from kvjax.cache.eviction.budgets import TokenBudget
from kvjax.cache.eviction.scorers import Scorer, Scores, token_scores
from kvjax.cache.eviction.selection import make_selection
from kvjax.cache.method import Method
from kvjax.cache.protocol import LayerSpec
from kvjax.core.attention_mass import Observation
from kvjax.core.types import Array, KVBlock
from kvjax.methods.registry import register_method


@dataclasses.dataclass(frozen=True)
class KeyDiff(Scorer):
    """Minus the cosine between a key and the mean direction of all keys held (Park et al. 2025, arXiv 2504.15364).

    The mean is that of the keys at unit length, over a row's real tokens; a key of zeros points nowhere and scores 0.
    """

    def scores(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> Scores:
        direction = _unit(block.clean().k.astype(jnp.float32))
        count = jnp.maximum((block.pos >= 0).sum(2, keepdims=True, dtype=jnp.int32), 1)
        anchor = direction.sum(2, keepdims=True) / count[..., None].astype(jnp.float32)
        return token_scores(-(direction * _unit(anchor)).sum(-1), block)


def _unit(x: Array) -> Array:
    """x [B K S H] at length 1."""
    length = jnp.sqrt(jnp.square(x).sum(-1, keepdims=True))
    return x / jnp.maximum(length, 1e-12)


@register_method(example="keydiff:budget=512", family="eviction after the prompt")
def keydiff(
    budget: TokenBudget = 1024, sinks: int = 0, recent: int = 0, unit: str = "token", per: str = "head"
) -> Method:
    """Keeps the prompt tokens whose keys differ most from the mean key; it needs no queries.

    With 'keydiff + recompress:every=1' it selects again at every decoded token.

    Formula:
      score_s = -cos(k_s, mean over the sequence's tokens of k / |k|)

    Differs:
      The paper compresses block by block while it reads the prompt, and later blocks attend to what is left; here, as
      in kvpress (KeyDiffPress), the prompt is attended in full and compressed once.

    Args:
      budget, sinks, recent, unit, per: as in `make_selection`.

    Reference:
      KeyDiff, Park et al. 2025, arXiv 2504.15364, section 3; scored once after the prompt as in kvpress
    """
    return Method(select=make_selection(KeyDiff(), budget, sinks, recent, unit, per))
