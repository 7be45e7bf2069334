"""The interface between a method and its components: all that either knows about the other.

A `kvjax.Method` is made of components. This page has the base class of each kind but codecs, which `cache.storage` has,
and the values that a component is given in addition to its own fields:

- `LayerSpec` (in `cache.protocol`), the layer of the model;
- `KVStorage` (in `cache.storage`), how the layer encodes keys and values: readers and side stores get it;
- `PromptSelection`, how the layer chooses the prompt tokens that stay: budgets of layers get it, and policies that
  repeat the choice;
- `Slots`, how many slots a prompt takes;
- `Components`, all components side by side: only the checks of what goes together get it.

A component is a frozen dataclass without arrays: it is a static argument of compiled programs, so its fields must have
hashes, and components that compare equal must do the same. Flags such as `needs_weights` are set in the class body,
without a type or as `ClassVar`, so that they are no fields. Where a component differs between layers it has a method
`at(spec)`, which returns the component of one layer; it is called once, when the method is bound (see `cache.binding`).

Axis letters and annotations are those of `core.types`: the axis `#K` of `Int32[Array, "B #K S"]` has size 1 where all
heads hold the same tokens. All arrays are traced under `jax.jit`, the lengths of prompts among them; numbers annotated
as `int`, such as `num_slots` and the fields of `Slots`, are known when a program is traced and may set shapes. Prompts
of a batch are padded on the right to one T, with `pos` -1; T is at least the longest length. What a component returns
for a sequence must depend neither on T nor on the other sequences. In the tests dtypes are promoted strictly:
write `x.astype(jnp.float32)` where an integer or a 16-bit float meets an f32.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Bool, Float, Float32, Int32

from kvjax.cache.eviction.granularity import Granularity, Token
from kvjax.cache.protocol import LayerSpec, LayerState, Replay
from kvjax.cache.storage import CacheIndex, Codec, KVStorage
from kvjax.core import memory
from kvjax.core.attention import AttentionPattern
from kvjax.core.attention_mass import Observation
from kvjax.core.mesh import over_heads
from kvjax.core.step_bytes import StepBytes
from kvjax.core.types import Array, KVBlock, Partial
from kvjax.errors import IncompatibleMethod, KvjaxError
from kvjax.utils.abstract import abstract
from kvjax.utils.parameter_types import NonNegativeInt, check_fields


class Slots(NamedTuple):
    """Slots of one layer for a prompt, of each sequence and key/value head.

    They are sizes of arrays. A shorter prompt of the batch leaves the last of its slots empty.
    """

    kept: int  # tokens that the selection leaves, all of them without a selection: the argument of `SideStore.slots`
    main: int  # of these, tokens in the main slots; decoded tokens get slots behind them
    side: int = 0  # slots of the side store; with the main ones they have room for the `kept` tokens


# How a query reads the slots: the component `read`.


class Reader:
    """Attends queries to the stored keys and values; the base keeps no state of its own.

    A reader is a frozen dataclass that defines `read`. One with a state, such as an index of the keys, also defines
    `init_state` and `append`.
    """

    draft_tokens = 0  # predicted tokens that each decode step carries along
    cross_layer = False  # whether `read` takes a value from the layer below, or makes one for the layer above
    sequential_writes = False  # whether `append` takes at most one token per call
    supports_eviction = True  # whether tokens can leave the slots, and enter them in any order
    prompt_chunk = 0  # above 0, prompts are read through the reader too, in chunks of this many tokens
    unbounded_length = False  # whether relative positions stay in the trained range at any length, as in `Needs`
    num_queries: int | None = 0  # last prompt queries of each sequence that `init_state` observes, as in `Needs`
    remembers_queries = False  # whether what `read` reads depends on the queries of earlier steps
    chooses_slots = True  # whether `read` may leave slots unread, or keeps a state

    def init_state(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> Any:
        """Returns the reader's state after a prompt, left-aligned; `observation` has its last queries."""
        return None

    def append(self, reader_state: Any, new: KVBlock, at: Int32[Array, "B #K"], spec: LayerSpec) -> Any:
        """Returns the state after tokens that are now in the slots from `at` on; there may be none."""
        return reader_state

    def used_part(self, reader_state: Any, num_tokens: int) -> Any:
        """The arrays, or parts of them, that a cache with `num_tokens` slots would have; as in `Codec.used_part`."""
        return reader_state

    def read_bytes(self, storage: KVStorage, state: LayerState) -> StepBytes:
        """Counts the bytes that `read` reads for one token: by default all keys, all values and the reader's state.

        A reader that reads less overrides it, with `storage.read_bytes(state, tokens)` or the codecs' own `read_bytes`.
        Positions and biases are counted by the layer. What `read` writes into its state may be added.

        Args:
          storage: as in `read`.
          state: the layer's state, of abstract values.
        """
        return storage.read_bytes(state) + StepBytes.of_all(state.reader_state)

    def crop(self, storage: KVStorage, state: LayerState) -> Any:
        """Returns the reader's state after its last tokens were rolled back; `state.pos` says which are left."""
        if state.reader_state is None:
            return None
        raise IncompatibleMethod(
            f"component `read`, {type(self).__name__}, keeps something of all tokens, which none can be taken out of; "
            "a context is a value: keep the one of before, or fork it"
        )

    @abstract
    def read(
        self,
        storage: KVStorage,
        state: LayerState,
        q: Float[Array, "B K G T H"],
        q_pos: Int32[Array, "B T"],
        other_partial: Partial | None,
        cross_layer: Any,
    ) -> ReadResult:
        """Attends queries to the visible slots.

        Args:
          storage: the codecs of the layer's keys and values, and its spec.
          state: the layer's state, to which the tokens of this call have been appended.
          q: queries.
          q_pos: their positions.
          other_partial: attention of the queries to what is in no slot, for a reader that needs a softmax over all:
            tokens of this call that are not kept, a prefix that sequences share, learned sinks; None for nothing.
          cross_layer: value from the layer below in this step, None in layer 0.
        """
        ...


