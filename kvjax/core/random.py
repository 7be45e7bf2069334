"""Random numbers by index: the same for a token wherever it stands in a batch, on a device or in a chunk."""

from __future__ import annotations

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.core.types import Array
from kvjax.errors import KvjaxError


def key_from_seed(seed: int) -> Array:
    """The key of a seed of up to 64 bits; `jax.random.key` drops all but 32 of them, and gives the same key for these.

    Raises KvjaxError for anything else.
    """
    high, low = divmod(check_seed(seed), 2**32)
    key = jax.random.key(np.uint32(low))
    return jax.random.fold_in(key, np.uint32(high)) if high else key


def check_seed(seed: Any) -> int:
    """A seed as an int; raises KvjaxError unless it is an integer of up to 64 bits."""
    if not isinstance(seed, numbers.Integral) or isinstance(seed, bool) or not 0 <= int(seed) < 2**64:
        raise KvjaxError(f"seed must be an integer from 0 to 2**64 - 1, got {seed!r:.60}")
    return int(seed)


def draw(seed: int, *index: Array) -> Array:
    """Random uint32 of the indices' shape; each depends on the seed and its own indices, and on nothing else.

    A chain of hashes (MurmurHash3's finaliser): for given first indices, different last ones never draw alike.
    """
    x = jnp.full(index[0].shape, np.uint32(seed % 2**32))
    for i in index:
        x = _hash(_hash(x) ^ i.astype(jnp.uint32))
    return x


def _hash(x: Array) -> Array:
    x = (x + np.uint32(0x9E3779B9)).astype(jnp.uint32)
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
