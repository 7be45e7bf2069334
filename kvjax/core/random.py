"""Random numbers by index: a token draws the same one at any place in a batch, on a mesh or in a chunk."""

from __future__ import annotations

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, UInt32

from kvjax.core.types import Array
from kvjax.errors import KvjaxError


def key_from_seed(seed: int) -> Array:
    """Makes a random key of a seed of up to 64 bits; raises KvjaxError for anything else."""
    # `jax.random.key` drops all but 32 bits. A seed within 32 bits gives the key that it gives.
    high, low = divmod(check_seed(seed), 2**32)
    key = jax.random.key(np.uint32(low))
    return jax.random.fold_in(key, np.uint32(high)) if high else key


def check_seed(seed: Any) -> int:
    """Returns a seed as an int; raises KvjaxError unless it is an integer of up to 64 bits."""
    if not isinstance(seed, numbers.Integral) or isinstance(seed, bool) or not 0 <= int(seed) < 2**64:
        raise KvjaxError(f"seed must be an integer from 0 to 2**64 - 1, got {seed!r:.60}")
    return int(seed)


def draw(seed: int, *index: Int[Array, "..."]) -> UInt32[Array, "..."]:
    """Draws a number for each of the indices, broadcast; it depends on the seed and these indices alone.

    Different last indices never draw the same number where the other indices are equal: a hash is a bijection.
    """
    # `jax.random` draws whole arrays, in which a number depends on its place and on the array's size.
    x = jnp.full(index[0].shape, np.uint32(seed % 2**32))
    for i in index:
        x = _hash(_hash(x) ^ i.astype(jnp.uint32))
    return x


def _hash(x: UInt32[Array, "*rest"]) -> UInt32[Array, "*rest"]:
    """The finalizer of MurmurHash3."""
    # The golden ratio is added first, because the finalizer maps 0 to 0.
    x = (x + np.uint32(0x9E3779B9)).astype(jnp.uint32)
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
