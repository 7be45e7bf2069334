"""Shared prefixes: a prefix that several sequences continue is stored and read once (Hydragen).

The queries of all sequences read one copy of the prefix together, each sequence's own tokens are read as ever, and both
partials are merged by their log-sum-exp, which is exact (Juravsky et al. 2024, arXiv 2402.05099, section 3). A prefix
may itself continue a shared prefix, so levels nest.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.protocol import (
    EditableLayer,
    KVMethod,
    LayerSpec,
    Needs,
    ShareableLayer,
    SizedLayer,
    StepResult,
    Traits,
)
from kvjax.cache.readers.query_blocks import map_query_blocks
from kvjax.cache.sequences import concat_sequences, missing_ability, take_sequences
from kvjax.cache.uses import AFTER_SHARED_PREFIX, SHARED_BY_SEQUENCES, Use
from kvjax.core import memory
from kvjax.core.attention import MASKED_LOGIT, attend_dense, combine, log_sum_exp, merge
from kvjax.core.attention_mass import Observation
from kvjax.core.memory import array_bytes
from kvjax.core.mesh import to_numpy
from kvjax.core.types import Array, KVBlock, Partial, pytree
from kvjax.errors import IncompatibleMethod, KvjaxError


@pytree
class SharedPrefixState:
    """The state of one layer: P prefixes, and the own tokens of B sequences that continue them."""

    prefix: Any  # state of the P prefixes
    own: Any  # state of the B sequences, as of texts that begin where the prefix ends
    before: Array  # i32[B], tokens of each sequence's prefix
    members: Array | None  # i32[P M], the sequences that have each prefix, -1 unused; None: all have the only one


@dataclasses.dataclass(frozen=True)
class SharedPrefixLayer:
    """Two bound layers as one: `prefix` holds the shared tokens and is never written to, `own` those of each sequence.

    To `own`, a sequence is a text that begins at position 0. Rotations depend on relative positions only, so the
    products of its queries and keys are the same. The attention weights that its policy gets, and those that
    `attention_mass` sums for its scorers, are those of the softmax over the prefix and the own tokens, as in the papers
    of these methods. A scorer that makes a softmax of its own (`turned_queries`, `scissorhands` in the prompt) makes it
    over the own tokens.
    """

    prefix: ShareableLayer
    own: ShareableLayer

    @property
    def spec(self) -> LayerSpec:
        """The layer of the model."""
        return self.own.spec

    @property
    def needs(self) -> Needs:
        """The requests of the sequences' own method to the decoder."""
        return self.own.needs

    @property
    def parts(self) -> tuple[ShareableLayer, ShareableLayer]:
        """The layers whose states come first in its own state, in this order."""
        return self.prefix, self.own

    def num_slots(self, prompt_tokens: int, headroom_tokens: int) -> int:
        """Slots for a sequence's own tokens."""
        return self.own.num_slots(prompt_tokens, headroom_tokens)

    def prefill(self, block: KVBlock, observation: Observation | None, num_slots: int) -> Any:
        """Raises KvjaxError: prompts come after a prefix, see `prefill_after_prefix`."""
        raise KvjaxError("a shared prefix is read first: kvjax.read(model, prefix, ..).extend_prefix(documents)")

    def prefill_after_prefix(
        self,
        prefix: Any,
        before: Array,
        members: Array | None,
        q: Array,
        block: KVBlock,
        observation: Observation | None,
        outside: Partial | None = None,
        *,
        num_slots: int,
    ) -> tuple[Array, SharedPrefixState]:
        """Attends prompts to themselves and to their prefixes, and compresses the prompts.

        Args:
          prefix: state of the prefixes.
          before: i32[B], tokens of each prompt's prefix.
          members: i32[P M], as in `SharedPrefixState`.
          q: queries [B K G T H] of the prompts.
          block: their keys and values [B K T H], at positions that begin at 0.
          observation: as in `BoundLayer.prefill`.
          outside: as in `BoundLayer.extend`.
          num_slots: of the own state.

        Returns:
          Attention output f32[B K G T H], and the state.
        """
        # Own positions begin at 0, and only the queries to the prefix are moved behind it: see the class.
        q_pos = block.pos[:, 0]
        part = self._attend_prefix(prefix, members, q, shift_positions(q_pos, before))
        # A block of queries at a time: the logits of a whole prompt would be a T x T array.
        own_part = map_query_blocks(lambda q, pos: attend_dense(q, block, pos, self.spec.rule), q, q_pos, 128)
        part = combine(part, own_part)
        part = part if outside is None else combine(part, outside)
        if observation is not None:
            # The observed queries are some of the prompt's, and a position is its index.
            at = jnp.maximum(observation.pos, 0)[:, None, None]
            lse = jnp.take_along_axis(log_sum_exp(part.m, part.l), at, 3)
            observation = observation._replace(softmax_lse=lse)
        own = self.own.prefill(block, observation, num_slots)
        return merge([part]), SharedPrefixState(prefix, own, before, members)

    def extend(
        self,
        state: SharedPrefixState,
        q: Array,
        new: KVBlock,
        commit: int,
        cross_layer: Any,
        outside: Partial | None = None,
    ) -> StepResult:
        """`BoundLayer.extend`; new tokens become the sequences' own. A prefix of this prefix is `outside`."""
        # Named, so that a profile tells the prefix, read once for all sequences, from the own tokens.
        with jax.named_scope("shared"):
            part = self._attend_prefix(state.prefix, state.members, q, new.pos[:, 0])
        part = part if outside is None else combine(outside, part)
        new = dataclasses.replace(new, pos=shift_positions(new.pos, -state.before))
        out, own, cross_layer = self.own.extend(state.own, q, new, commit, cross_layer, part)
        return StepResult(out, dataclasses.replace(state, own=own), cross_layer)

    def partial(self, state: SharedPrefixState, q: Array, q_pos: Array) -> Partial:
        """`ShareableLayer.partial`, of a prefix that continues a prefix."""
        part = self._attend_prefix(state.prefix, state.members, q, q_pos)
        return combine(part, self.own.partial(state.own, q, shift_positions(q_pos, -state.before)))

    def _attend_prefix(self, prefix: Any, members: Array | None, q: Array, q_pos: Array) -> Partial:
        """Attends queries [B K G T H] at i32[B T] to their sequences' prefixes, and reads each prefix once."""
        B, K, G, T, H = q.shape
        if members is None:
            grouped_q, grouped_pos = q[None], q_pos[None]
        else:
            index = jnp.maximum(members, 0)
            grouped_q, grouped_pos = q[index], jnp.where(members[..., None] >= 0, q_pos[index], -1)
        P, M = grouped_q.shape[:2]
        # A prefix takes the queries of its M sequences as M*T queries of one.
        prefix_q = jnp.moveaxis(grouped_q, 1, 3).reshape(P, K, G, M * T, H)
        part = self.prefix.partial(prefix, prefix_q, grouped_pos.reshape(P, M * T))

        def scatter(x: Array, fill: float) -> Array:
            """[P K G M*T ..] -> [B K G T ..], `fill` where a sequence has no prefix."""
            x = jnp.moveaxis(x.reshape(P, *x.shape[1:3], M, T, *x.shape[4:]), 3, 1)  # [P M K G T ..]
            if members is None:
                return x[0]
            # Out of range, unused places are dropped; a negative index would count from the end.
            sequence = jnp.where(members >= 0, members, B)
            return jnp.full((B, *x.shape[2:]), fill, x.dtype).at[sequence].set(x, mode="drop")

        return Partial(*(scatter(x, fill) for x, fill in zip(part, (0.0, MASKED_LOGIT, 0.0), strict=True)))

    def positions(self, state: SharedPrefixState) -> Array:
        """i32[B 1|K S]: those of the prefix, then those of the sequence's own tokens."""
        own = shift_positions(self.own.positions(state.own), state.before)
        shared = self.prefix.positions(state.prefix)
        which = prefix_by_sequence(state.members, own.shape[0])
        shared = jnp.where(which[:, None, None] >= 0, shared[which], -1)
        heads = max(shared.shape[1], own.shape[1])
        return jnp.concatenate([jnp.broadcast_to(x, (x.shape[0], heads, x.shape[2])) for x in (shared, own)], 2)

    def empty_bytes(self, state: SharedPrefixState, dtype: str, prompt: int | None = None) -> dict[str, int]:
        """`SizedLayer.empty_bytes`: of the prefixes, and of the sequences' own slots."""
        total = array_bytes(())
        for layer, part in ((self.prefix, state.prefix), (self.own, state.own)):
            if isinstance(layer, SizedLayer):
                empty = layer.empty_bytes(part, dtype)
                total = {kind: size + empty[kind] for kind, size in total.items()}
        return total

    def take_sequences(self, state: SharedPrefixState, which: Array | np.ndarray) -> SharedPrefixState:
        """`BatchedLayer.take_sequences`; the prefixes stay, stored once."""
        members = state.members
        if members is not None:
            prefix = prefix_by_sequence(members, len(state.before))
            members = sequences_by_prefix(to_numpy(prefix[which]), members.shape[0])
        before = take_sequences(None, state.before, which)
        return SharedPrefixState(state.prefix, take_sequences(self.own, state.own, which), before, members)

    def concat_sequences(self, states: list[SharedPrefixState]) -> SharedPrefixState:
        """`BatchedLayer.concat_sequences`, of sequences that share one prefix; raises ValueError for others."""

        def is_equal(x: Array, y: Array) -> bool:
            # Forks of one context have the very arrays in common; otherwise elements decide, wherever they lie.
            return x is y or bool(to_numpy(jnp.array_equal(*(jax.device_put(a, memory.DEVICE) for a in (x, y)))))

        first, *others = [jax.tree.leaves(state.prefix) for state in states]
        if not all(len(first) == len(other) and all(map(is_equal, first, other)) for other in others):
            raise ValueError("shared prefixes that are not the same one")
        if any(state.members is not None for state in states):
            raise ValueError("several shared prefixes")
        before = concat_sequences(None, [state.before for state in states])
        own = concat_sequences(self.own, [state.own for state in states])
        return SharedPrefixState(states[0].prefix, own, before, None)

    def max_rollback(self, state: SharedPrefixState) -> Array:
        """`RewindableLayer.max_rollback`, of the sequences' own tokens."""
        return self._editable.max_rollback(state.own)

    def crop(self, state: SharedPrefixState, count: Array) -> SharedPrefixState:
        """`RewindableLayer.crop`, of the sequences' own tokens."""
        return dataclasses.replace(state, own=self._editable.crop(state.own, count))

    def decoded_block(self, state: SharedPrefixState) -> KVBlock:
        """`EditableLayer.decoded_block`, of the sequences' own tokens."""
        return self._editable.decoded_block(state.own)

    def append_block(self, state: SharedPrefixState, block: KVBlock) -> SharedPrefixState:
        """`EditableLayer.append_block`."""
        return dataclasses.replace(state, own=self._editable.append_block(state.own, block))

    def check_use(self, use: Use) -> None:
        """`ShareableLayer.check_use`: the sequences' own method decides."""
        self.own.check_use(use)

    @property
    def _editable(self) -> EditableLayer:
        if not isinstance(self.own, EditableLayer):
            raise missing_ability(self.own, "give back tokens")
        return self.own


