"""From one layer's prompt keys, values and queries to its cache state."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Float, Float32, Int32

from kvjax.cache.protocol import BoundLayer, last_positions
from kvjax.cache.reading_layer import ReadingLayer
from kvjax.cache.recurrent_layer import RecurrentLayer
from kvjax.core.attention import Rule, sink_partial
from kvjax.core.attention_mass import Observation
from kvjax.core.mesh import constrain, per_device
from kvjax.core.types import Array, KVBlock, Partial
from kvjax.engine.positions import token_positions
from kvjax.models.kinds import LayerKind


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """One bound layer in one pass. Hashable: equal calls share a compiled program, wherever they stand in the model."""

    layer: BoundLayer
    rule: Rule  # the model's window and soft cap in this layer
    num_slots: int = 0  # of the cache state, in the modes that make one
    selects_queries: bool = False  # whether the mode computes only some outputs in this layer, the model's last one
    kind: LayerKind | None = None  # of kvjax's own decoder; None where another one runs the layers
    is_read: bool = False  # whether layers above read this one's keys and values, as they have none of their own


class LayerInputs(NamedTuple):
    """The queries, keys and values of one layer in this pass, and the hidden vectors that they come from."""

    q: Float[Array, "B K G T H"]  # after RoPE
    k: Float[Array, "B K T H"]  # after RoPE
    v: Float[Array, "B K T Hv"]
    # Normalized, what q, k and v were projected from; None where no method observes it.
    hidden: Float[Array, "B T D"] | None
    output_projection: Float[Array, "1 K G Hv D"] | None
    sinks: Float[Array, "1 K G"] | None = None  # logits that take weight and give no value
    # Of a layer that has no keys and values, so that k and v are None: the new state of the layer that it reads in
    # their place, and what `ForwardMode.share` returned there. None for other layers.
    source: tuple[Any, Any] | None = None

    @property
    def outside(self) -> Partial | None:
        """The queries' attention to the sinks, as `BoundLayer.extend` takes it; None without sinks."""
        return None if self.sinks is None else sink_partial(self.sinks, self.q, self.v.shape[3])


class LayerPrompt(NamedTuple):
    """Exact keys and values of a prompt in one layer, and what the layer's method observes; None where it does not."""

    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S Hv"]
    q: Float[Array, "B K G Q H"]  # the observed queries
    hidden: Float[Array, "B 1 S D"] | None = None  # the input of the projections
    output_projection: Float[Array, "1 K G Hv D"] | None = None
    replay_scores: Float32[Array, "B K S"] | None = None
    # Keys and values of the layer that this one is paired with.
    paired: tuple[Float[Array, "B K S H"], Float[Array, "B K S Hv"]] | None = None
    softmax_lse: Float32[Array, "B K G Q"] | None = None  # the log normalizer of each observed query
    sinks: Float[Array, "1 K G"] | None = None  # of the layer, see `LayerInputs`


def begin_prompt(call: LayerCall, q: Any, k: Any, v: Any, hidden: Any, mesh: Mesh | None) -> LayerPrompt | Any:
    """Makes the state of a layer before the first chunk of a prompt: its cache state, or an exact prompt of zeros.

    Args:
      call: the bound layer, and the slots of its state.
      q: queries of the whole prompt [B K G S H]; of these and the others only shapes and dtypes are read.
      k: its keys [B K S H].
      v: its values [B K S V].
      hidden: the input of the projections [B S D]; None where the method does not observe it.
      mesh: the devices that heads and sequences are split over, or None.
    """
    needs = call.layer.needs

    def zeros(like: Any, num_tokens: int) -> Array:
        return constrain(jnp.zeros((*like.shape[:-2], num_tokens, like.shape[-1]), like.dtype), "B K", mesh)

    if needs.prompt_chunk or isinstance(call.layer, ReadingLayer | RecurrentLayer):
        nothing = KVBlock(zeros(k, 0), zeros(v, 0), jnp.zeros((k.shape[0], 1, 0), jnp.int32))
        return prefill_layer(call.layer, nothing, None, call.num_slots, mesh)
    width = k.shape[2]
    num_observed = width if needs.observed_queries is None else needs.observed_queries
    all_hidden = None
    if needs.hidden_states:
        all_hidden = jnp.zeros((k.shape[0], 1, width, hidden.shape[2]), hidden.dtype)
    return LayerPrompt(zeros(k, width), zeros(v, width), zeros(q, num_observed), all_hidden)


def prompt_of_inputs(
    layer: BoundLayer,
    inputs: LayerInputs,
    lengths: Int32[Array, " B"],
    first_query: Int32[Array, "..."] | int = 0,
    softmax_lse: Float32[Array, "B K G T"] | None = None,
) -> LayerPrompt:
    """Collects a whole prompt from the tensors of a decoder layer.

    Args:
      layer: the bound layer, whose `needs` say what it observes.
      inputs: queries, keys and values of all tokens of the prompts.
      lengths: of the prompts.
      first_query: position of the first query in `inputs`, one number or one for each sequence.
      softmax_lse: the log normalizers of the queries, where attention returned them.
    """
    return LayerPrompt(
        inputs.k,
        inputs.v,
        select_queries(layer, inputs.q, first_query, lengths),
        hidden=inputs.hidden[:, None] if layer.needs.hidden_states and inputs.hidden is not None else None,
        output_projection=inputs.output_projection if layer.needs.output_projection else None,
        softmax_lse=softmax_lse,
        sinks=inputs.sinks,
    )


