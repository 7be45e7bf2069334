"""Counts the bytes of a cache that a traced decode step reads: an oracle for `read_bytes` that knows no method.

The step of each layer is traced at abstract shapes and its jaxpr is walked. An array of the state, or a view of it
(reshaped, transposed, sliced, written in place), is read when an operation computes with it. A gather reads what it
takes, everything else the whole view, a loop's body as often as it runs; a branch that is rarely taken counts nothing.
From device memory each array counts once at most. XLA's own count cannot be used so: it has loops once, and adds what
the step writes and reads of its own intermediates, such as logits and dequantized tiles.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from kvjax.cache.protocol import num_layer_slots
from kvjax.core import memory
from kvjax.core.step_bytes import StepBytes
from kvjax.core.types import KVBlock
from kvjax.engine.forward import layer_calls
from kvjax.engine.layer_prompt import LayerCall
from kvjax.engine.plan import bind
from kvjax.generation.memory_plan import abstract_state
from kvjax.models.config import Config

VIEWS = set(
    "reshape squeeze transpose bitcast_convert_type copy broadcast_in_dim rev pvary sharding_constraint".split()
)
PARTS = {"slice", "dynamic_slice", "split"}
WRITES = {"scatter", "scatter-add", "dynamic_update_slice"}  # in place


@dataclasses.dataclass(frozen=True)
class View:
    """An array of the state, or a part of it."""

    array: int
    nbytes: int
    host: bool


class Reads:
    """What has been read so far, by array of the state."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.device: collections.Counter[int] = collections.Counter()
        self.link = self.host = 0

    def total(self) -> StepBytes:
        device = sum(min(count, self.sizes[array]) for array, count in self.device.items())
        return StepBytes(device=device, link=self.link, host=self.host)

    def copy_counts(self) -> tuple[Any, int, int]:
        return collections.Counter(self.device), self.link, self.host

    def restore(self, counts: tuple[Any, int, int]) -> None:
        self.device, self.link, self.host = collections.Counter(counts[0]), *counts[1:]


def nbytes(aval: Any) -> int:
    return int(np.prod(aval.shape)) * aval.dtype.itemsize if hasattr(aval, "dtype") else 0


def is_host(aval: Any) -> bool:
    return getattr(aval, "memory_space", None) == memory.HOST


def walk(jaxpr: Any, inputs: list[View | None], reads: Reads, times: int = 1, on_host: bool = False) -> list:
    """Adds what a jaxpr reads of its inputs; returns its outputs, those that are views as such."""
    env: dict[Any, View | None] = dict(zip(jaxpr.invars, inputs, strict=True))
    seen: set[Any] = set()

    def look(atom: Any) -> View | None:
        return None if isinstance(atom, jex.Literal) else env.get(atom)

    def read(atom: Any, size: int | None = None) -> None:
        view = look(atom)
        if view is None or (size is None and atom in seen):
            return
        if size is None:
            seen.add(atom)
        size = times * (view.nbytes if size is None else size)
        if not view.host:
            reads.device[view.array] += size
        elif on_host:
            reads.host += size
        else:
            raise NotImplementedError("the device computes with an array in host memory")

    for eqn in jaxpr.eqns:
        name, operands = eqn.primitive.name, eqn.invars
        outs: list[View | None] = [None] * len(eqn.outvars)
        first = look(operands[0]) if operands else None
        views = [look(x) for x in operands]
        if not any(views):
            pass
        elif name in VIEWS:
            outs = [first]
        elif name == "optimization_barrier":
            outs = list(views)
        elif name == "device_put":
            outs = []
            for x, out in zip(operands, eqn.outvars, strict=True):
                view = look(x)
                if view is not None and view.host and not is_host(out.aval):
                    reads.link += times * nbytes(out.aval)
                    view = None
                elif view is not None and is_host(out.aval):
                    view = dataclasses.replace(view, host=True)
                outs.append(view)
        elif name in PARTS and first is not None:
            # Memory is read in lines, so that a slice with strides reads what it skips, too.
            skips = name == "slice" and eqn.params["strides"] is not None
            outs = [first if skips else dataclasses.replace(first, nbytes=nbytes(out.aval)) for out in eqn.outvars]
        elif name in WRITES and first is not None:
            for x in operands[1:]:
                read(x)
            outs = [first]
        elif name == "gather" and first is not None:
            if not first.host:
                read(operands[0], nbytes(eqn.outvars[0].aval))
            for x in operands[1:]:
                read(x)
        elif name == "cond":
            outs = _walk_branches(eqn, [look(x) for x in operands[1:]], reads, times, on_host)
        elif name == "scan":
            outs = _walk_scan(eqn, views, reads, times, on_host)
        elif name == "while":
            outs = _walk_while(eqn, views, reads, times, on_host)
        elif (inner := _inner_jaxpr(eqn)) is not None:
            runs_on_host = on_host or eqn.params.get("compute_type") == "device_host"
            if len(inner.invars) != len(operands):
                raise NotImplementedError(f"{name}: {len(inner.invars)} inputs for {len(operands)}")
            outs = walk(inner, views, reads, times, runs_on_host)
            if runs_on_host and not on_host:
                reads.link += times * sum(nbytes(out.aval) for out in eqn.outvars)
                outs = [None] * len(outs)
        else:
            for x in operands:
                read(x)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [look(x) for x in jaxpr.outvars]


