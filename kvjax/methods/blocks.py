"""Blocks: an eviction method chooses while the prompt is read, among the tokens that it kept and the next block."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax import method_api as kv
from kvjax.cache.eviction.selection import count_kept, select_slots
from kvjax.methods.recompress import Recompress, RepeatedSelection


@dataclasses.dataclass(frozen=True)
class ReadInBlocks(Recompress):
    """Reads a text in blocks of `every` tokens, and returns to the budget before each of them."""

    example: ClassVar[str] = "blocks:size=128"

    @property
    def string(self) -> str:
        return f"blocks:size={self.every}"

    @property
    def prompt_chunk(self) -> int:
        return self.every

    def with_selection(self, selection: kv.PromptSelection) -> kv.Policy:
        return SelectionInBlocks(self.every, selection)


class SelectionInBlocks(RepeatedSelection):
    """`ReadInBlocks` over the selection of a layer. It observes the latest queries before the block."""

    @property
    def prompt_chunk(self) -> int:
        return self.every

    def init(
        self, spec: kv.LayerSpec, block: kv.KVBlock, observation: kv.Observation | None, slots: int
    ) -> tuple[kv.Array, kv.Observation | None]:
        if block.pos.shape[2]:
            return super().init(spec, block, observation, slots)
        B, K, _, H = block.k.shape
        none = jnp.zeros((B, 1 if self.selection.select.scope == "layer" else K, 0), jnp.int32)
        num_queries = self.selection.select.scorer.num_queries
        if num_queries == 0:
            return none, None
        W = self.every if num_queries is None else num_queries
        q = jnp.zeros((B, K, spec.num_groups, W, H), block.k.dtype)
        return none, kv.Observation(q, jnp.full((B, W), -1, jnp.int32))

    def before_token(self, storage: kv.KVStorage, state: kv.LayerState, q: kv.Array, q_pos: kv.Array) -> kv.LayerState:
        first = q_pos[:, :1]
        is_over = kv.over_heads.any((state.pos >= 0).sum(2) > self._target(first, state.pos.shape[2]))[:, 0]
        is_due = is_over & (first[:, 0] >= 0) & (first[:, 0] % self.every == 0)
        state = lax.cond(is_due.any(), lambda s: self._select_again(storage, s, is_due, first), lambda s: s, state)
        if state.policy_state is None:
            return state
        ring: kv.Observation = state.policy_state
        W = ring.pos.shape[1]
        # Of a block longer than the ring the last queries stay; two writes to one place would come in any order.
        at = jnp.where((q_pos >= 0) & (q_pos > q_pos.max(1, keepdims=True) - W), q_pos % W, W)
        sequence = jnp.arange(len(at))[:, None]
        new_q = ring.q.at[sequence, :, :, at].set(jnp.moveaxis(q, 3, 1).astype(ring.q.dtype), mode="drop")
        new_pos = ring.pos.at[sequence, at].set(q_pos, mode="drop")
        return dataclasses.replace(state, policy_state=ring._replace(q=new_q, pos=new_pos))


@dataclasses.dataclass(frozen=True)
class ChosenInBlocks(kv.SecondStageScorer):
    """Chooses a prompt's tokens as if it came in blocks of `size` tokens, after the first `budget`."""

    share: ClassVar[float] = 0.0  # the scores of the whole prompt choose no token
    size: kv.PositiveInt

    __post_init__ = kv.check_fields

    def check(self, components: kv.Components) -> None:
        assert components.select is not None
        scorer, store = components.select.scorer, components.side_store
        if scorer.needs_hidden or scorer.replay is not None:
            raise kv.IncompatibleMethod(
                f"component `second_stage`, {self}, scores parts of a prompt, and {type(scorer).__name__} (component "
                "`select`) scores all of its tokens together, by hidden states or a second pass; leave `blocks` out"
            )
        if components.layer_budgets is not None or (store is not None and store.head_budgets is not None):
            raise kv.IncompatibleMethod(
                f"component `second_stage`, {self}, keeps equally many tokens in every head while a prompt is read, "
                "and another component divides the budget when it ends; leave one of them out"
            )

    def with_selection(self, selection: kv.PromptSelection) -> kv.SecondStageScorer:
        return ChoiceInBlocks(self.size, dataclasses.replace(selection, second_stage=None, merge=None))


