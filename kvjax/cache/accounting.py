"""Bytes and kept tokens, read off the cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.protocol import BoundLayer, Cache, SizedLayer
from kvjax.core import memory

KINDS = ("device", "pinned_host")


@dataclasses.dataclass(frozen=True)
class CacheBytes:
    """Bytes of a KV cache, by memory kind: "device" and "pinned_host".

    Attributes:
      held: bytes that the tokens of the cache take. It is what the same cache would take if every sequence had exactly
        as many slots as it has tokens: codes, scales, positions, indices and residual windows included.
      reserved: bytes of slots that no token fills yet: room for tokens to come, and padding of shorter sequences.
        `held` and `reserved` together are the bytes of the arrays.
      full: bytes that the exact cache (`full`) of the same tokens holds, in the dtype of the model.
      dtype: the dtype of the model, in which `full` is counted.
    """

    held: Mapping[str, int]
    reserved: Mapping[str, int]
    full: int
    dtype: str

    @property
    def total(self) -> dict[str, int]:
        """Bytes of all arrays, by memory kind: what is held, and what is reserved."""
        return {kind: self.held[kind] + self.reserved[kind] for kind in KINDS}

    @property
    def fraction_of_full(self) -> float:
        """What the device holds, as a fraction of the exact cache of the same tokens in the model's dtype."""
        return self.held["device"] / self.full if self.full else 0.0

    @property
    def host_fraction_of_full(self) -> float:
        """What host memory holds, as a fraction of the exact cache of the same tokens in the model's dtype."""
        return self.held["pinned_host"] / self.full if self.full else 0.0

    def __str__(self) -> str:
        held, reserved = self.held, sum(self.reserved.values())
        text = f"{held['device']:,} bytes held ({self.fraction_of_full:.1%} of the exact {self.dtype} cache)"
        if held["pinned_host"]:
            text += f" and {held['pinned_host']:,} on the host ({self.host_fraction_of_full:.1%})"
        return text + (f", {reserved:,} reserved" if reserved else "")

    def to_json(self) -> dict[str, Any]:
        """All fields, and both fractions."""
        fractions = {"fraction_of_full": self.fraction_of_full, "host_fraction_of_full": self.host_fraction_of_full}
        return dataclasses.asdict(self) | fractions

    def __add__(self, other: CacheBytes) -> CacheBytes:
        """The bytes of two caches, of models in one dtype."""
        held, reserved = (
            {kind: mine[kind] + theirs[kind] for kind in KINDS}
            for mine, theirs in ((self.held, other.held), (self.reserved, other.reserved))
        )
        return CacheBytes(held, reserved, self.full + other.full, self.dtype)

    def per_sequence(self, count: int) -> CacheBytes:
        """The mean of a batch of `count` sequences, rounded down."""
        held, reserved = ({kind: part[kind] // count for kind in KINDS} for part in (self.held, self.reserved))
        return CacheBytes(held, reserved, self.full // count, self.dtype)


def array_bytes(tree: Any) -> dict[str, int]:
    """Bytes of a pytree of arrays or typed abstract values, by memory kind."""
    total: dict[str, int] = dict.fromkeys(KINDS, 0)
    for x in jax.tree.leaves(tree):
        total[memory.memory_kind(x)] += x.size * x.dtype.itemsize
    return total


def state_bytes(cache: Cache) -> CacheBytes:
    """Counts the bytes of a cache, read off its arrays.

    Args:
      cache: as `kvjax.prefill` and `kvjax.extend` return it.

    Returns:
      The bytes of its tokens, those of the room behind them, and what an exact cache of these tokens takes.

    Raises:
      KvjaxError: the cache was used up by an answer that did not copy it.
    """
    cache.check_whole()
    total, empty = array_bytes(cache), array_bytes(())
    for layer, state in zip(cache.plan, cache.layers, strict=True):
        # A layer that is no `kvjax.Method` need not tell: all its arrays then count as held.
        if isinstance(layer, SizedLayer):
            for kind, size in layer.empty_bytes(state, cache.dtype).items():
                empty[kind] += size
    held = {kind: total[kind] - empty[kind] for kind in KINDS}
    full = full_bytes(cache.config, np.asarray(cache.length).tolist(), cache.dtype)
    return CacheBytes(held, empty, full, cache.dtype)


def full_bytes(config: Any, lengths: Sequence[int], dtype: Any) -> int:
    """Bytes that the exact cache holds of sequences of these lengths: keys, values, positions and lengths."""
    per_token = 2 * config.kv_heads * config.head_dim * jnp.dtype(dtype).itemsize + 4
    return sum(config.layers * (length * per_token + 4) + 4 for length in lengths)


def kept_positions(cache: Cache) -> list[list[list[np.ndarray]]]:
    """[layer][row][key/value head]: the positions, ascending, of the tokens whose keys and values the cache holds."""
    cache.check_whole()

    def of_layer(layer: BoundLayer, state: Any) -> list[list[np.ndarray]]:
        pos = np.asarray(layer.positions(state))
        pos = np.broadcast_to(pos, (pos.shape[0], cache.config.kv_heads, pos.shape[2]))
        return [[np.sort(head[head >= 0]) for head in row] for row in pos]

    return [of_layer(layer, state) for layer, state in zip(cache.plan, cache.layers, strict=True)]
