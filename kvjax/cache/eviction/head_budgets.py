"""Heads that keep numbers of tokens known before any prompt, by a table of how much each head of the model matters."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter

import jax.numpy as jnp
import numpy as np

from kvjax.cache.calibration.table_file import Given
from kvjax.cache.eviction.budget_allocation import HeadBudgets, match_total
from kvjax.cache.eviction.budgets import Budget
from kvjax.cache.eviction.representatives import Count
from kvjax.cache.protocol import LayerSpec
from kvjax.core.types import Array
from kvjax.errors import KvjaxError

ALL = 2**30
"""More tokens than any row has."""


@dataclasses.dataclass(frozen=True)
class Lengths(HeadBudgets, Budget):
    """How many tokens each head of a layer keeps, or all if a row has fewer: a division, and the budget that it needs.

    tokens: of each head, those that it keeps in any case among them; `ALL` for a head that loses none. part: above 0, a
    head also keeps one in so many of a row's tokens, and `beside` more, where that makes more than its number.
    """

    tokens: tuple[int, ...]
    part: int = 0
    beside: int = 0

    def kept(self, length: int) -> int:
        """The mean over the heads, rounded up."""
        total, least = 0, self._growing(length)
        for tokens, heads in _alike(self.tokens):  # this is asked for every length up to that of the prompt
            total += heads * min(length, max(tokens, least))
        return -(-total // len(self.tokens))

    def most(self) -> int | None:
        unbounded = self.part > 0 or ALL in self.tokens
        return None if unbounded else self.kept(max(self.tokens))

    def allocate(self, scores: Array, allowed: Array, quota: Array, beside: Array) -> Array:
        free = allowed.sum(-1, dtype=jnp.int32)
        own = jnp.asarray(self.tokens, jnp.int32)[:, None]
        least = jnp.broadcast_to(self._growing(free + beside), free.shape)[None]
        parts = jnp.clip(jnp.maximum(own, least) - beside[None], 0, free[None])
        # Other slots of a method may take places that the heads of this one would have used.
        total = jnp.minimum(parts.sum(0, dtype=jnp.int32), len(self.tokens) * quota)
        return match_total(parts, total, jnp.zeros_like(quota), free).T

    def _growing(self, length: Count) -> Count | int:
        """The least that a head keeps of rows of so many tokens, if they have it."""
        return length // self.part + self.beside if self.part else 0


@functools.lru_cache(maxsize=1024)
def _alike(tokens: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Each number that occurs, and how often."""
    return tuple(Counter(tokens).items())


class ByTable(HeadBudgets, Budget):
    """A rule that makes `Lengths` of a table: a frozen dataclass with the method `at`.

    It stands in a method twice: as the budget of its selection, and as the shares of its pages.
    """

    def at(self, spec: LayerSpec) -> Lengths:
        """The numbers of one layer; raises KvjaxError for a table that does not fit the model."""
        raise NotImplementedError


def of_all_heads(table: Given, spec: LayerSpec, name: str) -> np.ndarray:
    """What a table says of every head of the model under a name, f64[L K]."""
    layers = (dataclasses.replace(spec, index=i) for i in range(spec.num_layers))
    return np.stack([table.of(layer, **{name: (spec.num_kv_heads,)})[name] for layer in layers]).astype(np.float64)


def highest(scores: np.ndarray, count: int) -> np.ndarray:
    """bool[L K]: the `count` heads of the highest scores; of equal ones the later layer and head."""
    order = np.argsort(scores, axis=None, kind="stable")
    chosen = np.zeros(scores.size, bool)
    chosen[order[scores.size - count :]] = True
    return chosen.reshape(scores.shape)


def check_share_of_heads(**shares: float) -> None:
    """Raises KvjaxError unless every share of heads lies in [0, 1]."""
    for name, share in shares.items():
        if not 0 <= share <= 1:
            raise KvjaxError(f"{name} is a share of the model's heads, from 0 to 1, and got {share}")
