"""Recompression while decoding: after every few tokens, a layer selects again and returns to its budget."""

from __future__ import annotations

import bisect
import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax

from kvjax import method_api as kv
from kvjax.cache.eviction.selection import select_slots
from kvjax.cache.protocol import last_positions


@dataclasses.dataclass(frozen=True)
class Recompress(kv.Policy):
    """Makes the selection again, by the latest queries, whenever a head has `every` tokens more than its budget.

    The scorer observes as many of the latest queries as it asks for. If it asks for all, it observes the last `every`,
    those since the last selection (`h2o` accumulates over all queries instead).
    """

    example: ClassVar[str] = "recompress:every=128"
    every: kv.PositiveInt

    __post_init__ = kv.check_fields

    @property
    def string(self) -> str:
        return f"recompress:every={self.every}"

    def check(self, components: kv.Components) -> None:
        select = components.select
        if select is None:
            raise kv.IncompatibleMethod(
                f"{self.string} makes an eviction method's selection again and finds none; compose it "
                f"with one, as in 'snapkv:budget=256 + {self.example}'"
            )
        if select.max_kept() is None and not select.budget.is_fraction:
            raise kv.IncompatibleMethod(
                f"{select.budget} grows with the text; give a budget in tokens, or a fraction such as 25%"
            )
        scorer = select.scorer
        if scorer.needs_hidden or scorer.needs_output or scorer.replay is not None:
            raise kv.IncompatibleMethod(
                f"component `decode`, {self}, makes the selection again while decoding, when there are no hidden "
                f"states, no output projection and no second pass for {type(scorer).__name__} (component `select`); "
                "leave it out, or take a scorer of keys, values and queries, as in 'snapkv:budget=256 + "
                f"{self.example}'"
            )
        if components.merge is not None or components.layer_budgets is not None:
            raise kv.IncompatibleMethod(
                f"component `decode`, {self}, cannot work with components `merge` and `layer_budgets`: lost tokens are "
                "folded into others, and a budget is divided among layers, when the prompt ends and not while "
                "decoding; leave one of them out"
            )
        if components.second_stage is not None:
            raise kv.IncompatibleMethod(
                f"component `second_stage`, {components.second_stage}, looks at the layer when the prompt ends, and "
                f"component `decode`, {self}, makes the selection again while decoding; leave one of them out"
            )

    def with_selection(self, selection: kv.PromptSelection) -> kv.Policy:
        return RepeatedSelection(self.every, selection)

    def is_constant(self, components: kv.Components) -> bool:
        return components.select is None or components.select.max_kept() is not None


