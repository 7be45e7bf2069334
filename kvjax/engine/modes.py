"""The forward modes: what attention reads in one layer, and what the layer holds after the pass."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Float32, Int32

from kvjax.cache.protocol import BoundLayer, ReplayedLayer, StepResult, last_positions
from kvjax.cache.readers.query_blocks import map_query_blocks
from kvjax.cache.reading_layer import ReadingLayer
from kvjax.cache.recurrent_layer import RecurrentLayer, RecurrentState
from kvjax.core.attention import (
    Rule,
    TileChoosing,
    attend_dense,
    causal_attention_with_lse,
    merge,
    sink_partial,
)
from kvjax.core.attention_mass import Observation
from kvjax.core.gated_delta import RecurrentInputs
from kvjax.core.mesh import per_device
from kvjax.core.types import Array, KVBlock, Partial, pytree
from kvjax.engine.layer_prompt import (
    LayerCall,
    LayerInputs,
    LayerPrompt,
    compress_prompt,
    observed_block,
    prompt_of_inputs,
    select_queries,
)
from kvjax.engine.positions import token_positions
from kvjax.errors import IncompatibleMethod
from kvjax.utils.abstract import abstract

QUERY_BLOCK_TOKENS = 128
"""Queries that attend at a time, where the logits of all of them at once would not fit the processor's caches."""


class ForwardMode:
    """Base class of the modes; each is a pytree of arrays that all layers share."""

    def query_indices(self, call: LayerCall) -> Int32[Array, "B Q"] | None:
        """Returns the tokens whose outputs this layer computes; None for all of them."""
        return None

    def share(self, inputs: LayerInputs) -> Any:
        """Returns what layers that read this one are given in addition to its new state; see `LayerInputs.source`."""
        raise IncompatibleMethod(
            f"{type(self).__name__} runs layers that have keys and values of their own, and in this model layers read "
            "those of another one (reads_layer); read the prompts with kvjax.prefill"
        )

    def recurrent_tokens(self, hidden: Float[Array, "B T D"]) -> tuple[Bool[Array, "B T"], int]:
        """Returns which tokens of this pass are real, and how many a layer with a recurrence keeps in its state."""
        raise IncompatibleMethod(
            f"{type(self).__name__} runs layers that have keys and values, and in this model layers have a recurrent "
            "state (recurrence); read the prompts with kvjax.prefill or kvjax.read"
        )

    @abstract
    def attend(
        self, call: LayerCall, state: Any, inputs: LayerInputs, cross_layer: Any, mesh: Mesh | None
    ) -> tuple[Float[Array, "B K G Q Hv"], Any, Any]:
        """Runs attention in one layer.

        Args:
          call: the bound layer and its static sizes.
          state: what this layer holds before the pass; see the table in `kvjax.engine`.
          inputs: queries, keys and values of the tokens of this pass.
          cross_layer: the value that the layer below hands up within this pass, None in layer 0.
          mesh: the devices that heads and sequences are split over, or None.

        Returns:
          The output for the tokens of `query_indices`, the layer's new state, and the value for the layer above.
        """
        ...


