"""What the adapters share: the layers of one pass, and the check that a layer computes what is read from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp

import kvjax
from kvjax.core.mesh import to_numpy
from kvjax.core.types import Array
from kvjax.errors import KvjaxError

PROBE_TOKENS = 6


class Pass:
    """One call of a package's model, as its layers share it: no pytree, since it lives while the call is traced."""

    def __init__(self, layers: dict[int, Any], positions: Array):
        self.layers = dict(layers)  # each layer replaces its cache
        self.positions = positions  # i32[B T], -1 for padding
        self.cross_layer = None


@dataclasses.dataclass
class LayerOfPass:
    """What a package's model hands to one of its layers as the cache of that layer."""

    current: Pass
    index: int

    def attend(self, q: Array, k: Array, v: Array, hidden: Array, output_projection: Array) -> Array:
        """Attends [B T N H] to this layer's cache, which then holds the new tokens; returns [B T N V]."""
        out, self.current.layers[self.index], self.current.cross_layer = kvjax.attend(
            self.current.layers[self.index],
            q,
            k,
            v,
            self.current.positions,
            hidden=hidden,
            output_projection=output_projection,
            cross_layer=self.current.cross_layer,
        )
        return out


GIVES = ("hidden", "output_projection", "cross_layer", "finish", "repeat")
"""What the adapters give to methods, see `kvjax.attach`."""

PROBE_CAPACITY = 64


def installed_version(package: str) -> str:
    """Returns the version of an installed package; a package that is only on the path has none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of unknown version"


def check_layer(
    name: str,
    package: str,
    tested: str,
    width: int,
    dtype: Any,
    run_own: Callable[[Array, Array, Array], Array],
    run_attached: Callable[[Array, Array, Array], Array],
) -> None:
    """Compares a layer of a package with the adapter's reading of it, on random numbers.

    An adapter repeats the package's projections line by line. A version that adds a bias, a norm or another rotation
    would
    otherwise change the answers without any error.

    Args:
      name: the layer, for messages.
      package: the package, and `tested` the versions that the adapter's tests run.
      width: D of the layer's input, and `dtype` that of its weights.
      run_own: the package's attention without a cache, (x [1 T D], positions [1 T], mask [1 T T]) -> [1 T D].
      run_attached: the same under the method `full`.
    """
    x = jax.random.normal(jax.random.key(0), (1, PROBE_TOKENS, width)).astype(dtype)
    positions = jnp.arange(PROBE_TOKENS, dtype=jnp.int32)[None]
    mask = jnp.tril(jnp.ones((1, PROBE_TOKENS, PROBE_TOKENS), bool))
    problem = ""
    try:
        want = run_own(x, positions, mask).astype(jnp.float32)
        got = run_attached(x, positions, mask).astype(jnp.float32)
        error = to_numpy(jnp.abs(got - want).max() / jnp.maximum(jnp.abs(want).max(), 1e-30)).item()
        limit = 1e-3 if jnp.finfo(dtype).bits >= 32 else 0.1
        if not error <= limit:
            problem = f"the outputs of {name} differ by {error:.1e} of the largest"
    except KvjaxError:
        raise
    except (AttributeError, TypeError, ValueError) as e:
        problem = f"{name} could not be run: {type(e).__name__}: {e}"
    if problem:
        raise KvjaxError(
            f"{package} {installed_version(package)} computes attention in another way than this adapter expects: "
            f"{problem}; "
            f"it is tested with {package} {tested}: pip install '{package}=={tested}'"
        )