@dataclasses.dataclass(frozen=True)
class RepeatedSelection(kv.Policy):
    """`Recompress` over the selection of a layer.

    A budget that is a fraction is one of all tokens of the text so far.

    Args:
      every: as in `Recompress`.
      selection: that is made again.
    """

    every: int
    selection: kv.PromptSelection

    def num_slots(self) -> int:
        budget = self.selection.select.max_kept()
        assert budget is not None  # else the slots are those of a text
        # One slot stays empty, for the padding of a sequence that waits while others of the batch get a token.
        return budget + self.every + 1

    def num_slots_of_text(self, text_tokens: int) -> int:
        select = self.selection.select
        return self.num_slots() if select.max_kept() is not None else select.num_kept(text_tokens) + self.every + 1

    def num_kept(self, prompt: int) -> int:
        return prompt if self.selection.select.max_kept() is None else super().num_kept(prompt)

    def _target(self, num_tokens: kv.Array, slots: int) -> kv.Array | int:
        """Tokens that heads keep of texts of i32[B 1] tokens, in a state of so many slots."""
        select = self.selection.select
        if (budget := select.max_kept()) is not None:
            return budget
        # No text of this state has more tokens than the first that would fill all slots.
        longest = bisect.bisect_left(range(2**31 - 1), slots, key=select.budget.num_kept)
        return jnp.asarray(select.num_kept_by_length(longest))[jnp.minimum(num_tokens, longest)]

    def init(
        self, spec: kv.LayerSpec, block: kv.KVBlock, observation: kv.Observation | None, slots: int
    ) -> tuple[kv.Array, kv.Observation | None]:
        place = jnp.arange(min(slots, block.pos.shape[2]), dtype=jnp.int32)[None, None]
        length = (block.pos >= 0).sum(2, keepdims=True, dtype=jnp.int32)
        if observation is not None:
            num_queries = self.selection.select.scorer.num_queries
            observation = latest_queries(observation, self.every if num_queries is None else num_queries)
            # Each query goes to its position modulo W, so that a new one overwrites the oldest. Positions are
            # consecutive, so a rotation is enough.
            W = observation.pos.shape[1]
            shift = (observation.pos[:, -1:] + 1) % W
            at = (jnp.arange(W, dtype=jnp.int32)[None] - shift) % W
            q = jnp.take_along_axis(observation.q, at[:, None, None, :, None], 3)
            # A state's arrays have one entry for each sequence, where the layer's sinks have one for all.
            sinks = observation.sinks
            sinks = None if sinks is None else jnp.broadcast_to(sinks, (len(q), *sinks.shape[1:]))
            observation = kv.Observation(q, jnp.take_along_axis(observation.pos, at, 1), sinks=sinks)
        return jnp.where(place < length, place, -1), observation

    def before_token(self, storage: kv.KVStorage, state: kv.LayerState, q: kv.Array, q_pos: kv.Array) -> kv.LayerState:
        if state.policy_state is not None:
            ring: kv.Observation = state.policy_state
            B, K, G, W, H = ring.q.shape
            at = jnp.where(q_pos >= 0, q_pos % W, W)  # sequences without a token in this step add no query
            new_q = kv.memory.put(ring.q.reshape(B, K * G, W, H), q.reshape(B, K * G, 1, H), at).reshape(ring.q.shape)
            new_pos = kv.memory.put(ring.pos[:, None], q_pos[:, None], at)[:, 0]
            state = dataclasses.replace(state, policy_state=ring._replace(q=new_q, pos=new_pos))
        target = self._target(q_pos + 1, state.pos.shape[2])
        is_full = ~kv.over_heads.any((state.pos >= 0).sum(2) < target + self.every)[:, 0]
        # A sequence without a token in this step waits, because its own next query has to be observed first.
        is_due = is_full & (q_pos[:, 0] >= 0)
        return lax.cond(is_due.any(), lambda s: self._select_again(storage, s, is_due, q_pos), lambda s: s, state)

    def after_token(
        self, spec: kv.LayerSpec, state: kv.LayerState, weights: kv.Array | None, q_pos: kv.Array
    ) -> tuple[kv.Array, kv.Observation | None]:
        return state.pos, state.policy_state

    def read_bytes(self, storage: kv.KVStorage, state: kv.LayerState) -> kv.StepBytes:
        return kv.StepBytes()  # a new selection is made once in `every` steps; in the others a query is written

    def _select_again(
        self, storage: kv.KVStorage, state: kv.LayerState, is_due: kv.Array, q_pos: kv.Array
    ) -> kv.LayerState:
        """Evicts the tokens that a new selection leaves out, in the sequences that are due, bool[B]."""
        S = state.pos.shape[2]
        # The selection expects a prompt: tokens in the order of their positions, empty slots last.
        order = jnp.argsort(jnp.where(state.pos < 0, jnp.iinfo(jnp.int32).max, state.pos), axis=2).astype(jnp.int32)
        block = kv.gather_tokens(storage.decode(state.k, state.v, state.pos), order)
        target = jnp.broadcast_to(self._target(jnp.maximum(q_pos, 0), S), q_pos.shape)[:, 0]
        num_kept = jnp.where(is_due, target, (state.pos >= 0).sum(2, dtype=jnp.int32)[:, 0])
        chosen = select_slots(self.selection, block, state.policy_state, num_kept, S).slots
        slot = jnp.take_along_axis(jnp.broadcast_to(order, chosen.shape), jnp.maximum(chosen, 0), 2)
        slot = jnp.where(chosen >= 0, slot, S)
        B, K, _ = slot.shape
        index = jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None], slot
        stays = jnp.zeros(slot.shape, bool).at[index].set(True, mode="drop")
        return dataclasses.replace(state, pos=jnp.where(stays, state.pos, -1))


def latest_queries(observation: kv.Observation, count: int) -> kv.Observation:
    """Returns each sequence's last `count` queries, in the order of their positions, -1 before the first."""
    pos = last_positions(observation.pos.max(1) + 1, count)
    at = (observation.pos[:, None] == pos[:, :, None]).argmax(2).astype(jnp.int32)
    q = jnp.take_along_axis(observation.q, at[:, None, None, :, None], 3)
    return kv.Observation(q, pos, sinks=observation.sinks)


@kv.register_method(example="snapkv:budget=512 + recompress:every=32", family="component over a selection")
def recompress(every: int = 128) -> kv.Method:
    """Returns an eviction method to its budget whenever `every` tokens have been decoded, in constant memory.

    Use it as in 'snapkv:budget=256 + kvcrush + recompress:every=128'. The scorer observes the latest queries. A budget
    that is a fraction, 'snapkv:budget=25% + recompress:every=384', is one of the whole text and grows with it.

    Formula:
      whenever budget + every tokens are cached, the selection is made again by the latest queries

    Differs:
      kvpress compresses after a step's attention, here before the next token comes in, whose query is observed too;
      kvpress also counts steps below its target, and rotates every buffered query to the newest position. A cache that
      begins empty (`kvjax.functional.empty`) selects without a model's learned sinks. Under a fraction f `every` counts
      tokens above the target, where kvpress' `CompressionRatioDecodingPress` counts steps: every = (1 - f) interval.

    Args:
      every: decoded tokens between compressions (kvpress: 512).

    Reference:
      periodic compression while decoding, as kvpress' DecodingPress does it
    """
    return kv.Method(decode=Recompress(every))