@dataclasses.dataclass(frozen=True)
class SharedPrefixMethod:
    """The method of sequences that share a prefix.

    Args:
      prefix: the method under which the prefix was read.
      own: the method for the sequences' own tokens.
    """

    prefix: KVMethod
    own: KVMethod

    @property
    def traits(self) -> Traits:
        """The facts that hold for both methods, or for either."""
        a, b = self.prefix.traits, self.own.traits
        return Traits(
            evicts=a.evicts or b.evicts,
            exact=a.exact and b.exact,
            constant=b.constant,
            host=a.host or b.host,
            after_prompt=a.after_prompt or b.after_prompt,
        )

    def bind(self, spec: LayerSpec) -> SharedPrefixLayer:
        """Binds both methods; raises IncompatibleMethod where one of them cannot share or follow a prefix."""
        if spec.recurrent_layers:
            raise IncompatibleMethod(
                f"layer {spec.recurrent_layers[0]} of this model holds a recurrent state, a sum over the tokens of a "
                "prefix, which documents cannot read as they read its keys and values; fork the context of the prefix "
                "and feed each document (kvjax.Context.fork, kvjax.Context.feed)"
            )
        prefix, own = self.prefix.bind(spec), self.own.bind(spec)
        if not isinstance(prefix, ShareableLayer) or not isinstance(own, ShareableLayer):
            name = type(own if isinstance(prefix, ShareableLayer) else prefix).__name__
            raise IncompatibleMethod(f"{name} cannot be read together with other tokens; use a kvjax.Method")
        prefix.check_use(SHARED_BY_SEQUENCES)
        own.check_use(AFTER_SHARED_PREFIX)
        return SharedPrefixLayer(prefix, own)


