"""Parts that the adapters share: caches during a forward pass, and the check that a layer is the one they expect."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp

from kvjax import custom_decoder
from kvjax.cache.protocol import LayerSpec
from kvjax.core.mesh import to_numpy
from kvjax.core.rope import Rope, RopeScaling
from kvjax.core.types import Array
from kvjax.errors import KvjaxError

GIVES = ("hidden", "output_projection", "cross_layer", "finish", "repeat")
"""Names for `custom_decoder.attach` of what the adapters give to methods."""

PROBE_TOKENS = 6
PROBE_CAPACITY = 64


class ForwardPass:
    """The caches of a model's layers during one forward pass, and what its layers share.

    It is no pytree and is changed in place: it lives only while the package's model is traced.
    """

    def __init__(self, layers: dict[int, Any], positions: Array):
        self.layers = dict(layers)  # each layer replaces its cache
        self.positions = positions  # i32[B T], -1 for padding
        self.cross_layer = None


@dataclasses.dataclass
class CacheHandle:
    """Stands for a layer's cache: the package's model hands it to the layer in place of the package's own cache."""

    forward_pass: ForwardPass
    index: int

    def attend(self, q: Array, k: Array, v: Array, hidden: Array, output_projection: Array) -> Array:
        """Attends [B T N H] to this layer's cache, which then holds the new tokens; returns [B T N V]."""
        forward_pass = self.forward_pass
        out, forward_pass.layers[self.index], forward_pass.cross_layer = custom_decoder.attend(
            forward_pass.layers[self.index],
            q,
            k,
            v,
            forward_pass.positions,
            hidden=hidden,
            output_projection=output_projection,
            cross_layer=forward_pass.cross_layer,
        )
        return out


def make_rope(head_dim: int, theta: float, divisor: float) -> Rope:
    """Makes the rotation of all channels of a head, at positions that are divided by `divisor`."""
    return Rope(head_dim, float(theta), None if divisor == 1 else RopeScaling("linear", float(divisor)))


def installed_version(package: str) -> str:
    """Returns the version of an installed package; a package that is only on the path has none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of unknown version"


def check_layer(
    spec: LayerSpec,
    run: Callable[[CacheHandle | None, Array, Array, Array], Array],
    *,
    package: str,
    tested: str,
    width: int,
    dtype: Any,
) -> None:
    """Compares a layer of a package with the adapter's reading of it, on random numbers.

    An adapter repeats the package's projections line by line. A version that adds a bias, a norm or another rotation
    would otherwise change the answers without any error.

    Args:
      spec: of the layer.
      run: the layer's attention, (cache, x [1 T D], positions [1 T], mask [1 T T]) -> [1 T D]. Without a cache it is
        the package's own, with a handle that of the adapter.
      package: the package's name.
      tested: the version of it that the adapter's tests run.
      width: D of the layer's input.
      dtype: of the layer's weights.
    """
    x = jax.random.normal(jax.random.key(0), (1, PROBE_TOKENS, width)).astype(dtype)
    positions = jnp.arange(PROBE_TOKENS, dtype=jnp.int32)[None]
    mask = jnp.tril(jnp.ones((1, PROBE_TOKENS, PROBE_TOKENS), bool))
    only_layer = dataclasses.replace(spec, index=0, num_layers=1, method_layers=None)
    handle = CacheHandle(
        ForwardPass(custom_decoder.attach("full", [only_layer], capacity=PROBE_CAPACITY), positions), 0
    )
    problem = ""
    try:
        want = run(None, x, positions, mask).astype(jnp.float32)
        got = run(handle, x, positions, mask).astype(jnp.float32)
        error = to_numpy(jnp.abs(got - want).max() / jnp.maximum(jnp.abs(want).max(), 1e-30)).item()
        limit = 1e-3 if jnp.finfo(dtype).bits >= 32 else 0.1
        if not error <= limit:
            problem = f"the outputs of layer {spec.index} differ by {error:.1e} of the largest"
    except KvjaxError:
        raise
    except (AttributeError, TypeError, ValueError) as e:
        problem = f"layer {spec.index} could not be run: {type(e).__name__}: {e}"
    if problem:
        raise KvjaxError(
            f"{package} {installed_version(package)} computes attention in another way than this adapter expects: "
            f"{problem}; it is tested with {package} {tested}: pip install '{package}=={tested}'"
        )
