"""The contract between the decoder and a KV-cache method: everything that one may ask of the other stands here.

A method is bound to each layer of a model. The bound layer turns a prompt's keys and values into a state, and attends
fresh tokens to that state. The decoder knows nothing else of it, and a method knows of the model what `LayerSpec` says.

On a mesh of devices each of them runs `prefill`, `extend` and `measure` of a layer on its own rows and heads: B and K
are then its own, and what concerns all heads of a layer goes through `kvjax.core.mesh.over_heads`. Which part of a
state or a carry belongs to which device is told by the shapes of its arrays alone: axis 0 is B, or 1 for what all rows
share; of three axes or more, axis 1 is K, or 1 for what all heads share. What is shared must be equal on all devices,
and so must a number without axes.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.core.attention import AttentionPattern
from kvjax.core.attention_mass import Observation
from kvjax.core.rope import Rope
from kvjax.core.types import Array, KVBlock, KvjaxError, TracedCall, pytree


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """One layer of a model, as far as methods may know it.

    num_kv_heads counts all heads of the layer; on several devices the arrays that a method sees hold only some of them.
    """

    index: int | None  # 0 for the first layer; only told while a method is bound: what a bound layer keeps has None
    num_layers: int  # L
    num_kv_heads: int  # K
    num_groups: int  # G, query heads per key/value head
    head_dim: int  # H
    window: int | None  # the layer's sliding window: so many last positions, itself included, are visible
    rope: Rope

    @property
    def without_index(self) -> LayerSpec:
        """The spec that a bound layer keeps: layers that differ in their place alone are then equal values."""
        return dataclasses.replace(self, index=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
    """A second pass over a prompt: what the model does when it repeats it, piece by piece (KVzip, 2505.23416).

    Each piece of `chunk_tokens` tokens is run once more behind the whole prompt, after the `lead_tokens` tokens before
    it and a text that tells the model what to do: `first` for the first piece, `later` for the others. A model without
    a tokenizer reads no text.
    """

    chunk_tokens: int
    lead_tokens: int = 0
    first: str = ""
    later: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needs:
    """What a bound method asks of the decoder, beside keys, values and queries of fresh tokens.

    observed_queries: how many of a row's last prompt queries `BoundLayer.prefill` wants to see; None: all of them.
    prompt_chunk: above 0, the prompt's own attention goes through the method: it is fed to `BoundLayer.extend`, so many
    tokens at a time, from the state that `BoundLayer.prefill` makes of a block without slots.
    draft_tokens: tokens that each decode step carries beside the true one, a guess of what follows (SpeCache).
    global_budget: how many tokens a layer keeps is known only when all layers have seen the prompt; see
    `BudgetedLayer`.
    prompt_pattern: what the prompt's own queries read; None: every token before them.
    output_projection, hidden_states: `BoundLayer.prefill` wants to see the layer's output projection, or the hidden
    states of the prompt.
    replay: the prompt is run a second time for `ReplayedLayer.update_scores`, and `BoundLayer.prefill` sees what that
    found.
    paired_layer: +1 or -1 where `BoundLayer.prefill` wants to see the prompt's keys and values in the layer above or
    below.
    unbounded_length: no query meets a token at a larger distance than the method allows, however long the text is, so
    that it may go on beyond the positions that the model was made for.
    """

    observed_queries: int | None = 0
    prompt_chunk: int = 0
    draft_tokens: int = 0
    global_budget: bool = False
    prompt_pattern: AttentionPattern | None = None
    output_projection: bool = False
    hidden_states: bool = False
    replay: Replay | None = None
    paired_layer: int = 0
    unbounded_length: bool = False

    @property
    def observes(self) -> bool:
        """Whether `BoundLayer.prefill` wants to see anything beside keys and values."""
        return (
            self.observed_queries != 0
            or self.output_projection
            or self.hidden_states
            or self.replay is not None
            or self.paired_layer != 0
        )


@dataclasses.dataclass(frozen=True)
class Traits:
    """What reports may say of a method without running it."""

    evicts: bool = False  # some tokens are lost for good
    exact: bool = False  # attention is that of the full cache
    constant: bool = False  # the state's size does not grow with the text
    host: bool = False  # something lives in host memory
    after_prompt: bool = False  # what stays is decided when the prompt ends, before later questions are known


class BoundLayer(Protocol):
    """A method bound to one layer: frozen and hashable. Its state is any pytree, returned and never assigned to."""

    @property
    def needs(self) -> Needs:
        """What it asks of the decoder; a field will do."""
        ...

    def num_slots(self, prompt_tokens: int, headroom_tokens: int) -> int:
        """Slots for a row whose prompt has so many tokens, with room for so many more."""
        ...

    def prefill(self, block: KVBlock, observation: Observation | None, num_slots: int) -> Any:
        """The state after a prompt: block [B K T H], rows left-aligned, of which `num_slots` slots have to be held."""
        ...

    def extend(self, state: Any, q: Array, new: KVBlock, commit: int, cross_layer: Any) -> tuple[Array, Any, Any]:
        """Attends T fresh tokens to past and fresh ones, and keeps the first `commit` of them.

        q [B K G T H]; new [B K T H] with pos i32[B 1 T], -1 for padding on the right. cross_layer: what the layer below
        hands up within this step, None in the first layer; arrays [B K T ...], each query its own, or [B K S ...]
        from a layer to the one that it is a pair with, which hands nothing up. Returns (out f32[B K G T H], the state,
        the value for the layer above).
        """
        ...

    def positions(self, state: Any) -> Array:
        """i32[B 1|K S]: the positions of the tokens that the state holds, -1 where there is none."""
        ...


class BudgetedLayer(BoundLayer, Protocol):
    """A layer with `Needs.global_budget`: the tokens that it keeps are its share of what all layers keep together."""

    def measure(self, block: KVBlock, observation: Observation | None) -> Any:
        """What the shares are made of, from this layer's prompt: arrays [B ...]."""
        ...

    def divide_budget(self, measures: Any, lengths: Array) -> Array:
        """Measures of all layers [L B ...], lengths i32[B] of the prompts -> tokens kept, i32[L B] or i32[L B K]."""
        ...

    def slots_for(self, tokens: np.ndarray) -> int:
        """Slots for what the layer keeps of the prompts: i32[B] tokens, or i32[B K] of each head."""
        ...

    def with_room_for(self, slots: int) -> BoundLayer:
        """The layer that has so many slots for what it keeps of the prompts."""
        ...

    def num_slots_for(self, num_kept: int, headroom_tokens: int) -> int:
        """Slots for so many prompt tokens that stay, with room for so many more."""
        ...