@pytree
class FullPrefill(ForwardMode):
    """Runs a whole prompt at once and turns each layer's exact keys and values into its cache state."""

    lengths: Int32[Array, " B"]
    capacity: int = dataclasses.field(metadata={"static": True})  # tokens a sequence of the cache may grow to
    num_observed: int | None = dataclasses.field(metadata={"static": True})  # last queries observed; None: all
    num_kept: Int32[Array, "B K"] | None = None  # tokens that each head of this layer keeps, for a layer that is told

    def query_indices(self, call: LayerCall) -> Int32[Array, "B Q"] | None:
        # In the model's last layer nothing reads the outputs except the sampler and the methods that observe queries.
        if not call.selects_queries or self.num_observed is None:
            return None
        return jnp.maximum(last_positions(self.lengths, self.num_observed), 0)

    def recurrent_tokens(self, hidden: Float[Array, "B T D"]) -> tuple[Bool[Array, "B T"], int]:
        return token_positions(hidden[..., 0], self.lengths) >= 0, hidden.shape[1]

    def share(self, inputs: LayerInputs) -> tuple[Array, Array]:
        """Returns the exact keys and values of the prompt."""
        return inputs.k, inputs.v

    def attend(
        self, call: LayerCall, state: None, inputs: LayerInputs, cross_layer: Any, mesh: Mesh | None
    ) -> tuple[Float[Array, "B K G Q Hv"], Any, Any]:
        if inputs.source is not None:
            _, (k, v) = inputs.source
            inputs = inputs._replace(k=k, v=v)
        q, k, v = inputs[:3]
        needs = call.layer.needs
        first_query, softmax_lse = 0, None
        if call.selects_queries and self.num_observed is not None:
            block = KVBlock(k, v, token_positions(k[:, 0, :, 0], self.lengths)[:, None])
            # `inputs` has the queries of `query_indices` alone, the last ones of each prompt.
            query_pos = last_positions(self.lengths, self.num_observed)
            first_query = self.lengths - self.num_observed
            part = attend_dense(q, block, query_pos, call.rule, needs.prompt_pattern)
            out = merge([part] if inputs.outside is None else [part, inputs.outside])
        else:
            out, sums = attend_causally(call, q, k, v, inputs.sinks, 0, self.lengths, mesh)
            # A method that weighs all queries needs each softmax's normalizer; attention just computed it.
            if needs.observed_queries is None and needs.prompt_pattern is None:
                softmax_lse = sums
        prompt = prompt_of_inputs(call.layer, inputs, self.lengths, first_query, softmax_lse)
        return out, compress_prompt(call, prompt, self.lengths, self.capacity, mesh, self.num_kept), cross_layer


@pytree
class ChunkedPrefill(ForwardMode):
    """Runs one chunk of a prompt; each layer holds the earlier chunks exactly, or in its method's state."""

    start: Int32[Array, ""] | np.int32  # position of the chunk's first token
    lengths: Int32[Array, " B"]  # of whole prompts

    def recurrent_tokens(self, hidden: Float[Array, "B T D"]) -> tuple[Bool[Array, "B T"], int]:
        return self.start + token_positions(hidden[..., 0]) < self.lengths[:, None], hidden.shape[1]

    def share(self, inputs: LayerInputs) -> None:
        """Returns nothing more: the layer holds the exact keys and values of the chunks so far."""

    def attend(
        self, call: LayerCall, state: LayerPrompt | Any, inputs: LayerInputs, cross_layer: Any, mesh: Mesh | None
    ) -> tuple[Float[Array, "B K G Q H"], LayerPrompt | Any, Any]:
        q, k, v, hidden = inputs[:4]
        layer, needs = call.layer, call.layer.needs
        if needs.prompt_chunk:
            pos = self.start + token_positions(k[:, 0, :, 0])
            new = new_tokens(layer, inputs, jnp.where(pos < self.lengths[:, None], pos, -1))
            out, state, _ = extend_layer(layer, state, q, new, k.shape[2], None, inputs.outside, mesh=mesh)
            return out, state, cross_layer
        # Causal attention reads the whole buffers: slots behind this chunk are still zero and masked by position.
        at = (0, 0, self.start, 0)
        if inputs.source is None:
            k, v = lax.dynamic_update_slice(state.k, k, at), lax.dynamic_update_slice(state.v, v, at)
        else:
            k, v = inputs.source[0][:2]
        out, _ = attend_causally(call, q, k, v, inputs.sinks, self.start, self.lengths, mesh)
        if inputs.source is not None:
            return out, state, cross_layer
        prompt = state._replace(k=k, v=v, q=select_queries(layer, q, self.start, self.lengths, state.q))
        if state.hidden is not None:
            assert hidden is not None
            prompt = prompt._replace(hidden=lax.dynamic_update_slice(state.hidden, hidden[:, None], at))
        return out, prompt, cross_layer


