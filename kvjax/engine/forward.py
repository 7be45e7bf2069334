"""One pass of tokens through the decoder's layers, under a mode."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh
from jaxtyping import Float, Float32, Int32

from kvjax.cache.protocol import BoundLayer
from kvjax.cache.recurrent_layer import RecurrentLayer
from kvjax.core.attention import causal_attention
from kvjax.core.gated_delta import RecurrentInputs
from kvjax.core.mesh import constrain
from kvjax.core.types import Array, hash_once
from kvjax.engine.layer_prompt import LayerCall, LayerInputs
from kvjax.engine.modes import ForwardMode, run_recurrence
from kvjax.engine.positions import token_positions
from kvjax.models import decoder
from kvjax.models.config import Config
from kvjax.models.decoder import Angles, Decoder

BoundLayers = tuple[BoundLayer, ...]
"""A method bound to each layer of a model."""


@functools.partial(jax.jit, static_argnames="target")
def embed(
    params: Any,
    tokens: Int32[Array, "B T"],
    offset: Int32[Array, " B"] | Int32[Array, ""] | None,
    lengths: Int32[Array, " B"] | None,
    target: Target,
) -> tuple[Float[Array, "B T D"], Angles, Int32[Array, "B T"]]:
    """Embeds tokens that follow others.

    Args:
      params: `outer_params` of the model.
      tokens: ids.
      offset: tokens before these in each sequence, or in all; None for none.
      lengths: how many of the tokens are real; None for all.
      target: model configuration and mesh.

    Returns:
      Hidden vectors, the angles of RoPE, and positions, -1 for padding.
    """
    pos = token_positions(tokens, lengths)
    if offset is not None:
        pos = jnp.where(pos >= 0, jnp.broadcast_to(offset, tokens.shape[:1])[:, None] + pos, -1)
    return *embed_at(params, tokens, pos, target), pos


@functools.partial(jax.jit, static_argnames="target")
def embed_at(
    params: Any, tokens: Int32[Array, "B T"], pos: Int32[Array, "B T"], target: Target
) -> tuple[Float[Array, "B T D"], Angles]:
    """Embeds tokens at their positions, -1 for padding: hidden vectors, and the angles of RoPE."""
    pos = jnp.maximum(pos, 0)  # nothing reads the angle of padding
    outputs = _decoder(params, target.config).apply({"params": params}, tokens, pos, method=Decoder.embed)
    hidden, angles = cast(tuple[Array, Angles], outputs)
    return constrain(hidden, "B T D", target.mesh), angles


@functools.partial(jax.jit, static_argnames="target")
def _token_vectors(
    params: Any, tokens: Int32[Array, "B T"], layer: Int32[Array, ""] | np.int32, target: Target
) -> Float[Array, "B T J"]:
    vectors = _decoder(params, target.config).apply({"params": params}, tokens, layer, method=Decoder.token_vectors)
    return cast(Array, vectors)


def layer_angles(params: Any, angles: Angles, layer: int, target: Target) -> Angles:
    """Returns what a layer takes of the angles: where tokens have a vector for each layer, those in place of the ids.

    Args:
      params: of the model.
      angles: from `embed`.
      layer: index of the layer. Its value is traced, so that all layers share one program.
      target: model configuration.
    """
    if target.config.per_layer_embedding is None:
        return angles
    return (*angles[:-1], (_token_vectors(outer_params(params), *angles[-1], np.int32(layer), target=target),))


def apply_unembed(params: Any, hidden: Float[Array, "*rest D"], target: Target) -> Float32[Array, "*rest V"]:
    """Turns hidden vectors of the last layer into logits."""
    return cast(Array, _decoder(params, target.config).apply({"params": params}, hidden, method=Decoder.finish))


def apply_layer(
    params: Any,
    hidden: Float[Array, "B T D"],
    angles: Angles,
    mode: ForwardMode,
    state: Any,
    cross_layer: Any,
    source: Any = None,
    added_output: Float[Array, "B T D"] | None = None,
    *,
    call: LayerCall,
    target: Target,
) -> tuple[Float[Array, "B Q D"], Any, Any, Any]:
    """Runs one layer of a pass; arguments as in `run_layers`, for this layer alone.

    Args:
      cross_layer: value from the layer below in this pass, None in layer 0.
      source: see `LayerInputs`.
      added_output: zeros that are added to the attention's output, for a gradient with respect to it.

    Returns:
      Hidden vectors for the layer above, of all tokens or of the mode's `query_indices`; this layer's new state; the
      value for the layer above; what it shares with layers that read it (`ForwardMode.share`), None where none does.
    """

    kind = call.kind
    assert kind is not None, "a pass through a decoder's layers needs their kinds"

    def attend(_: int, q: Any, k: Any, v: Any, hidden: Array) -> tuple[Array, Any]:
        if isinstance(q, RecurrentInputs):
            out, new_state = run_recurrence(call.layer, state, q, *mode.recurrent_tokens(hidden), mesh=target.mesh)
            return out, (new_state, cross_layer, None)
        inputs = LayerInputs(
            q=constrain(q, "B K G T H", target.mesh),
            k=k if source is not None else constrain(k, "B K T H", target.mesh),
            v=v if source is not None else constrain(v, "B K T H", target.mesh),
            hidden=hidden,
            output_projection=decoder.output_projection_of(params, kind)[None],
            sinks=decoder.sinks_of(params),
            source=source,
        )
        out, new_state, above = mode.attend(call, state, inputs, cross_layer, target.mesh)
        # The decoder returns the rest as it is.
        return out, (new_state, above, mode.share(inputs) if call.is_read else None)

    # The layer is told its kind and not its index in the model, which would give each a compiled program of its own.
    layer = decoder.Layer(target.config, 0, hidden.dtype, kind)
    variables = {"params": params}
    if added_output is not None:
        variables["perturbations"] = {"attention_output": added_output}
    hidden, (state, cross_layer, shared) = layer.apply(variables, hidden, angles, attend, mode.query_indices(call))
    return hidden, state, cross_layer, shared


@functools.partial(jax.jit, static_argnames="config")
def exact_logits(params: Any, tokens: Int32[Array, "B T"], config: Config) -> Float32[Array, "B T V"]:
    """Computes logits under exact causal attention, without a cache."""

    exact: dict[int, tuple[Array, Array]] = {}

    def attend(i: int, q: Any, k: Any, v: Any, hidden: Array) -> tuple[Array, None]:
        if isinstance(q, RecurrentInputs):
            layer, is_real = RecurrentLayer.of(config.kind(i).attention), jnp.ones(tokens.shape, bool)
            return run_recurrence(layer, None, q, is_real, tokens.shape[1], mesh=None)[0], None
        source = config.kind(i).attention.reads_layer
        k, v = exact[i] = (k, v) if source is None else exact[source]
        rule, sinks = config.kind(i).attention.rule, decoder.sinks_of(params[f"layer_{i}"])
        return causal_attention(q, k, v, rule=rule, sinks=sinks), None

    pos = token_positions(tokens)
    return _decoder(params, config).apply({"params": params}, tokens, pos, attend, method=Decoder.logits)[0]


@hash_once
@dataclasses.dataclass(frozen=True)
class Target:
    """The model and mesh that a pass is compiled for, and its compiled functions; a static argument.

    All callers but `kvjax.generation` and the systems above it use the default functions. JAX allows compiler options
    and donation in the outermost `jit` alone; those callers are never traced, and take functions that have them from
    `kvjax.generation.programs`. Targets that differ in these functions alone are equal: what is jitted over a
    target runs no layers, or is given the default ones.

    Attributes:
      config: of the model.
      mesh: the devices that heads and sequences are split over, or None.
      run_layer: the compiled form of `apply_layer`.
      unembed: the compiled form of `apply_unembed`.
      run_selecting_layer: `run_layer` for a layer that computes the outputs of some tokens alone, which cannot replace
        the donated hidden vectors of all; None for `run_layer` itself.
    """

    config: Config
    mesh: Mesh | None = None
    run_layer: Callable[..., tuple[Array, Any, Any, Any]] = dataclasses.field(
        default=jax.jit(apply_layer, static_argnames=("call", "target")), compare=False
    )
    unembed: Callable[..., Array] = dataclasses.field(
        default=jax.jit(apply_unembed, static_argnames="target"), compare=False
    )
    run_selecting_layer: Callable[..., tuple[Array, Any, Any, Any]] | None = dataclasses.field(
        default=None, compare=False
    )


def run_layers(
    params: Any,
    hidden: Float[Array, "B T D"],
    angles: Angles,
    mode: ForwardMode,
    calls: Sequence[LayerCall],
    states: Sequence[Any],
    *,
    target: Target,
    first_layer: int = 0,
) -> tuple[Float[Array, "B Q D"], tuple[Any, ...]]:
    """Runs consecutive layers.

    Args:
      params: of the model.
      hidden: the input of the first of these layers.
      angles: of RoPE.
      mode: what attention reads, and what each layer holds afterwards.
      calls: one for each layer, see `layer_calls`.
      states: what each of these layers holds before the pass.
      target: model configuration, mesh and compiled functions.
      first_layer: index of the first of these layers in the model.

    Returns:
      Hidden vectors of the last of these layers, of all tokens or of its mode's `query_indices`; each layer's new
      state.
    """
    # An unrolled loop: each layer keeps its own state type and sizes, which a scan over stacked layers could not.
    results, cross_layer, shared = [], None, {}
    for i, (call, state) in enumerate(zip(calls, states, strict=True), first_layer):
        reads = target.config.kind(i).attention.reads_layer
        source = None if reads is None else (results[reads - first_layer], shared[reads])
        run_layer = (target.run_selecting_layer if call.selects_queries else None) or target.run_layer
        own_angles = layer_angles(params, angles, i, target)
        hidden, result, cross_layer, shared[i] = run_layer(
            params[f"layer_{i}"], hidden, own_angles, mode, state, cross_layer, source, call=call, target=target
        )
        results.append(result)
    return hidden, tuple(results)


@functools.lru_cache(maxsize=1024)
def layer_calls(plan: BoundLayers, config: Config, num_slots: tuple[int, ...] | None = None) -> tuple[LayerCall, ...]:
    """Returns the layers of a plan in one pass; `num_slots` of each layer's state, in the modes that make one."""
    # Cached, so that equal calls are one object: every step compares them, which then ends at identity.
    sizes = num_slots or (0,) * len(plan)
    kinds = [config.kind(i) for i in range(len(plan))]
    are_read = {kind.attention.reads_layer for kind in kinds}
    return tuple(
        LayerCall(layer, kind.attention.rule, n, kind=kind, is_read=i in are_read)
        for i, (layer, kind, n) in enumerate(zip(plan, kinds, sizes, strict=True))
    )