class ReplayedLayer(BoundLayer, Protocol):
    """A layer with `Needs.replay`: it looks at what the model attends to while it repeats the prompt."""

    def update_scores(
        self, block: KVBlock, start: Array, observation: Observation, new: KVBlock, before: Array
    ) -> Array:
        """What the tokens of the prompt are worth, f32[B K T], after one more piece has been repeated.

        block [B K T H]: the prompt. start: the piece's first position in it. observation: the queries of the
        repetition, and what else the method asked for, of it. new: the repetition's own keys and values. before: what
        earlier pieces gave, 0 at first.
        """
        ...


@runtime_checkable
class PromptFreeLayer(Protocol):
    """A layer that decode steps may run in a smaller form, which more layers have in common."""

    @property
    def after_prompt(self) -> BoundLayer:
        """The layer without what acts on prompts alone; it extends a state exactly as this one does."""
        ...


class KVMethod(Protocol):
    """A KV-cache method: frozen and hashable, without arrays."""

    @property
    def traits(self) -> Traits:
        """What reports may say of it; a field will do."""
        ...

    def bind(self, spec: LayerSpec) -> BoundLayer:
        """The method in one layer; raises KvjaxError for a model that it cannot serve.

        Layers that are equal values share compiled programs, so that the layer should keep `spec.without_index`, and
        beside it what follows from the index.
        """
        ...


@pytree
class LayerState:
    """The state of one layer under `kvjax.Method`: what the codecs hold, and what the other slots keep beside it."""

    k: Any  # stored by the key codec, S slots
    v: Any  # stored by the value codec, S slots
    pos: Array  # i32[B 1|K S], original positions, -1 empty
    n: Array | None = None  # i32[B], slots in use; None where a policy fills any empty slot
    bias: Array | None = None  # f32[B K S], added to the logits
    reader_state: Any = None  # of the reader
    policy_state: Any = None  # of the policy
    side_store: Any = None  # prompt tokens that are held apart from the slots


@pytree
class Cache:
    """The KV cache of a model: one state per layer, how many tokens each row has seen, and the plan that made it."""

    layers: tuple[Any, ...]
    length: Array  # i32[B], also the position of the next token
    capacity: int = dataclasses.field(metadata={"static": True})  # tokens per row
    plan: tuple[BoundLayer, ...] = dataclasses.field(metadata={"static": True})  # one per layer
    config: Any = dataclasses.field(metadata={"static": True})  # of the model that filled it
    dtype: str = dataclasses.field(metadata={"static": True})  # of that model's keys and values
    # A fingerprint of that model's weights; empty where nobody looked, as under a transformation of `params`.
    weights: str = dataclasses.field(default="", metadata={"static": True})

    def __repr__(self) -> str:
        rows, layers = self.length.shape[0], len(self.layers)
        return f"Cache({rows} rows, {layers} layers, capacity {self.capacity} tokens a row)"

    @property
    def used_up(self) -> bool:
        """Whether any of its arrays has been given away; one that somebody looks at, as `length`, may be left."""
        return any(x.is_deleted() for x in jax.tree.leaves(self))

    def check_whole(self) -> None:
        """Raises KvjaxError where its arrays have been given away."""
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(self)):
            raise TracedCall(
                "this cache is traced by a JAX transformation, and what kvjax's convenient calls check and measure are "
                "values: use kvjax.functional (prefill, extend, decode) inside jit, grad, vmap and scan"
            )
        if self.used_up:
            raise KvjaxError("this cache was used up by an answer that did not copy it; read the prompts again")


def slots_of(layer: BoundLayer, lengths: tuple[int, ...], capacity: int) -> int:
    """Slots of one layer for prompts of these lengths in a cache of `capacity` tokens per row.

    Room is counted in multiples of 16, so that similar prompts share one compiled program.
    """
    room = -(-(capacity - max(lengths)) // 16) * 16
    return min(capacity, max(layer.num_slots(n, room) for n in set(lengths)))


def last_positions(lengths: Array, n: int) -> Array:
    """i32[B n]: the last n positions of rows of lengths i32[B], -1 where a row has fewer."""
    return jnp.maximum(lengths[:, None] - n + jnp.arange(n, dtype=jnp.int32)[None], -1)
