"""The different layers of a model under a method, and the arrays of their caches: traced, and not run."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax

from kvjax.cache.protocol import KVMethod, Needs
from kvjax.core import memory
from kvjax.core.mesh import axes_of_layer_array
from kvjax.core.step_bytes import StepBytes
from kvjax.engine.layer_prompt import LayerCall
from kvjax.engine.plan import bind
from kvjax.generation.inputs import round_up
from kvjax.generation.memory_plan import count_layers, count_step_bytes, trace_chunk, trace_prefill, trace_state_read
from kvjax.models.config import Config
from kvjax.models.kinds import LayerKind
from kvjax.planning.live_bytes import count_condition_bytes, count_live_bytes
from kvjax.utils import arguments

MAX_TRACED_LAYERS = 6
"""Different layers of one kind that are all traced; of more, four are, and the others are interpolated."""


class TracedLayer(NamedTuple):
    """Equal layers of a model under a method, of all devices together."""

    needs: Needs
    kind: LayerKind
    count: int  # layers that are like this
    slots: int
    # (memory kind, devices along the sequences and the heads that divide it, dtype, axes) -> bytes; of a layer that
    # reads another layer's cache, those of that cache
    arrays: Mapping[tuple[str, tuple[int, int], str, int], int]
    step: StepBytes
    # bytes of one device at the peak of making the state from keys and values, these among them, without the state; a
    # program that is given them, and cannot free them, makes as much: masked copies in another layout. Of a layer that
    # is fed a prompt in chunks of its own, those at the peak of taking one.
    making: int

    @property
    def has_cache(self) -> bool:
        """Whether the layer holds a cache, and does not read that of another layer."""
        return self.kind.attention.reads_layer is None

    def total_bytes(self) -> dict[str, int]:
        """Bytes of one layer on all devices together, by memory kind."""
        total = dict.fromkeys(memory.MEMORY_KINDS, 0)
        for (kind, *_), size in self.arrays.items():
            total[kind] += size
        return total

    def device_bytes(self) -> dict[str, int]:
        """Bytes of one layer on one device of the mesh, by memory kind."""
        total = dict.fromkeys(memory.MEMORY_KINDS, 0)
        for (kind, (along_sequences, along_heads), *_), size in self.arrays.items():
            total[kind] += size // (along_sequences * along_heads)
        return total

    def read_bytes(self) -> tuple[float, float]:
        """Bytes of one layer that a step reads on one device: from its memory, and over the host's link."""
        # Each device reads what all heads share. How much that adds is known of the arrays as a whole alone.
        total, part = self.total_bytes(), self.device_bytes()
        device, host = (part[kind] / max(total[kind], 1) for kind in memory.MEMORY_KINDS)
        return self.step.device * device, self.step.link * host


bind_once = functools.lru_cache(maxsize=64)(bind)  # the same layers at every context and batch; 80 of them take a while


@functools.lru_cache(maxsize=512)
def trace_layers(
    method: KVMethod, config: Config, context: int, room: int, batch: int, dtype: str, mesh: tuple[int, int]
) -> tuple[TracedLayer, ...]:
    """Traces the states of all different layers after prompts of `context` tokens."""
    capacity, width = context + room, round_up(context)
    counts = count_layers(bind_once(method, config), config, context, capacity)

    @functools.cache
    def trace(call: LayerCall) -> TracedLayer:
        assert call.kind is not None
        state = trace_state_read(call, config, min(width, capacity), batch, arguments.float_type(dtype))
        arrays = collections.Counter()
        for x in jax.tree.leaves(state):
            kv_heads = call.kind.attention.kv_heads
            axes = axes_of_layer_array(x.shape, batch, kv_heads).split() if mesh != (1, 1) else ()
            parts = (mesh[0] if "B" in axes else 1, mesh[1] if "K" in axes else 1)
            arrays[memory.memory_kind(x), parts, x.dtype.name, len(x.shape)] += x.size * x.dtype.itemsize
        step, making = count_step_bytes(call.layer, state), 0
        if call.layer.needs.prompt_chunk:
            chunk = trace_chunk(call, config, min(width, capacity), batch, arguments.float_type(dtype))
            making = (count_live_bytes(chunk) + count_condition_bytes(chunk)) // (mesh[0] * mesh[1])
        elif call.kind.attention.stored_numbers:
            traced, _ = trace_prefill(call, config, min(width, capacity), batch, arguments.float_type(dtype))
            making = count_live_bytes(traced.jaxpr, 2) // (mesh[0] * mesh[1])  # keys and values come first
        return TracedLayer(call.layer.needs, call.kind, counts[call], call.num_slots, arrays, step, making)

    found = {}
    for kind in dict.fromkeys(call.kind for call in counts):
        ordered = sorted((call for call in counts if call.kind == kind), key=lambda call: call.num_slots)
        low, high, last = trace(ordered[0]), trace(ordered[-1]), len(ordered) - 1
        # PyramidKV gives each layer slots of its own, and tracing all takes seconds: where four layers lie on one line
        # in every number, the others do.
        are_on_line = last >= MAX_TRACED_LAYERS and all(
            interpolate(low, high, x.slots, x.count) == x._replace(making=max(low.making, high.making))
            for x in (trace(ordered[i]) for i in (last // 3, 2 * last // 3))
        )
        for call in ordered:
            on_line = interpolate(low, high, call.num_slots, counts[call]) if are_on_line else None
            found[call] = on_line or trace(call)
    return tuple(found[call] for call in counts)


def interpolate(low: TracedLayer, high: TracedLayer, slots: int, count: int) -> TracedLayer | None:
    """Returns the layer with `slots` slots on the line through two others; None where a number would be no integer."""

    def at_slots(a: int, b: int) -> int:
        value, rest = divmod((b - a) * (slots - low.slots), high.slots - low.slots)
        if rest:
            raise ValueError
        return a + value

    if low.slots == high.slots or low.needs != high.needs or low.arrays.keys() != high.arrays.keys():
        return None
    try:
        arrays = collections.Counter({key: at_slots(low.arrays[key], high.arrays[key]) for key in low.arrays})
        step = StepBytes(*map(at_slots, dataclasses.astuple(low.step), dataclasses.astuple(high.step)))
    except ValueError:
        return None
    return TracedLayer(low.needs, low.kind, count, slots, arrays, step, max(low.making, high.making))
