"""SimLayerKV: layers that attend to the first and the latest tokens alone keep no others."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from kvjax import method_api as kv
from kvjax.methods.sinks_and_recent import Recency


@dataclasses.dataclass(frozen=True)
class LazyLayers(kv.LayerBudgets):
    """Gives lazy layers sinks and recent tokens, and the others the whole prompt (Zhang et al. 2024, 2410.13846).

    A layer is lazy for a sequence if the last queries give its sinks and recent tokens more than `threshold` of their
    attention, in the mean over queries and heads. The fields are arguments of `simlayerkv`; `num_queries` is its
    `last`.
    """

    num_queries: kv.PositiveInt = 1
    threshold: kv.UnitFloat = 0.9
    sinks: kv.NonNegativeInt = 4
    recent: kv.PositiveInt = 1024

    __post_init__ = kv.check_fields

    def measure(self, selection: kv.PromptSelection, block: kv.KVBlock, observation: kv.Observation | None) -> kv.Array:
        observation = kv.require_observation(observation, "LazyLayers", f"the last {self.num_queries} queries")
        is_last = kv.window_query_mask(observation, self.num_queries).astype(jnp.float32)
        query_weights = is_last / jnp.maximum(is_last.sum(-1, keepdims=True), 1.0)
        weights, _ = kv.attention_mass(block, observation, query_weights, selection.spec.rule)
        before = kv.pre_window_mask(block, self.num_queries)
        is_recent = before & ~kv.pre_window_mask(block, self.num_queries + self.recent)
        is_sink = before & (jnp.arange(block.pos.shape[2]) < self.sinks)[None, None]
        share = jnp.where((is_sink | is_recent)[:, :, None], weights, 0.0).sum(-1).mean(2)
        return kv.over_heads.mean(share)[:, 0]

    def allocate_tokens(self, selection: kv.PromptSelection, measures: kv.Array, lengths: kv.Array) -> kv.Array:
        # Rounding may sum weights to more than 1, where no layer is lazy.
        is_lazy = jnp.minimum(measures, 1.0) > self.threshold
        is_long = lengths > self.sinks + self.recent + self.num_queries
        return jnp.where(is_lazy & is_long[None], self.sinks + self.recent - self.num_queries, lengths[None])


@kv.register_method(example="simlayerkv:threshold=0.8", family="eviction after the prompt")
def simlayerkv(threshold: float = 0.9, recent: int = 1024, sinks: int = 4, last: int = 1) -> kv.Method:
    """Keeps only sinks and recent tokens in layers whose last queries attend to these, and all tokens in the others.

    There is no budget: how many layers are lazy depends on the prompt.

    Formula:
      a layer keeps s < sinks and s >= T - (recent - last) if the mean attention of the last queries to its sinks, and
      to the `recent` tokens before these queries, is above threshold; else all

    Differs:
      Lazy layers free their bytes: a layer has slots for the sequence of the batch that keeps most in it, so that a
      layer which is lazy for some sequences alone holds empty slots for these. Bytes are planned as an upper bound, all
      tokens. Each sequence is judged alone; kvpress judges a batch by its mean. The paper's lazy layers also evict
      while decoding; here, as in kvpress (SimLayerKVPress), decoded tokens all stay. Layers with a sliding window are
      left as they are.

    Args:
      threshold: of the attention (kvpress recommends 0.9 for Llama 3, 0.65 for Llama 2, 0.8 for Mistral, 0.85 for Qwen,
        and its default of 1 has no layer lazy).
      recent: latest tokens of a lazy layer, `last` included (kvpress: 1,024).
      sinks: first tokens of a lazy layer (kvpress: 4).
      last: queries that judge the layer (kvpress: 1).

    Reference:
      SimLayerKV, Zhang et al. 2024, arXiv 2410.13846; constants of its press in kvpress
    """
    if recent <= last:
        raise kv.KvjaxError(
            f"recent={recent} counts the last={last} tokens whose queries judge a layer, and at least one before them; "
            f"use recent={last + 1} or more"
        )
    return kv.Method(
        select=kv.make_selection(Recency(), "100%", sinks, per="layer"),
        layer_budgets=LazyLayers(last, threshold, sinks, recent),
    )
