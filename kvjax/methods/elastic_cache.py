"""Elastic Cache: merges evicted tokens into the nearest important ones; decoding evicts at a fixed distance."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from kvjax import method_api as kv

NUM_LAST_TOKENS = 1  # last tokens of a prompt, which always stay and are no anchors


@dataclasses.dataclass(frozen=True)
class AnchorMerge:
    """Averages keys and values of evicted tokens into the nearest anchor by position; ties go to the earlier.

    Anchors are the kept tokens after the first `sinks` and before the last one. Without an anchor nothing is merged.
    """

    sinks: int

    def __call__(self, block: kv.KVBlock, kept: kv.KVBlock, choice: kv.SelectedSlots, spec: kv.LayerSpec) -> kv.KVBlock:
        block, kept = block.clean(), kept.clean()
        lost, n = kv.evicted_mask(block, choice), kept.k.shape[2]
        # Kept slots ascend, so the nearest anchor is the last one before the token or the first one after it.
        following = jnp.cumsum((block.pos >= 0) & ~lost, 2, dtype=jnp.int32)  # the first kept slot after each token
        last = (kept.pos >= 0).sum(2, keepdims=True, dtype=jnp.int32) - NUM_LAST_TOKENS - 1
        left, right = (jnp.clip(slot, self.sinks, last) for slot in (following - 1, following))
        kept_pos = jnp.broadcast_to(kept.pos, kept.k.shape[:3])
        to_left, to_right = (
            jnp.abs(jnp.take_along_axis(kept_pos, jnp.maximum(slot, 0), 2) - block.pos) for slot in (left, right)
        )
        nearest = jnp.where(to_right < to_left, right, left)
        slot = jnp.where(lost & (last >= self.sinks), nearest, n)  # there is no slot n
        weight = jnp.ones(slot.shape)
        total = 1.0 + kv.scatter_add(weight, slot, n)
        k, v = (kv.fold_into_kept(x, 1.0, y, weight, slot, total) for x, y in ((kept.k, block.k), (kept.v, block.v)))
        return dataclasses.replace(kept, k=k, v=v)


@dataclasses.dataclass(frozen=True)
class FixedPointEviction(kv.Policy):
    """Evicts, over the selection's budget, the token that has `distance` newer ones (Liu et al. 2024, 2407.18121).

    All but the newest `distance` of the selected tokens stay for good, and of all later ones the newest `distance`.
    """

    distance: kv.PositiveInt = 25

    __post_init__ = kv.check_fields

    def check(self, components: kv.Components) -> None:
        select = components.select
        budget = None if select is None else select.max_kept()
        if budget is None or components.layer_budgets is not None:
            raise kv.IncompatibleMethod(
                "component `decode` of Elastic Cache holds as many tokens as component `select` leaves of any prompt, "
                "and here that is no fixed number; use a selection with a budget in tokens, without component "
                "`layer_budgets`"
            )
        if budget <= self.distance:
            raise kv.KvjaxError(
                f"the budget of Elastic Cache must be more than distance={self.distance}, got {budget} tokens; use "
                f"budget={self.distance + 1} or more"
            )

    def with_selection(self, selection: kv.PromptSelection) -> kv.Policy:
        budget = selection.select.max_kept()
        assert budget is not None
        return SizedFixedPointEviction(self.distance, budget)

    def init(
        self, spec: kv.LayerSpec, block: kv.KVBlock, observation: kv.Observation | None, slots: int
    ) -> tuple[kv.Array, None]:
        place = jnp.arange(min(slots, block.pos.shape[2]), dtype=jnp.int32)[None, None]
        length = (block.pos >= 0).sum(2, keepdims=True, dtype=jnp.int32)
        return jnp.where(place < length, place, -1), None

    def after_token(
        self, spec: kv.LayerSpec, state: kv.LayerState, weights: kv.Array | None, q_pos: kv.Array
    ) -> tuple[kv.Array, None]:
        is_full = (state.pos >= 0).all(2, keepdims=True) & (q_pos[:, None] >= 0)
        rank = max(state.pos.shape[2] - 1 - self.distance, 0)  # rank of the evicted token, from the oldest
        evicted = jnp.sort(state.pos, 2)[:, :, rank, None]
        return jnp.where(is_full & (state.pos == evicted), -1, state.pos), None


@dataclasses.dataclass(frozen=True)
class SizedFixedPointEviction(FixedPointEviction):
    """The policy over a selection, with the number of tokens that stay after a step."""

    budget: int = 0

    def num_slots(self) -> int:
        return self.budget + 1


@kv.register_method(example="elastic_cache:budget=512", family="merging")
def elastic_cache(budget: kv.TokenBudget = 1024, sinks: int = 1, distance: int = 25) -> kv.Method:
    """Keeps a layer's most attended prompt tokens, averages the others into them, and never grows beyond its budget.

    Formula:
      prompt: x_a <- mean of x_a and of all evicted x_e for which |a - e| is least, for keys and values; decode: over
      the budget, the token with `distance` newer ones leaves

    Differs:
      The public code takes the result of argsort for ranks, so that its selection is almost arbitrary, and drops tokens
      at slots that are off by the number of its sinks; here real ranks are used. Its budget is a fraction of the text
      so far, here a number of tokens.

    Args:
      budget: tokens of a layer, the same for all heads, by the attention that they received in the prompt.
      sinks: first tokens that always stay, as does the last one (1 in the evaluation of the public code, 4 in its
        class).
      distance: the token that leaves while decoding has this many newer ones (25).

    Reference:
      Elastic Cache, Liu et al. 2024, arXiv 2407.18121; constants of its public code, liuzuyan/ElasticCache
    """
    select = kv.make_selection(kv.AccumulatedAttention(), budget, sinks, NUM_LAST_TOKENS, per="layer")
    return kv.Method(select=select, merge=AnchorMerge(sinks), decode=FixedPointEviction(distance))
