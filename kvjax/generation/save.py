"""Saving a cache to one file, and reading it back: NumPy arrays, and a JSON header.

The file does not store the structure of the cache. It is the structure of the state that the method makes of a prompt,
recovered by tracing the method, so that no file names a class.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvjax.cache.protocol import BudgetedLayer, Cache, KVMethod, num_layer_slots
from kvjax.cache.shared_prefix import SharedPrefixLayer, SharedPrefixState
from kvjax.core import memory
from kvjax.core.mesh import axes_of_layer_array
from kvjax.core.types import Array
from kvjax.engine.forward import layer_calls
from kvjax.engine.layer_prompt import LayerCall
from kvjax.engine.plan import bind
from kvjax.errors import KvjaxError
from kvjax.generation import archive
from kvjax.generation.inputs import BUCKET_TOKENS, place
from kvjax.generation.memory_plan import abstract_state
from kvjax.models.model import Model
from kvjax.registry.method_hash import has_user_code, method_hash
from kvjax.registry.strings import method_of, name_of, split_methods

FORMAT = archive.Format("kvjax-context", 3, {"method": str, "code": str, "capacity": int, "layers": int})


def write(path: str | Path, model: Model, method: KVMethod, cache: Cache, last: Array) -> Path:
    """Writes a cache and the logits of its last tokens, whole or not at all; returns the path."""
    arrays = {"last": last, "length": cache.length}
    for i, layer in enumerate(cache.layers):
        arrays |= {f"layer {i}, {j}": x for j, x in enumerate(jax.tree.leaves(memory.without_guards(layer)))}
    header = {"method": name_of(method), "code": _code_of(method)}
    header |= {"capacity": cache.capacity, "layers": len(cache.layers)}
    return archive.write(path, FORMAT, model.with_config(cache.config), header, arrays)


def read(path: str | Path, model: Model, method: str | KVMethod | None) -> tuple[KVMethod, Cache, Array]:
    """Reads the method, the cache, and the logits f32[B V] of its last tokens; raises as `kvjax.resume` does."""
    header, arrays = archive.read(path, FORMAT, model)
    model = archive.writer_of(model, header)
    name, capacity, batch, problem = header["method"], header["capacity"], arrays["length"].shape[0], None
    layers, trees, plan = [], [], ()
    # The methods of kvjax are recognized by their value, a user's own by its name.
    expected = None if split_methods(name) == () else method_of(name)
    method = expected if method is None else method_of(method)
    if method is None:
        problem = (
            f"{path} was saved under {name}, which no string makes; pass it as method=, or load the file that defines "
            "it first (kvjax.method_api.load_methods)"
        )
    elif (name_of(method) != name) if expected is None else (method != expected):
        problem = f"{path} was saved under {name} and not under {name_of(method)}; leave `method` out"
    else:
        plan = bind(method, model.config)
        layers = [{key: x for key, x in arrays.items() if key.startswith(f"layer {i}, ")} for i in range(len(plan))]
        for call, leaves in zip(layer_calls(plan, model.config), layers, strict=True):
            candidates = _candidate_trees(call, model, batch, capacity, list(leaves.values()))
            trees.append(next((tree for tree in candidates if tree.num_leaves == len(leaves)), None))
        if any(tree is None for tree in trees) or header["code"] != _code_of(method):
            problem = f"{path} was saved under {name} when its code or values were others; read the documents again"
    if method is None or problem is not None:
        raise KvjaxError(problem)
    states = []
    for i, (tree, leaves) in enumerate(zip(trees, layers, strict=True)):
        placed, heads = [], model.config.kind(i).attention.kv_heads
        for key, x in leaves.items():
            axes = "" if model.mesh is None else axes_of_layer_array(x.shape, batch, heads)
            x = place(model, x, axes)
            placed.append(jax.device_put(x, memory.HOST) if header["arrays"][key]["host"] else x)
        states.append(memory.map_buffers(memory.with_guard, jax.tree.unflatten(tree, placed)))
    last, length = place(model, arrays["last"], "B"), place(model, arrays["length"], "B")
    cache = Cache(tuple(states), length, capacity, plan, model.config, model.dtype.name, model.fingerprint)
    return method, cache, last


def _code_of(method: KVMethod) -> str:
    """Hashes a user's own method; empty for the methods of kvjax, which their strings identify."""
    return method_hash(method) if has_user_code(method) else ""


def _candidate_trees(
    call: LayerCall, model: Model, batch: int | None, capacity: int, arrays: Sequence[np.ndarray]
) -> Iterator[Any]:
    """Yields tree structures of a layer's state, of `batch` sequences if known, that fit the first of the arrays."""
    layer, kind = call.layer, call.kind
    assert kind is not None
    if isinstance(layer, SharedPrefixLayer):
        prefix, own = (dataclasses.replace(call, layer=part) for part in layer.parts)
        capacity = max([capacity, *(x.shape[2] for x in arrays if x.ndim > 2)])  # a prefix may have had a larger one
        for prefix_tree in _candidate_trees(prefix, model, None, capacity, arrays):
            rest = arrays[prefix_tree.num_leaves :]
            for own_tree in _candidate_trees(own, model, batch, capacity, rest):
                states = (
                    prefix_tree.unflatten(arrays[: prefix_tree.num_leaves]),
                    own_tree.unflatten(rest[: own_tree.num_leaves]),
                )
                leaf: Any = 0
                for members in (None, leaf):
                    yield jax.tree.structure(SharedPrefixState(*states, before=leaf, members=members))
        return
    batches = dict.fromkeys(map(len, arrays)) if batch is None else (batch,)
    layers = [layer]
    if isinstance(layer, BudgetedLayer) and layer.needs.global_budget:
        # The layer's part of the budget depended on the prompts; one of the arrays has as many slots.
        layers += [layer.resize(n, 0)[0] for n in dict.fromkeys(x.shape[2] for x in arrays if x.ndim > 2)]
    # The header does not say how long the prompts were nor how many slots there are: candidates, likelier ones first.
    # The state of most methods depends on the slots alone.
    prompts = (capacity, *range(BUCKET_TOKENS, capacity, BUCKET_TOKENS))
    slots = [x.shape[2] for x in arrays if x.ndim > 2 and x.shape[1] in (1, kind.attention.kv_heads)]
    slots += [num_layer_slots(layer, (n,), capacity) for n in prompts]
    slots = list(dict.fromkeys(n for n in slots if 0 < n <= capacity))
    sizes = [*((n, n) for n in slots), *itertools.product(prompts, slots)]
    for candidate, (prompt, num_slots), count in itertools.product(layers, sizes, batches):
        with contextlib.suppress(ValueError, TypeError):  # sizes that the method cannot have
            candidate_call = dataclasses.replace(call, layer=candidate, num_slots=num_slots)
            leaves, tree = abstract_state(candidate_call, model.config, prompt, count, model.dtype)
            if [(x.shape, x.dtype) for x in leaves] == [(x.shape, x.dtype) for x in arrays[: len(leaves)]]:
                yield tree
                return
