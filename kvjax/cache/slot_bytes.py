"""What so many slots of a layer take, by shapes alone: nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kvjax.core import memory
from kvjax.core.attention_mass import Observation
from kvjax.core.types import KVBlock

if TYPE_CHECKING:
    from kvjax.cache.bound_layer import MethodLayer

MOST_KNOWN = 65_536
"""Results that are remembered: every length of a text that grows is one for each distinct layer."""

_KNOWN: dict[Any, dict[str, int]] = {}


def slot_bytes(layer: MethodLayer, slots: int, dtype: str, filled: bool = False) -> dict[str, int]:
    """Bytes of what codecs and reader of a `MethodLayer` keep of one sequence with so many slots.

    Args:
      layer: a bound layer.
      slots: of the sequence.
      dtype: of the model's keys and values.
      filled: whether only what counts that tokens in all of these slots fill; otherwise all arrays.

    Returns:
      Bytes by memory kind, of one sequence and all its heads.
    """

    def keep(block: KVBlock, queries: Observation) -> Any:
        # A prompt that is fed through the method is stored before any query has been seen.
        observes = layer.needs.observes and not layer.needs.prompt_chunk
        k, v, reader_state = layer.stored(block, queries if observes else None)
        if not filled:
            return k, v, reader_state
        return layer.k.filled(k, slots), layer.v.filled(v, slots), layer.method.read.filled(reader_state, slots)

    def trace() -> Any:
        def array(*shape: int, of: Any = dtype) -> Any:  # abstract, where its users say Array
            return jax.ShapeDtypeStruct((1, *shape), of)

        spec, wanted = layer.spec, layer.needs.observed_queries
        asked = slots if wanted is None else wanted
        rows = array(spec.num_kv_heads, slots, spec.head_dim)
        q = array(spec.num_kv_heads, spec.num_groups, asked, spec.head_dim)
        block = KVBlock(rows, rows, array(1, slots, of=jnp.int32))
        return jax.make_jaxpr(keep)(block, Observation(q, array(asked, of=jnp.int32)))

    return remembered((layer, slots, dtype, filled), trace)


def bytes_beyond(store: Any, slots: int, used: Sequence[float]) -> dict[str, int]:
    """Bytes of what a store keeps beyond the first `used` slots of each sequence, by memory kind.

    Args:
      store: arrays of which those with an entry for each slot have the slots as axis 2; others count as used.
      slots: of each sequence and head.
      used: for each sequence of the batch, the slots that tokens fill: of each head, or their mean over the heads.
    """
    total = {"device": 0, "pinned_host": 0}
    for x in jax.tree.leaves(store):
        if x.shape[2:3] == (slots,):
            each = x.size * x.dtype.itemsize / (len(used) * slots)
            total[memory.memory_kind(x)] += sum(int(each * (slots - count)) for count in used)
    return total


def remembered(key: Any, trace: Callable[[], Any]) -> dict[str, int]:
    """Bytes of what a traced program returns, by memory kind; a program with an equal key is traced once."""
    if key not in _KNOWN:
        if len(_KNOWN) >= MOST_KNOWN:
            _KNOWN.clear()
        # `jax.eval_shape` would not tell in which memory an array lies.
        total = {"device": 0, "pinned_host": 0}
        for x in trace().out_avals:
            total[memory.memory_kind(x)] += x.size * x.dtype.itemsize
        _KNOWN[key] = total
    return _KNOWN[key]
