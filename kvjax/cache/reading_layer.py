"""`ReadingLayer`: a layer of a model that has no keys and values of its own, and reads those of an earlier layer.

Such layers share one cache (YOCO, arXiv 2405.05254; cross-layer attention, arXiv 2405.12981; the upper layers of
Gemma 3n). A method acts in the layer that is read: it makes its state of that layer's prompt, by that layer's queries.
The queries of a reading layer attend to the prompt exactly, and to the state as it is after the step, in which the new
tokens are stored and those that leave have left. They change nothing in it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from kvjax.cache.protocol import Needs, ReadableLayer
from kvjax.core.attention_mass import Observation
from kvjax.core.memory import array_bytes
from kvjax.core.step_bytes import StepBytes
from kvjax.core.types import Array, KVBlock, Partial, pytree


@pytree
class ReadingState:
    """The state of a reading layer: no token, in no bytes."""

    pos: Array  # i32[B 1 0]


@dataclasses.dataclass(frozen=True)
class ReadingLayer:
    """A bound layer without a state.

    Attributes:
      source: the layer whose state is read, bound for the query heads of this one.
    """

    source: ReadableLayer

    @property
    def needs(self) -> Needs:
        """Requests that concern this layer's own queries, which nothing observes."""
        needs = self.source.needs
        return Needs(prompt_pattern=needs.prompt_pattern, unbounded_length=needs.unbounded_length)

    @property
    def after_prompt(self) -> ReadingLayer:
        """The layer for decode steps."""
        return ReadingLayer(getattr(self.source, "after_prompt", self.source))

    def num_slots(self, prompt_tokens: int, headroom_tokens: int) -> int:
        """Slots that a step of this layer reads, those of its source; the layer has none."""
        return self.source.num_slots(prompt_tokens, headroom_tokens)

    def prefill(self, block: KVBlock, observation: Observation | None, num_slots: int) -> ReadingState:
        """Keeps nothing of a prompt."""
        return ReadingState(block.pos[:, :, :0])

    def extend(
        self, state: ReadingState, q: Array, new: KVBlock, commit: int, cross_layer: Any, outside: Partial | None = None
    ) -> Any:
        """Is never called: the engine calls `read` with the state of the source."""
        raise AssertionError("a layer that reads another layer's cache is not extended")

    def read(self, source: Any, q: Array, q_pos: Array, outside: Partial | None = None) -> Array:
        """Attends new tokens to the state of the source after the step; see `ReadableLayer.read_state`."""
        return self.source.read_state(source, q, q_pos, outside)

    def positions(self, state: ReadingState) -> Array:
        """i32[B 1 0]."""
        return state.pos

    def read_bytes(self, source: Any) -> StepBytes:
        """Bytes that a step reads of the source's state, which each layer that reads it counts."""
        return self.source.read_bytes(source)

    def empty_bytes(self, state: ReadingState, dtype: str, prompt: int | None = None) -> dict[str, int]:
        """`SizedLayer.empty_bytes`: none."""
        return array_bytes(())

    def max_rollback(self, state: ReadingState) -> Array:
        """`RewindableLayer.max_rollback`: the source decides."""
        return jnp.full(state.pos.shape[0], jnp.iinfo(jnp.int32).max, jnp.int32)

    def crop(self, state: ReadingState, count: Array) -> ReadingState:
        """`RewindableLayer.crop`."""
        return state
