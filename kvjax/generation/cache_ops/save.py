"""A cache in one file, and back: arrays as NumPy holds them, and what they are as JSON.

The file does not hold the cache's structure. It is that of the state which the method makes of a prompt, found again
by tracing the method, so that a file never names a class.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvjax.cache.protocol import BoundLayer, BudgetedLayer, Cache, KVMethod, num_layer_slots
from kvjax.cache.shared_prefix import SharedPrefixLayer, SharedPrefixState
from kvjax.core import memory
from kvjax.core.mesh import axes_of_layer_array
from kvjax.core.types import Array
from kvjax.engine.plan import bind
from kvjax.errors import KvjaxError
from kvjax.generation.cache_ops import archive
from kvjax.generation.inputs import BUCKET, place
from kvjax.generation.memory_plan import abstract_state
from kvjax.methods.method_hash import has_user_code, method_hash
from kvjax.methods.strings import method_of, name_of, split_methods
from kvjax.models.config import Config
from kvjax.models.model import Model

FORMAT = archive.Format("kvjax-context", 2, {"method": str, "code": str, "capacity": int, "layers": int})


def write(path: str | Path, model: Model, method: KVMethod, cache: Cache, last: Array) -> Path:
    """Writes the file, whole or not at all: it takes its place only when all of it is on disk."""
    arrays = {"last": last, "length": cache.length, **_by_name(cache.layers)}
    header = {"method": name_of(method), "code": _code(method)}
    header |= {"capacity": cache.capacity, "layers": len(cache.layers)}
    return archive.write(path, FORMAT, model, header, arrays)


def read(path: str | Path, model: Model, method: str | KVMethod | None) -> tuple[KVMethod, Cache, Array]:
    """(the method, the cache, the logits of each row's last token f32[B V]); raises as `kvjax.resume` does."""
    header, found = archive.read(path, FORMAT, model)
    method = _method(header["method"], method, path)
    if header["code"] != _code(method):
        raise KvjaxError(
            f"{path} was saved under {header['method']} when its code or values were others; read the documents again"
        )
    layers = _layers(model, method, header, found, path)
    last, length = place(model, found["last"], "B"), place(model, found["length"], "B")
    plan = bind(method, model.config)
    return (
        method,
        Cache(layers, length, header["capacity"], plan, model.config, model.dtype.name, model.fingerprint),
        last,
    )


def _code(method: KVMethod) -> str:
    """The identity of a method of one's own; nothing of kvjax's, which are known by their strings."""
    return method_hash(method) if has_user_code(method) else ""


def _by_name(layers: Sequence[Any]) -> dict[str, Array]:
    return {f"layer {i}, {j}": x for i, layer in enumerate(layers) for j, x in enumerate(jax.tree.leaves(layer))}


def _method(name: str, given: str | KVMethod | None, path: str | Path) -> KVMethod:
    """The method that the file names, or the given one, which must be that one."""
    known = split_methods(name) != ()
    if given is None:
        if not known:
            raise KvjaxError(
                f"{path} was saved under {name}, which no string makes; pass it as method=, or load the file that "
                "defines it first (kvjax.method_api.load_methods)"
            )
        return method_of(name)
    given = method_of(given)
    same = given == method_of(name) if known else name_of(given) == name
    if not same:
        raise KvjaxError(f"{path} was saved under {name} and not under {name_of(given)}; leave `method` out")
    return given


def _layers(
    model: Model, method: KVMethod, header: Mapping[str, Any], found: Mapping[str, np.ndarray], path: str | Path
) -> tuple[Any, ...]:
    plan, rows = bind(method, model.config), found["length"].shape[0]
    if len(plan) != header["layers"]:
        raise KvjaxError(f"{path} has {header['layers']} layers and the model has {len(plan)}; save it again")
    layers = []
    for i, layer in enumerate(plan):
        names = [name for name in found if name.startswith(f"layer {i}, ")]
        tree = _tree(layer, model, rows, header["capacity"], [found[name] for name in names])
        if tree is None:
            raise KvjaxError(
                f"{path} holds other arrays than {header['method']} makes in layer {i}: another version of the method "
                "wrote it; read the documents again"
            )
        placed = [_placed(model, found[name], rows, header["arrays"][name]["host"]) for name in names]
        layers.append(jax.tree.unflatten(tree, placed))
    return tuple(layers)


def _placed(model: Model, x: np.ndarray, rows: int, host: bool) -> Array:
    """An array of a layer on the model's devices, in the kind of memory that it came from."""
    axes = "" if model.mesh is None else axes_of_layer_array(x.shape, rows, model.config.kv_heads)
    there = place(model, x, axes)
    return jax.device_put(there, memory.HOST) if host else there


def _tree(layer: BoundLayer, model: Model, rows: int, capacity: int, arrays: Sequence[np.ndarray]) -> Any:
    """The structure of a layer's state that has these arrays; None where there is none."""
    found = _trees(layer, model, rows, capacity, arrays)
    return next((tree for tree in found if tree.num_leaves == len(arrays)), None)


def _trees(
    layer: BoundLayer, model: Model, rows: int | None, capacity: int, arrays: Sequence[np.ndarray]
) -> Iterator[Any]:
    """The structures that the first of these arrays may have, of so many rows if that is known."""
    if isinstance(layer, SharedPrefixLayer):
        yield from _shared_trees(layer, model, rows, capacity, arrays)
        return
    counts = dict.fromkeys(map(len, arrays)) if rows is None else (rows,)
    sizes = list(_sizes(layer, model.config, capacity, arrays))
    layers = [layer]
    if (
        isinstance(layer, BudgetedLayer) and layer.needs.global_budget
    ):  # what it keeps of the prompts has as many slots as one of the arrays
        layers += [layer.with_kept_slots(n) for n in dict.fromkeys(x.shape[2] for x in arrays if x.ndim > 2)]
    for here, (prompt, slots), count in itertools.product(layers, sizes, counts):
        with contextlib.suppress(ValueError, TypeError):  # sizes that the method cannot have
            made, tree = abstract_state(here, model.config, prompt, slots, count, model.dtype)
            if [(x.shape, x.dtype) for x in made] == [(x.shape, x.dtype) for x in arrays[: len(made)]]:
                yield tree
                return


def _shared_trees(
    layer: SharedPrefixLayer, model: Model, rows: int | None, capacity: int, arrays: Sequence[np.ndarray]
) -> Iterator[Any]:
    """Those of prefixes and of what rows have behind them."""
    prefix, own = layer.parts
    most = max([capacity, *(x.shape[2] for x in arrays if x.ndim > 2)])  # a prefix may have had more room
    for of_prefix in _trees(prefix, model, None, most, arrays):
        left = arrays[of_prefix.num_leaves :]
        for of_own in _trees(own, model, rows, most, left):
            held = of_prefix.unflatten(arrays[: of_prefix.num_leaves]), of_own.unflatten(left[: of_own.num_leaves])
            leaf: Any = 0
            for members in (None, leaf):
                yield jax.tree.structure(SharedPrefixState(*held, before=leaf, members=members))


def _sizes(layer: BoundLayer, config: Config, capacity: int, arrays: Sequence[np.ndarray]) -> Iterator[tuple[int, int]]:
    """(tokens of a prompt, slots) that may have led to a state, the likelier ones first."""
    usual = [num_layer_slots(layer, (n,), capacity) for n in (capacity, *range(BUCKET, capacity, BUCKET))]
    seen = [x.shape[2] for x in arrays if x.ndim > 2 and x.shape[1] in (1, config.kv_heads)]
    every = list(dict.fromkeys(n for n in (*seen, *usual) if 0 < n <= capacity))
    yield from ((slots, slots) for slots in every)  # what most methods hold depends on the slots alone
    yield from itertools.product((capacity, *range(BUCKET, capacity, BUCKET)), every)
