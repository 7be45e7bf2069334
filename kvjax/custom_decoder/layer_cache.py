"""Any method inside a decoder that is not kvjax's: the cache of one layer, and attention that reads and fills it.

The first call of a layer is its prompt, all further ones are steps: the state says which, so that it is static under
`jax.jit`. A prompt or a step runs the forward modes of `kvjax.engine` that kvjax's own decoder runs; there is no second
path. `docs/your_model.md` leads through it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, PartitionSpec

from kvjax.cache.protocol import BoundLayer, KVMethod, LayerSpec, num_layer_slots
from kvjax.core.attention import Rule
from kvjax.core.explicit_axes import accepts_explicit_axes, layer_specs, spec_of
from kvjax.core.mesh import auto_mesh, check_divides, named_sharding, to_numpy, vary
from kvjax.core.precision import computes_in_32_bits
from kvjax.core.rope import Rope
from kvjax.core.types import Array, pytree
from kvjax.engine.layer_prompt import LayerCall, LayerInputs, LayerPrompt, begin_prompt
from kvjax.engine.modes import ChunkedPrefill, Decode, ForwardMode, FullPrefill, PromptReplay
from kvjax.engine.plan import bind_specs
from kvjax.engine.positions import token_positions
from kvjax.engine.prefill import compress_prompts
from kvjax.engine.replay import ChunkCopy, ReplayPrompts, copy_chunks
from kvjax.errors import KvjaxError
from kvjax.utils import arguments
from kvjax.utils.keywords import checks_keywords
from kvjax.utils.mesh_context import keeps_callers_mesh

_WITHOUT_MESH = "leave mesh out of attach(..): the cache is then divided as q, k and v are"

LAYOUTS = "BTNH", "BNTH"
"""Orders of the axes of queries: sequences, tokens, heads, channels; keys and values have K in place of N."""

GIVES = {
    "hidden": "attend(.., hidden=x), the normalized hidden vectors that q, k and v are projected from, on the prompt",
    "output_projection": "attend(.., output_projection=w), the layer's output projection, on the prompt",
    "cross_layer": "out, cache[i], up = attend(.., cross_layer=up), with up=None in the first layer",
    "drafts": "steps of a token and its draft, attend(.., commit=1), and one with commit=0 before the first",
    "finish": "cache = finish(cache) between the prompt and the first step",
    "repeat": "cache = finish(cache, tokens=tokens, repeat=run) between the prompt and the first step",
}
"""Arguments and calls that some methods need in addition to q, k, v and positions, by their names in `gives`."""

REASONS = {
    "hidden": "it scores tokens by the vectors that keys and values are projected from",
    "output_projection": "it scores tokens by what their values add to the output",
    "cross_layer": "each layer of a step hands a value to the layer above",
    "drafts": "it reads one step ahead, by a draft of the next token",
    "repeat": "the model repeats the prompt, and its scores come from that",
    "finish": "what a layer keeps is known once all layers have seen the prompt",
}
"""The reasons for which methods need them, in the order of error messages."""


@dataclasses.dataclass(frozen=True)
class AttachedLayer:
    """A bound layer and the sizes of its cache; static, and equal for layers that do the same.

    Attributes:
      bound: the method in this layer.
      spec: the layer, without its index.
      capacity: tokens that a sequence may grow to.
      defers: whether the prompts of all layers wait for `finish`.
      mesh: the devices that heads and sequences are split over, or None.
    """

    bound: BoundLayer
    spec: LayerSpec
    capacity: int
    defers: bool = False
    mesh: Mesh | None = None

    @property
    def has_constant_size(self) -> bool:
        """Whether the state's size does not grow with the text, so that steps may go beyond the capacity."""
        return self.bound.num_slots(1, 1 << 20) <= self.capacity

    def call(self, num_tokens: int) -> LayerCall:
        """The layer in a pass over prompts of up to `num_tokens` tokens."""
        num_slots = num_layer_slots(self.bound, (min(num_tokens, self.capacity),), self.capacity)
        return LayerCall(self.bound, self.spec.rule, num_slots)


@pytree
class Empty:
    """The state of a layer that has no token yet."""

    index: int | None = dataclasses.field(metadata={"static": True})  # of the layer, where layers wait for each other


@pytree
class ExactPrompt:
    """The state of a layer between its prompt and `finish`."""

    prompt: LayerPrompt | Any  # the state, of a method that is fed its prompt chunk by chunk
    order: Array | None  # i32[B T], the tokens in the order of `prompt`, for a method that has them repeated
    start: Array | None  # i32[], the first token of the chunk that is being repeated; None: no chunk is
    index: int | None = dataclasses.field(metadata={"static": True})


