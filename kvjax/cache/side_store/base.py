"""Prompt tokens that a layer holds apart from its slots: by unequal heads, or in a second precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax.cache.protocol import LayerSpec, LayerState
from kvjax.core.attention_mass import Observation
from kvjax.core.types import Array, KVBlock, Partial
from kvjax.errors import IncompatibleMethod

if TYPE_CHECKING:
    from kvjax.cache.bound_layer import MethodLayer
    from kvjax.cache.eviction.budgets import Budget
    from kvjax.cache.method import Method


class SideStore:
    """The `side_store` slot of a method. What it holds is read as one more partial, and merged with that of the slots.

    A store that differs between layers has a method `at(spec)`, which returns that of one layer, None for none there.
    """

    num_queries: int | None = 0  # of a row's last prompt queries, as in `Needs`
    host = False  # whether something of the store lives in host memory
    by_head = False  # whether heads may keep unequal numbers of tokens
    # +1 or -1 where two layers hold their prompts as a pair, as in `Needs`; `open_pair` is then called
    paired_layer: int = 0

    @property
    def after_prompt(self) -> SideStore:
        """The store as decode steps need it, without what says which tokens it takes; the base is all of it."""
        return self

    def bind_budget(self, method: Method, budget: Budget, spec: LayerSpec) -> Method:
        """The method in one layer, where the store divides the budget of its selection; the base changes nothing.

        Args:
          method: a `Method` whose components are those of this layer.
          budget: of the selection before it was bound, for those who need the budgets of all layers.
          spec: the layer.
        """
        return method

    def num_main_slots(self, kept: int) -> int:
        """Of so many tokens that a prompt leaves, those that stay in the slots."""
        raise NotImplementedError

    def num_kept_slots(self, tokens: np.ndarray) -> int:
        """Slots of each head in the mean for the tokens i32[B K] that heads keep; of a store with `by_head`."""
        raise NotImplementedError

    def with_kept_slots(self, slots: int) -> SideStore:
        """The store that has this many slots of each head in the mean; of a store with `by_head`."""
        raise NotImplementedError

    def split(
        self, layer: MethodLayer, block: KVBlock, observation: Observation | None, slots: int
    ) -> tuple[KVBlock, Any]:
        """A prompt's block -> (what goes into the slots, the store of the others)."""
        raise NotImplementedError

    def open_pair(self, layer: MethodLayer, store: Any, cross_layer: Any) -> tuple[Any, Any]:
        """The store of a layer of a pair as `read` takes it in this step, and the value for the layer above."""
        raise NotImplementedError

    def read(self, layer: MethodLayer, state: LayerState, q: Array, q_pos: Array) -> Partial:
        """Queries q [B K G T H] at q_pos i32[B T] over the store `state.side_store`."""
        raise NotImplementedError

    def positions(self, store: Any) -> Array:
        """i32[B 1|K S], of the tokens in the store."""
        raise NotImplementedError

    def visible_block(self, layer: MethodLayer, store: Any) -> KVBlock | None:
        """What queries read of these tokens, keys rotated, in the places of `positions`; None where it is not told."""
        return None

    def empty_bytes(self, store: Any) -> dict[str, int]:
        """Bytes of the store's slots that hold no token, by memory kind; the base tells of none."""
        return {"device": 0, "pinned_host": 0}

    def planned_empty_bytes(self, store: Any, kept: int, prompt: int) -> dict[str, int]:
        """The same of an abstract store, for prompts of `prompt` tokens that keep `kept`, those in slots included."""
        return {"device": 0, "pinned_host": 0}

    def check(self, layer: MethodLayer) -> None:
        """Raises IncompatibleMethod for other slots of the method that this one cannot work with.

        The base: for a policy, which would have to reach what is held apart, and for prompts that come in pieces.
        """
        method = layer.method
        if method.decode is not None:
            raise IncompatibleMethod(
                f"slot `side_store`, {type(self).__name__}, holds prompt tokens for good, and slot `decode`, "
                f"{type(method.decode).__name__}, would have to evict them too; leave one of them out"
            )
        if layer.needs.prompt_chunk:
            raise IncompatibleMethod(
                f"slot `side_store`, {type(self).__name__}, divides a prompt that has been seen whole, and slot "
                f"`read`, {type(method.read).__name__}, takes it in pieces of {layer.needs.prompt_chunk} tokens; leave "
                "one of them out"
            )
