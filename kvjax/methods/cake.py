"""CAKE: gives most of a model's budget to the layers whose attention is dispersed and shifts."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from kvjax import method_api as kv
from kvjax.cache.eviction.budget_allocation import match_total
from kvjax.core.attention_mass import moments


@dataclasses.dataclass(frozen=True)
class ShiftingAttention(kv.WindowAttention):
    """Scores by mean + gamma * variance over the window's queries instead of their mean (2503.12491)."""

    gamma: float = 200.0

    def window_attention(self, block: kv.KVBlock, observation: kv.Observation, spec: kv.LayerSpec) -> kv.Array:
        mean, variance, _ = _window_statistics(block, observation, self.num_queries, spec)
        return mean + self.gamma * variance


@dataclasses.dataclass(frozen=True)
class Preference(kv.LayerBudgets):
    """Divides the budget by dispersion^(1/tau1) * shift^(1/tau2) of each layer (Qin et al. 2025, arXiv 2503.12491).

    Both describe the attention p of the prompt's last queries to the tokens before them, summed over all heads:
    dispersion is -p ln p, summed over queries and tokens, and shift is the unbiased variance over the queries, summed
    over tokens. The budgets of all layers, without sinks and recent tokens, are divided in proportion and rounded down.
    Tokens that a layer does not have go to the others in equal parts, and then the rounding remainder: one more token
    for the first layers. Each layer keeps at least one token in addition to sinks and recent tokens. If nothing shifts
    in any layer, all get the same.

    Args:
      num_queries: last queries of the prompt.
      tau1: temperature of the dispersion.
      tau2: temperature of the shift.
    """

    num_queries: int = 32
    tau1: kv.PositiveFloat = 1.6
    tau2: kv.PositiveFloat = 0.6

    __post_init__ = kv.check_fields

    def measure(self, selection: kv.PromptSelection, block: kv.KVBlock, observation: kv.Observation | None) -> kv.Array:
        observation = selection.select.scorer.require_observation(observation)
        _, variance, entropy = _window_statistics(block, observation, self.num_queries, selection.spec)
        before = kv.pre_window_mask(block, self.num_queries)[:, :, None]
        dispersion, shift = (
            kv.over_heads.sum(jnp.where(before, x, 0.0).sum((2, 3)))[:, 0] for x in (entropy, variance)
        )
        # Rounding can leave a sum of -p ln p below 0, which has no fractional power.
        return jnp.maximum(dispersion, 0.0) ** (1 / self.tau1) * shift ** (1 / self.tau2)

    def allocate_tokens(self, selection: kv.PromptSelection, measures: kv.Array, lengths: kv.Array) -> kv.Array:
        select, L = selection.select, measures.shape[0]
        if None in selection.budgets:
            raise kv.KvjaxError(f"{select.budget} grows with the text and cannot be divided among layers; give tokens")
        always = jnp.minimum(select.sinks + select.recent, lengths)
        total = jnp.minimum(jnp.array(selection.budgets)[:, None], lengths[None]).sum(0, dtype=jnp.int32) - L * always
        most = lengths - always
        sum_of_layers = measures.sum(0, keepdims=True)
        share = jnp.where(sum_of_layers > 0, measures / jnp.maximum(sum_of_layers, 1e-30), 1 / L)
        parts = jnp.floor(share * total[None].astype(jnp.float32)).astype(jnp.int32)
        parts = match_total(parts, parts.sum(0, dtype=jnp.int32), jnp.zeros_like(most), most)
        return match_total(parts, total, jnp.minimum(most, 1), most) + always[None]


def _window_statistics(
    block: kv.KVBlock, observation: kv.Observation, num_queries: int, spec: kv.LayerSpec
) -> tuple[kv.Array, kv.Array, kv.Array]:
    """Computes f32[B K G S] of what each slot receives from the window's queries.

    Returns:
      The mean over the queries; the unbiased variance, 0 for a single query; and the sum of -p ln p.
    """
    is_observed = kv.window_query_mask(observation, num_queries)
    count = is_observed.sum(-1, dtype=jnp.int32).astype(jnp.float32)[:, None, None, None]
    count = jnp.maximum(count, 1.0)
    window = kv.Observation(observation.q, jnp.where(is_observed, observation.pos, -1), sinks=observation.sinks)
    sums = moments(block, window, spec.rule)
    squares = sums.square - sums.p * sums.p / count
    return sums.p / count, jnp.maximum(squares, 0.0) / jnp.maximum(count - 1, 1.0), -sums.p_log_p


@kv.register_method(example="cake:budget=512", family="eviction after the prompt")
def cake(
    budget: int = 1024,
    window: kv.PositiveInt = 32,
    kernel: int = 5,
    gamma: float = 200.0,
    tau1: float = 1.6,
    tau2: float = 0.6,
    sinks: int = 0,
    unit: str = "token",
) -> kv.Method:
    """Divides a budget among layers by how far attention spreads and shifts, and keeps the tokens that it shifts to.

    Formula:
      tokens of a layer = window + L (budget - window) P / sum of P over layers, P = (-sum p ln p)^(1/tau1) (sum var
      p)^(1/tau2); score_s = pool(mean p_s + gamma var p_s)

    Differs:
      The authors' code keeps a prompt of up to budget + window tokens whole, and compresses again at every decoded
      token; here a prompt longer than the budget is cut to it once, and decoded tokens stay.

    Args:
      budget: prompt tokens kept per layer and key/value head, on average over the layers, the window included.
      window: last queries of the prompt, which are observed, and whose tokens stay.
      kernel: neighbors over which scores are averaged.
      gamma: weight of the variance relative to the mean.
      tau1: temperature of the spread; the higher, the less it counts.
      tau2: temperature of the shift; the higher, the less it counts.
      sinks, unit: as in `make_selection`.

    Reference:
      CAKE, Qin et al. 2025, arXiv 2503.12491; formulas and constants as in the public fork qtris123/cakekv of its code
    """
    scorer = ShiftingAttention(window, kernel, "avg", gamma=gamma)
    if budget <= window + sinks:
        raise kv.KvjaxError(
            f"every layer keeps its window of {window} and {sinks} sinks and at least one token more, got "
            f"budget={budget}; use {window + sinks + 1} or more"
        )
    return kv.Method(
        select=kv.make_selection(scorer, budget, sinks, window, unit, "head"),
        layer_budgets=Preference(window, tau1, tau2),
    )
