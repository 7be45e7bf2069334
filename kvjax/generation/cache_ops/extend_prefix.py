"""Documents read behind a context that is held once, whatever method holds what is their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from kvjax.cache.protocol import Cache, num_layer_slots
from kvjax.cache.shared_prefix import SharedPrefixLayer, SharedPrefixMethod, sequences_by_prefix
from kvjax.core import memory
from kvjax.core.attention_mass import Observation
from kvjax.core.mesh import axes_of_layer_array, named_sharding, per_device
from kvjax.core.types import Array, KVBlock, pytree
from kvjax.engine.forward import Target, embed, layer_calls, outer_params, run_layers
from kvjax.engine.layer_prompt import observed_block, prompt_of_inputs
from kvjax.engine.modes import ForwardMode, LayerCall, LayerInputs
from kvjax.engine.plan import bind
from kvjax.engine.prefill import take_last
from kvjax.errors import KvjaxError
from kvjax.generation.checks import check_cache
from kvjax.generation.compiled import compiled_for
from kvjax.generation.inputs import pad, place, round_up
from kvjax.generation.timing import Timer
from kvjax.models.model import Model


def read_after_prefix(
    model: Model,
    prefix: Cache,
    method: SharedPrefixMethod,
    ids: Sequence[Sequence[int]],
    of: Sequence[int] | None,
    room: int,
    timer: Timer,
) -> tuple[Array, Cache]:
    """Documents, lists of ids, behind the rows of a cache: (logits of each row's last token f32[B V], their cache).

    of: the row of the cache that each document follows, -1 for none; default row 0, the only one. On a mesh all follow
    row 0, and the cache has as many equal rows as the mesh divides rows among.
    """
    check_cache(model, prefix)
    which, plan = _chosen(prefix, len(ids), of), bind(method, model.config)
    shared = np.asarray(prefix.length)
    before = np.where(which >= 0, shared[np.maximum(which, 0)], 0)
    lengths = np.array([len(row) for row in ids])
    capacity = round_up(int((before + lengths).max()) + room)
    own = capacity - int(before.min())  # no row's own tokens are more
    num_slots = tuple(num_layer_slots(layer, tuple(lengths.tolist()), own) for layer in plan)
    tokens, _ = pad(ids, min(round_up(int(lengths.max())), own))
    one = (len(shared) == 1 or model.mesh is not None) and (which == 0).all()
    if model.mesh is not None and not one:
        raise KvjaxError("on a mesh all rows share one prefix, row 0; read each group of rows as a batch of its own")
    members = None if one else sequences_by_prefix(which, len(shared))
    lengths, before = (place(model, x.astype(np.int32), "B") for x in (lengths, before))
    mode, target = PrefillAfterPrefix(lengths, before, members), Target(model.config, model.mesh)
    compiled = compiled_for(model, tokens.size, in_place=False, logits_of=len(ids))
    states = prefix.layers if model.mesh is None else _first_row(prefix, model.mesh)
    outer = outer_params(model.params)
    with timer.timed():
        hidden, angles, _ = embed(outer, place(model, tokens, "B T"), before, lengths, target=target)
        calls = layer_calls(plan, model.config, num_slots)
        hidden, layers = run_layers(model.params, hidden, angles, mode, calls, states, target, compiled)
        last = compiled.unembed(outer, take_last(hidden, lengths), target=target)
        length = before + lengths
        jax.block_until_ready((last, layers, length))
    return last, Cache(layers, length, capacity, plan, model.config, model.dtype.name, model.fingerprint)


@pytree
class PrefillAfterPrefix(ForwardMode):
    """Runs prompts after prefixes that are held once for many prompts (Hydragen), and compresses what is their own."""

    lengths: Array  # i32[B], of the prompts without their prefixes
    prefix_lengths: Array  # i32[B]
    members: Array | None  # i32[P M], the prompts that follow each prefix, -1 unused; None: all follow the only one

    def attend(
        self, call: LayerCall, state: Any, inputs: LayerInputs, cross_layer: Any, mesh: Mesh | None
    ) -> tuple[Array, Any, Any]:
        layer = call.layer
        assert isinstance(layer, SharedPrefixLayer)
        prompt = prompt_of_inputs(layer, inputs, self.lengths)
        block, observation = observed_block(layer, prompt, self.lengths)

        def begin(
            prefix: Any, prefix_lengths: Array, members: Any, q: Array, block: KVBlock, observation: Observation | None
        ) -> Any:
            return layer.prefill_after_prefix(
                prefix, prefix_lengths, members, q, block, observation, num_slots=call.num_slots
            )

        run = per_device(begin, *inputs.q.shape[:2], mesh=mesh)
        out, state = run(state, self.prefix_lengths, self.members, inputs.q, block, observation)
        return out, state, cross_layer


def _chosen(prefix: Cache, count: int, of: Sequence[int] | None) -> np.ndarray:
    """The row of the prefix for each of so many documents."""
    rows = prefix.length.shape[0]
    if of is None:
        if rows != 1:
            raise KvjaxError(f"the context has {rows} rows; say with `of` which of them each document follows")
        return np.zeros(count, np.int64)
    which = np.asarray(of)
    if which.shape != (count,) or not np.issubdtype(which.dtype, np.integer):
        raise KvjaxError(f"`of` names one row of the context for each of {count} documents, got {of!r}")
    if which.min() < -1 or which.max() >= rows:
        raise KvjaxError(f"`of` names rows 0..{rows - 1} of the context, or -1 for none, got {of!r}")
    return which.astype(np.int64)


def _first_row(prefix: Cache, mesh: Mesh) -> tuple[Any, ...]:
    """Row 0 of a cache, on all devices along the rows."""

    def one(x: Array) -> Array:
        row = jax.device_put(x, memory.DEVICE)[:1]
        sharding = named_sharding(axes_of_layer_array(row.shape, 2, prefix.config.kv_heads), mesh)
        kind = x.sharding.memory_kind
        return jax.device_put(row, sharding if kind is None else sharding.with_memory_kind(kind))

    return jax.tree.map(one, prefix.layers)
