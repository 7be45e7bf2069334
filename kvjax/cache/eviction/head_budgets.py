"""Budgets of heads that are known before any prompt, from a table of each head's importance (DuoAttention, HeadKV)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from kvjax.cache.calibration.table_file import TableFile
from kvjax.cache.components import Budget, HeadBudgets
from kvjax.cache.eviction.budget_allocation import match_total
from kvjax.cache.eviction.representatives import IntOrArray
from kvjax.cache.protocol import LayerSpec
from kvjax.core.types import Array
from kvjax.utils.abstract import abstract

ALL_TOKENS = 2**30
"""More tokens than any sequence has."""


class HeadTableBudgets(HeadBudgets):
    """A rule that makes the `HeadTokens` of each layer from a table: a frozen dataclass with the method `at`."""

    @abstract
    def at(self, spec: LayerSpec) -> HeadTokens:
        """Returns the tokens of one layer's heads; raises KvjaxError for a table that does not fit the model."""
        ...


@dataclasses.dataclass(frozen=True)
class HeadTokens(HeadBudgets):
    """Tokens that each head of a layer keeps of a prompt, or all of them where the prompt has fewer.

    Args:
      tokens: of each head, sinks and recent tokens included; `ALL_TOKENS` for a head that evicts none.
      part: above 0, a head keeps at least one in `part` of the prompt's tokens, and `extra` more.
      extra: tokens of that minimum that do not grow with the prompt.
    """

    tokens: tuple[int, ...]
    part: int = 0
    extra: int = 0

    def allocate(self, scores: Array, allowed: Array, num_units: Array, num_always: Array) -> Array:
        num_free = allowed.sum(-1, dtype=jnp.int32)
        own = jnp.asarray(self.tokens, jnp.int32)[:, None]
        least = jnp.broadcast_to(self.min_tokens(num_free + num_always), num_free.shape)[None]
        parts = jnp.clip(jnp.maximum(own, least) - num_always[None], 0, num_free[None])
        # Other components of the method may have taken places that the heads would have used.
        total = jnp.minimum(parts.sum(0, dtype=jnp.int32), len(self.tokens) * num_units)
        return match_total(parts, total, jnp.zeros_like(num_units), num_free).T

    def min_tokens(self, length: IntOrArray) -> IntOrArray | int:
        """Fewest tokens that a head keeps of a prompt of `length` tokens, if it has as many."""
        return length // self.part + self.extra if self.part else 0


@dataclasses.dataclass(frozen=True)
class MeanOfHeads(Budget):
    """The budget of a selection whose heads keep the tokens of a `HeadTableBudgets`: their mean, rounded up.

    A method holds the rule twice, here for how much a layer keeps and in `PagedHeads` for which head keeps how much.
    """

    heads: HeadTableBudgets | HeadTokens  # bound to a layer, it is `HeadTokens`

    def num_kept(self, length: int) -> int:
        return int(self.num_kept_by_length(length)[length])

    def num_kept_by_length(self, max_length: int) -> np.ndarray:
        assert isinstance(self.heads, HeadTokens)
        lengths = np.arange(max_length + 1)
        least = self.heads.min_tokens(lengths)
        # Head by head: all heads of a long text at once would take gigabytes.
        total = np.zeros_like(lengths)
        for tokens in self.heads.tokens:
            total += np.minimum(lengths, np.maximum(tokens, least))
        return (-(-total // len(self.heads.tokens))).astype(np.int32)

    def max_kept(self) -> int | None:
        assert isinstance(self.heads, HeadTokens)
        is_unbounded = self.heads.part > 0 or ALL_TOKENS in self.heads.tokens
        return None if is_unbounded else self.num_kept(max(self.heads.tokens))


def scores_of_all_heads(table: TableFile, spec: LayerSpec, name: str) -> np.ndarray:
    """Reads one array of every layer that the method works in from a table of all layers, f64[L K]."""
    layers = (dataclasses.replace(spec, index=i) for i in spec.method_layers)
    scores = [table.layer_arrays(layer, **{name: (spec.num_kv_heads,)})[name] for layer in layers]
    return np.stack(scores).astype(np.float64)


def top_heads_mask(scores: np.ndarray, count: int) -> np.ndarray:
    """bool[L K]: the `count` heads of the highest scores; of equal scores the later layer and head."""
    order = np.argsort(scores, axis=None, kind="stable")
    mask = np.zeros(scores.size, bool)
    mask[order[scores.size - count :]] = True
    return mask.reshape(scores.shape)
