"""The component `side_store`: prompt tokens that a layer stores outside the slots of its cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax.cache.accounting import array_bytes
from kvjax.cache.protocol import LayerSpec, LayerState
from kvjax.core.attention_mass import Observation
from kvjax.core.types import Array, KVBlock, Partial
from kvjax.errors import IncompatibleMethod

if TYPE_CHECKING:
    from kvjax.cache.bound_layer import MethodLayer
    from kvjax.cache.eviction.budgets import Budget
    from kvjax.cache.method import Method


class SideStore:
    """Stores a part of the prompt's tokens apart from the slots: in another precision, in pages, or on the host.

    Attention over the store is one more `Partial`, which the layer merges with attention over the slots. A store that
    differs between layers has a method `at(spec)`, which returns the store of one layer, or None for a layer without.
    """

    num_queries: int | None = 0  # last prompt queries of each sequence that `split` observes, as in `Needs`
    uses_host_memory = False
    has_unequal_heads = False  # whether heads can keep different numbers of tokens
    # +1 or -1 in a layer that shares its store with the next or the previous layer; `open_pair` is then called
    paired_layer: int = 0

    @property
    def after_prompt(self) -> SideStore:
        """The store as decode steps need it: equal stores share a compiled program, whatever filled them."""
        return self

    def bind_budget(self, method: Method, budget: Budget, spec: LayerSpec) -> Method:
        """Returns the method of one layer, with the budget of its selection divided as the store says.

        `method` is bound to the layer already; `budget` is that of its selection before, with all layers' numbers.
        """
        return method

    def num_main_slots(self, kept: int) -> int:
        """The number of `kept` prompt tokens that stay in the main slots."""
        raise NotImplementedError(f"{type(self).__name__} has no method `num_main_slots`")

    def num_kept_slots(self, tokens: np.ndarray) -> int:
        """Mean slots per head for heads that keep i32[B K] tokens; of a store that `has_unequal_heads`."""
        raise NotImplementedError(f"{type(self).__name__} has no method `num_kept_slots`")

    def with_kept_slots(self, slots: int) -> SideStore:
        """Returns the store with this many slots per head on average; of a store that `has_unequal_heads`."""
        raise NotImplementedError(f"{type(self).__name__} has no method `with_kept_slots`")

    def split(
        self, layer: MethodLayer, block: KVBlock, observation: Observation | None, slots: int
    ) -> tuple[KVBlock, Any]:
        """Divides a prompt [B K T H] between `slots` main slots and the store.

        Returns:
          The tokens of the main slots, and the stored form of the rest: any pytree.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method `split`")

    def open_pair(self, layer: MethodLayer, store: Any, cross_layer: Any) -> tuple[Any, Any]:
        """Returns the store of a paired layer as `read` takes it in this step, and the value for the layer above."""
        raise NotImplementedError(f"{type(self).__name__} has no method `open_pair`")

    def read(self, layer: MethodLayer, state: LayerState, q: Array, q_pos: Array) -> Partial:
        """Attends queries q [B K G T H] at q_pos i32[B T] to the tokens of `state.side_store`."""
        raise NotImplementedError(f"{type(self).__name__} has no method `read`")

    def positions(self, store: Any) -> Array:
        """i32[B 1|K S]: positions of the stored tokens, -1 in empty places."""
        raise NotImplementedError(f"{type(self).__name__} has no method `positions`")

    def visible_block(self, layer: MethodLayer, store: Any) -> KVBlock | None:
        """Keys (rotated) and values as queries read them, in the places of `positions`; None if it cannot say."""
        return None

    def empty_bytes(self, store: Any) -> dict[str, int]:
        """Bytes of the places that hold no token, by memory kind."""
        return array_bytes(())

    def planned_empty_bytes(self, store: Any, kept: int, prompt: int) -> dict[str, int]:
        """`empty_bytes` of an abstract store, for prompts of `prompt` tokens that leave `kept`, slots included."""
        return array_bytes(())

    def check(self, layer: MethodLayer) -> None:
        """Raises IncompatibleMethod for other components of the method that the store cannot work with.

        The base refuses a decode policy, which would have to evict stored tokens, and prompts that come in chunks.
        """
        method = layer.method
        if method.decode is not None:
            raise IncompatibleMethod(
                f"component `side_store`, {type(self).__name__}, holds prompt tokens for good, and component `decode`, "
                f"{type(method.decode).__name__}, would have to evict them too; leave one of them out"
            )
        if layer.needs.prompt_chunk:
            raise IncompatibleMethod(
                f"component `side_store`, {type(self).__name__}, divides a prompt that has been seen whole, and "
                f"component `read`, {type(method.read).__name__}, takes it in chunks of {layer.needs.prompt_chunk} "
                "tokens; leave one of them out"
            )