@pytree
class LayerCache:
    """The cache of one layer of a decoder; `attach` makes it, `attend` returns the next one.

    It is an ordinary pytree. From the prompt on its structure, shapes and dtypes stay as they are, so that it is a
    carry of `lax.scan` and `lax.while_loop`, and its buffers can be donated.
    """

    state: Any  # `Empty`, `ExactPrompt`, or what the method keeps of this layer
    layer: AttachedLayer = dataclasses.field(metadata={"static": True})
    length: Array | None = None  # i32[B], tokens of each sequence so far, also the position of the next one
    dtype: str = dataclasses.field(default="", metadata={"static": True})  # of the keys and values

    def __repr__(self) -> str:
        if isinstance(self.state, Empty):
            return f"LayerCache(empty, capacity {self.layer.capacity} tokens a sequence)"
        waits = ", waits for custom_decoder.finish" if isinstance(self.state, ExactPrompt) else ""
        num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))
        return f"LayerCache({num_bytes:,} bytes, capacity {self.layer.capacity} tokens a sequence{waits})"

    @property
    def positions(self) -> Array:
        """i32[B 1|K S], the position of the token in each slot, -1 for an empty slot."""
        if isinstance(self.state, Empty | ExactPrompt):
            raise KvjaxError(
                "this cache holds no compressed prompt yet: attend the prompt first, then cache = finish(cache)"
            )
        sequences = spec_of(self.length)
        return accepts_explicit_axes(lambda *_: sequences)(self.layer.bound.positions)(self.state)


@checks_keywords
def specs_of(
    num_layers: int,
    heads: int | Sequence[int],
    kv_heads: int | Sequence[int],
    head_dim: int | Sequence[int],
    *,
    rope: Rope | None | Sequence[Rope | None],
    window: int | None | Sequence[int | None] = None,
    soft_cap: float | None | Sequence[float | None] = None,
    value_dim: int | None | Sequence[int | None] = None,
    values_from: int | None | Sequence[int | None] = None,
) -> tuple[LayerSpec, ...]:
    """Describes the layers of a decoder to methods; what differs between layers is a sequence, one entry a layer.

    Args:
      num_layers: layers of the decoder.
      heads: query heads.
      kv_heads: key/value heads; query head n reads key/value head n // (heads // kv_heads).
      head_dim: width of queries and keys.
      rope: the rotary embedding by which queries and keys were rotated, `Rope(dim, theta, scaling)`; None for a
        layer without. `check_rope` compares it with a decoder's own function.
      window: latest positions that a query sees, its own included; None for all.
      soft_cap: c in c * tanh(s / c), which bounds the logits s (Gemma 2); None for none.
      value_dim: width of values; None: `head_dim`.
      values_from: first channel of the keys that is one of the values, where values are channels of their keys (latent
        attention: behind those that `rope` turns), so that they are stored once; None where they are not.

    Returns:
      The specs, for `attach`.

    Raises:
      KvjaxError: sizes that do not fit together, or a sequence of another length.
    """
    num_layers = arguments.integer("num_layers", num_layers)
    arguments_of_layers = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "rope": rope,
        "window": window,
        "soft_cap": soft_cap,
        "value_dim": value_dim,
        "values_from": values_from,
    }
    by_layer: dict[str, list[Any]] = {}
    for name, value in arguments_of_layers.items():
        is_sequence = isinstance(value, Sequence | np.ndarray) and not isinstance(value, str)
        by_layer[name] = list(value) if is_sequence else [value] * num_layers
        if len(by_layer[name]) != num_layers:
            raise KvjaxError(
                f"{name} has {len(by_layer[name])} entries and the model {num_layers} layers; give one for each layer, "
                "or one value for all"
            )
    # As in `kvjax.engine.plan.specs`: methods leave layers with a window alone.
    method_layers = tuple(i for i, window in enumerate(by_layer["window"]) if window is None)
    specs = []
    for i in range(num_layers):
        fields = {name: values[i] for name, values in by_layer.items()}
        where = f" in layer {i}"
        N, K, H = (arguments.integer(name + where, fields[name]) for name in ("heads", "kv_heads", "head_dim"))
        if N % K:
            raise KvjaxError(
                f"heads={N}{where} is no multiple of kv_heads={K}: every key/value head serves equally many"
            )
        if not isinstance(fields["rope"], Rope | None):
            raise KvjaxError(
                f"rope{where} is Rope(dim, theta=.., scaling=..), or None without rotation, got {fields['rope']!r:.80}"
            )
        layer_rope = fields["rope"] or Rope(0)
        if layer_rope.dim > H or layer_rope.dim % 2:
            raise KvjaxError(
                f"rope{where} rotates {layer_rope.dim} channels of a head of {H}; give an even number, at most {H}"
            )
        for name in ("window", "value_dim"):
            if fields[name] is not None:
                fields[name] = arguments.integer(name + where, fields[name], remedy="; None for none")
        if fields["soft_cap"] is not None:
            fields["soft_cap"] = arguments.number("soft_cap" + where, fields["soft_cap"], 1e-3, 1e9, "; None for none")
        if fields["values_from"] is not None:
            fields["values_from"] = arguments.integer(
                "values_from" + where, fields["values_from"], 0, remedy="; None for none"
            )
        specs.append(
            LayerSpec(
                index=i,
                num_layers=num_layers,
                num_kv_heads=K,
                num_groups=N // K,
                head_dim=H,
                rope=layer_rope,
                rule=Rule(fields["window"], fields["soft_cap"]),
                value_dim=fields["value_dim"],
                values_from=fields["values_from"],
                method_layers=method_layers,
            )
        )
    return tuple(specs)


