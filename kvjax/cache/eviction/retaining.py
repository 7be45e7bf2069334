"""Retaining heads: what a small network says of a token from its own queries, key and value, and its table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache.calibration.table_kinds import TableKind, register_table_kind
from kvjax.cache.calibration.text_halves import max_logits, split_halves
from kvjax.cache.protocol import LayerSpec
from kvjax.cache.readers.base import map_query_blocks
from kvjax.core.attention import MASKED_LOGIT
from kvjax.core.attention_mass import Observation
from kvjax.core.mesh import over_heads
from kvjax.core.rope import Rope
from kvjax.core.types import Array, KVBlock
from kvjax.errors import KvjaxError


def inputs(q: Array, pos: Array, k: Array, v: Array, rope: Rope) -> Array:
    """Queries [B K G T H], keys and values [B K 1 T H] at pos i32[B T] -> f32[B K T (G+2)*H], zeros for padding.

    Of each token the queries of a head's query heads, its key and its value, side by side, all without rotation.
    """
    bare = [rope.unrotate_queries(q, pos), rope.unrotate_queries(k, pos), v.astype(jnp.float32)]
    x = jnp.where((pos >= 0)[:, None, None, :, None], jnp.concatenate(bare, 2), 0.0)
    return jnp.moveaxis(x, 2, 3).reshape(*x.shape[:2], x.shape[3], -1)


def group_by_head(fc1: np.ndarray, spec: LayerSpec) -> np.ndarray:
    """The first layer's weights [R (K*G+2*K)*H] as they are released, by the heads that they weigh: [K (G+2)*H R]."""
    K, G, H = spec.num_kv_heads, spec.num_groups, spec.head_dim
    parts = np.split(fc1, [K * G * H, (K * G + K) * H], 1)
    return np.concatenate([x.reshape(-1, K, x.shape[1] // K) for x in parts], 2).transpose(1, 2, 0)


def ungroup_heads(weights: np.ndarray, spec: LayerSpec) -> np.ndarray:
    """The inverse of `group_by_head`."""
    G, H = spec.num_groups, spec.head_dim
    parts = np.split(weights.transpose(2, 0, 1), [G * H, (G + 1) * H], 2)
    return np.concatenate([x.reshape(len(x), -1) for x in parts], 1)


def retained(block: KVBlock, observation: Observation, fc1: Array, fc2: Array, rope: Rope) -> Array:
    """f32[B K T]: what the network says of each token; fc1 f32[K (G+2)*H R] and fc2 f32[K R] of this device's heads."""

    def of_tokens(q: Array, pos: Array, k: Array, v: Array) -> Array:
        x = inputs(q, pos, k, v, rope)
        here = jnp.einsum("bktc,kcr->btr", x, fc1, precision=lax.Precision.HIGHEST)
        hidden = jax.nn.silu(over_heads.sum(here[:, None])[:, 0])
        return jnp.einsum("btr,kr->bkt", hidden, fc2, precision=lax.Precision.HIGHEST)[:, :, None]

    return map_query_blocks(of_tokens, observation.q, observation.pos, 512, block.k[:, :, None], block.v[:, :, None])[
        :, :, 0
    ]


@register_table_kind("locret")
@dataclasses.dataclass(frozen=True)
class RetainingHeads(TableKind):
    """The weights of a network of one hidden layer of R units, without biases, as Locret's public release has them.

    `fc1` f32[R (N+2*K)*H]: of the layer's N query heads, its K keys and its K values, in this order and before their
    rotation; `fc2` f32[K R]. They are `model.layers.{i}.self_attn.fc1.weight` and `....fc2.weight` of the release.

    Calibrated, R = 2 K: linear regression of the greatest logit that a token of a text's earlier half gets from the
    queries of the later half. The SiLU of a number, less that of its negative, is the number itself, so two units make
    one linear function. ridge: what is added to the inputs' variances, as 1 / ridge of their mean.
    """

    ridge: int = 1000
    num_queries = None

    def __post_init__(self):
        if self.ridge < 1:
            raise KvjaxError(f"ridge must be at least 1, got {self.ridge}; 1000 adds a thousandth of the variance")

    def count(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> dict[str, Array]:
        assert observation is not None
        earlier, later = split_halves(block, observation)
        target = max_logits(block, observation, later, spec.window)
        asked = earlier[:, :1] & over_heads.any(
            target > MASKED_LOGIT / 2
        )  # a sliding window hides some from all that ask
        own = inputs(observation.q, observation.pos, block.k[:, :, None], block.v[:, :, None], spec.rope)
        every = jnp.moveaxis(over_heads.gather(own), 1, 2)
        x = jnp.where(asked[:, 0, :, None], every.reshape(*every.shape[:2], -1), 0.0)
        y = jnp.where(asked, target, 0.0)
        return {
            "tokens": asked.sum(2, keepdims=True, dtype=jnp.float32),
            "x": x.sum(1)[:, None],
            "y": y.sum(2, keepdims=True),
            "xx": jnp.einsum("btc,btd->bcd", x, x, precision=lax.Precision.HIGHEST)[:, None],
            "xy": jnp.einsum("btc,bkt->bkc", x, y, precision=lax.Precision.HIGHEST),
        }

    def arrays(self, counted: dict[str, np.ndarray], spec: LayerSpec) -> Mapping[str, np.ndarray]:
        tokens = counted["tokens"].item()
        if not tokens:
            raise KvjaxError("no token of these texts is asked by a later one; give texts of at least 2 tokens")
        x, y = counted["x"] / tokens, counted["y"] / tokens
        covariance = counted["xx"][0] / tokens - x.T @ x
        covariance += np.eye(len(covariance)) * (np.trace(covariance) / len(covariance) / self.ridge + 1e-12)
        linear = np.linalg.solve(covariance, (counted["xy"] / tokens - y * x).T)  # [K*(G+2)*H K], a column for a head
        weights = ungroup_heads(linear.reshape(spec.num_kv_heads, -1, spec.num_kv_heads), spec)
        same = np.eye(spec.num_kv_heads)
        both = {"fc1": np.concatenate([weights, -weights]), "fc2": np.concatenate([same, -same], 1)}
        return {name: array.astype(np.float32) for name, array in both.items()}