class ReadResult(NamedTuple):
    """The result of `Reader.read`."""

    part: Partial  # attention over the slots that were read
    reader_state: Any = None  # the reader's new state
    # The softmax of a single query over the slots, for decode policies.
    weights: Float32[Array, "B K G 1 S"] | None = None
    cross_layer: Any = None  # for the layer above


# What leaves the cache while decoding: the component `decode`.


class Policy:
    """Decides which tokens stay, at the end of the prompt and after every decoded token.

    A policy is a frozen dataclass. It owns the statistics that it keeps of each token, `LayerState.policy_state`, and
    never keys or values, which the method's codecs hold. The order of slots means nothing under a policy: a new token
    goes into the first empty slot of each head, `pos` says which token is where, and a token is evicted by setting its
    `pos` to -1. Its statistics stay in its slot, until the policy writes those of the token that takes the slot: the
    new token is where `state.pos == q_pos[:, None]`, in sequences whose q_pos is not -1.
    """

    num_queries: int | None = 0  # last prompt queries that `init` observes, as in `Needs`
    needs_weights = False  # whether `after_token` reads the attention weights of a step
    needs_hidden = False  # whether `observe_token` reads hidden states; `init` has those of the prompt, as scorers do
    # Above 0, prompts are read through the layer too, this many tokens at a time, and tokens leave before positions
    # that are multiples of it and at no others. `before_token`, `observe_token` and `after_token` may then get all
    # tokens between two of these positions at once, q [B K G T H] and q_pos i32[B T].
    prompt_chunk = 0

    @abstract
    def num_slots(self) -> int:
        """Slots of the layer: the tokens that stay after a step, and the next one."""
        ...

    def num_slots_of_text(self, text_tokens: int) -> int:
        """Slots of the layer for texts of so many tokens, where they depend on that; the base's do not."""
        return self.num_slots()

    def is_constant(self, components: Components) -> bool:
        """Whether the layer's slots are equally many for all texts, over a method's other components."""
        return True

    def num_kept(self, prompt: int) -> int:
        """Most tokens that a prompt of `prompt` tokens leaves."""
        return min(prompt, self.num_slots() - 1)

    def with_selection(self, selection: PromptSelection) -> Policy:
        """Returns the policy over a method's selection, where it sizes itself by it or repeats it; the base does not.

        Called once, when the method is bound; the other members are those of what it returns.
        """
        return self

    @abstract
    def init(
        self, spec: LayerSpec, block: KVBlock, observation: Observation | None, num_slots: int
    ) -> tuple[Int32[Array, "B #K n"], Any]:
        """Selects the prompt's tokens that stay.

        Args:
          spec: the layer.
          block: the prompt, or what the method's selection keeps of it.
          observation: the queries that `num_queries` asks for.
          num_slots: of the state, S in `after_token`; fewer than `num_slots()` where no text can fill those.

        Returns:
          Their slots in the block, -1 where unused, at most `num_slots`; and the policy state, None or a pytree of
          arrays such as f32[B K S]. Token i of the first is in slot i of the state (`method_api.policy_state_at` takes
          statistics along). The K axis of the first is K where heads may later hold different tokens, since
          `state.pos` keeps its shape.
        """
        ...

    def before_token(
        self, storage: KVStorage, state: LayerState, q: Float[Array, "B K G T H"], q_pos: Int32[Array, "B T"]
    ) -> LayerState:
        """Prepares the state for a token with query q at `q_pos`; the base changes nothing."""
        return state

    def observe_token(self, spec: LayerSpec, state: LayerState, new: KVBlock) -> Any:
        """Returns the policy state with a new token, which is in its slot; the base changes nothing.

        Args:
          spec: the layer.
          state: the layer's state, with the new token in it.
          new: its key [B K 1 H] and value as they come, its position, -1 in sequences that got no token, and with
            `needs_hidden` what they were projected from.
        """
        return state.policy_state

    @abstract
    def after_token(
        self,
        spec: LayerSpec,
        state: LayerState,
        weights: Float32[Array, "B K G S"] | None,
        q_pos: Int32[Array, "B 1"],
    ) -> tuple[Int32[Array, "B K S"], Any]:
        """Evicts tokens after a new token has attended.

        Sequences that got no token, whose q_pos is -1, are included: their results must be what they were.

        Args:
          spec: the layer.
          state: the layer's state, with the new token in it.
          weights: the new token's attention, where `needs_weights`: those of the softmax that the model makes, in which
            learned sinks and a prefix that sequences share take their part, so that the sum may be below 1; 0 in empty
            slots.
          q_pos: its position.

        Returns:
          `pos` with -1 for evicted tokens, in the shape of `state.pos`, and the policy state, finite and in its shapes
          and dtypes. Every head must then have an empty slot for the next token, unless the state has a slot for every
          token of the text (`method_api.evict_lowest` keeps to that).
        """
        ...

    def read_bytes(self, storage: KVStorage, state: LayerState) -> StepBytes:
        """Bytes that the policy reads and writes in a step: by default its whole state, and the positions written."""
        size = memory.array_bytes((state.policy_state, state.pos))
        return StepBytes.of_all(state.policy_state) + StepBytes(device_written=size["device"])

    def check(self, components: Components) -> None:
        """Raises IncompatibleMethod for other components of the method that this policy cannot work with."""

    def cache_positions(self, held: Int32[Array, "B #K S"], pos: Int32[Array, "B #K T"]) -> Int32[Array, "B #K T"]:
        """Counts positions inside the cache: of tokens at `pos`, among the held tokens."""
        return _count_before(jnp.sort(jnp.where(held < 0, jnp.iinfo(jnp.int32).max, held), -1), pos)