def select_queries(
    layer: BoundLayer,
    q: Float[Array, "B K G C H"],
    first: Int32[Array, "..."] | int | np.int32,
    lengths: Int32[Array, " B"],
    earlier: Float[Array, "B K G Q H"] | None = None,
) -> Float[Array, "B K G Q H"]:
    """Selects the queries that a layer's method observes.

    Args:
      layer: the bound layer.
      q: queries at positions first, first + 1, ..
      first: position of the first query, one number or one for each sequence.
      lengths: of the whole prompts.
      earlier: the same selection over the chunks before this one; its entries stay where this chunk has none.

    Returns:
      The observed queries.
    """
    num_observed, B, C = layer.needs.observed_queries, q.shape[0], q.shape[3]
    if num_observed is None:
        return q if earlier is None else lax.dynamic_update_slice(earlier, q, (0, 0, 0, first, 0))
    # Indices in this chunk of the observed queries, the last of each prompt; one outside 0..C-1 is in another chunk.
    at = last_positions(lengths, num_observed) - jnp.broadcast_to(jnp.asarray(first), (B,))[:, None]
    new = jnp.take_along_axis(q, jnp.clip(at, 0, C - 1)[:, None, None, :, None], 3)
    if earlier is None:
        return new
    return jnp.where(((at >= 0) & (at < C))[:, None, None, :, None], new, earlier)


def observed_block(
    layer: BoundLayer,
    prompt: LayerPrompt,
    lengths: Int32[Array, " B"],
    num_kept: Int32[Array, " B"] | Int32[Array, "B K"] | None = None,
    measure: Any = None,
) -> tuple[KVBlock, Observation | None]:
    """Returns the prompt as `BoundLayer.prefill` takes it.

    Args:
      layer: the bound layer.
      prompt: exact keys and values, and what the method observes.
      lengths: of the prompts.
      num_kept: tokens that this layer, or each of its heads, may keep where all layers share one budget (CAKE); else
        None.
      measure: what the layer has measured of the prompt for that division.

    Returns:
      The keys and values with their positions, and the observation; None for a method that observes nothing.
    """
    pos = token_positions(prompt.k[:, 0, :, 0], lengths)
    block = KVBlock(prompt.k, prompt.v, pos[:, None])
    if not layer.needs.observes and num_kept is None:
        return block, None
    query_pos = pos if layer.needs.observed_queries is None else last_positions(lengths, layer.needs.observed_queries)
    paired = None if prompt.paired is None else KVBlock(*prompt.paired, pos[:, None])
    return block, Observation(
        prompt.q,
        query_pos,
        num_kept=num_kept,
        measure=measure,
        output_projection=prompt.output_projection,
        hidden_states=prompt.hidden,
        replay_scores=prompt.replay_scores,
        paired_block=paired,
        softmax_lse=prompt.softmax_lse,
        sinks=prompt.sinks,
    )


def compress_prompt(
    call: LayerCall,
    prompt: LayerPrompt,
    lengths: Int32[Array, " B"],
    capacity: int,
    mesh: Mesh | None = None,
    num_kept: Int32[Array, " B"] | Int32[Array, "B K"] | None = None,
    measure: Any = None,
) -> Any:
    """Turns a layer's exact prompt into its cache state.

    Args:
      call: the bound layer, and the slots of its state.
      prompt: exact keys and values, and what the method observes.
      lengths: of the prompts.
      capacity: tokens that a sequence of the cache may grow to.
      mesh: the devices that heads and sequences are split over, or None.
      num_kept, measure: as in `observed_block`.
    """
    prompt = truncate_prompt(call.layer, prompt, capacity)
    block, observation = observed_block(call.layer, prompt, lengths, num_kept, measure)
    return prefill_layer(call.layer, block, observation, call.num_slots, mesh)


def truncate_prompt(layer: BoundLayer, prompt: LayerPrompt, capacity: int) -> LayerPrompt:
    """Cuts off what lies beyond the capacity: prompts are padded to a multiple that may exceed it."""
    width = min(prompt.k.shape[2], capacity)

    def truncate(x: Array | None, axis: int = 2) -> Array | None:
        return None if x is None else lax.slice_in_dim(x, 0, width, axis=axis)

    observes_all = layer.needs.observed_queries is None
    return prompt._replace(
        k=truncate(prompt.k),
        v=truncate(prompt.v),
        q=truncate(prompt.q, 3) if observes_all else prompt.q,
        softmax_lse=truncate(prompt.softmax_lse, 3) if observes_all else prompt.softmax_lse,
        hidden=truncate(prompt.hidden),
        replay_scores=truncate(prompt.replay_scores),
        paired=None if prompt.paired is None else tuple(map(truncate, prompt.paired)),
    )


def prefill_layer(
    layer: BoundLayer, block: KVBlock, observation: Observation | None, num_slots: int, mesh: Mesh | None
) -> Any:
    """Runs `BoundLayer.prefill` on each device's own sequences and heads."""
    if mesh is None:
        return layer.prefill(block, observation, num_slots)
    is_empty = block.pos.shape[2] == 0

    def prefill(block: KVBlock, observation: Observation | None) -> Any:
        return layer.prefill(block.first(0) if is_empty else block, observation, num_slots)

    # XLA cannot divide a call whose arguments are all empty: the block gets one slot here, which `prefill` drops.
    if is_empty:
        block = jax.tree.map(lambda x: jnp.zeros((*x.shape[:2], 1, *x.shape[3:]), x.dtype), block)
    return per_device(prefill, *block.k.shape[:2], mesh=mesh)(block, observation)
