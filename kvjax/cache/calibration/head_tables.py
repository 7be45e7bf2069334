"""Tables of heads: how much each key/value head of a model needs tokens that are far away."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache.calibration.table_kinds import Kind, table
from kvjax.cache.protocol import LayerSpec
from kvjax.cache.readers.base import cut
from kvjax.core.attention import MASKED_LOGIT, scores, visible, weights
from kvjax.core.attention_mass import Observation
from kvjax.core.types import Array, KVBlock

COPIES, RANDOM_TOKENS = 4, 2500  # how often so many tokens of chance are repeated to find retrieval heads


@table("heads")
class HeadWeights(Kind):
    """How much each head needs all tokens: `weights` f32[K], as kvpress scores heads for DuoAttention without training.

    The mean query and the mean key of a text, both without rotation, are set at 500 positions. A head's weight is the
    mean of the cumulated attention that the last of these queries pays, from the first key to the last: near 1 if it
    looks far back. It is averaged over the query heads of a key/value head, and over texts.
    """

    num_queries = None
    positions = 500

    def count(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> dict[str, Array]:
        bare_k = jnp.where((block.pos >= 0)[..., None], spec.rope.unrotate(block.k, block.pos), 0.0)
        assert observation is not None
        real = (observation.pos >= 0)[:, None, None, :, None]
        bare_q = jnp.where(real, spec.rope.unrotate_queries(observation.q, observation.pos), 0.0)
        tokens = jnp.maximum(real.sum(3, keepdims=True, dtype=jnp.float32), 1.0)
        at = jnp.arange(self.positions, dtype=jnp.int32)[None]
        k = jnp.repeat(bare_k.sum(2, keepdims=True) / tokens[:, :, 0], self.positions, 2)
        q = spec.rope.rotate_queries(bare_q.sum(3, keepdims=True) / tokens, at[:, -1:])
        paid = jax.nn.softmax(scores(q, spec.rope.rotate(k, at[:, None])), -1)
        weight = jnp.cumsum(paid, -1).mean((2, 3, 4))
        return {"weights": weight, "texts": jnp.ones_like(weight)}

    def arrays(self, counted: dict[str, np.ndarray], spec: LayerSpec) -> Mapping[str, np.ndarray]:
        return {"weights": (counted["weights"] / counted["texts"]).astype(np.float32)}


@table("retrieval_heads")
class RetrievalHeads(Kind):
    """How much each head looks back at earlier copies of a text: `echo` and `induction` f32[K] (RazorAttention).

    It brings its own text: random tokens, repeated four times. echo: the mean attention that a token pays to the same
    token of each earlier copy; induction: to the one after that. Of a key/value head the query head with the most
    counts. As in Huawei's msmodelslim, which also says how many tokens, and how often.
    """

    num_queries = None

    def documents(self, vocabulary: int, positions: int) -> list[list[int]]:
        once = np.random.default_rng(0).integers(vocabulary, size=min(RANDOM_TOKENS, positions // COPIES))
        return [once.tolist() * COPIES]

    def count(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> dict[str, Array]:
        assert observation is not None
        size = min(64, observation.pos.shape[1])
        some = cut(observation.q, 3, size), cut(observation.pos, 1, size, -1)
        period = jnp.maximum((block.pos >= 0).sum(2, dtype=jnp.int32) // COPIES, 1)[:, :, None, None]
        found = lax.map(lambda xs: _looked_back(block, xs[0], xs[1], period, spec.window), some)
        return jax.tree.map(lambda x: x.sum(0), found)

    def arrays(self, counted: dict[str, np.ndarray], spec: LayerSpec) -> Mapping[str, np.ndarray]:
        means = {name: counted[name] / np.maximum(counted[f"{name}_pairs"], 1) for name in ("echo", "induction")}
        return {name: mean.max(1).astype(np.float32) for name, mean in means.items()}


def _looked_back(block: KVBlock, q: Array, q_pos: Array, period: Array, window: int | None) -> dict[str, Array]:
    """Of queries [B K G Q H], what they pay to earlier copies f32[B K G], and the number of such pairs f32[B K 1]."""
    p, _, l = weights(jnp.where(visible(block.pos, q_pos, window), scores(q, block.k), MASKED_LOGIT))
    back = q_pos[:, None, :, None] - block.pos[:, :, None]  # i32[B 1 Q S], tokens from the key to the query
    real = (q_pos[:, None, :, None] >= 0) & (block.pos[:, :, None] >= 0)
    which = {
        "echo": real & (back > 0) & (back % period == 0),
        "induction": real & (back >= 0) & ((back + 1) % period == 0) & (block.pos[:, :, None] > 0),  # 0 follows none
    }
    found = {}
    for name, pairs in which.items():
        number = jnp.broadcast_to(pairs, (*q.shape[:2], *pairs.shape[2:])).sum((2, 3), dtype=jnp.float32)
        found[name] = jnp.where(pairs[:, :, None], p / jnp.maximum(l, 1e-30)[..., None], 0.0).sum((3, 4))
        found[f"{name}_pairs"] = number[..., None]
    return found
