"""`MethodLayer`: a `kvjax.Method` bound to one layer, and what its components do with a prompt and with each token.

The life of a prompt; `MethodLayer.prefill` begins with step 2:

1. The engine attends the prompt exactly (or by `attend`) and hands over its keys and values, and an `Observation`: the
   queries, attention sums and outputs that `needs` asked for.
2. `select` scores the tokens and keeps the best; `second_stage` and `representatives` change a part of that choice.
3. `merge` adds evicted tokens to kept ones. A `side_store` takes tokens out of the main slots, and selects for itself.
4. `decode`, a policy that evicts at every step, takes over the tokens that fit its constant number of slots.
5. The codecs `k` and `v` encode the tokens that are left; `read` makes its summaries of them.

The life of a decoded token, in `MethodLayer.extend`:

6. `decode` chooses the slot whose token leaves, if the cache is full.
7. The codecs and the reader append the token; only then is the cache read, since a token attends to itself.
8. `read` attends to the slots that it chooses, the side store to its own; the partial results merge exactly.
9. `decode` updates its statistics with the attention weights of the step.
10. Draft tokens, those after the first `commit`, are attended in plain precision and leave no trace.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.chunked_extend import Extend, extend_in_chunks, extend_token_by_token
from kvjax.cache.components import Codec, HeadBudgets, Scores
from kvjax.cache.eviction.decode_policy import check_policy_result
from kvjax.cache.protocol import LayerSpec, LayerState, Needs, StepResult
from kvjax.cache.state import StateOperations
from kvjax.core import memory
from kvjax.core.attention import attend_dense, combine, merge
from kvjax.core.attention_mass import Observation
from kvjax.core.types import Array, KVBlock, Partial, gather_tokens, hash_once
from kvjax.errors import KvjaxError

if TYPE_CHECKING:
    from kvjax.cache.method import Method


PROMPT_COMPONENTS = "select", "second_stage", "representatives", "merge", "layer_budgets", "attend"
"""The components of a method that act on prompts alone."""


@hash_once
@dataclasses.dataclass(frozen=True)
class MethodLayer(StateOperations):
    """A method bound to one layer: implements `BoundLayer` by the method's components.

    Its optional abilities (crop, partial attention, editing, ..) are those of `StateOperations`. Layers that do the
    same are equal values, wherever they stand in the model, and share their compiled programs.

    Attributes:
      method: the components as they are in this layer.
      spec: the layer, without its index.
      budgets: tokens that the selection would keep in each layer of the model, None for no bound; only where all layers
        divide one budget, empty otherwise.
    """

    method: Method
    spec: LayerSpec
    budgets: tuple[int | None, ...] = ()

    @property
    def k(self) -> Codec:
        """Codec of the keys."""
        return self.method.k

    @property
    def v(self) -> Codec:
        """Codec of the values."""
        return self.method.v

    @property
    def needs(self) -> Needs:
        """Requests of all components to the decoder."""
        m = self.method
        scorer = None if m.select is None else m.select.scorer
        observers = (scorer, m.decode, m.k, m.v, m.read, m.side_store, m.layer_budgets)
        num_queries = [observer.num_queries for observer in observers if observer is not None]
        return Needs(
            # One component that observes all queries (None) decides for the others.
            observed_queries=None if None in num_queries else max(n for n in num_queries if n is not None),
            hidden_states=scorer is not None and scorer.needs_hidden,
            output_projection=scorer is not None
            and (scorer.needs_output or (m.second_stage is not None and m.second_stage.needs_output)),
            replay=None if scorer is None else scorer.replay,
            paired_layer=0 if m.side_store is None else m.side_store.paired_layer,
            global_budget=m.layer_budgets is not None,
            # A selection takes the prompt as a whole, so a reader's own chunks are for methods without one.
            prompt_chunk=0 if m.select else m.read.prompt_chunk,
            prompt_pattern=m.attend,
            draft_tokens=m.read.draft_tokens,
            unbounded_length=m.positions == "cache" or m.read.unbounded_length,
        )

    @functools.cached_property
    def after_prompt(self) -> MethodLayer:
        """The layer for decode steps: without the components that act on prompts alone.

        Methods that only select are equal in this form and share one decode program. Questions about the content of a
        cache, such as its bytes and positions, go to the layer itself.
        """
        if self.method.decode is not None:  # a policy may repeat the selection
            return self
        method = dataclasses.replace(self.method, **dict.fromkeys(PROMPT_COMPONENTS))
        if method.side_store is not None:
            method = dataclasses.replace(method, side_store=method.side_store.after_prompt)
        return dataclasses.replace(self, method=method, budgets=())

    # Sizes.

    def num_kept(self, prompt_tokens: int) -> int:
        """Most tokens that a prompt of this length leaves in this layer."""
        m = self.method
        kept = m.select.num_kept(prompt_tokens) if m.select else prompt_tokens
        return m.decode.num_kept(self, kept) if m.decode else kept

    def num_slots(self, prompt_tokens: int, headroom_tokens: int) -> int:
        """Slots for a prompt of this length and `headroom_tokens` more."""
        return self.num_slots_for(self.num_kept(prompt_tokens), headroom_tokens)

    def num_slots_for(self, num_kept: int, headroom_tokens: int) -> int:
        """Slots for `num_kept` tokens of a prompt and `headroom_tokens` more."""
        m = self.method
        if m.decode:  # its number of slots is constant
            return m.decode.num_slots(self)
        return (m.side_store.num_main_slots(num_kept) if m.side_store else num_kept) + headroom_tokens

    def positions(self, state: LayerState) -> Array:
        """i32[B 1|K S], the position of the token in each slot, those of the side store last; -1 where it is empty."""
        if self.method.side_store is None:
            return state.pos
        parts = state.pos, self.method.side_store.positions(state.side_store)
        heads = max(pos.shape[1] for pos in parts)
        return jnp.concatenate([jnp.broadcast_to(pos, (pos.shape[0], heads, pos.shape[2])) for pos in parts], 2)

    # A budget that all layers of the model divide: the members of `BudgetedLayer`.

    def measure(self, block: KVBlock, observation: Observation | None) -> Any:
        """See `BudgetedLayer`."""
        assert self.method.layer_budgets is not None
        return self.method.layer_budgets.measure(self, block, observation)

    def divide_budget(self, measures: Any, lengths: Array) -> Array:
        """See `BudgetedLayer`."""
        assert self.method.layer_budgets is not None
        return self.method.layer_budgets.allocate_tokens(self, measures, lengths)

    def num_kept_slots(self, tokens: np.ndarray) -> int:
        """See `BudgetedLayer`."""
        if tokens.ndim == 1:  # heads keep equally many, in the main slots
            return int(tokens.max())
        assert self.method.side_store is not None
        return self.method.side_store.num_kept_slots(tokens)

    def with_kept_slots(self, slots: int) -> MethodLayer:
        """See `BudgetedLayer`."""
        m = self.method
        if m.side_store is None or m.layer_budgets is None or not m.layer_budgets.by_head:
            return self  # the main slots are sized when the state is made
        return dataclasses.replace(self, method=dataclasses.replace(m, side_store=m.side_store.with_kept_slots(slots)))

    # The prompt.

    def update_scores(
        self, block: KVBlock, start: Array, observation: Observation, new: KVBlock, before: Array
    ) -> Array:
        """f32[B K T]: see `ReplayedLayer`."""
        assert self.method.select is not None
        return self.method.select.scorer.update_scores(block, start, observation, new, before, self.spec)

    def prefill(self, block: KVBlock, observation: Observation | None, num_slots: int) -> LayerState:
        """Compresses a prompt; see `BoundLayer`."""
        m = self.method
        side_store = policy_state = None
        # A side store applies the selection itself, in `split`.
        if m.side_store:
            block, side_store = m.side_store.split(self, block, observation, num_slots)
        elif m.select:
            block = self.apply_selection(block, observation, min(num_slots, block.pos.shape[2]))
        if (m.side_store or m.select) and observation is not None:
            # The softmax sums cover the whole prompt, and some of its tokens are gone: the components below sum anew.
            observation = observation._replace(softmax_lse=None)
        if m.decode:
            result = m.decode.init(self, block, observation, num_slots)
            slots, policy_state = check_policy_result(m.decode, "init", result, block.k.shape[:2])
            block = gather_tokens(block, slots)
        # Empty slots follow the tokens, for what is decoded later.
        more = [(0, 0), (0, 0), (0, num_slots - block.pos.shape[2])]
        k, v = (jnp.pad(x, [*more, (0, 0)]) for x in (block.k, block.v))
        bias = None if block.bias is None else jnp.pad(block.bias, more)
        block = KVBlock(k, v, jnp.pad(block.pos, more, constant_values=-1), bias)
        # Under a policy any slot may be empty, so that no number says which are.
        n = None if m.decode else (block.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
        keys, values, reader_state = self.encode_slots(block, observation)
        return LayerState(keys, values, block.pos, n, block.bias, reader_state, policy_state, side_store)

    def apply_selection(
        self,
        block: KVBlock,
        observation: Observation | None,
        slots: int,
        head_budgets: HeadBudgets | None = None,
        scores: Scores | None = None,
    ) -> KVBlock:
        """Applies the selection to a prompt, with representatives and merging.

        Args:
          block: the prompt [B K T H].
          observation: of the prompt's queries.
          slots: static size of the result.
          head_budgets: divides the layer's budget among its heads; a head may then keep more than the mean.
          scores: of the tokens, where they are known; None: the selection's scorer is asked.

        Returns:
          The tokens that stay [B K slots H], in the order of their positions.
        """
        m = self.method
        assert m.select is not None
        keep = m.select.num_kept_per_sequence(block, observation, slots)
        choice = m.select.select_slots(
            block,
            observation,
            keep,
            slots,
            self.spec,
            representatives=m.representatives,
            head_budgets=head_budgets,
            second_stage=m.second_stage,
            scores=scores,
        )
        kept = gather_tokens(block, choice.slots)
        return kept if m.merge is None else m.merge(block, kept, choice, self.spec)

    def encode_slots(self, block: KVBlock, observation: Observation | None) -> tuple[Any, Any, Any]:
        """Encodes the tokens of the main slots: (keys, values, the reader's state)."""
        return (
            self.k.encode_prompt(self.keys_to_store(block), block.pos, observation),
            self.v.encode_prompt(block.v, block.pos, observation),
            self.method.read.init_state(block, observation, self.spec),
        )

    # Keys are stored before or after their rotation.

    def keys_to_store(self, block: KVBlock) -> Array:
        """The keys as the codec gets them: without rotation if it asks so, or if positions are indices in the cache."""
        if self.method.positions == "true" and not self.k.pre_rope:
            return block.k
        return self.spec.rope.unrotate(block.k, block.pos).astype(block.k.dtype)

    def decode_keys(self, stored: Any, pos: Array) -> Array:
        """Decodes all keys [B K S H], rotated to their positions i32[B 1|K S]; for methods of true positions."""
        return self._rotate_keys(self.k.decode(stored), pos)

    def gather_keys(self, stored: Any, idx: Array, pos: Array) -> Array:
        """Decodes the keys [B K n H] in slots idx i32[B K n], rotated to their positions i32[B 1|K n]."""
        return self._rotate_keys(self.k.gather(stored, idx), pos)

    def _rotate_keys(self, k: Array, pos: Array) -> Array:
        return self.spec.rope.rotate(k, pos).astype(k.dtype) if self.k.pre_rope else k

    # Tokens after the prompt.

    def extend(self, state: LayerState, q: Array, new: KVBlock, commit: int, cross_layer: Any = None) -> StepResult:
        """Attends T new tokens to past and new ones, and keeps the first `commit` of them; see `BoundLayer`.

        A chunk of T tokens gives what T single steps give. A method with drafts is the exception: a call does not know
        the draft that an earlier one would have carried.
        """
        if not self.needs.paired_layer or self.method.side_store is None:
            return self._extend_in_steps(self._extend_once, state, q, new, commit, cross_layer)
        # A pair of layers shares the content of its store for the whole call, in however many steps it is read.
        store, cross_layer = self.method.side_store.open_pair(self, state.side_store, cross_layer)
        opened = dataclasses.replace(state, side_store=store)
        out, after, _ = self._extend_in_steps(self._extend_once, opened, q, new, commit, None)
        return StepResult(out, dataclasses.replace(after, side_store=state.side_store), cross_layer)

    def _extend_in_steps(
        self, extend: Extend, state: LayerState, q: Array, new: KVBlock, commit: int, cross_layer: Any
    ) -> StepResult:
        """Calls `extend` with as many tokens at a time as the components can take."""
        m, T = self.method, q.shape[3]
        if m.decode is not None:
            # A policy evicts for one token at a time. A draft may come with it only if the reader is made for drafts.
            token_by_token = T > 1 and (commit > 1 or not m.read.draft_tokens)
        else:
            # Uncommitted tokens change nothing for the others, so that one token and any number of drafts are one step.
            token_by_token = commit > 1 and any(x.sequential_writes for x in (m.k, m.v, m.read))
        if token_by_token:
            if commit < T and m.decode is None:
                raise KvjaxError(
                    f"this method keeps 0, 1 or all of a chunk's tokens, got commit={commit} of {T}: it holds "
                    "sequences, and no tree or beam of guesses"
                )
            return extend_token_by_token(extend, state, q, new, commit, cross_layer)
        if 0 < m.read.prompt_chunk < T:
            return extend_in_chunks(extend, state, q, new, commit, cross_layer, size=m.read.prompt_chunk)
        return extend(state, q, new, commit, cross_layer)

    def _extend_once(
        self,
        state: LayerState,
        q: Array,
        new: KVBlock,
        commit: int,
        cross_layer: Any,
        other_partial: Partial | None = None,
    ) -> StepResult:
        """`extend` of tokens that all components take in one call.

        Args:
          other_partial: attention of the same queries to tokens outside this state (a shared prefix).
        """
        m, T, q_pos = self.method, q.shape[3], new.pos[:, 0]
        if m.decode:
            new = new.clean()
            if commit:
                state = m.decode.before_token(self, state, q[:, :, :, :1], q_pos[:, :1])
        with jax.named_scope("append"):
            state = self._append(state, new.first(commit))
        with jax.named_scope("read"):
            outside = [] if other_partial is None else [other_partial]
            if commit < T:
                outside.append(attend_dense(q, new.without_first(commit), q_pos, self.spec.window))
            # A reader that adapts to the attention weights has to know how much weight lies outside its slots.
            outside_partial = functools.reduce(combine, outside) if outside else None
            result = m.read.read(self, state, q, q_pos, outside_partial, cross_layer)
            partials = [result.part]
            if m.side_store:
                partials.append(m.side_store.read(self, state, q, q_pos))
        state = dataclasses.replace(state, reader_state=result.reader_state)
        if m.decode and commit:
            weights = result.weights if m.decode.needs_weights else None
            weights = None if weights is None else weights[:, :, :, 0]
            after = m.decode.after_token(self, state, weights, q_pos[:, :1])
            pos, policy_state = check_policy_result(m.decode, "after_token", after, q.shape[:2])
            state = dataclasses.replace(state, pos=pos, policy_state=policy_state)
        return StepResult(merge(partials + outside), state, result.cross_layer)

    def _append(self, state: LayerState, new: KVBlock) -> LayerState:
        """Writes new tokens after the last slot in use, or, under a policy, one token into an empty slot."""
        count = new.pos.shape[2]
        pos = jnp.broadcast_to(new.pos, (*state.pos.shape[:2], count))
        if state.n is None:
            if not count:
                return state
            slot, n = jnp.argmin(state.pos, 2).astype(jnp.int32), None  # an empty slot: -1 is the least position
            # A padding token must not take a position: its write goes beyond the last slot, where it is dropped.
            pos_slot = jnp.where(pos[:, :, 0] >= 0, slot, state.pos.shape[2])
        else:
            # This runs without tokens too: a codec may have a group to encode before the next ones are read.
            slot = pos_slot = state.n[:, None]
            n = state.n + (new.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
        bias = state.bias
        if bias is not None:  # a new token counts once; only merged tokens have a bias
            bias = memory.put(bias, jnp.zeros((*bias.shape[:2], count), bias.dtype), pos_slot)
        return dataclasses.replace(
            state,
            k=self.k.append(state.k, self.keys_to_store(new), slot),
            v=self.v.append(state.v, new.v, slot),
            pos=memory.put(state.pos, pos, pos_slot),
            n=n,
            bias=bias,
            reader_state=self.method.read.append(state.reader_state, new, slot, self.spec),
        )