def outer_params(params: Any) -> Any:
    """Returns a model's parameters outside its layers, so that `embed` and `unembed` are not traced with all others."""
    return {name: x for name, x in params.items() if not name.startswith("layer_")}


Progress = Callable[[Iterable[int]], Iterable[int]]
"""Wraps the indices of a loop and reports each of them, as `rich.progress.track` does."""


def scan_if_traced(
    body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any, progress: Progress = iter
) -> tuple[Any, Any]:
    """Runs `lax.scan` if `carry` or `xs` are traced, and a Python loop over the same body if not.

    Only the loop reports to `progress`. Inside a caller's program the loop's length must not add to what is compiled.
    Called eagerly, each layer is a program of its own that all rounds share, and a scan would compile the whole model
    once more.
    """
    if any(isinstance(x, Tracer) for x in jax.tree.leaves((carry, xs))):
        return lax.scan(body, carry, xs)
    xs, ys = jax.tree.map(np.asarray, xs), []  # slices of NumPy arrays compile nothing
    num_rounds = len(jax.tree.leaves(xs)[0])
    for i in progress(range(num_rounds)):
        carry, y = body(carry, jax.tree.map(operator.itemgetter(i), xs))
        ys.append(y)
    return carry, jax.tree.map(lambda *rounds: jnp.stack(rounds), *ys)


def _decoder(params: Any, config: Config) -> Decoder:
    return Decoder(config, params["embedding"].dtype)