@dataclasses.dataclass(frozen=True)
class ChoiceInBlocks(ChosenInBlocks):
    """`ChosenInBlocks` over the selection of a layer: 1 for the tokens that stay, 0 for others."""

    selection: kv.PromptSelection

    def scores(
        self, block: kv.KVBlock, own: kv.Array, observation: kv.Observation | None, spec: kv.LayerSpec
    ) -> kv.Array:
        B, K, S, _ = block.k.shape
        select, length = self.selection.select, (block.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
        kept_by_length = select.num_kept_by_length(S)
        num_slots, num_kept = int(kept_by_length.max()), count_kept(select, block, int(kept_by_length.max()))
        # The sums of the observed queries are over all tokens.
        observation = None if observation is None else observation._replace(softmax_lse=None)

        def read_block(i: kv.Array, kept: kv.Array) -> kv.Array:
            new = (num_kept + i * self.size)[:, None] + jnp.arange(self.size, dtype=jnp.int32)[None]
            new = jnp.where(new < length[:, None], new, S)[:, None]
            tokens = jnp.sort(jnp.concatenate([kept, jnp.broadcast_to(new, (B, K, self.size))], 2), -1)
            part = kv.gather_tokens(block, jnp.where(tokens < S, tokens, -1))
            chosen = select_slots(self.selection, part, observation, num_kept, num_slots).slots
            chosen = jnp.broadcast_to(chosen, (B, K, num_slots))
            return jnp.where(chosen >= 0, jnp.take_along_axis(tokens, jnp.maximum(chosen, 0), 2), S)

        first = jnp.arange(num_slots, dtype=jnp.int32)[None]
        kept = jnp.where(first < num_kept[:, None], first, S)[:, None]
        num_blocks = -(-int((np.arange(S + 1) - kept_by_length).max()) // self.size)
        kept = lax.fori_loop(0, num_blocks, read_block, kv.vary(jnp.broadcast_to(kept, (B, K, num_slots))))
        index = jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None], kept
        stays = jnp.zeros((B, K, S), jnp.float32).at[index].set(1.0, mode="drop")
        return jnp.where(block.pos >= 0, stays, -jnp.inf)


@kv.register_method(example="keydiff:budget=512 + blocks:size=128", family="component over a selection")
def blocks(size: kv.PositiveInt = 128, attend: Literal["kept", "all"] = "kept") -> kv.Method:
    """Makes an eviction method's selection again for every block of a text, so that no more than that is ever held.

    Use it as in 'keydiff:budget=512 + blocks:size=128'. The prompt is read in blocks, whose queries attend to the kept
    tokens and their own block: a layer holds budget + size tokens, however long the prompt is, and goes on so while
    decoding. With attend=all the prompt is attended in full, and only the choice is made block by block.

    Formula:
      kept_0 = {}; before block b: kept_b = the best `budget` of kept_(b-1) and block b-1, scored among themselves; a
      query of block b attends to kept_b and to its own block, up to itself

    Differs:
      From the paper, blocks begin at multiples of `size`, so that a text gives the same however it is fed; the last
      block stays whole until the next one begins. A scorer that reads queries gets the last ones before a block, and
      not a model's learned sinks. A budget that is a fraction is one of the text so far. attend=all is kvpress'
      BlockPress, where the first block is the `budget` first tokens, and a scorer that reads queries gets the prompt's
      last ones; kvpress hands later blocks the kept tokens in the order of their scores.

    Args:
      size: tokens of a block (kvpress and KeyDiff: 128).
      attend: what the prompt's queries attend to: "kept", or "all".

    Reference:
      KeyDiff, Park et al. 2025, arXiv 2504.15364, section 4 (block prompt processing); BlockPress of kvpress
    """
    if attend == "all":
        return kv.Method(second_stage=ChosenInBlocks(size))
    return kv.Method(decode=ReadInBlocks(size))
