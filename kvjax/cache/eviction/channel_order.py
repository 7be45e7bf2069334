"""Calibrated channels: those of a head whose products with the query are greatest."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from kvjax.cache.calibration.table_kinds import TableKind, register_table_kind
from kvjax.cache.protocol import LayerSpec
from kvjax.core.attention_mass import Observation
from kvjax.core.types import Array, KVBlock


@register_table_kind("channels")
class Channels(TableKind):
    """Of each layer and key/value head the mean of |q_c k_c| by channel c, each token's key with its own query.

    Arrays: `order` i32[K H], channels by falling mean, of equal ones the lower first, and `means` f32[K H]. Queries and
    keys after RoPE; all query heads of a key/value head together (Double Sparsity, Yang et al. 2024, arXiv 2408.07092,
    section 3.1).
    """

    num_queries = None

    def count(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> dict[str, Array]:
        assert observation is not None
        B, K, _, _ = block.k.shape
        full = (block.pos >= 0)[:, :, None, :, None]
        product = jnp.abs(observation.q.astype(jnp.float32) * block.k.astype(jnp.float32)[:, :, None])
        tokens = jnp.broadcast_to(full.sum((2, 3, 4), dtype=jnp.float32)[..., None], (B, K, 1))
        return {"products": jnp.where(full, product, 0.0).mean(2).sum(2), "tokens": tokens}

    def arrays(self, counted: dict[str, np.ndarray], spec: LayerSpec) -> Mapping[str, np.ndarray]:
        means = counted["products"] / np.maximum(counted["tokens"], 1)
        order = np.argsort(-means, -1, kind="stable")
        return {"order": order.astype(np.int32), "means": means.astype(np.float32)}