@checks_keywords
def attach(
    method: str | KVMethod,
    specs: Sequence[LayerSpec],
    capacity: int,
    *,
    gives: Collection[str] = (),
    differentiable: bool = False,
    mesh: Mesh | None = None,
) -> dict[int, LayerCache]:
    """Makes the caches of a decoder's layers under a method.

    Args:
      method: a method or its string, as in "snapkv:budget=256 + int8".
      specs: of the layers, from `specs_of`.
      capacity: tokens that a sequence may grow to.
      gives: what the decoder gives in addition to q, k, v and positions: names of `GIVES`.
      differentiable: gradients pass through what the cache stores; see `kvjax.functional.bind`.
      mesh: the devices that sequences are split over, along its axis "data", and heads, along "model"; None for one
        device, or for the compiler, which divides the cache as it finds q, k and v divided, over any mesh.

    Returns:
      {layer: LayerCache}, empty; the first `attend` of each is its prompt.

    Raises:
      KvjaxError: a method that cannot serve the layers, or needs what the decoder does not give.
    """
    capacity = arguments.integer("capacity", capacity)
    specs = tuple(specs) if isinstance(specs, Sequence) else specs
    if not isinstance(specs, tuple) or not specs or not all(isinstance(spec, LayerSpec) for spec in specs):
        raise KvjaxError(
            f"specs are what custom_decoder.specs_of(num_layers, heads, kv_heads, ..) returns, got {specs!r:.80}"
        )
    if [(spec.index, spec.num_layers) for spec in specs] != [(i, len(specs)) for i in range(len(specs))]:
        raise KvjaxError(
            "specs name other layers than their places say; take all that specs_of has returned, in their order"
        )
    if reading := [spec.index for spec in specs if spec.reads_layer is not None]:
        raise KvjaxError(
            f"layer {reading[0]} reads the keys and values of another layer, and custom_decoder.attach does not serve "
            "such layers yet: write the model as a kvjax Config (AttentionKind.reads_layer)"
        )
    gives = {gives} if isinstance(gives, str) else set(gives)
    if unknown := sorted(gives - GIVES.keys()):
        suggestion = arguments.suggest_name(unknown[0], GIVES)
        raise KvjaxError(f"gives has no {unknown[0]!r:.60}{suggestion}; it takes {', '.join(GIVES)}")
    if mesh is not None:
        auto_mesh(mesh, f", or {_WITHOUT_MESH}")
        for spec in specs:
            check_divides("K", spec.num_kv_heads, mesh, f"give another mesh, or {_WITHOUT_MESH}")
    plan = bind_specs(method, specs, differentiable)
    _check_gives(plan, gives)
    defers = any(x.needs.global_budget or x.needs.replay or x.needs.paired_layer for x in plan)
    return {
        i: LayerCache(
            Empty(i if defers else None),
            AttachedLayer(bound, spec.without_index, capacity, defers, mesh),
        )
        for i, (bound, spec) in enumerate(zip(plan, specs, strict=True))
    }


def _check_gives(plan: Sequence[BoundLayer], gives: Collection[str]) -> None:
    """Raises KvjaxError, with each remedy, for what a method needs and the decoder does not give."""
    needs = [layer.needs for layer in plan]
    divides_budget = any(n.global_budget for n in needs)
    is_needed = {
        "hidden": any(n.hidden_states for n in needs),
        "output_projection": any(n.output_projection for n in needs),
        "cross_layer": any(n.cross_layer for n in needs),
        "drafts": any(n.draft_tokens for n in needs),
        "repeat": any(n.replay for n in needs),
        "finish": any((n.global_budget or n.paired_layer) and not n.replay for n in needs),
    }
    # A decoder that repeats the prompt does so in `finish`.
    gives = {*gives, "finish"} if "repeat" in gives else gives
    needed = [name for name in REASONS if is_needed[name]]
    missing = [name for name in needed if name not in gives]
    if not missing:
        return
    alternatives = {
        "drafts": "; kcache has the same layout without drafts",
        "repeat": "; turned_queries scores in one pass",
        "finish": "; under head_shares the division is known beforehand" if divides_budget else "",
    }
    sentences = [f"{REASONS[name].capitalize()}: {GIVES[name]}{alternatives.get(name, '')}" for name in missing]
    raise KvjaxError(
        f"this method needs more than q, k, v and positions. {'. '.join(sentences)}. "
        f"Say attach(.., gives={tuple(needed)!r}) once your decoder does so"
    )


class _Absent:
    """The default of `cross_layer`: None is a value, that of the first layer."""

    def __repr__(self) -> str:
        return "no cross_layer"


_ABSENT = _Absent()


