"""The placement of parameters on a mesh."""

from __future__ import annotations

import flax.linen as nn
import jax
from jax.sharding import Mesh, PartitionSpec

from kvjax.core.mesh import auto_mesh, check_divides, named_sharding
from kvjax.models.config import Config
from kvjax.models.decoder import init
from kvjax.models.quantized_params import quantize_boxes


def abstract_params(config: Config, dtype, weights: str | None = None) -> dict:
    """Returns the shapes and axis letters of all parameters, with kernels in codes if need be, without making any."""
    boxes = jax.eval_shape(lambda: init(config, jax.random.key(0), dtype))
    return boxes if weights is None else quantize_boxes(boxes, weights)


def divided_sizes(config: Config) -> list[tuple[str, int]]:
    """Returns the sizes that the devices along the heads must divide, in any layer, each with its axis letter."""
    sizes = [("K", kind.attention.kv_heads) for kind in config.kinds]
    sizes += [("F", kind.mlp.width) for kind in config.kinds]
    shared_widths = [kind.mlp.experts.shared_width for kind in config.kinds if kind.mlp.experts is not None]
    sizes += [("F", width) for width in shared_widths if width]
    return [*dict.fromkeys(sizes), ("V", config.vocab_size)]


def param_shardings(config: Config, mesh: Mesh, weights: str | None = None) -> dict:
    """Returns a NamedSharding for each parameter, with kernels in codes of the kind `weights` if it is given.

    Raises KvjaxError if an axis does not divide over the mesh.
    """
    auto_mesh(mesh)  # raises for one that divides nothing
    for letter, size in divided_sizes(config):
        check_divides(letter, size, mesh, "use a mesh axis that divides kv_heads, mlp_width and vocab_size")
    axes = nn.get_partition_spec(abstract_params(config, "float32", weights))
    return jax.tree.map(
        lambda p: named_sharding(" ".join(p), mesh), axes, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