class SlotOrder:
    """Counts positions inside a cache without a policy, whose tokens lie in the order of the text."""

    def cache_positions(self, held: Int32[Array, "B #K S"], pos: Int32[Array, "B #K T"]) -> Int32[Array, "B #K T"]:
        """Counts positions inside the cache: of tokens at `pos`, among the held tokens."""
        return _count_before(jnp.where(held < 0, jnp.iinfo(jnp.int32).max, held), pos)


SLOT_ORDER = SlotOrder()
"""The only one, so that storages with it are equal."""


def _count_before(ascending: Array, pos: Array) -> Array:
    """i32[B K T]: how many of ascending i32[B K S] are smaller than each of pos i32[B 1|K T]; 0 for pos < 0."""
    B, K, _ = ascending.shape
    queries = jnp.broadcast_to(pos, (B, K, pos.shape[2])).reshape(B * K, -1)
    index = lax.map(lambda x: jnp.searchsorted(*x).astype(jnp.int32), (ascending.reshape(B * K, -1), queries))
    return jnp.where(pos < 0, 0, index.reshape(B, K, pos.shape[2]))


# Which prompt tokens stay: the component `select`, and the components that change its choice.


class Budget:
    """Prompt tokens kept per sequence, layer and key/value head, sinks and recent tokens included.

    A budget is a frozen dataclass with the methods `num_kept` and `max_kept`. One that differs between layers also has
    a method `at(spec)`, which returns the budget of one layer.
    """

    is_fraction = False  # a fraction of each prompt, which may ask for fewer tokens than the sinks and recent ones

    @abstract
    def num_kept(self, length: int) -> int:
        """Tokens kept of a prompt of `length` tokens, at most `length`."""
        ...

    def num_kept_by_length(self, max_length: int) -> np.ndarray:
        """i32[max_length + 1]: `num_kept` of every length; a budget that knows all of them at once overrides it."""
        return np.array([self.num_kept(n) for n in range(max_length + 1)], np.int32)

    @abstract
    def max_kept(self) -> int | None:
        """Most tokens kept of a prompt of any length; None if there is no bound."""
        ...


