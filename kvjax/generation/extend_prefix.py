"""Documents read after a shared prefix that is stored once (Hydragen)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from kvjax.cache.protocol import Cache, num_layer_slots
from kvjax.cache.shared_prefix import SharedPrefixLayer, SharedPrefixMethod, sequences_by_prefix
from kvjax.core import memory
from kvjax.core.mesh import axes_of_layer_array, named_sharding, per_device, to_numpy
from kvjax.core.types import Array, pytree
from kvjax.engine.forward import embed, layer_calls, outer_params, run_layers
from kvjax.engine.layer_prompt import LayerCall, LayerInputs, observed_block, prompt_of_inputs
from kvjax.engine.modes import ForwardMode
from kvjax.engine.plan import bind
from kvjax.engine.prefill import take_last
from kvjax.errors import KvjaxError
from kvjax.generation import user_warnings
from kvjax.generation.finite import check_logits
from kvjax.generation.inputs import check_cache, pad, place, round_up
from kvjax.generation.programs import Timer, target_for
from kvjax.models.model import Model


def read_after_prefix(
    model: Model,
    prefix: Cache,
    method: SharedPrefixMethod,
    ids: Sequence[Sequence[int]],
    *,
    of: Sequence[int] | None,
    headroom: int,
    timer: Timer,
) -> tuple[Array, Cache]:
    """Runs documents, lists of ids, after the sequences of a cache, the prefixes.

    On a mesh all documents follow sequence 0, and the cache has as many equal sequences as the mesh divides the batch
    into.

    Args:
      of: index of the prefix that each document follows, -1 for none; None for the only one.
      headroom: tokens per sequence that may follow.

    Returns:
      Logits of each document's last token f32[B V], and their cache.
    """
    model = model.with_config(check_cache(model, prefix).config)
    num_prefixes, mesh, plan = prefix.length.shape[0], model.auto_mesh, bind(method, model.config)
    followed = np.zeros(len(ids), np.int64) if of is None and num_prefixes == 1 else np.asarray(of)
    is_list = followed.shape == (len(ids),) and np.issubdtype(followed.dtype, np.integer)
    problem = None
    if not is_list or followed.min() < -1 or followed.max() >= num_prefixes:
        problem = (
            f"`of` names one of the sequences 0..{num_prefixes - 1} of the context for each of {len(ids)} documents, "
            f"or -1 for none, got {of!r:.80}"
        )
    elif mesh is not None and (followed != 0).any():
        problem = "on a mesh all documents share one prefix, sequence 0; read each group of them as a batch of its own"
    if problem is not None:
        raise KvjaxError(problem)
    before = np.where(followed >= 0, to_numpy(prefix.length)[np.maximum(followed, 0)], 0)
    lengths = np.array([len(row) for row in ids])
    capacity = round_up(int((before + lengths).max()) + headroom)
    own_capacity = capacity - int(before.min())  # the most tokens of its own that a sequence may grow to
    num_slots = tuple(num_layer_slots(layer, tuple(lengths.tolist()), own_capacity) for layer in plan)
    user_warnings.warn_of_positions(model, plan, int(before.max()), int(lengths.max()))
    tokens, _ = pad(ids, min(round_up(int(lengths.max())), own_capacity))
    is_single = (num_prefixes == 1 or mesh is not None) and (followed == 0).all()
    members = None if is_single else sequences_by_prefix(followed, num_prefixes)
    lengths, before = (place(model, x.astype(np.int32), "B") for x in (lengths, before))
    mode = PrefillAfterPrefix(lengths, before, members)
    target = target_for(model, tokens.size, in_place=False, num_logits=len(ids))

    def replicate_first(x: Array, heads: int) -> Array:
        assert mesh is not None
        first = jax.device_put(x, memory.DEVICE)[:1]
        # For a batch of 2, `axes_of_layer_array` takes one sequence for shared by all: only the heads are split.
        sharding = named_sharding(axes_of_layer_array(first.shape, 2, heads), mesh)
        kind = x.sharding.memory_kind
        return jax.device_put(first, sharding if kind is None else sharding.with_memory_kind(kind))

    states = prefix.layers
    if mesh is not None:
        heads = [model.config.kind(i).attention.kv_heads for i in range(len(states))]
        states = tuple(
            jax.tree.map(functools.partial(replicate_first, heads=n), state)
            for n, state in zip(heads, states, strict=True)
        )
    outer, calls = outer_params(model.auto_params), layer_calls(plan, model.config, num_slots)
    with timer.timed():
        hidden, angles, _ = embed(outer, place(model, tokens, "B T"), before, lengths, target=target)
        hidden, layers = run_layers(model.auto_params, hidden, angles, mode, calls, states, target=target)
        last = target.unembed(outer, take_last(hidden, lengths), target=target)
        length = before + lengths
        jax.block_until_ready((last, layers, length))
    cache = Cache(layers, length, capacity, plan, model.config, model.dtype.name, model.fingerprint)
    check_logits(model, last, what="document")
    return last, cache


@pytree
class PrefillAfterPrefix(ForwardMode):
    """Runs prompts after prefixes that many of them share (Hydragen), and compresses the prompts' own tokens."""

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
        prefill = functools.partial(layer.prefill_after_prefix, num_slots=call.num_slots)
        run = per_device(prefill, *inputs.q.shape[:2], mesh=mesh)
        out, state = run(state, self.prefix_lengths, self.members, inputs.q, block, observation, inputs.outside)
        return out, state, cross_layer
