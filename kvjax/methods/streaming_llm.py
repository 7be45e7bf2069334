"""StreamingLLM: keeps the first and the most recent tokens, in constant memory for a text of any length."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from kvjax import method_api as kv


@dataclasses.dataclass(frozen=True)
class SinksAndRecent(kv.Policy):
    """Keeps the first `sinks` tokens and the last `recent` ones (Xiao et al. 2023, arXiv 2309.17453, section 3.2).

    A step runs first and then evicts: a query attends to sinks + recent tokens and to its own, so there are
    sinks + recent + 1 slots. A prompt attends in full; then only these tokens are kept. With positions inside the cache
    (the paper) a text may grow beyond the trained length: keys are stored before RoPE, which is undone once, in
    float32, and applied at every read in float32. That costs one more rounding of a key to its dtype (a relative 2**-9
    per element in bfloat16, 2**-24 in float32), which never accumulates. With true positions keys are stored after RoPE
    (kvpress and KVCache-Factory). A layer with a sliding window also hides tokens outside it, sinks too. Over a
    selection, first and last tokens are counted among the selected ones.

    Args:
      recent: last tokens.
      sinks: first tokens.
    """

    recent: kv.NonNegativeInt
    sinks: kv.NonNegativeInt = 4

    __post_init__ = kv.check_fields

    def num_slots(self) -> int:
        return self.sinks + self.recent + 1

    def init(
        self, spec: kv.LayerSpec, block: kv.KVBlock, observation: kv.Observation | None, slots: int
    ) -> tuple[kv.Array, None]:
        length = (block.pos >= 0).sum(2, keepdims=True, dtype=jnp.int32)
        place = jnp.arange(min(slots, self.sinks + self.recent), dtype=jnp.int32)[None, None]
        skipped = jnp.maximum(length - self.sinks - self.recent, 0)
        chosen = jnp.where(place < self.sinks, place, place + skipped)
        return jnp.where(chosen < length, chosen, -1), None

    def after_token(
        self, spec: kv.LayerSpec, state: kv.LayerState, weights: kv.Array | None, q_pos: kv.Array
    ) -> tuple[kv.Array, None]:
        pos = state.pos
        is_full = (pos >= 0).all(2, keepdims=True) & (q_pos[:, None] >= 0)
        # Sinks were written first and never leave, so they are in the first slots.
        is_recent = jnp.arange(pos.shape[2])[None, None] >= self.sinks
        oldest = jnp.where(is_recent, pos, jnp.iinfo(jnp.int32).max).min(2, keepdims=True)
        return jnp.where(is_full & is_recent & (pos == oldest), -1, pos), None

    def with_selection(self, selection: kv.PromptSelection) -> kv.Policy:
        return SelectedSinksAndRecent(self.recent, self.sinks)

    def cache_positions(self, held: kv.Array, pos: kv.Array) -> kv.Array:
        # Without gaps between the recent tokens, the newest position alone tells.
        base = jnp.maximum(held.max(2, keepdims=True) - self.sinks - self.recent, 0)
        return jnp.where(pos < self.sinks, pos, pos - base)


class SelectedSinksAndRecent(SinksAndRecent):
    """The policy over a selection, which leaves gaps between the recent tokens: cached ones have to be counted."""

    cache_positions = kv.Policy.cache_positions


@kv.register_method(example="streaming_llm:recent=508", family="eviction at every step", sized_by="recent")
def streaming_llm(recent: int = 2000, sinks: int = 4, reindex: bool = True) -> kv.Method:
    """Keeps the first and the most recent tokens, in constant memory for a text of any length.

    Attention in the prompt is exact.

    Formula:
      t sees the first `sinks` tokens, the last `recent` ones and itself, at their indices in the cache

    Differs:
      No difference is known; reindex=false keeps true positions, as kvpress and KVCache-Factory do.

    Args:
      recent: last tokens that stay.
      sinks: first tokens that always stay (the paper: 4).
      reindex: whether positions are indices inside the cache (the paper) instead of true positions.

    Reference:
      StreamingLLM, Xiao et al. 2023, arXiv 2309.17453, section 3.2
    """
    return kv.Method(decode=SinksAndRecent(recent, sinks), positions="cache" if reindex else "true")