class Scores(NamedTuple):
    """The scores of a prompt's tokens; -inf exactly at empty slots."""

    per_query_head: Float32[Array, "B K G S"]  # G = 1 for a scorer that observes no queries
    per_kv_head: Float32[Array, "B K S"]  # by which a key/value head chooses its tokens


class Scorer:
    """Scores how important each token of a prompt is.

    A scorer is a frozen dataclass with one method, `scores`; its class attributes say what it observes.
    """

    num_queries: int | None = 0  # last queries of each sequence that it observes: none, W, or None for all of them
    needs_output = False  # whether it reads the layer's output projection, `Observation.output_projection`
    needs_hidden = False  # whether it reads the prompt's hidden states, `Observation.hidden_states`
    is_comparable = True  # whether scores of different layers and heads are on one scale, as attention weights are
    # a second pass over the prompt; what `update_scores` makes of it is `Observation.replay_scores` for `scores`
    replay: Replay | None = None

    @abstract
    def scores(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> Scores:
        """Scores a prompt.

        Args:
          block: prompt keys and values, sequences left-aligned; empty slots may hold anything.
          observation: what the class attributes ask for, None if nothing. `method_api.attention_mass` sums the
            attention of its queries without building the whole matrix.
          spec: the layer.

        Returns:
          `token_scores(x, block)` for scores x f32[B K S], or `head_scores` where query heads have scores of their own.
        """
        ...

    @abstract
    def update_scores(
        self,
        block: KVBlock,
        start: Int32[Array, ""],
        observation: Observation,
        new: KVBlock,
        before: Float32[Array, "B K S"],
        spec: LayerSpec,
    ) -> Float32[Array, "B K S"]:
        """See `ReplayedLayer.update_scores`; only called for a scorer with a `replay`."""
        ...

    def require_observation(self, observation: Observation | None) -> Observation:
        """Returns the observation; raises KvjaxError where the caller brought none."""
        if observation is None:
            which = "all" if self.num_queries is None else f"the last {self.num_queries}"
            raise KvjaxError(f"{self} scores by queries, got none; observe {which} of each sequence")
        return observation


class SecondStageScorer:
    """Scores the tokens that the first stage of a selection has not kept (CriticalKV).

    A second stage is a frozen dataclass with the field `share` and the method `scores`.
    """

    share: float  # fraction of a head's kept tokens, sinks and recent ones included, that the first stage chooses
    num_queries: int | None = 0  # last prompt queries that it observes, as in `Needs`
    needs_output = False  # whether it reads the layer's output projection, `Observation.output_projection`

    def with_selection(self, selection: PromptSelection) -> SecondStageScorer:
        """Returns the stage over a method's selection, where it repeats it; as in `Policy.with_selection`."""
        return self

    @abstract
    def scores(
        self, block: KVBlock, own: Float32[Array, "B K S"], observation: Observation | None, spec: LayerSpec
    ) -> Float32[Array, "B K S"]:
        """Scores a block's tokens anew, from the scorer's own scores; -inf at empty slots."""
        ...

    def check(self, components: Components) -> None:
        """Raises IncompatibleMethod for other components of the method that this stage cannot work with."""


class EvictableUnits(NamedTuple):
    """The units of a prompt, c tokens each, among which representatives are chosen, and the features to go by."""

    scores: Float32[Array, "B K G U c"]  # of each query head
    keys: Float[Array, "B K U c H"]  # arbitrary where not valid
    valid: Bool[Array, "B U"]  # the evictable units of the sequence
    candidates: Bool[Array, "B U"]  # units that no head keeps for their score


@runtime_checkable
class Representatives(Protocol):
    """Keeps some of the units that a selection would evict, so that they stand for the others (KVCrush, k-means)."""

    @property
    def share(self) -> float:
        """The fraction of the kept units that representatives take, rounded down."""
        ...

    def choose(self, units: EvictableUnits, count: Int32[Array, " B"], places: int) -> Int32[Array, "B {places}"]:
        """Chooses at most `count` of each sequence's candidates.

        Returns:
          Distinct units, -1 where there is none.
        """
        ...


class SelectedSlots(NamedTuple):
    """The prompt tokens that a selection keeps, and the scores that it went by."""

    slots: Int32[Array, "B #K n"]  # ascending, -1 where unused
    scores: Scores


@runtime_checkable
class MergeRule(Protocol):
    """Folds keys and values of evicted tokens into kept ones."""

    def __call__(self, block: KVBlock, kept: KVBlock, choice: SelectedSlots, spec: LayerSpec) -> KVBlock:
        """Merges what a selection evicts.

        Args:
          block: the prompt.
          kept: its kept tokens, in the order of `choice.slots`.
          choice: the selection's result.
          spec: the layer.

        Returns:
          `kept` with evicted tokens folded in. Slots keep their positions; a slot that stands for several tokens may
          have the log of their number as its bias (`KVBlock.bias`).
        """
        ...


Scope = Literal["head", "layer"]
"""Whether each key/value head keeps tokens of its own, or all heads of a layer the same."""


@dataclasses.dataclass(frozen=True)
class Selection:
    """Keeps each sequence's budget of prompt tokens and evicts the others, once, when the prompt ends.

    Args:
      scorer: how important each token is.
      budget: how many tokens each layer keeps, sinks and recent tokens included.
      sinks: first tokens that always stay.
      recent: last tokens that always stay.
      granularity: whether single tokens, chunks or pages are kept; `cache.eviction.granularity` says how many tokens
        that makes.
      scope: "head", where each key/value head keeps its own tokens, or "layer", one set for all heads.
    """

    scorer: Scorer
    budget: Budget
    sinks: NonNegativeInt = 0
    recent: NonNegativeInt = 0
    granularity: Granularity = Token()
    scope: Scope = "head"

    def __post_init__(self):
        check_fields(self)
        if isinstance(self.scorer, type):
            raise KvjaxError(
                f"the scorer is the class {self.scorer.__name__}; give a value of it, as {self.scorer.__name__}()"
            )
        size = self.granularity.size
        if self.granularity.is_aligned and self.sinks % size:
            raise KvjaxError(
                f"{self.sinks} sinks do not fill whole pages of {size} tokens; use {-(-self.sinks // size) * size}"
            )

    @property
    def protected_counts(self) -> dict[str, int]:
        """The numbers of tokens that always stay, by the parameters of a method's string; none that is 0."""
        # Methods call the newest tokens a window where the scorer looks at them or at their queries.
        windows = (self.scorer.num_queries, getattr(self.scorer, "window", None))
        recent = "window" if self.recent in windows else "recent"
        return {name: count for name, count in (("sinks", self.sinks), (recent, self.recent)) if count}

    def num_kept(self, prompt: int) -> int:
        """Most tokens that a prompt of `prompt` tokens leaves."""
        return int(self.num_kept_by_length(prompt)[prompt])

    def num_kept_by_length(self, longest: int) -> np.ndarray:
        """i32[longest + 1]: `num_kept` of prompts of 0..longest tokens, to be indexed with traced lengths.

        Raises:
          KvjaxError: for a budget in tokens that is below the sinks and recent tokens of the longest prompt.
        """
        return _num_kept_by_length(self.budget, longest, tuple(self.protected_counts.items()))

    def max_kept(self) -> int | None:
        """Most tokens that a prompt of any length leaves; None if there is no bound."""
        tokens = self.budget.max_kept()
        return None if tokens is None else max(tokens, self.sinks + self.recent)


# Cached, since a bound method asks for each length that it meets, and a table of a long text takes a while.
@functools.lru_cache(maxsize=1024)
def _num_kept_by_length(budget: Budget, longest: int, counts: tuple[tuple[str, int], ...]) -> np.ndarray:
    kept, protected = budget.num_kept_by_length(longest), sum(count for _, count in counts)
    if kept[-1] < min(longest, protected) and not budget.is_fraction:
        always, names = ", ".join(f"{name}={count}" for name, count in counts), " + ".join(name for name, _ in counts)
        raise KvjaxError(
            f"budget={kept[-1]} of a layer is less than the {protected} tokens that always stay, {always}; give "
            f"budget>={protected}, or {names}<={kept[-1]}"
        )
    kept = np.maximum(kept, np.minimum(np.arange(longest + 1), protected)).astype(np.int32)
    kept.flags.writeable = False  # the cache hands the same array to all callers
    return kept


@dataclasses.dataclass(frozen=True)
class PromptSelection:
    """The choice of the prompt tokens that stay in one layer: all that budgets and policies know of a method.

    `cache.eviction.selection` has the functions that make the choice.

    Attributes:
      spec: the layer, without its index.
      select: scores the tokens and keeps the best.
      second_stage, representatives, merge: as in `Components`.
      budgets: tokens that the selection would keep in each layer of the model, None for no bound; only where all layers
        divide one budget, empty otherwise.
    """

    spec: LayerSpec
    select: Selection
    second_stage: SecondStageScorer | None = None
    representatives: Representatives | None = None
    merge: MergeRule | None = None
    budgets: tuple[int | None, ...] = ()


class HeadBudgets:
    """Units that each key/value head of a layer keeps: the rule of the side store `PagedHeads`.

    A rule is a frozen dataclass with the method `allocate`, and `at(spec)` where it differs between layers.
    """

    def bind_budget(self, selection: PromptSelection, budget: Budget, index: int) -> tuple[Budget, HeadBudgets]:
        """Returns the budget of one layer's selection, and the rule in that layer; the base changes neither.

        Args:
          selection: of the layer.
          budget: of the selection before it was bound, with all layers' numbers.
          index: of the layer, for a rule that also divides the budget among layers before any prompt.
        """
        return selection.select.budget, self

    def undivided_budget(self, budget: Budget) -> Budget:
        """Returns the budget that `bind_budget` divided among the layers, given what it returned; here the same."""
        return budget

    def num_kept_by_length(self, longest: int) -> np.ndarray | None:
        """i32[longest + 1, K]: tokens that each head keeps of prompts of 0..longest; None where the prompt decides."""
        return None

    def for_lengths(self, lengths: Int32[Array, " B"], longest: int) -> HeadBudgets:
        """The rule for prompts of these lengths, at most `longest`; a rule that goes by lengths looks them up here."""
        return self

    def num_other_heads(self, spec: LayerSpec) -> int:
        """Heads whose budgets one head may take in addition to its own: it bounds the slots of a head."""
        return spec.num_kv_heads - 1

    @abstract
    def allocate(
        self,
        scores: Float32[Array, "B K U"],
        allowed: Bool[Array, "B U"],
        num_units: Int32[Array, " B"],
        num_always: Int32[Array, " B"],
    ) -> Int32[Array, "B K"]:
        """Divides the units of a layer among all its heads.

        Args:
          scores: of every unit.
          allowed: units that a head may keep; no head gets more than there are.
          num_units: units per head on average.
          num_always: units that each head keeps in any case, in addition.

        Returns:
          Units of each head, the sum of a sequence K * num_units.
        """
        ...

    def allocate_local(
        self,
        scores: Float32[Array, "B local U"],
        allowed: Bool[Array, "B U"],
        num_units: Int32[Array, " B"],
        num_always: Int32[Array, " B"],
    ) -> Int32[Array, "B local"]:
        """`allocate` for the heads on this device, whose scores are given."""
        # Heads compete across devices, so every device divides the budget of all heads and takes its own part.
        local_heads = scores.shape[1]
        all_heads = self.allocate(over_heads.gather(scores), allowed, num_units, num_always)
        return lax.dynamic_slice_in_dim(all_heads, over_heads.first_head(local_heads), local_heads, 1)


class LayerBudgets:
    """The component `layer_budgets`: each layer measures its prompt, and gets tokens by its measure (CAKE)."""

    num_queries: int | None = 0  # last prompt queries that `measure` observes, as in `Needs`
    # whether `allocate_tokens` counts tokens of each head, which takes a side store for heads of unequal length
    by_head = False

    @abstract
    def measure(self, selection: PromptSelection, block: KVBlock, observation: Observation | None) -> Any:
        """Measures one layer's prompt: a pytree of arrays [B ...]."""
        ...

    @abstract
    def allocate_tokens(
        self, selection: PromptSelection, measures: Any, lengths: Int32[Array, " B"]
    ) -> Int32[Array, "L B"] | Int32[Array, "L B K"]:
        """Divides the budget of all layers.

        Args:
          selection: of one of the layers, for what all have in common; its `budgets` are what each would keep alone.
          measures: those of all layers, arrays [L B ...].
          lengths: tokens of the prompts.

        Returns:
          Tokens that each layer keeps, or each of its heads.
        """
        ...

    def check(self, components: Components, budgets: tuple[int | None, ...]) -> None:
        """Raises KvjaxError for other components of the method, or `PromptSelection.budgets`, that do not suit it."""


# Prompt tokens outside the main slots: the component `side_store`.


class SideStore:
    """Stores a part of the prompt's tokens apart from the slots: in another precision, in pages, or on the host.

    Attention over the store is one more `Partial`, which the layer merges with attention over the slots. A store is a
    frozen dataclass that defines `slots`, `split`, `read` and `positions`. Its method `at(spec)`, where it differs
    between layers, may return None for a layer without a store.

    Decoded tokens go into the main slots, never into the store. A store that only keeps some tokens by other codecs
    is shortest as a subclass of `method_api.PrecisionTiers`, which asks for `slots` and a mask of these tokens.
    """

    num_queries: int | None = 0  # last prompt queries of each sequence that `split` observes, as in `Needs`
    uses_host_memory = False
    # gives heads different numbers of tokens; the selection then divides its budget by it before `split`
    head_budgets: HeadBudgets | None = None
    # +1 or -1 in a layer that shares its store with the next or the previous layer; `open_pair` is then called
    paired_layer: int = 0

    @property
    def after_prompt(self) -> SideStore:
        """The store as decode steps need it: equal stores share a compiled program, whatever filled them."""
        return self

    @abstract
    def slots(self, spec: LayerSpec, kept: int, width: int) -> Slots:
        """Divides the tokens of a prompt.

        Args:
          spec: the layer.
          kept: tokens that stay in the layer, of each head in the mean.
          width: slots that the prompt is padded to, at least its tokens.

        Returns:
          `Slots(kept, main, side)`. `main` must not fall as `kept` grows: a layer takes the largest `kept` that fits.
        """
        ...

    @abstract
    def count_slots(self, tokens: np.ndarray) -> int:
        """Mean slots per head for heads that keep i32[B K] tokens; of a store with `head_budgets`."""
        ...

    @abstract
    def place(self, storage: KVStorage, block: KVBlock, num_slots: int) -> Any:
        """Puts what the heads keep into `num_slots` places for each head in the mean, before it is encoded.

        Of a store with `head_budgets`, whose `split` is `place` and `encode_placed`. Layers that keep unlike numbers
        share a program of `place`, since it may have more places than a layer needs.
        """
        ...

    @abstract
    def encode_placed(self, storage: KVStorage, placed: Any, num_slots: int) -> Any:
        """Stores in `num_slots` places for each head what `place` put into at least as many."""
        ...

    @abstract
    def split(
        self, storage: KVStorage, block: KVBlock, observation: Observation | None, slots: Slots
    ) -> tuple[KVBlock, Any]:
        """Divides the tokens of a prompt between the main slots and the store.

        Args:
          storage: of the layer's main slots.
          block: what the method's selection keeps of the prompt, or all of it without one.
          observation: the queries that `num_queries` asks for.
          slots: what `slots` says of this prompt.

        Returns:
          The tokens of the main slots, in `slots.main` places that are filled from the front, equally many in each
          head; and the stored form of the rest: any pytree, in `max(slots.side, 1)` places, since attention over no
          places is undefined. A bias of the block belongs to both parts. `method_api.mask_to_slots` and
          `gather_tokens` take marked tokens into a number of places.
        """
        ...

    @abstract
    def open_pair(self, storage: KVStorage, store: Any, cross_layer: Any) -> tuple[Any, Any]:
        """Returns the store of a paired layer as `read` takes it in this step, and the value for the layer above."""
        ...

    @abstract
    def read(
        self, storage: KVStorage, state: LayerState, q: Float[Array, "B K G T H"], q_pos: Int32[Array, "B T"]
    ) -> Partial:
        """Attends queries at the positions `q_pos` to the tokens of `state.side_store`.

        `attention.attend_dense(q, block, q_pos, storage.spec.rule)` does so for a `KVBlock`, with its bias and the
        layer's sliding window. Keys in a block are rotated; a store that takes `block.k` as it is keeps them so.
        """
        ...

    @abstract
    def positions(self, store: Any) -> Int32[Array, "B #K S"]:
        """Positions of the stored tokens, -1 in empty places."""
        ...

    def visible_block(self, storage: KVStorage, store: Any) -> KVBlock | None:
        """Keys (rotated) and values as queries read them, in the places of `positions`; None if it cannot say."""
        return None

    def read_bytes(self, storage: KVStorage, state: LayerState) -> StepBytes:
        """Bytes of `state.side_store` that `read` reads for one token; by default all of them."""
        return StepBytes.of_all(state.side_store)

    def empty_bytes(self, store: Any, slots: Slots | None = None, prompt: int | None = None) -> dict[str, int]:
        """Bytes of the places that hold no token, by memory kind; the base counts every place as held.

        Args:
          store: the store, or only its shapes after prompts of `prompt` tokens each, which take `slots`.
        """
        return memory.array_bytes(())

    def check(self, components: Components) -> None:
        """Raises IncompatibleMethod for other components of the method that the store cannot work with.

        The base refuses a decode policy, which would have to evict stored tokens, and prompts that come in chunks.
        """
        if components.decode is not None:
            raise IncompatibleMethod(
                f"component `side_store`, {type(self).__name__}, holds prompt tokens for good, and component `decode`, "
                f"{type(components.decode).__name__}, would have to evict them too; leave one of them out"
            )
        if components.prompt_chunk:
            raise IncompatibleMethod(
                f"component `side_store`, {type(self).__name__}, divides a prompt that has been seen whole, and "
                f"component `read`, {type(components.read).__name__}, takes it in chunks of {components.prompt_chunk} "
                "tokens; leave one of them out"
            )


# All of them.


@dataclasses.dataclass(frozen=True, repr=False)
class Components:
    """The components of a method in one layer, side by side; `kvjax.Method` says what each does."""

    select: Selection | None
    second_stage: SecondStageScorer | None
    representatives: Representatives | None
    merge: MergeRule | None
    layer_budgets: LayerBudgets | None
    side_store: SideStore | None
    decode: Policy | None
    positions: Literal["true", "cache"]
    k: Codec
    v: Codec
    read: Reader
    attend: AttentionPattern | None

    @property
    def indexed_by(self) -> CacheIndex | None:
        """What counts positions inside the cache, as in `KVStorage`; None for true positions."""
        if self.positions == "true":
            return None
        return SLOT_ORDER if self.decode is None else self.decode

    @property
    def prompt_chunk(self) -> int:
        """Tokens of a prompt that are read through the layer at a time; 0 for a prompt that is attended exactly."""
        if self.decode is not None and self.decode.prompt_chunk:
            return self.decode.prompt_chunk
        # A selection takes the prompt as a whole, so a reader's own chunks are for methods without one.
        return 0 if self.select else self.read.prompt_chunk

    def choose_from_prompt(self, spec: LayerSpec, budgets: tuple[int | None, ...]) -> PromptSelection | None:
        """Returns the selection with what changes its choice; None where every token of a prompt stays."""
        if self.select is None:
            return None
        return PromptSelection(spec, self.select, self.second_stage, self.representatives, self.merge, budgets)
