"""A method bound to one layer: what its slots do with a prompt, and with each token after it."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import compatibility
from kvjax.cache.chunked_extend import Extend, extend_in_chunks, extend_token_by_token
from kvjax.cache.codecs.base import Codec
from kvjax.cache.eviction.budget_allocation import HeadBudgets
from kvjax.cache.eviction.decode_policy import first_empty_slot
from kvjax.cache.protocol import LayerSpec, LayerState, Needs, StepResult
from kvjax.cache.state import StateOperations
from kvjax.core import memory
from kvjax.core.attention import attend_dense, combine, merge
from kvjax.core.attention_mass import Observation
from kvjax.core.types import Array, KVBlock, Partial, gather_tokens, hash_once
from kvjax.errors import KvjaxError

if TYPE_CHECKING:
    from kvjax.cache.method import Method
    from kvjax.cache.side_store.base import SideStore


PROMPT_COMPONENTS = "select", "second_stage", "representatives", "merge", "layer_budgets", "attend"
"""The components of a method that act on prompts alone."""


@hash_once
@dataclasses.dataclass(frozen=True)
class MethodLayer(StateOperations):
    """A method bound to one layer: the `BoundLayer` of the contract, by the method's slots.

    Layers of a model that do the same are equal values, wherever they stand.

    Attributes:
      method: its components as they are in this layer.
      spec: the layer's, without its index.
      budgets: the tokens that the selection would keep in each layer of the model, None for no bound; only where
        layers divide one budget, empty otherwise.
    """

    method: Method
    spec: LayerSpec
    budgets: tuple[int | None, ...] = ()

    @property
    def k(self) -> Codec:
        """How keys are held."""
        return self.method.k

    @property
    def v(self) -> Codec:
        """How values are held."""
        return self.method.v

    @property
    def needs(self) -> Needs:
        """What the slots ask of the decoder."""
        m = self.method
        asked = [
            0 if m.select is None else m.select.scorer.num_queries,
            0 if m.decode is None else m.decode.num_queries,
        ]
        asked += [x.num_queries for x in (m.k, m.v, m.read, m.side_store, m.layer_budgets) if x is not None]
        queries = None if None in asked else max(n for n in asked if n is not None)
        chunk = 0 if m.select else m.read.prompt_chunk
        output = m.select is not None and (
            m.select.scorer.needs_output or (m.second_stage is not None and m.second_stage.needs_output)
        )
        hidden = m.select is not None and m.select.scorer.needs_hidden
        probe = None if m.select is None else m.select.scorer.replay
        neighbour = 0 if m.side_store is None else m.side_store.paired_layer
        endless = m.positions == "cache" or m.read.unbounded_length
        shared = m.layer_budgets is not None
        return Needs(
            observed_queries=queries,
            prompt_chunk=chunk,
            draft_tokens=m.read.draft_tokens,
            global_budget=shared,
            prompt_pattern=m.attend,
            output_projection=output,
            hidden_states=hidden,
            replay=probe,
            paired_layer=neighbour,
            unbounded_length=endless,
        )

    @functools.cached_property
    def after_prompt(self) -> MethodLayer:
        """The layer as decode steps need it: without the components that act on prompts alone.

        Methods that only select have one decode program in common. What is asked about a cache's content, as its bytes
        or positions, is asked of the layer itself.
        """
        if self.method.decode is not None:  # a policy may make the selection again
            return self
        method = dataclasses.replace(self.method, **dict.fromkeys(PROMPT_COMPONENTS))
        if method.side_store is not None:
            method = dataclasses.replace(method, side_store=method.side_store.after_prompt)
        return dataclasses.replace(self, method=method, budgets=())

    def check(self) -> None:
        """Raises IncompatibleMethod for slots that cannot work together."""
        compatibility.check_components(self)

    def num_kept(self, prompt: int) -> int:
        """Most tokens that a prompt of this length leaves in this layer."""
        m = self.method
        kept = m.select.num_kept(prompt) if m.select else prompt
        return m.decode.num_kept(self, kept) if m.decode else kept

    def num_slots(self, prompt_tokens: int, headroom_tokens: int) -> int:
        """Slots for a prompt of so many tokens and so many more."""
        return self.num_slots_for(self.num_kept(prompt_tokens), headroom_tokens)

    def num_slots_for(self, num_kept: int, headroom_tokens: int) -> int:
        """Slots for so many prompt tokens that stay and so many more."""
        if self.method.decode:
            return self.method.decode.num_slots(self)
        return (
            self.method.side_store.num_main_slots(num_kept) if self.method.side_store else num_kept
        ) + headroom_tokens

    def positions(self, state: LayerState) -> Array:
        """i32[B 1|K S], of the tokens held."""
        if self.method.side_store is None:
            return state.pos
        here, there = state.pos, self.method.side_store.positions(state.side_store)
        heads = max(here.shape[1], there.shape[1])
        return jnp.concatenate([jnp.broadcast_to(x, (x.shape[0], heads, x.shape[2])) for x in (here, there)], 2)

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
        store = self._store_by_head
        return int(tokens.max()) if store is None else store.num_kept_slots(tokens)

    def with_kept_slots(self, slots: int) -> MethodLayer:
        """See `BudgetedLayer`."""
        store = self._store_by_head
        if store is None:
            return self  # the number of its slots says it
        method = dataclasses.replace(self.method, side_store=store.with_kept_slots(slots))
        return dataclasses.replace(self, method=method)

    @property
    def _store_by_head(self) -> SideStore | None:
        """The store of heads of unequal length, where layers divide their budget among heads too."""
        m = self.method
        return m.side_store if m.layer_budgets is not None and m.layer_budgets.by_head else None

    def update_scores(
        self, block: KVBlock, start: Array, observation: Observation, new: KVBlock, before: Array
    ) -> Array:
        """f32[B K T]: see `ReplayedLayer`."""
        assert self.method.select is not None
        return self.method.select.scorer.update_scores(block, start, observation, new, before, self.spec)

    def prefill(self, block: KVBlock, observation: Observation | None, num_slots: int) -> LayerState:
        """The state after a prompt: block [B K T H], rows left-aligned, seen by the queries `observation`."""
        m = self.method
        side_store = policy_state = None
        if m.side_store:
            block, side_store = m.side_store.split(self, block, observation, num_slots)
        elif m.select:
            block = self.selected(block, observation, min(num_slots, block.pos.shape[2]))
        if m.decode:
            if (m.side_store or m.select) and observation is not None:
                observation = observation._replace(softmax_sums=None)  # those are over the whole prompt
            stay, policy_state = m.decode.init(self, block, observation, num_slots)
            block = gather_tokens(block, stay)
        block = _grown(block, num_slots)
        n = None if m.decode else (block.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
        k, v, reader_state = self.stored(block, observation)
        return LayerState(k, v, block.pos, n, block.bias, reader_state, policy_state, side_store)

    def stored(self, block: KVBlock, observation: Observation | None) -> tuple[Any, Any, Any]:
        """What the codecs and the reader keep of the tokens in the slots: (keys, values, the reader's)."""
        k, v = (
            self.k.encode_prompt(self.as_held(block), block.pos, observation),
            self.v.encode_prompt(block.v, block.pos, observation),
        )
        return k, v, self.method.read.init_state(block, observation, self.spec)

    def selected(
        self, block: KVBlock, observation: Observation | None, slots: int, share: HeadBudgets | None = None
    ) -> KVBlock:
        """What the selection leaves of a prompt, in at most so many slots, representatives and merging included.

        share: of the places of all heads; a head may then have more tokens than `num_slots`.
        """
        m = self.method
        assert m.select is not None
        keep = m.select.num_kept_per_sequence(block, observation, slots)
        components = {"representatives": m.representatives, "second_stage": m.second_stage}
        choice = m.select.select_slots(block, observation, keep, slots, self.spec, head_budgets=share, **components)
        kept = gather_tokens(block, choice.slots)
        return kept if m.merge is None else m.merge(block, kept, choice, self.spec)

    def as_held(self, block: KVBlock) -> Array:
        """The keys as the codec gets them: without rotation where it asks so, or positions are those in the cache."""
        if self.method.positions == "true" and not self.k.pre_rope:
            return block.k
        return self.spec.rope.unrotate(block.k, block.pos).astype(block.k.dtype)

    def keys(self, stored: Any, pos: Array) -> Array:
        """All keys of the codec [B K S H], rotated to their positions i32[B 1|K S]."""
        return self._rotated(self.k.decode(stored), pos)

    def key_rows(self, stored: Any, idx: Array, pos: Array) -> Array:
        """Of these keys, those in slots idx i32[B K n] at positions i32[B 1|K n]: [B K n H]."""
        return self._rotated(self.k.gather(stored, idx), pos)

    def _rotated(self, k: Array, pos: Array) -> Array:
        return self.spec.rope.rotate(k, pos).astype(k.dtype) if self.k.pre_rope else k

    def _takes_singly(self, count: int, commit: int) -> bool:
        """Whether a call of so many tokens, of which `commit` are kept, has to be one call for each of them."""
        m = self.method
        if count == 1:
            return False
        if m.decode is None:
            # What is not kept changes nothing that others see, so one token and any guesses make a single step.
            return commit > 1 and (m.k.sequential_writes or m.v.sequential_writes or m.read.sequential_writes)
        # A policy takes one token a step, beside a guess only if the reader is made for that.
        return commit > 1 or not m.read.draft_tokens

    def extend(self, state: LayerState, q: Array, new: KVBlock, commit: int, cross_layer: Any = None) -> StepResult:
        """Attends T fresh tokens to past and fresh ones, and keeps the first `commit` of them.

        A chunk of T tokens gives what T single steps give, of a method that guesses ahead what its loop gives: a call
        does not know the guess that an earlier one would have gone on with.
        """
        if not self.needs.paired_layer or self.method.side_store is None:
            return self._in_steps(self._at_once, state, q, new, commit, cross_layer)
        # What a pair of layers shares is that of all tokens of the call, however many are taken at a time.
        store, cross_layer = self.method.side_store.open_pair(self, state.side_store, cross_layer)
        opened = dataclasses.replace(state, side_store=store)
        out, after, _ = self._in_steps(self._at_once, opened, q, new, commit, None)
        return StepResult(out, dataclasses.replace(after, side_store=state.side_store), cross_layer)

    def _in_steps(
        self, at_once: Extend, state: LayerState, q: Array, new: KVBlock, commit: int, cross_layer: Any
    ) -> StepResult:
        """`at_once`, with as many tokens at a time as the slots take."""
        m, T = self.method, q.shape[3]
        if self._takes_singly(T, commit):
            if commit < T and m.decode is None:
                raise KvjaxError(
                    f"this method keeps 0, 1 or all of a chunk's tokens, got commit={commit} of {T}: it holds one "
                    "sequence per row, and no tree or beam of guesses"
                )
            return extend_token_by_token(at_once, state, q, new, commit, cross_layer)
        if 0 < m.read.prompt_chunk < T:
            return extend_in_chunks(at_once, state, q, new, commit, cross_layer, size=m.read.prompt_chunk)
        return at_once(state, q, new, commit, cross_layer)

    def _at_once(
        self,
        state: LayerState,
        q: Array,
        new: KVBlock,
        commit: int,
        cross_layer: Any,
        other_partial: Partial | None = None,
    ) -> StepResult:
        """`extend` of tokens that the slots take in one call."""
        m, T, q_pos = self.method, q.shape[3], new.pos[:, 0]
        if m.decode:
            new = new.clean()
            if commit:
                state = m.decode.before_token(self, state, q[:, :, :, :1], q_pos[:, :1])
        with jax.named_scope("append"):
            state = self._append(state, new.first(commit))
        with jax.named_scope("read"):
            others = [] if other_partial is None else [other_partial]
            if commit < T:
                others.append(attend_dense(q, new.after(commit), q_pos, self.spec.window))
            elsewhere = functools.reduce(combine, others) if others else None
            found = m.read.read(self, state, q, q_pos, elsewhere, cross_layer)
            parts = [found.part]
            if m.side_store:
                parts.append(m.side_store.read(self, state, q, q_pos))
        state = dataclasses.replace(state, reader_state=found.reader_state)
        if m.decode and commit:
            weights = found.weights[:, :, :, 0] if m.decode.needs_weights and found.weights is not None else None
            pos, policy_state = m.decode.after_token(self, state, weights, q_pos[:, :1])
            state = dataclasses.replace(state, pos=pos, policy_state=policy_state)
        return StepResult(merge(parts + others), state, found.cross_layer)

    def _append(self, state: LayerState, new: KVBlock) -> LayerState:
        """The state with fresh tokens: behind the last slot in use, or under a policy one in any empty slot."""
        count = new.pos.shape[2]
        pos = jnp.broadcast_to(new.pos, (*state.pos.shape[:2], count))
        if state.n is None:
            if not count:
                return state
            at, n = first_empty_slot(state.pos), None
            where = jnp.where(pos[:, :, 0] >= 0, at, state.pos.shape[2])  # of padding no position is noted
        else:  # also without tokens: a codec may have something due before the next ones are read
            at = where = state.n[:, None]
            n = state.n + (new.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
        bias = state.bias
        if bias is not None:  # a fresh token stands for itself alone
            bias = memory.put(bias, jnp.zeros((*bias.shape[:2], count), bias.dtype), where)
        return dataclasses.replace(
            state,
            k=self.k.append(state.k, self.as_held(new), at),
            v=self.v.append(state.v, new.v, at),
            pos=memory.put(state.pos, pos, where),
            n=n,
            bias=bias,
            reader_state=self.method.read.append(state.reader_state, new, at, self.spec),
        )


def _grown(block: KVBlock, slots: int) -> KVBlock:
    """The block with empty slots behind it."""
    more = [(0, 0), (0, 0), (0, slots - block.pos.shape[2])]
    k, v = (jnp.pad(x, [*more, (0, 0)]) for x in (block.k, block.v))
    bias = None if block.bias is None else jnp.pad(block.bias, more)
    return KVBlock(k, v, jnp.pad(block.pos, more, constant_values=-1), bias)