def _attended_specs(
    result: Any, cache: LayerCache, q: Array, k: Array, v: Array, *_: Any, layout: str = "BTNH", **__: Any
) -> Any:
    """Returns the specs of what `attend` returns: outputs lie as the queries do, and a new state as the keys."""
    keys, mesh = spec_of(k), cache.layer.mesh
    sequences, heads = (keys[0], keys[layout.index("N")]) if mesh is None else named_sharding("B K", mesh).spec
    by_layer = functools.partial(
        layer_specs, num_sequences=k.shape[0], num_heads=cache.layer.spec.num_kv_heads, sequences=sequences, heads=heads
    )
    out = PartitionSpec(*spec_of(q)[:3], spec_of(v)[3])
    # A step returns the types that it is given, so that the cache is a carry of the caller's loop.
    after = by_layer(result[1]) if isinstance(cache.state, Empty) else jax.tree.map(spec_of, cache)
    return out, after, *by_layer(result[2:])


@checks_keywords
@computes_in_32_bits
@accepts_explicit_axes(
    _attended_specs, lambda cache, *_, **__: cache.layer.mesh if isinstance(cache, LayerCache) else None
)
def attend(
    cache: LayerCache,
    q: Array,
    k: Array,
    v: Array,
    positions: Array | np.ndarray,
    *,
    hidden: Array | None = None,
    output_projection: Array | None = None,
    sinks: Array | np.ndarray | None = None,
    commit: int | None = None,
    scale: float | None = None,
    layout: str = "BTNH",
    cross_layer: Any = _ABSENT,
) -> Any:
    """Attends the queries of one layer to its cache and to the new tokens, which the cache then holds.

    The first call is the prompt: its tokens attend to each other, and the method compresses them. Every further call is
    a step of one token or more.

    Args:
      cache: of this layer.
      q: queries [B T N H], after RoPE.
      k: keys [B T K H], after RoPE.
      v: values [B T K V].
      positions: i32[B T], the tokens' positions in the text: 0, 1, 2, .. in each sequence over all calls, -1 for
        padding, which may stand on any side.
      hidden: [B T D], what q, k and v were projected from, where the method needs it.
      output_projection: [N V D], where the method needs it.
      sinks: [N], a learned logit of each query head that takes weight and gives no value (gpt-oss); None for none.
      commit: static, how many of a step's tokens the cache keeps, the first ones; None for all. Those beyond are
        drafts, which attend to the cache and to each other, and leave no trace.
      scale: of the dot products; None: H ** -0.5, for queries that are not scaled. A decoder that multiplies its
        queries by the scale beforehand says scale=1.0.
      layout: "BTNH", or "BNTH" for q [B N T H], k [B K T H], v [B K T V] and outputs alike.
      cross_layer: the value from the layer below in this pass, None in the first layer; where it is given, the value
        for the layer above is returned too.

    Returns:
      (outputs [B T N V] in q's dtype, before the output projection; the next cache), or (outputs, cache, cross_layer).
      Outputs of padding mean nothing. Under `jax_enable_x64` arrays of 64 bits are narrowed, and outputs have 32.

    Raises:
      KvjaxError: arrays that contradict the layer's spec, a prompt that waits for `finish`, or, where their values are
        known, positions that do not continue the sequence, or tokens beyond the capacity. Inside `jax.jit` values are
        not known: such a sequence then has outputs of NaN.
    """
    if not isinstance(cache, LayerCache):
        raise KvjaxError(
            f"cache is that of one layer, an entry of what custom_decoder.attach returns, got {type(cache).__name__}; "
            "give cache[i] in layer i"
        )
    layer, state, needs = cache.layer, cache.state, cache.layer.bound.needs
    spec = layer.spec
    q, k, v = _arrange(q, k, v, layout, spec)
    B, K, G, T, H = q.shape
    dtype = q.dtype
    positions, is_right_padded = _check_positions(positions, B, T)
    if scale is not None:
        q = (q.astype(jnp.float32) * (scale * H**0.5)).astype(dtype)
    if cache.length is not None and cache.length.shape != (B,):
        raise KvjaxError(f"the cache holds {cache.length.shape[0]} sequences and q has {B}; give one row for each")
    if cache.dtype and cache.dtype != k.dtype.name:
        raise KvjaxError(f"the prompt's keys are {cache.dtype} and these are {k.dtype.name}; keep one dtype")
    in_use = jax.sharding.get_abstract_mesh()
    if layer.mesh is not None and not in_use.empty and in_use.shape != layer.mesh.shape:
        raise KvjaxError(
            f"attach was given the mesh {dict(layer.mesh.shape)} and this program runs on {dict(in_use.shape)}; "
            f"use one mesh for both, or {_WITHOUT_MESH}"
        )
    if layer.mesh is not None:
        check_divides("B", B, layer.mesh, f"give a number of sequences that does, or {_WITHOUT_MESH}")
    is_prompt = isinstance(state, Empty)
    is_copy = isinstance(state, ExactPrompt)
    if isinstance(state, ExactPrompt) and state.start is None:
        raise KvjaxError(
            "this method compresses once all layers have seen the prompt, and the cache still waits for that: "
            "cache = finish(cache) after the prompt, then go on"
        )
    observes_inputs = (is_prompt or is_copy) and not needs.prompt_chunk
    hidden, output_projection = _check_observed(needs, hidden, output_projection, (B, T), spec, observes_inputs)
    if sinks is not None:
        logits = jnp.asarray(sinks)
        if logits.size != K * G:
            raise KvjaxError(f"sinks have one logit for each of the {K * G} query heads, got shape {logits.shape}")
        sinks = logits.reshape(1, K, G)
    commit = T if commit is None else arguments.integer("commit", commit, 0, T)
    if commit < T and (is_prompt or is_copy):
        raise KvjaxError("a prompt has no drafts: leave commit out, or give the prompt first and the drafts in a step")
    if needs.draft_tokens and not (is_prompt or commit == 0 or (commit, T) == (1, 1 + needs.draft_tokens)):
        raise KvjaxError(
            f"this method reads one step ahead, and takes {GIVES['drafts']}; got {T} tokens with commit={commit}"
        )
    inputs = LayerInputs(q, k, v, hidden, output_projection, sinks)
    up = None if isinstance(cross_layer, _Absent) else cross_layer
    if needs.cross_layer and isinstance(cross_layer, _Absent):
        raise KvjaxError(f"this method hands a value from layer to layer: {GIVES['cross_layer']}")

    before = jnp.zeros(B, jnp.int32) if cache.length is None else cache.length
    # The engine takes padding on the right. A step of one token has no order, and copies are made in the cache's own.
    order = None
    if T > 1 and not is_copy and not is_right_padded:
        order = jnp.argsort(positions < 0, axis=1, stable=True)
    if order is not None:
        inputs, positions = _reorder(inputs, order), jnp.take_along_axis(positions, order, 1)
    inputs = _clean(inputs, positions)
    count = (positions >= 0).sum(1, dtype=jnp.int32)
    length = before if is_copy else before + jnp.minimum(count, commit)
    is_wrong = None if is_copy else _find_wrong(cache, inputs, positions, before, count, length)

    if is_copy:
        assert state.start is not None
        mode: ForwardMode = PromptReplay(state.start, positions, before)
        call = LayerCall(layer.bound, spec.rule)
        out, prompt, up = _run(mode, state.prompt, inputs, up, call=call, mesh=layer.mesh)
        state, length = dataclasses.replace(state, prompt=prompt), cache.length
    elif is_prompt:
        call = layer.call(T)
        if layer.defers or needs.prompt_chunk:
            mode = ChunkedPrefill(np.int32(0), length)
        else:
            mode = FullPrefill(length, layer.capacity, None)
        out, after, up = _run(mode, None, inputs, up, call=call, mesh=layer.mesh)
        if layer.defers:
            if not needs.prompt_chunk:
                after = after._replace(output_projection=inputs.output_projection)
                after = after._replace(sinks=inputs.sinks)
            if needs.replay:
                after = after._replace(replay_scores=jnp.zeros(after.k.shape[:3], jnp.float32))
            after = ExactPrompt(after, order if needs.replay else None, None, state.index)
        state = after
    else:
        bound = getattr(layer.bound, "after_prompt", layer.bound)
        call = LayerCall(bound, spec.rule)
        out, state, up = _run(Decode(positions, commit), state, inputs, up, call=call, mesh=layer.mesh)
        if up is not None and isinstance(cross_layer, _Absent):
            raise KvjaxError(
                "this method hands a value to the layer above, and does not say so in advance: set cross_layer = True "
                "in its reader"
            )
    if is_wrong is not None:
        out = jnp.where(is_wrong[:, None, None, None, None], jnp.nan, out)
    if order is not None:
        out = jnp.take_along_axis(out, jnp.argsort(order, axis=1)[:, None, None, :, None], 3)
    out = out.reshape(B, K * G, T, -1).astype(dtype)
    out = jnp.moveaxis(out, 1, 2) if layout == "BTNH" else out
    # Arrays of zeros are constants until the first token is written, and a caller's loop needs one type throughout.
    after = vary(LayerCache(state, layer, length, k.dtype.name))
    return (out, after) if isinstance(cross_layer, _Absent) else (out, after, up)


