"""Tables of heads: how much each key/value head of a model needs tokens that are far away."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache.calibration.table_kinds import TableKind, register_table_kind
from kvjax.cache.protocol import LayerSpec
from kvjax.core.attention import scores, softmax, split_blocks
from kvjax.core.attention_mass import Observation, attention_rows
from kvjax.core.types import Array, KVBlock

NUM_COPIES = 4  # of the random text in which retrieval heads are looked for
MAX_RANDOM_TOKENS = 2500  # of one copy; fewer in a model of fewer positions


@register_table_kind("heads")
class HeadWeights(TableKind):
    """Each head's need for all tokens: `weights` f32[K], as kvpress scores heads for DuoAttention without training.

    The mean query and the mean key of a text, both without rotation, are rotated to 500 positions. A head's weight is
    the mean of the cumulated attention that the last of these queries pays, from the first key to the last: near 1 if
    it looks far back. It is averaged over the query heads of a key/value head, and over texts.
    """

    num_queries = None
    num_positions = 500

    def count(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> dict[str, Array]:
        pre_rope_k = jnp.where((block.pos >= 0)[..., None], spec.rope.unrotate(block.k, block.pos), 0.0)
        assert observation is not None
        is_real = (observation.pos >= 0)[:, None, None, :, None]
        pre_rope_q = jnp.where(is_real, spec.rope.unrotate_queries(observation.q, observation.pos), 0.0)
        num_tokens = jnp.maximum(is_real.sum(3, keepdims=True, dtype=jnp.float32), 1.0)
        pos = jnp.arange(self.num_positions, dtype=jnp.int32)[None]
        k = jnp.repeat(pre_rope_k.sum(2, keepdims=True) / num_tokens[:, :, 0], self.num_positions, 2)
        q = spec.rope.rotate_queries(pre_rope_q.sum(3, keepdims=True) / num_tokens, pos[:, -1:])
        logits = spec.rule.cap(scores(q, spec.rope.rotate(k, pos[:, None])))
        attention = softmax(logits, observation.sinks)
        weight = jnp.cumsum(attention, -1).mean((2, 3, 4))
        return {"weights": weight, "texts": jnp.ones_like(weight)}

    def arrays(self, counted: dict[str, np.ndarray], spec: LayerSpec) -> Mapping[str, np.ndarray]:
        return {"weights": (counted["weights"] / counted["texts"]).astype(np.float32)}


@register_table_kind("retrieval_heads")
class RetrievalHeads(TableKind):
    """The attention of each head to earlier copies of a text: `echo` and `induction` f32[K] (RazorAttention).

    It brings its own text, random tokens repeated four times. echo: the mean attention that a token pays to the same
    token of each earlier copy; induction: to the one after it. A key/value head has the score of its best query head.
    The text and its length are those of Huawei's msmodelslim.
    """

    num_queries = None

    def documents(self, vocabulary: int, positions: int) -> list[list[int]]:
        size = min(MAX_RANDOM_TOKENS, positions // NUM_COPIES)
        return [np.random.default_rng(0).integers(vocabulary, size=size).tolist() * NUM_COPIES]

    def count(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> dict[str, Array]:
        assert observation is not None
        period = jnp.maximum((block.pos >= 0).sum(2, dtype=jnp.int32) // NUM_COPIES, 1)[:, :, None, None]

        def sum_attention(queries: tuple[Array, Array]) -> dict[str, Array]:
            """Attention of queries [B K G Q H] to earlier copies f32[B K G], and the number of pairs f32[B K 1]."""
            q, q_pos = queries
            p = attention_rows(block, observation._replace(q=q, pos=q_pos, softmax_lse=None), spec.rule)
            distance = q_pos[:, None, :, None] - block.pos[:, :, None]  # i32[B 1 Q S], tokens from the key to the query
            is_real = (q_pos[:, None, :, None] >= 0) & (block.pos[:, :, None] >= 0)
            is_successor = (distance >= 0) & ((distance + 1) % period == 0)
            pairs = {
                "echo": is_real & (distance > 0) & (distance % period == 0),
                # Token 0 follows no token, so it is nobody's successor.
                "induction": is_real & is_successor & (block.pos[:, :, None] > 0),
            }
            sums = {}
            for name, mask in pairs.items():
                num_pairs = jnp.broadcast_to(mask, (*q.shape[:2], *mask.shape[2:])).sum((2, 3), dtype=jnp.float32)
                sums[name] = jnp.where(mask[:, :, None], p, 0.0).sum((3, 4))
                sums[f"{name}_pairs"] = num_pairs[..., None]
            return sums

        # A block of queries at a time: the attention of all 10,000 tokens to each other would not fit.
        size = min(64, observation.pos.shape[1])
        sums = lax.map(
            sum_attention, (split_blocks(observation.q, 3, size), split_blocks(observation.pos, 1, size, -1))
        )
        return jax.tree.map(lambda x: x.sum(0), sums)

    def arrays(self, counted: dict[str, np.ndarray], spec: LayerSpec) -> Mapping[str, np.ndarray]:
        means = {name: counted[name] / np.maximum(counted[f"{name}_pairs"], 1) for name in ("echo", "induction")}
        return {name: mean.max(1).astype(np.float32) for name, mean in means.items()}
