"""`RingLayer`: a layer with a sliding window that holds as many tokens as its queries can see, and headroom for a step.

A query at position t sees the tokens after t - window. So a layer with a window never reads more than its last `window`
tokens, and new tokens take the slots of those that no query will see again. Token i of a sequence lies in slot i modulo
the number of slots. The method's codecs say what is stored of it, as `codecs.plain.in_window` says; `Full` reads it.

The headroom makes a call exact that brings several tokens: all of them are written, and then each reads its own window.
It also bounds how many tokens can be taken back, as speculative decoding does.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache.bound_layer import MethodLayer
from kvjax.cache.chunked_extend import extend_in_chunks
from kvjax.cache.components import Slots
from kvjax.cache.protocol import LayerState, Needs, StepResult
from kvjax.core import memory
from kvjax.core.attention_mass import Observation
from kvjax.core.mesh import to_numpy
from kvjax.core.types import Array, KVBlock, Partial, gather_tokens, hash_once

HEADROOM_TOKENS = 16
"""Tokens that a ring holds beyond its window: a call takes as many at a time, and as many can be taken back."""


@hash_once
@dataclasses.dataclass(frozen=True)
class RingLayer(MethodLayer):
    """A bound layer with a sliding window, whose slots are a ring.

    Its method consists of codecs that store each token by itself (`in_window`), and a reader of all slots. In a
    cache whose capacity is below `ring_slots` tokens nothing is ever overwritten.
    """

    @property
    def window(self) -> int:
        """The last positions that a query sees, its own included."""
        assert self.spec.rule.window is not None
        return self.spec.rule.window

    @property
    def needs(self) -> Needs:
        """Requests of a `MethodLayer`; relative positions stay below the window at any length."""
        return dataclasses.replace(super().needs, unbounded_length=True)

    @property
    def ring_slots(self) -> int:
        """Slots of the ring: those of the window and of a step."""
        return self.window + HEADROOM_TOKENS

    def num_slots(self, prompt_tokens: int, headroom_tokens: int) -> int:
        """Slots of the ring, for prompts of any length."""
        return self.ring_slots

    @property
    def readable_tokens(self) -> int | None:
        """`ReadableLayer.readable_tokens`: as many as the ring holds beyond its window."""
        most = super().readable_tokens
        return HEADROOM_TOKENS if most is None else most

    def _slots(self, prompt_tokens: int) -> Slots:
        kept = min(prompt_tokens, self.window)
        return Slots(kept, kept)

    def _is_ring(self, num_slots: int) -> bool:
        # A cache of fewer slots has one for each token that it may ever hold.
        return num_slots == self.ring_slots

    def _indices(self, n: Array | None, num_slots: int) -> Array:
        """i32[B S]: the index of the newest of n i32[B] tokens that belongs in each slot; negative for none."""
        assert n is not None
        newest = n[:, None] - 1
        return newest - (newest - jnp.arange(num_slots, dtype=jnp.int32)[None]) % num_slots

    def positions(self, state: LayerState) -> Array:
        """i32[B 1 S], the positions of the last `window` tokens; -1 in other slots."""
        assert state.n is not None
        # The tokens beyond the window are in their slots still, for a rollback, but no later query sees them.
        is_held = self._indices(state.n, state.pos.shape[2]) >= state.n[:, None] - self.window
        return jnp.where(is_held[:, None], state.pos, -1)

    def prefill(self, block: KVBlock, observation: Observation | None, num_slots: int) -> LayerState:
        """Stores the last tokens of a prompt; see `BoundLayer`."""
        assert num_slots <= self.ring_slots  # as the layer itself says how many
        if block.pos.shape[2] <= num_slots:
            return super().prefill(block, observation, num_slots)
        n = (block.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
        kept = gather_tokens(block, jnp.maximum(self._indices(n, num_slots), -1)[:, None])
        return dataclasses.replace(super().prefill(kept, observation, num_slots), n=n)

    def _extend_in_steps(
        self, state: LayerState, q: Array, new: KVBlock, commit: int, cross_layer: Any, outside: Partial | None
    ) -> StepResult:
        extend = super()._extend_in_steps
        # More tokens than the headroom would take the slots of tokens that the first of them still see. A cache that is
        # no ring overwrites none, and takes them in one pass.
        if commit <= HEADROOM_TOKENS or not self._is_ring(state.pos.shape[2]):
            return extend(state, q, new, commit, cross_layer, outside)
        return extend_in_chunks(extend, state, q, new, commit, cross_layer, outside, size=HEADROOM_TOKENS)

    def _append(self, state: LayerState, new: KVBlock) -> LayerState:
        """Writes each token over the one that has been in its slot, which is out of sight."""
        num_slots, count = state.pos.shape[2], new.pos.shape[2]
        if not count or not self._is_ring(num_slots):
            return super()._append(state, new)
        assert state.n is not None
        new = new.clean()
        is_token = new.pos[:, 0] >= 0
        n = state.n + is_token.sum(-1, dtype=jnp.int32)
        # Padding must not take the place of a token in sight. It goes where the next token will, and is empty there.
        index = state.n[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
        slots = jnp.where(is_token, index, n[:, None]) % num_slots

        def write(stored: tuple[Any, Any, Array], token: tuple[KVBlock, Array]) -> tuple[tuple[Any, Any, Array], None]:
            (k, v, pos), (block, slot) = stored, token
            k, v = self.storage.append(k, v, block, slot)
            return (k, v, memory.put(pos, block.pos, slot)), None

        stored = state.k, state.v, state.pos
        if count == 1:
            stored, _ = write(stored, (new, slots))
        else:  # one by one: a codec writes a run of slots, and these may pass the end of the ring
            tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0)[:, :, :, None], new), slots.T[..., None]
            stored, _ = lax.scan(write, stored, tokens)
        k, v, pos = stored
        return dataclasses.replace(state, k=k, v=v, pos=pos, n=n)

    def empty_bytes(self, state: LayerState, dtype: str, prompt: int | None = None) -> dict[str, int]:
        """`SizedLayer.empty_bytes`: of all slots beyond the last `window` tokens."""
        B, _, num_slots = state.pos.shape
        tokens = np.full(B, prompt) if prompt is not None else to_numpy(state.n)
        used = np.minimum(tokens, min(self.window, num_slots))
        return self._empty_slot_bytes(state, used.tolist(), dtype)

    def max_rollback(self, state: LayerState) -> Array:
        """`RewindableLayer.max_rollback`: as long as the token before the first one taken back has its whole window."""
        committed = super().max_rollback(state)
        assert state.n is not None
        index = self._indices(state.n, state.pos.shape[2])
        missing = jnp.where((state.pos[:, 0] < 0) & (index >= 0), index + 1, 0)
        first = jnp.maximum(missing.max(1), state.n - state.pos.shape[2])  # all tokens from this one on are there
        most = jnp.where(first > 0, jnp.maximum(state.n - self.window + 1 - first, 0), state.n)
        return jnp.minimum(committed, most)

    def crop(self, state: LayerState, count: Array) -> LayerState:
        """`RewindableLayer.crop`."""
        assert state.n is not None
        n = state.n - count
        is_left = self._indices(state.n, state.pos.shape[2]) < n[:, None]
        pos = jnp.where(is_left[:, None], state.pos, -1)
        return dataclasses.replace(state, pos=pos, n=n)

    def decoded_block(self, state: LayerState) -> KVBlock:
        """`EditableLayer.decoded_block`: in the order of the tokens."""
        block = super().decoded_block(state)
        order = jnp.argsort(jnp.where(block.pos < 0, jnp.iinfo(jnp.int32).max, block.pos), 2)
        return gather_tokens(block, order)