@functools.partial(jax.jit, static_argnames=("call", "mesh"))
def _run(mode: ForwardMode, state: Any, inputs: LayerInputs, up: Any, call: LayerCall, mesh: Mesh | None) -> Any:
    """Runs a forward mode of the engine, as its own decoder's layers do."""
    mesh = None if mesh is None else auto_mesh(mesh)
    if isinstance(mode, ChunkedPrefill):
        state = begin_prompt(call, *inputs[:4], mesh)
    return mode.attend(call, state, inputs, up, mesh)


def _arrange(q: Array, k: Array, v: Array, layout: str, spec: LayerSpec) -> tuple[Array, Array, Array]:
    """Returns q [B K G T H], k [B K T H] and v [B K T V]; raises KvjaxError where they contradict the spec."""
    if layout not in LAYOUTS:
        raise KvjaxError(f"layout is one of {', '.join(map(repr, LAYOUTS))}, got {layout!r:.60}")
    q, k, v = (jnp.asarray(x) for x in (q, k, v))
    K, G, H, V = spec.num_kv_heads, spec.num_groups, spec.head_dim, spec.value_dim

    def fits(layout: str) -> bool:
        if not q.ndim == k.ndim == v.ndim == 4:
            return False
        heads, tokens = (2, 1) if layout == "BTNH" else (1, 2)
        want = ((q, K * G, H), (k, K, H), (v, K, V))
        are_alike = len({(x.shape[0], x.shape[tokens]) for x in (q, k, v)}) == 1
        return are_alike and all((x.shape[heads], x.shape[3]) == (n, width) for x, n, width in want)

    if not fits(layout):
        other = LAYOUTS[1 - LAYOUTS.index(layout)]
        axes = "B T {} {}" if layout == "BTNH" else "B {} T {}"
        want = ", ".join(
            f"{name} [{axes.format(*sizes)}]" for name, sizes in (("q", (K * G, H)), ("k", (K, H)), ("v", (K, V)))
        )
        remedy = (
            f"they fit the layout {other!r}: say layout={other!r}"
            if fits(other)
            else "correct the call of specs_of, or them"
        )
        raise KvjaxError(
            f"q {q.shape}, k {k.shape} and v {v.shape} contradict this layer's spec, by which they are {want} in the "
            f"layout {layout!r}; {remedy}"
        )
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (q, k, v)) or k.dtype != v.dtype:
        raise KvjaxError(f"q, k and v are floats, k and v of one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if not q.shape[1] * q.shape[2] * q.shape[0]:
        raise KvjaxError(f"q has no token, its shape is {q.shape}; give one token at least")
    if layout == "BTNH":
        q, k, v = (jnp.moveaxis(x, 2, 1) for x in (q, k, v))
    return q.reshape(len(q), K, G, *q.shape[2:]), k, v


def _check_positions(positions: Array | np.ndarray, B: int, T: int) -> tuple[Array, bool]:
    """Returns positions as i32[B T], and whether padding is known to stand on the right alone."""
    if not isinstance(positions, jax.Array):
        positions = np.asarray(positions)
    if positions.shape != (B, T) or not jnp.issubdtype(positions.dtype, jnp.integer):
        raise KvjaxError(
            f"positions are integers [B T], here {(B, T)}, -1 for padding, got {positions.dtype} of shape "
            f"{positions.shape}; jnp.broadcast_to(positions, (B, T)) repeats one row for all sequences"
        )
    if isinstance(positions, Tracer):
        return positions.astype(jnp.int32), False
    is_padding = to_numpy(positions) < 0
    return jnp.asarray(positions, jnp.int32), bool((is_padding[:, 1:] >= is_padding[:, :-1]).all())


def _check_observed(
    needs: Any, hidden: Any, output_projection: Any, sizes: tuple[int, int], spec: LayerSpec, is_read: bool
) -> tuple[Any, Any]:
    """Returns hidden vectors [B T D] and the output projection [1 K G V D] where the method reads them, else None."""
    if not is_read:
        return None, None
    N, K, G, V = spec.num_kv_heads * spec.num_groups, spec.num_kv_heads, spec.num_groups, spec.value_dim
    for name, x, is_needed in (
        ("hidden", hidden, needs.hidden_states),
        ("output_projection", output_projection, needs.output_projection),
    ):
        if is_needed and x is None:
            raise KvjaxError(f"this method needs {GIVES[name]}")
    if needs.hidden_states:
        hidden = jnp.asarray(hidden)
        if hidden.ndim != 3 or hidden.shape[:2] != sizes:
            raise KvjaxError(f"hidden has shape [B T D], here {(*sizes, 'D')}, got {hidden.shape}")
    if needs.output_projection:
        w = jnp.asarray(output_projection)
        if w.ndim < 2 or w.shape[:-1] not in ((N, V), (K, G, V), (N * V,)):
            raise KvjaxError(f"output_projection has shape [N V D], here {(N, V, 'D')}, got {w.shape}")
        output_projection = w.reshape(1, K, G, V, w.shape[-1])
    return hidden if needs.hidden_states else None, output_projection if needs.output_projection else None


def _reorder(inputs: LayerInputs, order: Array) -> LayerInputs:
    """Takes the tokens in another order, i32[B T]."""

    def take(x: Array, axis: int) -> Array:
        index = order.reshape(order.shape[0], *[1] * (axis - 1), order.shape[1], *[1] * (x.ndim - axis - 1))
        return jnp.take_along_axis(x, index, axis)

    hidden = None if inputs.hidden is None else take(inputs.hidden, 1)
    return inputs._replace(q=take(inputs.q, 3), k=take(inputs.k, 2), v=take(inputs.v, 2), hidden=hidden)


def _clean(inputs: LayerInputs, positions: Array) -> LayerInputs:
    """Puts zeros where padding is: weights of 0 times what a decoder leaves there may be NaN."""
    is_token = (positions >= 0)[:, None, :, None]

    def clean(x: Array, is_token: Array) -> Array:
        return jnp.where(is_token, x, jnp.zeros((), x.dtype))

    hidden = None if inputs.hidden is None else clean(inputs.hidden, is_token[:, 0])
    q, k, v = clean(inputs.q, is_token[:, None]), clean(inputs.k, is_token), clean(inputs.v, is_token)
    return inputs._replace(q=q, k=k, v=v, hidden=hidden)


def _find_wrong(
    cache: LayerCache, inputs: LayerInputs, positions: Array, before: Array, count: Array, length: Array
) -> Array | None:
    """Finds the sequences whose positions do not continue them, that exceed the capacity, or contradict `values_from`.

    Raises KvjaxError where there are any and the values are known, and then returns None.
    """
    layer = cache.layer
    expected = token_positions(positions, count)
    expected = jnp.where(expected >= 0, before[:, None] + expected, -1)
    does_not_continue = (positions != expected).any(1)
    # A state of constant size has room for any step, but a prompt is cut at the capacity before it is compressed.
    is_limited = isinstance(cache.state, Empty) or not layer.has_constant_size
    exceeds = (length > layer.capacity) if is_limited else jnp.zeros_like(does_not_continue)
    has_other_values = jnp.zeros_like(exceeds)
    first = layer.spec.values_from
    if first is not None:  # v is not stored, and is read as these channels of k
        has_other_values = (inputs.v != inputs.k[..., first : first + layer.spec.value_dim]).any((1, 2, 3))
    if any(isinstance(x, Tracer) for x in (does_not_continue, exceeds, has_other_values)):
        return does_not_continue | exceeds | has_other_values
    if to_numpy(has_other_values).any():
        raise KvjaxError(
            f"the spec says that values are the channels of the keys from {first} on, and v holds others; give "
            "v = k[..., values_from:values_from + value_dim], or leave values_from out of specs_of"
        )
    if to_numpy(does_not_continue).any():
        b = int(np.argmax(to_numpy(does_not_continue)))
        start = int(to_numpy(before)[b])
        got = [int(x) for x in to_numpy(positions)[b] if x >= 0][:4]
        if start:
            raise KvjaxError(
                f"sequence {b} holds {start} tokens, so that positions continue with {start}, got {got}; another "
                "prompt needs a cache of its own: attach(..)"
            )
        raise KvjaxError(
            "a prompt has the positions 0, 1, 2, .. in each sequence, in ascending order, and -1 for padding; "
            f"sequence {b} has {got}"
        )
    if to_numpy(exceeds).any():
        raise KvjaxError(
            f"{int(to_numpy(length).max())} tokens exceed the cache's capacity of {layer.capacity}; attach with a "
            "larger capacity, or a method of constant size, such as streaming_llm"
        )
    return None


@checks_keywords
@computes_in_32_bits
@keeps_callers_mesh
def finish(
    cache: Any,
    *,
    tokens: Array | np.ndarray | None = None,
    repeat: Callable[[Any, Array, Array], Any] | None = None,
    replay_prompts: ReplayPrompts = ((), ()),
) -> Any:
    """Compresses the prompts of all layers, for methods that do so once every layer has seen them.

    It returns the cache of any other method as it is, so that a decoder may always call it.

    Args:
      cache: of all layers, after the prompt: the dict of `attach`, or any pytree with its entries.
      tokens: i32[B T], the prompt as the decoder was given it, padding included; for methods that repeat it.
      repeat: run(cache, tokens, positions) -> cache runs the decoder on the tokens [B n] at positions i32[B n], as on a
        step, and returns the cache; for methods that have the model repeat the prompt (KVzip).
      replay_prompts: ids before the first and before every later chunk that is repeated, as an instruction.

    Returns:
      The cache, of the same structure.

    Raises:
      KvjaxError: a cache without its prompt or without some of its layers, or a method that repeats the prompt and is
        given no `repeat`.
    """
    caches = _layer_caches(cache)
    if any(isinstance(x.state, Empty) for x in caches):
        raise KvjaxError("finish follows the prompt: attend the prompt in every layer first")
    if not any(isinstance(x.state, ExactPrompt) for x in caches):
        return cache
    ordered = _in_order(caches)
    plan = [x.layer.bound for x in ordered]
    replays = {layer.needs.replay for layer in plan} - {None}
    if replays:
        if repeat is None or tokens is None:
            raise KvjaxError(
                "this method has the model repeat the prompt: finish(cache, tokens=tokens, repeat=run), where "
                "run(cache, tokens, positions) runs your decoder and returns the cache; turned_queries scores in one "
                "pass"
            )
        cache = _repeat_prompt(cache, ordered, jnp.asarray(tokens, jnp.int32), repeat, replay_prompts)
        ordered = _in_order(_layer_caches(cache))
    compressed = dict(zip([x.state.index for x in ordered], _compress(ordered), strict=True))
    return map_layer_caches(lambda x: compressed[x.state.index], cache)


def _compressed_specs(result: Any, caches: Sequence[LayerCache]) -> list[LayerCache]:
    """Returns the specs of what `_compress` returns: a state lies as the exact keys do, and all else as before."""
    specs = []
    for after, before in zip(result, caches, strict=True):
        prompt = before.state.prompt
        if isinstance(prompt, LayerPrompt):
            state = layer_specs(after.state, *prompt.k.shape[:2], *spec_of(prompt.k)[:2])
        else:
            state = jax.tree.map(spec_of, prompt)
        specs.append(dataclasses.replace(after, state=state, length=spec_of(before.length)))
    return specs


@accepts_explicit_axes(_compressed_specs, lambda caches: caches[0].layer.mesh)
def _compress(caches: Sequence[LayerCache]) -> list[LayerCache]:
    """Compresses the prompts of all layers, in their order."""
    layer, lengths, T = caches[0].layer, caches[0].length, caches[0].state.prompt.k.shape[2]
    assert lengths is not None
    calls, prompts = [x.layer.call(T) for x in caches], [x.state.prompt for x in caches]
    mesh = None if layer.mesh is None else auto_mesh(layer.mesh)
    states = compress_prompts(prompts, lengths, calls, layer.capacity, mesh)
    return [dataclasses.replace(x, state=state) for x, state in zip(caches, vary(states), strict=True)]


def _repeat_prompt(
    cache: Any, caches: Sequence[LayerCache], tokens: Array, repeat: Callable[..., Any], replay_prompts: ReplayPrompts
) -> Any:
    """Runs the prompt a second time, chunk by chunk after itself; see `kvjax.engine.replay.copy_chunks`."""
    lengths, layers = caches[0].length, [x.layer.bound for x in caches]
    # Layers with a window may repeat nothing, and keep no order.
    order = next(x.state.order for x in caches if x.layer.bound.needs.replay)
    assert lengths is not None
    B, T = len(lengths), caches[0].state.prompt.k.shape[2]
    if tokens.shape != (B, T):
        raise KvjaxError(f"tokens are those of the prompt, of shape {(B, T)}, got {tokens.shape}")

    def set_start(cache: Any, start: Array | None) -> Any:
        return map_layer_caches(
            lambda x: dataclasses.replace(x, state=dataclasses.replace(x.state, start=start)), cache
        )

    for copy in _copy_chunks(tokens, order, lengths, layers, replay_prompts):
        repeated = repeat(set_start(cache, jnp.asarray(copy.start)), copy.tokens, copy.pos)
        for x in _layer_caches(repeated):
            if not isinstance(x.state, ExactPrompt) or x.state.start is None:
                raise KvjaxError("repeat returns the cache that attend has returned in every layer")
        cache = set_start(repeated, None)
    return cache


@accepts_explicit_axes(lambda result, tokens, *_: jax.tree.map(lambda _: PartitionSpec(spec_of(tokens)[0]), result))
def _copy_chunks(
    tokens: Array,
    order: Array | None,
    lengths: Array,
    layers: Sequence[BoundLayer],
    replay_prompts: ReplayPrompts,
) -> list[ChunkCopy]:
    """Copies the prompts in the order in which the caches hold them, i32[B T]."""
    tokens = tokens if order is None else jnp.take_along_axis(tokens, order, 1)
    return copy_chunks(tokens, lengths, layers, replay_prompts)


def _is_layer_cache(x: Any) -> bool:
    return isinstance(x, LayerCache)


def map_layer_caches(change: Callable[[LayerCache], LayerCache], cache: Any) -> Any:
    """Changes every layer's cache in a pytree, and leaves its other entries; raises KvjaxError where there are none."""
    _layer_caches(cache)
    return jax.tree.map(lambda x: change(x) if _is_layer_cache(x) else x, cache, is_leaf=_is_layer_cache)


def _layer_caches(cache: Any) -> list[LayerCache]:
    """The layers' caches in a pytree; raises KvjaxError where there are none."""
    caches = [x for x in jax.tree.leaves(cache, is_leaf=_is_layer_cache) if _is_layer_cache(x)]
    if not caches:
        raise KvjaxError(f"cache is what custom_decoder.attach returns, of all layers, got {type(cache).__name__}")
    return caches


def _in_order(caches: Sequence[LayerCache]) -> list[LayerCache]:
    """Sorts the caches by layer; JAX sorts the keys of dictionaries, by which layer_10 comes before layer_2."""
    known = {x.state.index: x for x in caches if isinstance(x.state, ExactPrompt) and x.state.index is not None}
    num_layers = 1 + max(known)
    if len(known) != len(caches) or len(caches) != num_layers:
        raise KvjaxError(
            f"finish takes the caches of all layers, each after its prompt, got {sorted(known)} of {num_layers}"
        )
    return [known[i] for i in range(num_layers)]
