"""Calibrated bases: the principal directions of keys and values, of each head or of several heads together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache.calibration.table_kinds import TableKind, register_table_kind
from kvjax.cache.protocol import LayerSpec
from kvjax.core.attention_mass import Observation
from kvjax.core.mesh import over_heads
from kvjax.core.types import Array, KVBlock
from kvjax.errors import KvjaxError


@register_table_kind("bases")
@dataclasses.dataclass(frozen=True)
class Bases(TableKind):
    """The principal directions of each layer's keys, without and with rotation, and of its values.

    With U = K / heads groups of C = heads * H channels, `keys`, `bare_keys` and `values` have three arrays each: the
    directions f32[U C C], one a column, by falling variance, so that the first r are the best basis of rank r for the
    vectors less their mean; `..._mean` f32[U C]; `..._deviation` f32[U C], the standard deviation along each direction.

    Args:
      heads: neighboring key/value heads that have directions in common, over all of their channels: 1 for each head's
        own, 0 for all heads of a layer.
    """

    heads: int = 1

    of: ClassVar[tuple[str, ...]] = ("keys", "bare_keys", "values")

    def count(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> dict[str, Any]:
        is_real = (block.pos >= 0)[..., None]
        pre_rope = jnp.where(is_real, spec.rope.unrotate(block.k, block.pos), 0.0)
        vectors = {"keys": block.k.astype(jnp.float32), "bare_keys": pre_rope, "values": block.v.astype(jnp.float32)}
        groups = {name: group_heads(vectors[name], self.heads, spec) for name in self.of}
        return {
            "tokens": is_real.sum(2, keepdims=True, dtype=jnp.float32),
            "sums": {name: x.sum(2, keepdims=True) for name, x in groups.items()},
            "products": {name: sum_outer_products(x) for name, x in groups.items()},
        }

    def arrays(self, counted: dict[str, Any], spec: LayerSpec) -> Mapping[str, np.ndarray]:
        made, tokens = {}, np.maximum(counted["tokens"], 1)
        for name in self.of:
            mean = counted["sums"][name] / tokens
            covariance = counted["products"][name] / tokens - mean.swapaxes(1, 2) * mean
            variances, directions = np.linalg.eigh(covariance)  # ascending
            # Rounding may leave a covariance with a slightly negative eigenvalue.
            deviation = np.sqrt(np.maximum(variances[..., ::-1], 0))
            made |= {name: directions[..., ::-1], f"{name}_mean": mean[:, 0], f"{name}_deviation": deviation}
        return {name: x.astype(np.float32) for name, x in made.items()}


@register_table_kind("joint_bases")
@dataclasses.dataclass(frozen=True)
class JointBases(Bases):
    """`Bases` of several heads together, by default all of a layer; of keys without rotation and of values alone."""

    heads: int = 0

    of: ClassVar[tuple[str, ...]] = ("bare_keys", "values")


def group_size(heads: int, spec: LayerSpec) -> int:
    """Heads in a group, where 0 stands for all of them; raises KvjaxError where they do not divide the layer."""
    size = spec.num_kv_heads if heads == 0 else heads
    if size < 1 or spec.num_kv_heads % size:
        raise KvjaxError(
            f"{heads} heads together do not divide the layer's {spec.num_kv_heads} key/value heads; use a number that "
            "does, or 0 for all of them"
        )
    return size


def group_heads(x: Array, heads: int, spec: LayerSpec) -> Array:
    """Concatenates the vectors x [B K S H] of neighboring heads: [B U S C].

    A group of several heads may lie on several devices, so every device then gets all groups of the layer.
    """
    size = group_size(heads, spec)
    if size == 1:
        return x
    every = over_heads.gather(x)
    B, K, S, H = every.shape
    return every.reshape(B, K // size, size, S, H).swapaxes(2, 3).reshape(B, K // size, S, size * H)


def sum_outer_products(x: Array) -> Array:
    """Sums the outer products of vectors x f32[B U S C] over S: f32[B U C C]."""
    return jnp.einsum("busc,busd->bucd", x, x, precision=lax.Precision.HIGHEST)