def _inner_jaxpr(eqn: Any) -> Any:
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if name in eqn.params:
            inner = eqn.params[name]
            return getattr(inner, "jaxpr", inner)
    return None


def _walk_branches(eqn: Any, views: list, reads: Reads, times: int, on_host: bool) -> list:
    before, results = reads.copy_counts(), []
    for branch in eqn.params["branches"]:
        reads.restore(before)
        outs = walk(branch.jaxpr, views, reads, times, on_host)
        total = reads.total()
        results.append((total.device + total.link + total.host, reads.copy_counts(), outs))
    _, counts, outs = min(results, key=lambda result: result[0])
    reads.restore(counts)
    every = zip(*(result[2] for result in results), strict=True)
    return [next((view for view in views if view is not None), None) for views in every]


def _scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
    """Returns how many of a scan's arguments are constants, and how many are its carry."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # since JAX 0.11
    return len(list(consts)), len(list(carry))


def _walk_scan(eqn: Any, views: list, reads: Reads, times: int, on_host: bool) -> list:
    p = eqn.params
    (consts, carry), length = _scan_sizes(p), p["length"]
    xs = [
        None if view is None else dataclasses.replace(view, nbytes=view.nbytes // length)
        for view in views[consts + carry :]
    ]
    outs = walk(_inner_jaxpr(eqn), [*views[: consts + carry], *xs], reads, times * length, on_host)
    return [*outs[:carry], *[None] * (len(outs) - carry)]


def _walk_while(eqn: Any, views: list, reads: Reads, times: int, on_host: bool) -> list:
    p = eqn.params
    cond, body = p["cond_nconsts"], p["body_nconsts"]
    walk(p["cond_jaxpr"].jaxpr, [*views[:cond], *views[cond + body :]], reads, times, on_host)
    return walk(p["body_jaxpr"].jaxpr, [*views[cond : cond + body], *views[cond + body :]], reads, times, on_host)


def count_reads(
    method: Any, config: Config, prompt: int, dtype: str, room: int = 16
) -> list[tuple[StepBytes, StepBytes]]:
    """For each layer of a model the bytes that a step of one token reads, as it says itself and as it was traced.

    The state is that after a prompt of one sequence, with room for some tokens.
    """
    results, cross_layer = [], None
    plan = bind(method, config)
    slots = tuple(num_layer_slots(layer, (prompt,), prompt + room) for layer in plan)
    for call in layer_calls(plan, config, slots):
        said, found, cross_layer = _count_layer(call, config, prompt, dtype, cross_layer)
        results.append((said, found))
    return results


@functools.lru_cache(maxsize=4096)
def _count_layer(
    call: LayerCall, config: Config, prompt: int, dtype: str, cross: Any
) -> tuple[StepBytes, StepBytes, Any]:
    layer: Any = call.layer
    arrays, tree = abstract_state(call, config, prompt, 1, jnp.dtype(dtype))
    from_below, cross_tree = ((), None) if cross is None else cross
    abstract: Any = jax.ShapeDtypeStruct
    tokens = 1 + layer.needs.draft_tokens
    assert call.kind is not None
    attention = call.kind.attention
    q = abstract((1, attention.kv_heads, attention.groups, tokens, attention.head_dim), dtype)
    k, v = (
        abstract((1, attention.kv_heads, tokens, width), dtype) for width in (attention.head_dim, attention.value_dim)
    )
    block = KVBlock(k, v, abstract((1, 1, tokens), jnp.int32))

    def step(leaves: list, below: list, q: Any, block: KVBlock) -> Any:
        # Abstract arguments lie on the device; these transfers, which the walk knows, say where the state lies.
        leaves = [jax.device_put(x, memory.HOST) if is_host(a) else x for x, a in zip(leaves, arrays, strict=True)]
        cross_layer = None if cross is None else jax.tree.unflatten(cross_tree, below)
        result = layer.extend(jax.tree.unflatten(tree, leaves), q, block, 1, cross_layer)
        return result.out, memory.without_guards(result.state), result.cross_layer

    shapes = [abstract(x.shape, x.dtype) for x in arrays]
    traced, out = jax.make_jaxpr(step, return_shape=True)(shapes, list(from_below), q, block)
    reads, inputs = Reads(), list[View | None]([None] * len(traced.jaxpr.invars))
    for i, x in enumerate((*arrays, *from_below)):
        reads.sizes[i], inputs[i] = nbytes(x), View(i, nbytes(x), False)
    walk(traced.jaxpr, inputs, reads)
    leaves, out_tree = jax.tree.flatten(out[2])
    above = (tuple(abstract(x.shape, x.dtype) for x in leaves), out_tree) if leaves else None
    return layer.step_bytes(jax.tree.unflatten(tree, arrays)), reads.total(), above
