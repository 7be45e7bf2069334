"""TOVA: while decoding, evicts the token that the newest query attends to least."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from kvjax import method_api as kv


@dataclasses.dataclass(frozen=True)
class Tova(kv.Policy):
    """Treats the cache as a multi-state recurrent network (Oren et al. 2024, arXiv 2401.06104, section 3.2).

    A step attends to the `budget` kept tokens and to its own; then, over budget, it evicts the token with the lowest
    weight, the mean over all query heads of the layer, so that all heads keep the same tokens; ties go to the older
    token. A longer prompt is cut by its last query in the same way. Kept tokens keep their positions. The fields are
    the arguments of `tova`.
    """

    budget: kv.PositiveInt
    keep_newest: bool = False

    num_queries: ClassVar[int] = 1
    needs_weights: ClassVar[bool] = True

    __post_init__ = kv.check_fields

    def num_slots(self) -> int:
        return self.budget + 1

    def init(
        self, spec: kv.LayerSpec, block: kv.KVBlock, observation: kv.Observation | None, slots: int
    ) -> tuple[kv.Array, None]:
        observation = kv.require_observation(observation, "TOVA", "the last query")
        last = observation.pos.max(1, keepdims=True)
        by = ((observation.pos >= 0) & (observation.pos == last)).astype(jnp.float32)
        weight = kv.over_heads.mean(kv.attention_mass(block, observation, by, spec.rule)[0].mean(2))
        if self.keep_newest:
            weight = jnp.where(block.pos == last[:, None], jnp.inf, weight)
        return kv.top_slots(weight, block.pos, min(self.budget, slots)), None

    def after_token(
        self, spec: kv.LayerSpec, state: kv.LayerState, weights: kv.Array, q_pos: kv.Array
    ) -> tuple[kv.Array, None]:
        t = q_pos[:, None]  # [B 1 1]
        may_leave = (state.pos >= 0) & ~(self.keep_newest & (state.pos == t))
        return kv.evict_lowest(kv.over_heads.mean(weights.mean(2)), state.pos, may_leave, t >= 0), None

    def check(self, components: kv.Components) -> None:
        select = components.select
        if select is not None and select.scope != "layer":
            raise kv.IncompatibleMethod(
                f"component `decode`, {self}, cannot work with component `select` by {select.scorer}: TOVA holds the "
                "same tokens in all heads of a layer, and this selection keeps others in each; give it per=layer, as "
                "in 'snapkv:per=layer + tova'"
            )


@kv.register_method(example="tova:budget=512", family="eviction at every step")
def tova(budget: int = 1024, keep_newest: bool = False) -> kv.Method:
    """Evicts, over the budget, the token that the newest query attends to least, in constant memory.

    Formula:
      w_s = mean over all heads of softmax(q_t k_s / sqrt(H)); over budget, the token of the lowest w_s leaves

    Differs:
      No difference from the authors' code is known; keep_newest=true is kvpress' rule.

    Args:
      budget: tokens that stay after each step, the newest included (the paper: an eighth to a quarter of the text).
      keep_newest: whether the newest token always stays (kvpress); by default it competes, as in the authors' code.

    Reference:
      TOVA, Oren et al. 2024, arXiv 2401.06104, section 3.2
    """
    return kv.Method(decode=Tova(budget, keep_newest))