@pytree
class PromptReplay(ForwardMode):
    """Runs a copy of one chunk after the whole prompt, and updates the scores that a method takes from it (KVzip)."""

    start: Int32[Array, ""] | np.int32  # position of the copied chunk's first token
    pos: Int32[Array, "B T"]  # of the copy's tokens, -1 for padding
    lengths: Int32[Array, " B"]  # of the prompts
    gradient_norms: Float32[Array, "B T"] | None = None  # of the copy's tokens in this layer, see `Observation`

    def recurrent_tokens(self, hidden: Float[Array, "B T D"]) -> tuple[Bool[Array, "B T"], int]:
        return self.pos >= 0, 0  # every copy begins with the state after the prompt

    def share(self, inputs: LayerInputs) -> tuple[Array, Array]:
        """Returns the keys and values of the copy."""
        return inputs.k, inputs.v

    def attend(
        self, call: LayerCall, state: LayerPrompt | Any, inputs: LayerInputs, cross_layer: Any, mesh: Mesh | None
    ) -> tuple[Float[Array, "B K G Q Hv"], LayerPrompt | Any, Any]:
        q, k, v, hidden, output_projection, sinks, source = inputs
        exact = state
        if source is not None:
            exact, (k, v) = source
        needs = call.layer.needs
        # The copy follows the prompt at later positions; they stay two blocks, whose attention is merged exactly.
        prompt, _ = observed_block(call.layer, exact, self.lengths)
        copy = KVBlock(k, v, self.pos[:, None])
        if isinstance(call.layer, ReplayedLayer) and state.replay_scores is not None:
            assert hidden is not None or not needs.hidden_states
            observation = Observation(
                q,
                self.pos,
                output_projection=output_projection if needs.output_projection else None,
                hidden_states=hidden[:, None] if hidden is not None and needs.hidden_states else None,
                sinks=sinks,
                gradient_norms=self.gradient_norms,
            )
            update_scores = per_device(call.layer.update_scores, *k.shape[:2], mesh=mesh)
            scores = update_scores(prompt, self.start, observation, copy, state.replay_scores)
            state = state._replace(replay_scores=scores)

        @jax.checkpoint  # a gradient would keep the weights of all queries to the whole prompt
        def attend(q: Array, query_pos: Array) -> Array:
            parts = [attend_dense(q, block, query_pos, call.rule) for block in (prompt, copy)]
            return merge(parts if sinks is None else [*parts, sink_partial(sinks, q, v.shape[3])])

        return map_query_blocks(attend, q, self.pos, QUERY_BLOCK_TOKENS), state, cross_layer


@pytree
class Decode(ForwardMode):
    """Runs new tokens on a cache and keeps the first `commit` of them."""

    pos: Int32[Array, "B T"]  # -1 for padding
    commit: int = dataclasses.field(metadata={"static": True})

    def recurrent_tokens(self, hidden: Float[Array, "B T D"]) -> tuple[Bool[Array, "B T"], int]:
        return self.pos >= 0, self.commit

    def share(self, inputs: LayerInputs) -> None:
        """Returns nothing more: the state holds the tokens of this step."""

    def attend(
        self, call: LayerCall, state: Any, inputs: LayerInputs, cross_layer: Any, mesh: Mesh | None
    ) -> tuple[Float[Array, "B K G Q Hv"], Any, Any]:
        if inputs.source is not None:
            layer = call.layer
            assert isinstance(layer, ReadingLayer) and call.kind is not None
            most = layer.source.readable_tokens
            num_tokens = inputs.q.shape[3]
            if self.commit < num_tokens or (most is not None and num_tokens > most):
                raise IncompatibleMethod(
                    f"a step brings {num_tokens} tokens and keeps {self.commit}, and this model has layers that read "
                    "another layer's cache, in which all tokens of a step have to be"
                    + ("" if most is None else f", under this method at most {most} at a time")
                    + "; feed them by kvjax.extend"
                )
            arguments: list[Any] = [inputs.source[0], inputs.q, self.pos]
            if inputs.sinks is not None:
                arguments.append(sink_partial(inputs.sinks, inputs.q, call.kind.attention.value_dim))
            return per_device(layer.read, *inputs.q.shape[:2], mesh=mesh)(*arguments), state, cross_layer
        new = new_tokens(call.layer, inputs, self.pos)
        return extend_layer(call.layer, state, inputs.q, new, self.commit, cross_layer, inputs.outside, mesh=mesh)


def new_tokens(layer: BoundLayer, inputs: LayerInputs, pos: Int32[Array, "B T"]) -> KVBlock:
    """Makes the block that a layer is extended by, with hidden states where its method reads those of new tokens."""
    hidden = inputs.hidden[:, None] if layer.needs.decoded_hidden_states and inputs.hidden is not None else None
    return KVBlock(inputs.k, inputs.v, pos[:, None], hidden=hidden)


