"""Where parameters and states live on a mesh: axis letters -> mesh axes."""

from __future__ import annotations

import flax.linen as nn
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax.core.types import Array, KvjaxError
from kvjax.models.config import Config
from kvjax.models.decoder import init

RULES = {"B": "data", "K": "model", "F": "model", "V": "model"}
"""Batch rows over `data`; key/value heads, MLP width and vocabulary over `model`."""


def spec(axes: str, mesh: Mesh) -> PartitionSpec:
    """Axis letters -> partition spec on a mesh; a mesh without the named axis leaves the letter unsharded."""
    named = [RULES.get(a) for a in axes.split()]
    return PartitionSpec(*(a if a in mesh.axis_names else None for a in named))


def named(axes: str, mesh: Mesh) -> NamedSharding:
    """Axis letters -> sharding on a mesh."""
    return NamedSharding(mesh, spec(axes, mesh))


def constrain(x: Array, axes: str, mesh: Mesh | None) -> Array:
    """Inside jit: x laid out by its axis letters; without a mesh, x."""
    return x if mesh is None else jax.lax.with_sharding_constraint(x, named(axes, mesh))


def abstract_params(config: Config, dtype) -> dict:
    """Shapes and axis letters of all parameters, without making any."""
    return jax.eval_shape(lambda: init(config, jax.random.key(0), dtype))


def param_shardings(config: Config, mesh: Mesh) -> dict:
    """A NamedSharding per parameter; raises when an axis does not divide."""
    for letter, size in (("K", config.kv_heads), ("F", config.mlp_width), ("V", config.vocab_size)):
        ways = mesh.shape.get(RULES[letter], 1)
        if size % ways:
            raise KvjaxError(
                f"axis {letter} of size {size} does not divide over the {ways} devices of mesh axis "
                f"{RULES[letter]!r}; use a mesh axis that divides kv_heads, mlp_width and vocab_size"
            )
    axes = nn.get_partition_spec(abstract_params(config, "float32"))
    return jax.tree.map(lambda p: named(" ".join(p), mesh), axes, is_leaf=lambda x: isinstance(x, PartitionSpec))
