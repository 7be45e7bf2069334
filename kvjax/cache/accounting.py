"""Bytes and kept tokens of a cache, read off its arrays, or off their shapes alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax.cache.protocol import Cache, SizedLayer
from kvjax.cache.recurrent_layer import RecurrentLayer
from kvjax.core.explicit_axes import accepts_explicit_axes
from kvjax.core.memory import MEMORY_KINDS, array_bytes
from kvjax.core.mesh import to_numpy
from kvjax.utils.keywords import checks_keywords


@dataclasses.dataclass(frozen=True)
class CacheBytes:
    """Bytes of a KV cache, by memory kind: "device" and "pinned_host".

    Attributes:
      held: bytes that the tokens of the cache take. It is what the same cache would take if every sequence had exactly
        as many slots as it has tokens: codes, scales, positions, indices and residual windows included.
      reserved: bytes of slots that no token fills yet: headroom for tokens to come, padding of shorter sequences, and
        tokens that have left a layer's window.
        `held` and `reserved` together are the bytes of the arrays.
      full: bytes that the exact cache (`full`) of the same tokens holds, in the dtype of the model: in a layer with a
        sliding window those of its window.
      dtype: the dtype of the model, in which `full` is counted.
    """

    held: Mapping[str, int]
    reserved: Mapping[str, int]
    full: int
    dtype: str

    @property
    def total(self) -> dict[str, int]:
        """Bytes of all arrays, `held` and `reserved`, by memory kind."""
        return {kind: self.held[kind] + self.reserved[kind] for kind in MEMORY_KINDS}

    @property
    def fraction_of_full(self) -> float:
        """`held` on the device, as a fraction of the exact cache of the same tokens in the model's dtype."""
        return self.held["device"] / self.full if self.full else 0.0

    @property
    def host_fraction_of_full(self) -> float:
        """`held` in host memory, as a fraction of the exact cache of the same tokens in the model's dtype."""
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
            {kind: mine[kind] + theirs[kind] for kind in MEMORY_KINDS}
            for mine, theirs in ((self.held, other.held), (self.reserved, other.reserved))
        )
        return CacheBytes(held, reserved, self.full + other.full, self.dtype)

    def per_sequence(self, count: int) -> CacheBytes:
        """The mean of a batch of `count` sequences, rounded down."""
        held, reserved = ({kind: part[kind] // count for kind in MEMORY_KINDS} for part in (self.held, self.reserved))
        return CacheBytes(held, reserved, self.full // count, self.dtype)


@checks_keywords
@accepts_explicit_axes(lambda result, cache: result)
def state_bytes(cache: Cache) -> CacheBytes:
    """Counts the bytes of a cache, read off its arrays.

    Args:
      cache: as `kvjax.prefill` and `kvjax.extend` return it.

    Returns:
      The bytes of its tokens, those of the slots behind them, and what an exact cache of these tokens takes.

    Raises:
      KvjaxError: the cache was used up by an answer that did not copy it, or is traced (`TracedCall`).
    """
    cache.check_usable()
    total, empty = array_bytes(cache), array_bytes(())
    for layer, state in zip(cache.plan, cache.layers, strict=True):
        # A layer that is no `kvjax.Method` need not tell its empty slots: all its arrays then count as held.
        if isinstance(layer, SizedLayer):
            for kind, size in layer.empty_bytes(state, cache.dtype).items():
                empty[kind] += size
    held = {kind: total[kind] - empty[kind] for kind in MEMORY_KINDS}
    full = full_bytes(cache.config, to_numpy(cache.length).tolist(), cache.dtype)
    return CacheBytes(held, empty, full, cache.dtype)


def full_bytes(config: Any, lengths: Sequence[int], dtype: Any) -> int:
    """Bytes that the exact cache of sequences of these lengths holds: keys, values, positions and lengths.

    A layer with a sliding window holds the tokens of its window alone, and one with a recurrence its state.
    """
    # 4 bytes each for a sequence's length, a token's position, and the count of slots in use of each layer.
    total = 4 * len(lengths)
    for i in range(config.layers):
        attention = config.kind(i).attention
        if attention.reads_layer is not None:
            continue
        if attention.recurrence is not None:
            layer, itemsize = RecurrentLayer.of(attention), jnp.dtype(dtype).itemsize
            total += len(lengths) * layer.count_bytes(attention.kv_heads, itemsize)
            continue
        per_token = attention.stored_numbers * jnp.dtype(dtype).itemsize + 4
        for length in lengths:
            num_held = length if attention.rule.window is None else min(length, attention.rule.window)
            total += num_held * per_token + 4
    return total


@checks_keywords
@accepts_explicit_axes(lambda result, cache: result)
def kept_positions(cache: Cache) -> list[list[list[np.ndarray]]]:
    """[layer][sequence][key/value head]: the positions, ascending, of the tokens that the cache holds."""
    cache.check_usable()
    kept = []
    for i, (layer, state) in enumerate(zip(cache.plan, cache.layers, strict=True)):
        pos = to_numpy(layer.positions(state))
        # Heads that hold the same tokens have one row of positions in common.
        pos = np.broadcast_to(pos, (pos.shape[0], cache.config.kind(i).attention.kv_heads, pos.shape[2]))
        kept.append([[np.sort(head[head >= 0]) for head in heads] for heads in pos])
    return kept