def shift_positions(pos: Array, by: Array) -> Array:
    """Adds by i32[B] to positions i32[B ...], and leaves -1 as it is."""
    return jnp.where(pos >= 0, pos + by.reshape(-1, *[1] * (pos.ndim - 1)), -1)


def sequences_by_prefix(prefix: np.ndarray, count: int) -> Array:
    """Turns the prefix of each sequence, i32[B], -1 for none, into the sequences of each of `count` prefixes.

    Returns:
      i32[P M], -1 unused.
    """
    sequences = [np.flatnonzero(prefix == p) for p in range(count)]
    table = np.full((count, max(1, *map(len, sequences))), -1, np.int32)
    for p, found in enumerate(sequences):
        table[p, : len(found)] = found
    return jnp.asarray(table)


def prefix_by_sequence(members: Array | None, num_sequences: int) -> Array:
    """The inverse of `sequences_by_prefix`: i32[B], -1 for none."""
    if members is None:
        return jnp.zeros(num_sequences, jnp.int32)
    which = jnp.broadcast_to(jnp.arange(members.shape[0], dtype=jnp.int32)[:, None], members.shape)
    sequence = jnp.where(members >= 0, members, num_sequences)
    return jnp.full(num_sequences, -1, jnp.int32).at[sequence].set(which, mode="drop")
