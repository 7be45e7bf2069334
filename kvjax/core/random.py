"""Random numbers by index: the same for a token wherever it stands in a batch, on a device or in a chunk."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from kvjax.core.types import Array


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
