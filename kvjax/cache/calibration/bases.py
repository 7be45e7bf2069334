"""Calibrated bases: the directions in which keys and values vary most, of each head or of several together."""

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
    """The principal directions of each layer's keys, bare and rotated, and of its values, by falling variance.

    heads: so many neighbouring key/value heads have directions in common, in all of their channels; 1: each its own; 0:
    all of a layer. With U = K / heads such groups of C = heads * H channels, for each of `keys`, `bare_keys` and
    `values`: an array of its name f32[U C C], a direction a column, of which the first r are the best basis of rank r
    for what is left after the mean; `..._mean` f32[U C]; `..._deviation` f32[U C], the standard deviation along each.
    """

    heads: int = 1

    of: ClassVar[tuple[str, ...]] = ("keys", "bare_keys", "values")

    def count(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> dict[str, Any]:
        full = (block.pos >= 0)[..., None]
        bare = jnp.where(full, spec.rope.unrotate(block.k, block.pos), 0.0)
        rows = {"keys": block.k.astype(jnp.float32), "bare_keys": bare, "values": block.v.astype(jnp.float32)}
        groups = {name: group_heads(rows[name], self.heads, spec) for name in self.of}
        return {
            "tokens": full.sum(2, keepdims=True, dtype=jnp.float32),
            "sums": {name: x.sum(2, keepdims=True) for name, x in groups.items()},
            "products": {name: sum_outer_products(x) for name, x in groups.items()},
        }

    def arrays(self, counted: dict[str, Any], spec: LayerSpec) -> Mapping[str, np.ndarray]:
        made, tokens = {}, np.maximum(counted["tokens"], 1)
        for name in self.of:
            mean = counted["sums"][name] / tokens
            directions, variance = _principal(counted["products"][name] / tokens - mean.swapaxes(1, 2) * mean)
            made |= {name: directions, f"{name}_mean": mean[:, 0], f"{name}_deviation": np.sqrt(variance)}
        return {name: x.astype(np.float32) for name, x in made.items()}


@register_table_kind("joint_bases")
@dataclasses.dataclass(frozen=True)
class JointBases(Bases):
    """The same of several heads together, by default all of a layer; of bare keys and of values alone."""

    heads: int = 0

    of: ClassVar[tuple[str, ...]] = ("bare_keys", "values")


def group_size(heads: int, spec: LayerSpec) -> int:
    """How many heads are together, 0 standing for all of them; raises KvjaxError where they do not divide the layer."""
    size = spec.num_kv_heads if heads == 0 else heads
    if size < 1 or spec.num_kv_heads % size:
        raise KvjaxError(
            f"{heads} heads together do not divide the layer's {spec.num_kv_heads} key/value heads; use a number that "
            "does, or 0 for all of them"
        )
    return size


def group_heads(x: Array, heads: int, spec: LayerSpec) -> Array:
    """Rows x [B K S H] of this device's heads -> those of all groups of the layer, [B U S C], on every device."""
    size = group_size(heads, spec)
    if size == 1:
        return x
    every = over_heads.gather(x)
    B, K, S, H = every.shape
    return every.reshape(B, K // size, size, S, H).swapaxes(2, 3).reshape(B, K // size, S, size * H)


def sum_outer_products(x: Array) -> Array:
    """Rows x f32[B U S C] -> the sum of their outer products, f32[B U C C]."""
    return jnp.einsum("busc,busd->bucd", x, x, precision=lax.Precision.HIGHEST)


def _principal(moment: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Covariances f64[U C C] -> (eigenvectors as columns, eigenvalues [U C]), the greatest first."""
    values, vectors = np.linalg.eigh(moment)
    return vectors[..., ::-1], np.maximum(values[..., ::-1], 0)
