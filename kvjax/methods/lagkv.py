"""LagKV: keeps the tokens that vary most relative to the tokens after them."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax

from kvjax import method_api as kv
from kvjax.cache.eviction.budgets import PromptFraction, parse_budget
from kvjax.cache.eviction.granularity import group_into_units

MIN_SPAN = 1e-6  # a channel with less between its extremes in a partition counts as constant


@dataclasses.dataclass(frozen=True)
class LagKV(kv.Scorer):
    """Scores a token by its variation within the range of the next partition (arXiv 2504.04704).

    After its `sinks` a sequence is cut into partitions of `lag` tokens. Each channel of a token's key is normalized to
    the range of that channel in the next partition; the standard deviation over the channels, as a softmax over the
    token's own partition, is the key's score. Values are scored alike, and the mean of both counts. Tokens without a
    whole partition after theirs have no score: they outrank all others, the later the higher, and the sinks outrank
    these. A channel that is constant in the next partition counts 0 for every token. The fields are arguments of
    `lagkv`.
    """

    lag: kv.PositiveInt = 128
    sinks: int = 4
    cross: bool = False

    __post_init__ = kv.check_fields

    def scores(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> kv.Scores:
        real = block.clean()
        keys, values = (group_into_units(x, self.sinks, self.lag, 2) for x in (real.k, real.v))
        scored = _score_partitions(keys, values)
        if not self.cross:
            scored = _rank_tokens(scored).astype(jnp.float32) / self.lag
        B, K, S = block.k.shape[:3]
        scored = jnp.pad(scored.reshape(B, K, -1), [(0, 0), (0, 0), (self.sinks, S)])[:, :, :S]
        slot = jnp.arange(S, dtype=jnp.int32)[None, None]
        length = (block.pos >= 0).sum(2, keepdims=True, dtype=jnp.int32)
        recency = slot.astype(jnp.float32) / jnp.maximum(length, 1).astype(jnp.float32)
        unscored = jnp.where(slot < self.sinks, 2.0, 1.0 + recency)
        end_of_next = self.sinks + ((slot - self.sinks) // self.lag + 2) * self.lag
        return kv.token_scores(jnp.where((slot >= self.sinks) & (end_of_next <= length), scored, unscored), block)


@dataclasses.dataclass(frozen=True)
class CutPartitions(kv.Policy):
    """Keeps the best tokens of a partition, `ratio` of them, as soon as the next one is full.

    A partition is cut once, by its own tokens and the next partition's, which are all still there. Its token count
    alone decides when, so a text gives the same however it is fed. The fields are arguments of `lagkv`.
    """

    ratio: float
    lag: kv.PositiveInt
    sinks: kv.NonNegativeInt

    __post_init__ = kv.check_fields

    @property
    def num_evicted(self) -> int:
        """Tokens of a partition that leave."""
        return self.lag - int(self.ratio * self.lag)

    def num_cut(self, tokens: int) -> int:
        """Partitions of a text of so many tokens that are cut."""
        return max((tokens - self.sinks) // self.lag - 1, 0)

    def num_slots(self) -> int:
        raise kv.KvjaxError("the slots of `lagkv:while_decoding=true` grow with the text")

    def num_slots_of_text(self, text_tokens: int) -> int:
        # The most tokens are held at the end, or before the last cut, which the token after a full partition brings.
        # One slot stays empty, for the padding of a sequence that waits while others of the batch get a token.
        num_cut = self.num_cut(text_tokens)
        before_cut = self.sinks + (num_cut + 1) * self.lag - (num_cut - 1) * self.num_evicted
        return max(self.num_kept(text_tokens), before_cut if num_cut else 0) + 1

    def num_kept(self, prompt: int) -> int:
        return prompt - self.num_cut(prompt) * self.num_evicted

    def is_constant(self, components: kv.Components) -> bool:
        return False

    def check(self, components: kv.Components) -> None:
        if components.select is not None:
            raise kv.IncompatibleMethod(
                "component `decode` of `lagkv:while_decoding=true` takes tokens out of whole partitions, and component "
                f"`select`, {type(components.select.scorer).__name__}, leaves gaps in them; leave one of them out"
            )

    def init(
        self, spec: kv.LayerSpec, block: kv.KVBlock, observation: kv.Observation | None, slots: int
    ) -> tuple[kv.Array, kv.Array]:
        scores = LagKV(self.lag, self.sinks).scores(block, observation, spec).per_kv_head
        # A score is the rank of a token in its partition, over `lag`; sinks and the last partitions have 1 and more.
        stays = scores > (self.num_evicted - 0.5) / self.lag
        # Behind a prefix that sequences share, the text of a sequence does not begin at position 0.
        first = block.pos[:, 0, 0] if block.pos.shape[2] else jnp.full(len(block.pos), -1, jnp.int32)
        return kv.mask_to_slots(stays & (block.pos >= 0), min(slots, block.pos.shape[2])), first

    def before_token(self, storage: kv.KVStorage, state: kv.LayerState, q: kv.Array, q_pos: kv.Array) -> kv.LayerState:
        first = jnp.where(state.policy_state < 0, q_pos[:, 0], state.policy_state)
        state = dataclasses.replace(state, policy_state=first)
        if state.pos.shape[2] < 2 * self.lag:
            return state  # the text is too short for two partitions
        num_tokens = q_pos[:, 0] - first - self.sinks
        is_due = (q_pos[:, 0] >= 0) & (num_tokens >= 2 * self.lag) & (num_tokens % self.lag == 0)
        # A prompt that ends with a full partition has been cut by `init`.
        num_kept = self.sinks + num_tokens - (num_tokens // self.lag - 1) * self.num_evicted
        is_due &= (state.pos[:, 0] >= 0).sum(1, dtype=jnp.int32) > num_kept
        return lax.cond(is_due.any(), lambda s: self._evict_partition(storage, s, is_due, q_pos), lambda s: s, state)

    def after_token(
        self, spec: kv.LayerSpec, state: kv.LayerState, weights: kv.Array | None, q_pos: kv.Array
    ) -> tuple[kv.Array, kv.Array]:
        return state.pos, state.policy_state

    def _evict_partition(
        self, storage: kv.KVStorage, state: kv.LayerState, is_due: kv.Array, q_pos: kv.Array
    ) -> kv.LayerState:
        """Evicts from the last partition but one, in the sequences that are due, bool[B]."""
        B, K, S = state.pos.shape
        # The last two partitions are whole, so theirs are the largest positions; a new token may be in any slot.
        slot = jnp.argsort(state.pos, axis=2).astype(jnp.int32)[:, :, S - 2 * self.lag :]
        keys, values = storage.gather(state, slot, jnp.take_along_axis(state.pos, slot, 2))
        partitions = (x.reshape(B, K, 2, self.lag, -1) for x in (keys, values))
        rank = _rank_tokens(_score_partitions(*partitions))[:, :, 0]
        leaves = jnp.where((rank < self.num_evicted) & is_due[:, None, None], slot[:, :, : self.lag], S)
        index = jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None], leaves
        return dataclasses.replace(state, pos=state.pos.at[index].set(-1, mode="drop"))


def _score_partitions(keys: kv.Array, values: kv.Array) -> kv.Array:
    """Scores the tokens of all partitions [B K U c H] but the last: f32[B K U-1 c]."""
    return (_spread(keys.astype(jnp.float32)) + _spread(values.astype(jnp.float32))) / 2


def _rank_tokens(scores: kv.Array) -> kv.Array:
    """Ranks the tokens of each partition [B K U c] by their scores, from 0 for the least."""
    return scores.argsort(-1).argsort(-1)


def _spread(x: kv.Array) -> kv.Array:
    """Scores the tokens of all partitions x [B K U c H] but the last: f32[B K U-1 c]."""
    scored, following = x[:, :, :-1], x[:, :, 1:]
    low = following.min(3, keepdims=True)
    span = following.max(3, keepdims=True) - low
    normalized = jnp.where(span > MIN_SPAN, (scored - low) / jnp.maximum(span, MIN_SPAN), 0.0)
    spread = normalized.std(-1, ddof=min(1, x.shape[-1] - 1))
    weight = jnp.exp(spread - spread.max(-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True)


@kv.register_method(example="lagkv:budget=512", family="eviction after the prompt")
def lagkv(
    budget: kv.TokenBudget = 1024,
    lag: int = 128,
    sinks: int = 4,
    cross: bool = False,
    unit: str = "token",
    per: kv.Scope = "head",
    while_decoding: bool = False,
) -> kv.Method:
    """Keeps the prompt tokens that stand out from the tokens that follow them; it needs no queries.

    'lagkv:budget=50%,lag=1024,sinks=16,while_decoding=true' is the authors' own form.

    Formula:
      x = (k - min_next) / (max_next - min_next) by channel, score = softmax over the partition of std(x); mean of key's
      and value's, ranked within the partition

    Differs:
      The prompt is compressed once, as in kvpress, so that a long answer stays whole; the authors cut each partition as
      soon as the next is full, while decoding too, which `while_decoding` does. On SmolLM2-135M 512 tokens and an
      answer of 512 take 66% of the exact cache's bytes with budget=30%, and 30% with
      budget=25%,lag=32,while_decoding=true, for 0.039 bits per byte of the answer (0.018 to 0.059; 4 contexts). kvpress
      leaves ties among the unscored tokens to chance; here the later ones stay.

    Args:
      budget, unit, per: as in `make_selection`.
      lag: tokens of a partition; the last whole partition and what follows it stay before all others (kvpress: 128; the
        class in the authors' code: 1024).
      sinks: as in `make_selection` (kvpress: 4; the class in the authors' code: 16).
      cross: whether partitions compete with one another; otherwise a token's score is its rank in its partition, so
        that all partitions keep equally many.
      while_decoding: whether every partition is cut to the fraction `budget` of its tokens when the next one is full,
        while decoding too (the authors' code, whose `ratio` it is); sinks and the last one or two partitions stay
        whole, so that a text shorter than sinks + 2 lag loses nothing.

    Reference:
      LagKV, Liang et al. 2025, arXiv 2504.04704, and its public code, AI-Lab-China-Merchants-Bank/LagKV; scored once
      after the prompt as in kvpress
    """
    if while_decoding:
        ratio = parse_budget(budget)
        if not isinstance(ratio, PromptFraction):
            raise kv.KvjaxError(
                "with while_decoding=true LagKV keeps a fraction of each partition, got "
                f"budget={budget}; give a fraction, as in budget=50%"
            )
        if cross or unit != "token" or per != "head":
            raise kv.KvjaxError(
                "with while_decoding=true each head of LagKV keeps tokens of its own, equally many of each partition; "
                "leave out cross, unit and per"
            )
        return kv.Method(decode=CutPartitions(ratio.fraction, lag, sinks))
    return kv.Method(select=kv.make_selection(LagKV(lag, sinks, cross), budget, sinks, 0, unit, per))
