"""The interface between the decoder and a KV-cache method: all that either knows about the other.

A `KVMethod` is bound to each layer of a model and gives a `BoundLayer`. The bound layer turns a prompt's keys and
values into a state, and attends new tokens to that state. The decoder knows nothing else about a method; a method sees
only a `LayerSpec` of the model.

Axis letters, some of those in `kvjax.core.types`: B sequences, T new tokens, S slots, K key/value heads, G query heads
per key/value head, H head dim, D model width, Q observed queries, L layers.

On a mesh, `prefill`, `extend` and `measure` run inside `shard_map`: B and K are then the device's own, and what
concerns all heads of a layer goes through `kvjax.core.mesh.over_heads`. How a state or a `cross_layer` value is split
is read off its shapes: axis 0 is B (or 1 where all sequences share it), axis 1 of three or more is K (or 1 where all
heads share it). What is shared must be equal on all devices, and so must a number without axes.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from kvjax.cache.uses import Use
from kvjax.core.attention import PLAIN, AttentionPattern, Rule
from kvjax.core.attention_mass import Observation
from kvjax.core.gated_delta import GatedDelta
from kvjax.core.rope import Rope
from kvjax.core.step_bytes import StepBytes
from kvjax.core.types import Array, KVBlock, Partial, pytree
from kvjax.errors import KvjaxError, TracedCall

State = TypeVar("State")  # any pytree; returned, never assigned to


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """One layer of a model, as far as a method may know it.

    Attributes:
      index: position in the model, 0 for the first layer. Only `KVMethod.bind` is told it; a bound layer keeps
        `without_index`, so that layers that do the same are equal and share their compiled programs.
      num_layers: layers of the model.
      num_kv_heads: key/value heads of the layer, on all devices together.
      num_groups: query heads per key/value head.
      head_dim: width of the keys and queries of a head.
      rope: rotary embedding of the first `rope.dim` channels of queries and keys.
      rule: the layer's sliding window and soft cap.
      value_dim: width of the values of a head; by default `head_dim`.
      values_from: first channel of the keys that is one of the values, where values are channels of their keys
        (multi-head latent attention); None where they are not.
      method_layers: indices of the layers in which the method's own components work: those without a window, or all
        layers if the method is asked for `in_windows` (`kvjax.Method.windowed`). Methods divide what the model has
        in common, such as a budget, among these layers. By default all layers with keys and values of their own.
      reads_layer: index of the layer whose keys and values this one reads, as it has none of its own; None for a layer
        that has. Methods are not bound to such a layer, see `kvjax.cache.reading_layer`.
      reading_layers: indices of all layers of the model that read another one's.
      recurrence: what the layer has in place of attention and of keys and values; None for attention. Methods are not
        bound to such a layer, see `kvjax.cache.recurrent_layer`.
      recurrent_layers: indices of all layers of the model with a recurrence.
    """

    index: int | None
    num_layers: int
    num_kv_heads: int
    num_groups: int
    head_dim: int
    rope: Rope
    rule: Rule = PLAIN
    value_dim: int = cast(int, None)
    values_from: int | None = None
    method_layers: tuple[int, ...] = cast(tuple[int, ...], None)
    reads_layer: int | None = None
    reading_layers: tuple[int, ...] = ()
    recurrence: GatedDelta | None = None
    recurrent_layers: tuple[int, ...] = ()

    def __post_init__(self):
        if self.value_dim is None:
            object.__setattr__(self, "value_dim", self.head_dim)
        if self.method_layers is None:
            others = {*self.reading_layers, *self.recurrent_layers}
            object.__setattr__(self, "method_layers", tuple(i for i in range(self.num_layers) if i not in others))
        if self.values_from is None:
            return
        if not self.rope.dim <= self.values_from <= self.head_dim - self.value_dim:
            raise KvjaxError(
                f"values of {self.value_dim} channels cannot be those of the keys from channel {self.values_from} on: "
                f"keys have {self.head_dim} channels, and RoPE turns the first {self.rope.dim}; put the channels "
                "with positions first, or give values_from=None, which stores values on their own"
            )

    def values_of(self, keys: Array) -> Array:
        """Returns the values [... Hv] of tokens with these keys [... H], where values are channels of their keys."""
        assert self.values_from is not None
        return keys[..., self.values_from : self.values_from + self.value_dim]

    @property
    def place(self) -> int:
        """The layer's place among the `method_layers`, 0 for the first."""
        assert self.index is not None
        return self.method_layers.index(self.index)

    @property
    def without_index(self) -> LayerSpec:
        """The spec that a bound layer keeps: layers that differ only in their index are then equal."""
        return dataclasses.replace(self, index=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
    """A second pass over the prompt in which the model repeats it chunk by chunk (KVzip, arXiv 2505.23416).

    Attributes:
      chunk_tokens: prompt tokens in a chunk, the part copied by one repetition.
      lead_tokens: tokens before the chunk that are copied too.
      first: instruction before the first chunk; unused without a tokenizer.
      later: instruction before every later chunk.
      needs_gradients: each repetition is also differentiated, for `Observation.gradient_norms` (KVgrad). The hidden
        vectors of its tokens before every layer are held meanwhile.
    """

    chunk_tokens: int
    lead_tokens: int = 0
    first: str = ""
    later: str = ""
    needs_gradients: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needs:
    """A bound layer's requests to the decoder, in addition to keys, values and queries of new tokens.

    Attributes:
      observed_queries: how many of a prompt's last queries `prefill` observes; None for all.
      hidden_states: `prefill` observes the hidden states that keys and values were projected from.
      decoded_hidden_states: the new tokens of `extend` come with theirs, `KVBlock.hidden`.
      output_projection: `prefill` observes the layer's output projection.
      replay: the prompt is run a second time for `ReplayedLayer.update_scores`, and `prefill` observes the scores.
      paired_layer: +1 or -1: `prefill` observes the keys and values of the layer above or below (MiniCache).
      global_budget: tokens kept per layer are known when all layers have seen the prompt; see `BudgetedLayer`.
      prompt_chunk: above 0, the prompt itself is read through `extend`, this many tokens at a time, from the state that
        `prefill` makes of an empty block (InfLLM).
      prompt_pattern: sparse attention of the prompt's own queries; None for causal attention.
      draft_tokens: draft tokens that follow the true token in each decode step (SpeCache: 1).
      cross_layer: a step's `cross_layer` values have to reach the layer above (TidalDecode, MiniCache).
      unbounded_length: relative positions stay within the trained range at any length (StreamingLLM).
    """

    observed_queries: int | None = 0
    hidden_states: bool = False
    decoded_hidden_states: bool = False
    output_projection: bool = False
    replay: Replay | None = None
    paired_layer: int = 0
    global_budget: bool = False
    prompt_chunk: int = 0
    prompt_pattern: AttentionPattern | None = None
    draft_tokens: int = 0
    cross_layer: bool = False
    unbounded_length: bool = False

    @property
    def observes(self) -> bool:
        """Whether the layer asks for an observation; one also comes with a part of a budget that layers divide."""
        return (
            self.observed_queries != 0
            or self.output_projection
            or self.hidden_states
            or self.replay is not None
            or self.paired_layer != 0
        )

    @property
    def differentiates_replay(self) -> bool:
        """Whether the prompt's second pass is differentiated, which takes kvjax's own decoder and all its layers."""
        return self.replay is not None and self.replay.needs_gradients


@dataclasses.dataclass(frozen=True)
class Traits:
    """Facts about a method that reports show without running it.

    Attributes:
      evicts: some tokens are lost for good.
      exact: attention is that of the full cache.
      constant: the state's size does not grow with the text.
      host: something lives in host memory.
      after_prompt: what stays is decided when the prompt ends, before later questions are known.
    """

    evicts: bool = False
    exact: bool = False
    constant: bool = False
    host: bool = False
    after_prompt: bool = False


class StepResult(NamedTuple):
    """The result of `BoundLayer.extend`."""

    out: Array  # f32[B K G T H], attention output
    state: Any  # the layer's new state
    cross_layer: Any  # value for the layer above within this step; None from most methods


class BoundLayer(Protocol[State]):
    """A method bound to one layer: frozen, hashable, equal to a layer that does the same.

    A layer may also have a property `after_prompt`: the layer without what acts on prompts alone. It extends a state
    exactly as this one does, and more layers have it in common, so that decode steps share their programs.
    """

    @property
    def needs(self) -> Needs:
        """The layer's requests to the decoder; a field will do."""
        ...

    def num_slots(self, prompt_tokens: int, headroom_tokens: int) -> int:
        """Slots that a prompt of this length takes, with `headroom_tokens` more behind it."""
        ...

    def prefill(self, block: KVBlock, observation: Observation | None, num_slots: int) -> State:
        """Compresses a prompt.

        Args:
          block: keys (after RoPE) and values [B K T H] and positions i32[B 1 T], -1 for padding on the right.
          observation: what `needs` asked for, and this layer's part of a budget that layers divide; None for neither.
          num_slots: static size of the state.
        """
        ...

    def extend(
        self, state: State, q: Array, new: KVBlock, commit: int, cross_layer: Any, outside: Partial | None = None
    ) -> StepResult:
        """Attends new tokens to past and new ones, and keeps the first `commit` of them.

        Args:
          state: what `prefill` or an earlier `extend` returned.
          q: queries [B K G T H], after RoPE.
          new: the tokens' keys and values [B K T H] and positions i32[B 1 T], -1 for padding on the right.
          commit: static; tokens beyond it are drafts and leave no trace.
          cross_layer: value from the layer below in this step, None in layer 0: per query [B K T ..] (TidalDecode), or
            per slot [B K S ..] between the two layers of a pair (MiniCache).
          outside: attention of the same queries to what is not in the state, a prefix that sequences share or learned
            sinks; the softmax is over all of it. None, and left out by callers, where there is nothing of the kind.
        """
        ...

    def positions(self, state: State) -> Array:
        """i32[B 1|K S], the position of the token in each slot, -1 for an empty slot."""
        ...


@runtime_checkable
class KVMethod(Protocol):
    """A KV-cache method: frozen, hashable, without arrays."""

    @property
    def traits(self) -> Traits:
        """Facts about the method, for reports; a field will do."""
        ...

    def bind(self, spec: LayerSpec) -> BoundLayer:
        """Binds the method to a layer; raises KvjaxError, with the remedy, for a model that it cannot serve."""
        ...


# The optional abilities of a bound layer. A caller asks `isinstance(layer, RewindableLayer)`, which looks at the names
# of members alone, and raises an error that names the ability where it is missing.


@runtime_checkable
class BudgetedLayer(Protocol):
    """A layer with `Needs.global_budget`: all layers divide one budget among them (CAKE)."""

    def measure(self, block: KVBlock, observation: Observation | None) -> Any:
        """Measures a prompt in this layer: a pytree of arrays [B ..]."""
        ...

    def divide_budget(self, measures: Any, lengths: Array) -> Array:
        """Divides the budget by the measures of all layers [L B ..] and the prompts' lengths i32[B].

        Returns:
          Tokens that each layer keeps, i32[L B], or each of its heads, i32[L B K].
        """
        ...

    def count_slots(self, tokens: np.ndarray) -> int:
        """Slots for the tokens that the layer keeps of the prompts: i32[B], or i32[B K] of each head."""
        ...

    def resize(self, kept_slots: int, headroom_tokens: int) -> tuple[BoundLayer, int]:
        """Returns the layer with slots for the tokens that it keeps of the prompts.

        Args:
          kept_slots: for these tokens, at least `count_slots`.
          headroom_tokens: slots for tokens to come.

        Returns:
          The layer, and the `num_slots` of its `prefill`.
        """
        ...


@runtime_checkable
class TabulatedLayer(Protocol):
    """A layer whose heads keep numbers of tokens that a table knows by the prompt's length.

    Every layer keeps other numbers, in arrays of other sizes, so that `BoundLayer.prefill` is a program of its own in
    each of them. The same in two steps: the `selector`, equal in all layers of the table, is given the numbers, and
    `store_selected` has little to compile.
    """

    @property
    def selector(self) -> Any:
        """A stand-in for the layer while it reads a prompt; None where the layer has no table, or does it all at once.

        Its `prefill` takes i32[B K] tokens of each head as `Observation.num_kept`. Its `num_slots` are at least the
        `num_side_slots` of the layer.
        """
        ...

    def tokens_of_heads(self, lengths: np.ndarray) -> np.ndarray:
        """i32[B K]: tokens that each head keeps of prompts of lengths i32[B]."""
        ...

    def num_side_slots(self, width: int, num_slots: int) -> int:
        """Slots beside the `num_slots` of `BoundLayer.prefill` that prompts of up to `width` tokens take."""
        ...

    def store_selected(self, selected: Any, num_slots: int, side_slots: int) -> Any:
        """Makes the state that `BoundLayer.prefill` makes, of what the selector's `prefill` returned."""
        ...


@runtime_checkable
class ReplayedLayer(Protocol):
    """A layer with `Needs.replay`."""

    def update_scores(
        self, block: KVBlock, start: Array, observation: Observation, new: KVBlock, before: Array
    ) -> Array:
        """Importance of the prompt's tokens f32[B K T] after one more chunk has been repeated.

        Args:
          block: the prompt [B K T H].
          start: the chunk's first position in it.
          observation: the repetition's queries, and what else the layer needs, of it.
          new: the repetition's own keys and values.
          before: the scores after earlier chunks, 0 at first.
        """
        ...


@runtime_checkable
class RewindableLayer(Protocol[State]):
    """A layer that can take back its last tokens exactly."""

    def max_rollback(self, state: State) -> Array:
        """i32[B], how many of each sequence's last tokens can be taken back; raises IncompatibleMethod if none ever."""
        ...

    def crop(self, state: State, count: Array) -> State:
        """Removes the last count i32[B] tokens of each sequence, at most `max_rollback`."""
        ...


@runtime_checkable
class EditableLayer(RewindableLayer[State], Protocol[State]):
    """A layer whose tokens can be taken out and put in again."""

    def decoded_block(self, state: State) -> KVBlock:
        """Decodes keys, rotated to their positions, and values of all slots."""
        ...

    def append_block(self, state: State, block: KVBlock) -> State:
        """Appends tokens [B K T H] after each sequence's last one without attending them."""
        ...


@runtime_checkable
class ShareableLayer(BoundLayer[State], Protocol[State]):
    """A layer whose state other sequences' queries can read, and that can itself follow such a state (Hydragen)."""

    @property
    def spec(self) -> LayerSpec:
        """The layer of the model, without its index; a field will do."""
        ...

    def partial(self, state: State, q: Array, q_pos: Array) -> Partial:
        """Attends queries [B K G T H] at q_pos i32[B T] to a state without adding to it."""
        ...

    def check_use(self, use: Use) -> None:
        """Raises IncompatibleMethod, with the remedy, if `partial` cannot be asked for, or the layer cannot follow."""
        ...


@runtime_checkable
class ReadableLayer(BoundLayer[State], Protocol[State]):
    """A layer whose state is also read by layers above that have no keys and values of their own."""

    def check_use(self, use: Use) -> None:
        """Raises IncompatibleMethod, with the remedy, unless other layers can read the state."""
        ...

    @property
    def readable_tokens(self) -> int | None:
        """Tokens of a step that other layers read as they would in single steps; None for any number."""
        ...

    def read_state(self, state: State, q: Array, q_pos: Array, outside: Partial | None = None) -> Array:
        """Attends the queries of another layer to a state, which stays as it is.

        Args:
          state: of this layer after the step, in which the tokens at q_pos are stored.
          q: queries [B K G T H], after RoPE.
          q_pos: i32[B T], their positions, -1 for padding.
          outside: as in `BoundLayer.extend`.

        Returns:
          The attention output f32[B K G T Hv].
        """
        ...

    def read_bytes(self, state: State) -> StepBytes:
        """Bytes that `read_state` reads for one token of every sequence; the state may be shapes alone."""
        ...


@runtime_checkable
class BatchedLayer(Protocol[State]):
    """A layer whose state is not sequences along axis 0 alone, because some of them share a part of it."""

    def take_sequences(self, state: State, which: Array | np.ndarray) -> State:
        """Takes the sequences `which` i32[n], each as often as it is named."""
        ...

    def concat_sequences(self, states: list[State]) -> State:
        """Concatenates the sequences of several states; raises ValueError where shapes differ."""
        ...


@runtime_checkable
class SizedLayer(Protocol[State]):
    """A layer that counts the bytes that no token fills; see `kvjax.cache.accounting` and `kvjax.planned_bytes`."""

    def empty_bytes(self, state: State, dtype: str, prompt: int | None = None) -> dict[str, int]:
        """Bytes of a state's slots that hold no token, by memory kind.

        Args:
          state: the state, or only its shapes where `prompt` is given.
          dtype: of the model's keys and values.
          prompt: tokens of each prompt after which the state is that of the shapes; None: the state tells.
        """
        ...


@runtime_checkable
class MeteredLayer(Protocol[State]):
    """A layer that counts what a decode step reads and writes of its state; see `kvjax.step_bytes`."""

    def step_bytes(self, state: State) -> StepBytes:
        """Bytes that `extend` reads and writes for one token of every sequence; the state may be shapes alone."""
        ...


@runtime_checkable
class InspectableLayer(Protocol[State]):
    """A layer that measures how exactly it holds its tokens; see `kvjax.cache.token_status`."""

    def reconstruction_error(self, state: State, exact: KVBlock) -> tuple[Array, Array]:
        """Compares the state with the exact keys and values [B K T H] of all tokens, each at its position.

        Returns:
          Relative errors of keys and of values f32[B K S], in the slots of `positions`; NaN where unknown. They do not
          depend on the layer's index, so that equal layers may share a program.
        """
        ...


@pytree
class LayerState:
    """The state of one layer under `kvjax.Method`: the codecs' storage, and that of the other components."""

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
    """The KV cache of a model."""

    layers: tuple[Any, ...]  # one state per layer
    length: Array  # i32[B], tokens of each sequence so far, also the position of the next one
    capacity: int = dataclasses.field(metadata={"static": True})  # most tokens per sequence
    plan: tuple[BoundLayer, ...] = dataclasses.field(metadata={"static": True})  # the bound layers that made the states
    config: Any = dataclasses.field(metadata={"static": True})  # of the model that filled it
    dtype: str = dataclasses.field(metadata={"static": True})  # of that model's keys and values
    # The fingerprint of that model's weights, `kvjax.Model.fingerprint`. It is empty in a cache of `kvjax.functional`,
    # which is given parameters and no model, and `kvjax.extend`, `kvjax.generate` and `kvjax.Context` refuse it.
    weights: str = dataclasses.field(default="", metadata={"static": True})

    def __repr__(self) -> str:
        sequences, layers = self.length.shape[0], len(self.layers)
        return f"Cache({sequences} sequences, {layers} layers, capacity {self.capacity} tokens a sequence)"

    @property
    def is_donated(self) -> bool:
        """Whether a buffer of the cache was donated; one with another live reference, as `length`, may survive."""
        return any(x.is_deleted() for x in jax.tree.leaves(self))

    def check_usable(self) -> None:
        """Raises KvjaxError for a cache whose buffers were donated, or whose arrays are traced."""
        if any(isinstance(x, Tracer) for x in jax.tree.leaves(self)):
            raise TracedCall(
                "this cache is traced by a JAX transformation, and what kvjax's convenient calls check and measure are "
                "values: use kvjax.functional (prefill, extend, decode) inside jit, grad, vmap and scan"
            )
        if self.is_donated:
            raise KvjaxError("this cache was used up by an answer that did not copy it; read the prompts again")


def num_layer_slots(layer: BoundLayer, lengths: tuple[int, ...], capacity: int) -> int:
    """Slots of one layer for prompts of these lengths in a cache of `capacity` tokens per sequence."""
    headroom_tokens = round_up_headroom(capacity - max(lengths))
    return min(capacity, max(layer.num_slots(n, headroom_tokens) for n in set(lengths)))


def round_up_headroom(num_tokens: int) -> int:
    """Rounds slots for tokens to come up to a multiple of 16, so that similar prompts share one compiled program."""
    return -(-num_tokens // 16) * 16


def last_positions(lengths: Array, n: int) -> Array:
    """i32[B n]: the last n positions of sequences of i32[B] tokens, -1 where a sequence has fewer."""
    return jnp.maximum(lengths[:, None] - n + jnp.arange(n, dtype=jnp.int32)[None], -1)
