"""Which tokens of a prompt a layer keeps: a scorer, a budget, what is protected, and what is kept or dropped as one."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from kvjax.cache.select.budgets import Budget, kept_by_length
from kvjax.cache.select.evict import evict
from kvjax.cache.select.scorers import Scorer
from kvjax.cache.select.units import Chunk, Page, Token, Unit
from kvjax.core.observe import Obs
from kvjax.core.types import Array, Block, KvjaxError
from kvjax.methods.kvcrush import Rest
from kvjax.models.config import Config


@dataclasses.dataclass(frozen=True)
class Eviction:
    """The `select` slot of a method: after the prompt, each row keeps its budget of tokens and loses the others.

    sinks, recent: so many first and last tokens always stay. unit: what is kept or dropped as one. per: "head", each
    key/value head its own tokens, or "layer", one set for all. layer, layers, window: where it is; `at` sets them.
    """

    scorer: Scorer
    budget: Budget
    sinks: int = 0
    recent: int = 0
    unit: Unit = Token()
    per: str = "head"
    layer: int = 0
    layers: int = 1
    window: int | None = None

    def at(self, layer: int, config: Config) -> Eviction:
        """The same in one layer of a model."""
        return dataclasses.replace(self, layer=layer, layers=config.layers, window=config.window(layer))

    def kept(self, length: int) -> int:
        """Most tokens that a prompt of this length leaves."""
        return int(self._table(length)[length])

    @property
    def target(self) -> int:
        """Tokens that are left of a text without end."""
        return max(self.budget.kept(2**30, self.layer, self.layers), self.sinks + self.recent)

    def __call__(self, block: Block, obs: Obs | None, slots: int, rest: Rest | None) -> Block:
        """block [B K T H] -> the tokens kept, in `slots` slots; rest chooses some of them to stand for the lost."""
        keep = jnp.asarray(self._table(block.pos.shape[2]))[(block.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)]
        return self.choose(block, obs, jnp.minimum(keep, slots), slots, rest)

    def choose(self, block: Block, obs: Obs | None, keep: Array, slots: int, rest: Rest | None) -> Block:
        """The same with so many tokens of each row, keep i32[B]."""
        return evict(
            block, obs, keep, slots, self.scorer, self.sinks, self.recent, self.unit, self.per, rest, self.window
        )

    def _table(self, longest: int):
        return kept_by_length(self.budget, longest, self.layer, self.layers, self.sinks + self.recent)


def unit_of(text: str) -> Unit:
    """A unit from "token", "chunk8" or "page32" and the like; raises KvjaxError for anything else."""
    kind = text.rstrip("0123456789")
    size = text[len(kind) :]
    if text == "token":
        return Token()
    if kind in ("chunk", "page") and size:
        return (Chunk if kind == "chunk" else Page)(int(size))
    raise KvjaxError(f"unit must be 'token', 'chunk' or 'page' with a size, as in 'chunk8' or 'page32', got {text!r}")