def extend_layer(
    layer: BoundLayer,
    state: Any,
    q: Float[Array, "B K G T H"],
    new: KVBlock,
    commit: int,
    cross_layer: Any = None,
    outside: Partial | None = None,
    *,
    mesh: Mesh | None,
) -> StepResult:
    """Runs `BoundLayer.extend` on each device's own sequences and heads."""
    # `commit` is static, so that it is closed over: the arguments are the arrays that devices divide.
    extend = per_device(
        lambda state, q, new, *more: layer.extend(state, q, new, commit, *more), *q.shape[:2], mesh=mesh
    )
    # A layer that is not kvjax's own need not take `outside` to serve models without anything of the kind.
    more = (cross_layer,) if outside is None else (cross_layer, outside)
    if outside is not None and "outside" not in inspect.signature(layer.extend).parameters:
        raise IncompatibleMethod(
            f"{type(layer).__name__}.extend does not take `outside`, and queries of this model also attend to what no "
            "state holds, its learned sinks; write the argument as kvjax.cache.protocol.BoundLayer describes it, and "
            "merge it with the attention to the state"
        )
    return extend(state, q, new, *more)


def run_recurrence(
    layer: BoundLayer,
    state: RecurrentState | None,
    inputs: RecurrentInputs,
    is_real: Bool[Array, "B T"],
    commit: int,
    *,
    mesh: Mesh | None,
) -> tuple[Float[Array, "B K G T Hv"], RecurrentState]:
    """Runs `RecurrentLayer.run` on each device's own sequences and heads; without a state, from the first token on."""
    assert isinstance(layer, RecurrentLayer)

    def run(state: RecurrentState | None, inputs: RecurrentInputs, is_real: Array) -> tuple[Array, RecurrentState]:
        B, K = inputs.mixed.shape[:2]
        return layer.run(state or layer.empty(B, K, inputs.mixed.dtype), inputs, is_real, commit)

    B, K = inputs.mixed.shape[:2]
    return per_device(run, B, K, mesh=mesh)(state, inputs, is_real)


def attend_causally(
    call: LayerCall,
    q: Float[Array, "B K G T H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S Hv"],
    sinks: Float[Array, "1 K G"] | None,
    start: Int32[Array, ""] | np.int32 | int,
    lengths: Int32[Array, " B"],
    mesh: Mesh | None,
) -> tuple[Float[Array, "B K G T Hv"], Float32[Array, "B K G T"]]:
    """Runs the prompt's own attention, `causal_attention_with_lse`, under the layer's window, soft cap and pattern."""
    attend = functools.partial(causal_attention_with_lse, rule=call.rule, pattern=call.layer.needs.prompt_pattern)
    if not isinstance(call.layer.needs.prompt_pattern, TileChoosing):
        return attend(q, k, v, start, sinks=sinks)

    def attend_chosen(q: Array, k: Array, v: Array, start: Array, lengths: Array, sinks: Array | None) -> Any:
        return attend(q, k, v, start, sinks=sinks, lengths=lengths)

    # Each device loops over the keys that its own heads read: one loop for all would wait for the others' choices.
    return per_device(attend_chosen, *k.shape[:2], mesh=mesh)(q, k, v, jnp.int32(start), lengths, sinks)


def attend_all(
    q: Float[Array, "B K G T H"],
    query_pos: Int32[Array, "B T"],
    block: KVBlock,
    rule: Rule,
    pattern: Any = None,
    outside: Partial | None = None,
) -> Float[Array, "B K G T Hv"]:
    """Computes exact attention of queries at their positions to a block, a few queries at a time.

    Args:
      q: queries.
      query_pos: their positions.
      block: keys and values.
      rule: the layer's window and soft cap.
      pattern: which slots a query reads; None for all visible ones.
      outside: attention of the same queries to what is not in the block, such as sinks.
    """
    partial = map_query_blocks(
        lambda q, query_pos: attend_dense(q, block, query_pos, rule, pattern), q, query_pos, QUERY_BLOCK_TOKENS
    )
    return merge([partial] if outside is None else [partial, outside])
