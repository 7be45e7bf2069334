"""`MethodLayer`: a `kvjax.Method` bound to one layer, and what its components do with a prompt and with each token.

The life of a prompt; `MethodLayer.prefill` begins with step 2:

1. The engine attends the prompt exactly (or by `attend`) and hands over its keys and values, and an `Observation`: the
   queries, attention sums and outputs that `needs` asked for.
2. `select` scores the tokens and keeps the best; `second_stage` and `representatives` change a part of that choice.
3. `merge` adds evicted tokens to kept ones. A `side_store` takes tokens out of the main slots.
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

import bisect
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache.chunked_extend import extend_in_chunks, extend_token_by_token
from kvjax.cache.components import Components, PromptSelection, ReadResult, Slots
from kvjax.cache.eviction.decode_policy import check_policy_result
from kvjax.cache.eviction.selection import apply_selection
from kvjax.cache.protocol import LayerSpec, LayerState, Needs, StepResult
from kvjax.cache.storage import Codec, KVStorage, observed_queries
from kvjax.cache.token_status import relative_error
from kvjax.cache.uses import EDIT, ROLLBACK, Use
from kvjax.core import memory
from kvjax.core.attention import attend_dense, combine, log_sum_exp, merge, weight_share
from kvjax.core.attention_mass import Observation
from kvjax.core.memory import array_bytes, bytes_beyond
from kvjax.core.mesh import to_numpy
from kvjax.core.step_bytes import StepBytes
from kvjax.core.types import Array, KVBlock, Partial, gather_tokens, hash_once
from kvjax.errors import KvjaxError

PROMPT_COMPONENTS = "select", "second_stage", "representatives", "merge", "layer_budgets", "attend"
"""The components of a method that act on prompts alone."""

F = TypeVar("F", bound=Callable[..., Any])


def packs(member: F) -> F:
    """Decorates a member of `MethodLayer` that packs or unpacks vectors: as floats, in a differentiable layer."""

    @functools.wraps(member)
    def run(self: MethodLayer, *args: Any, **kwargs: Any) -> Any:
        with memory.as_floats(self.is_differentiable):
            return member(self, *args, **kwargs)

    return cast(F, run)


@hash_once
@dataclasses.dataclass(frozen=True)
class MethodLayer:
    """A method bound to one layer: implements `BoundLayer`, and its optional abilities, by the method's components.

    A component is given what it reads and no more, see `cache.components`; nothing else calls back. Layers that do the
    same are equal values, wherever they stand in the model, and share their compiled programs.

    Attributes:
      method: the components as they are in this layer.
      spec: the layer, without its index.
      budgets: as in `PromptSelection`.
      side_slots: slots of the side store, of each head in the mean, once all layers have divided a budget among their
        heads; None: the store says itself.
      is_differentiable: whether the codecs carry gradients. All that the layer packs then stays floats on the device.
    """

    method: Components
    spec: LayerSpec
    budgets: tuple[int | None, ...] = ()
    side_slots: int | None = None
    is_differentiable: bool = False

    @functools.cached_property
    def storage(self) -> KVStorage:
        """The codecs and the spec, which readers and side stores get."""
        m = self.method
        return KVStorage(self.spec, m.k, m.v, m.indexed_by)

    @functools.cached_property
    def selection(self) -> PromptSelection | None:
        """The selection, as budgets get it; None where every token of a prompt stays."""
        return self.method.choose_from_prompt(self.spec, self.budgets)

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
        observers = (scorer, m.second_stage, m.decode, m.read, m.side_store, m.layer_budgets)
        num_queries = [observer.num_queries for observer in observers if observer is not None]
        num_queries += [observed_queries(m.k), observed_queries(m.v)]
        decodes_by_hidden = m.decode is not None and m.decode.needs_hidden
        return Needs(
            # One component that observes all queries (None) decides for the others.
            observed_queries=None if None in num_queries else max(n for n in num_queries if n is not None),
            hidden_states=(scorer is not None and scorer.needs_hidden) or decodes_by_hidden,
            decoded_hidden_states=decodes_by_hidden,
            output_projection=scorer is not None
            and (scorer.needs_output or (m.second_stage is not None and m.second_stage.needs_output)),
            replay=None if scorer is None else scorer.replay,
            paired_layer=0 if m.side_store is None else m.side_store.paired_layer,
            global_budget=m.layer_budgets is not None,
            prompt_chunk=m.prompt_chunk,
            prompt_pattern=m.attend,
            draft_tokens=m.read.draft_tokens,
            cross_layer=m.read.cross_layer or (m.side_store is not None and m.side_store.paired_layer != 0),
            unbounded_length=(m.indexed_by is not None and m.decode is not None) or m.read.unbounded_length,
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
        return dataclasses.replace(self, method=method, budgets=(), side_slots=None)

    def num_slots(self, prompt_tokens: int, headroom_tokens: int) -> int:
        """Slots for a prompt of this length and `headroom_tokens` more."""
        if self.method.decode:
            return self.method.decode.num_slots_of_text(prompt_tokens + headroom_tokens)
        return self._slots(prompt_tokens).main + headroom_tokens

    def num_kept(self, prompt_tokens: int) -> int:
        """Most tokens that a prompt of this length leaves, in the slots and in the side store together."""
        return self._slots(prompt_tokens).kept

    def _slots(self, prompt_tokens: int) -> Slots:
        """The slots that a prompt of this length takes, before layers divide a budget."""
        m = self.method
        kept = m.select.num_kept(prompt_tokens) if m.select else prompt_tokens
        kept = m.decode.num_kept(kept) if m.decode else kept
        return m.side_store.slots(self.spec, kept, prompt_tokens) if m.side_store else Slots(kept, kept)

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
        assert self.method.layer_budgets is not None and self.selection is not None
        return self.method.layer_budgets.measure(self.selection, block, observation)

    def divide_budget(self, measures: Any, lengths: Array) -> Array:
        """See `BudgetedLayer`."""
        assert self.method.layer_budgets is not None and self.selection is not None
        return self.method.layer_budgets.allocate_tokens(self.selection, measures, lengths)

    def count_slots(self, tokens: np.ndarray) -> int:
        """See `BudgetedLayer`."""
        if tokens.ndim == 1:  # heads keep equally many
            return int(tokens.max())
        assert self.method.side_store is not None
        return self.method.side_store.count_slots(tokens)

    def resize(self, kept_slots: int, headroom_tokens: int) -> tuple[MethodLayer, int]:
        """See `BudgetedLayer`."""
        m = self.method
        if m.decode:
            return self, m.decode.num_slots()
        if m.side_store is None:
            return self, kept_slots + headroom_tokens
        if m.side_store.head_budgets is not None:  # all tokens of the prompt are in the store
            return dataclasses.replace(self, side_slots=kept_slots), headroom_tokens
        return self, m.side_store.slots(self.spec, kept_slots, kept_slots).main + headroom_tokens

    # Heads whose numbers of tokens a table knows: the members of `TabulatedLayer`.

    @functools.cached_property
    def selector(self) -> PromptSelector | None:
        """See `TabulatedLayer`."""
        m, store = self.method, self.method.side_store
        if store is None or store.head_budgets is None or store.head_budgets.num_kept_by_length(0) is None:
            return None
        # These take places by the layer's own mean budget, which a selector does not know.
        if m.representatives is not None or m.second_stage is not None:
            return None
        # What is stored is encoded without an observation.
        if any(count != 0 for count in (observed_queries(m.k), observed_queries(m.v), m.read.num_queries)):
            return None
        assert m.select is not None
        budget = store.head_budgets.undivided_budget(m.select.budget)
        method = dataclasses.replace(
            m, select=dataclasses.replace(m.select, budget=budget), side_store=store.after_prompt
        )
        return PromptSelector(dataclasses.replace(self, method=method))

    def tokens_of_heads(self, lengths: np.ndarray) -> np.ndarray:
        """See `TabulatedLayer`."""
        assert self.method.side_store is not None and self.method.side_store.head_budgets is not None
        table = self.method.side_store.head_budgets.num_kept_by_length(int(lengths.max()))
        assert table is not None
        return table[lengths]

    def num_side_slots(self, width: int, num_slots: int) -> int:
        """See `TabulatedLayer`."""
        return self._prompt_slots(width, num_slots).side

    @packs
    def store_selected(self, selected: Any, num_slots: int, side_slots: int) -> LayerState:
        """See `TabulatedLayer`."""
        assert self.method.side_store is not None
        side_store = self.method.side_store.encode_placed(self.storage, selected, side_slots)
        nothing = KVBlock(selected.k[:, :, :0], selected.v[:, :, :0], selected.pos[:, :1, :0])
        return self._fill_slots(nothing, None, num_slots, None, side_store)

    # The prompt.

    def update_scores(
        self, block: KVBlock, start: Array, observation: Observation, new: KVBlock, before: Array
    ) -> Array:
        """f32[B K T]: see `ReplayedLayer`."""
        assert self.method.select is not None
        return self.method.select.scorer.update_scores(block, start, observation, new, before, self.spec)

    @packs
    def prefill(self, block: KVBlock, observation: Observation | None, num_slots: int) -> LayerState:
        """Compresses a prompt; see `BoundLayer`."""
        m = self.method
        side_store = policy_state = None
        slots = self._prompt_slots(block.pos.shape[2], num_slots)
        # Nothing is chosen among no tokens, as where a prompt is about to be read in chunks.
        if self.selection is not None and block.pos.shape[2]:
            head_budgets = None if m.side_store is None else m.side_store.head_budgets
            block = apply_selection(self.selection, block, observation, slots.kept, head_budgets)
            observation = _without_sums(observation)
        if m.side_store is not None:
            block, side_store = m.side_store.split(self.storage, block, observation, slots)
            observation = _without_sums(observation)
        if m.decode is not None:
            result = m.decode.init(self.spec, block, observation, num_slots)
            chosen, policy_state = check_policy_result(m.decode, "init", result, block.k.shape[:2], num_slots)
            block = gather_tokens(block, chosen)
        return self._fill_slots(block, observation, num_slots, policy_state, side_store)

    def _fill_slots(
        self, block: KVBlock, observation: Observation | None, num_slots: int, policy_state: Any, side_store: Any
    ) -> LayerState:
        """Makes the state of a layer whose main slots begin with the tokens of a block."""
        # Empty slots follow the tokens, for what is decoded later.
        more = [(0, 0), (0, 0), (0, num_slots - block.pos.shape[2])]
        k, v = (jnp.pad(x, [*more, (0, 0)]) for x in (block.k, block.v))
        bias = None if block.bias is None else jnp.pad(block.bias, more)
        pos = jnp.pad(block.pos, more, constant_values=-1)
        if not block.pos.shape[2]:
            # Every slot is empty, a constant: the compiler would compute its codes by itself, which takes seconds.
            k, v, pos = lax.optimization_barrier((k, v, pos))
        block = KVBlock(k, v, pos, bias)
        # Under a policy any slot may be empty, so that no number says which are.
        n = None if self.method.decode else (block.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
        keys, values, reader_state = self.encode_slots(block, observation)
        return LayerState(keys, values, block.pos, n, block.bias, reader_state, policy_state, side_store)

    def _prompt_slots(self, width: int, num_slots: int) -> Slots:
        """The slots that prompts of up to `width` tokens take, at most `num_slots` of the main ones."""
        m, store = self.method, self.method.side_store
        if store is None:
            return Slots(min(num_slots, width), min(num_slots, width))
        most = width
        # Where layers divide one budget, a layer may keep more than the selection's own budget says.
        if m.select is not None and (m.layer_budgets is None or store.head_budgets is not None):
            most = int(m.select.num_kept_by_length(width).max())
        # The most tokens whose main slots fit; by the contract of `SideStore.slots` these do not fall as tokens grow.
        counts = range(1, most + 1)
        kept = bisect.bisect(counts, num_slots, key=lambda kept: store.slots(self.spec, kept, width).main)
        slots = store.slots(self.spec, kept, width)
        return slots if self.side_slots is None else slots._replace(side=self.side_slots)

    @packs
    def encode_slots(self, block: KVBlock, observation: Observation | None) -> tuple[Any, Any, Any]:
        """Encodes the tokens of the main slots: (keys, values, the reader's state)."""
        k, v = self.storage.encode(block, observation)
        return k, v, self.method.read.init_state(block, observation, self.spec)

    # Tokens after the prompt.

    @packs
    def extend(
        self,
        state: LayerState,
        q: Array,
        new: KVBlock,
        commit: int,
        cross_layer: Any = None,
        outside: Partial | None = None,
    ) -> StepResult:
        """Attends T new tokens to past and new ones, and keeps the first `commit` of them; see `BoundLayer`.

        A chunk of T tokens gives what T single steps give, with two exceptions. Under a method with drafts a call does
        not know the draft that an earlier one would have carried (SpeCache). A reader with a `prompt_chunk` reads the
        tokens of a chunk together: they share one recall, by their mean query, where single steps make one each
        (InfLLM).
        """
        if not self.needs.paired_layer or self.method.side_store is None:
            return self._extend_in_steps(state, q, new, commit, cross_layer, outside)
        # A pair of layers shares the content of its store for the whole call, in however many steps it is read.
        store, cross_layer = self.method.side_store.open_pair(self.storage, state.side_store, cross_layer)
        opened = dataclasses.replace(state, side_store=store)
        out, after, _ = self._extend_in_steps(opened, q, new, commit, None, outside)
        return StepResult(out, dataclasses.replace(after, side_store=state.side_store), cross_layer)

    def _extend_in_steps(
        self, state: LayerState, q: Array, new: KVBlock, commit: int, cross_layer: Any, outside: Partial | None
    ) -> StepResult:
        """Calls `_extend_once` with as many tokens at a time as the components can take."""
        m, T, arguments = self.method, q.shape[3], (state, q, new, commit, cross_layer, outside)
        if m.decode is not None and m.decode.prompt_chunk and 1 < T == commit:
            return self._extend_in_blocks(*arguments)
        if m.decode is not None:
            # A policy evicts for one token at a time. A draft may come with it only if the reader is made for drafts.
            token_by_token = T > 1 and (commit > 1 or not m.read.draft_tokens)
        else:
            # Uncommitted tokens change nothing for the others, so that one token and any number of drafts are one step.
            token_by_token = commit > 1 and self._has_sequential_writes
        if token_by_token:
            if commit < T and m.decode is None:
                raise KvjaxError(
                    f"this method keeps 0, 1 or all of a chunk's tokens, got commit={commit} of {T}: it holds "
                    "sequences, and no tree or beam of guesses"
                )
            return extend_token_by_token(self._extend_once, *arguments)
        if 0 < m.read.prompt_chunk < T:
            return extend_in_chunks(self._extend_once, *arguments, size=m.read.prompt_chunk)
        return self._extend_once(*arguments)

    def _extend_in_blocks(
        self, state: LayerState, q: Array, new: KVBlock, commit: int, cross_layer: Any, outside: Partial | None
    ) -> StepResult:
        """Calls `_extend_once` with all tokens that come before a policy evicts again, see `Policy.prompt_chunk`."""
        assert self.method.decode is not None
        size, arguments = self.method.decode.prompt_chunk, (state, q, new, cross_layer, outside)
        if commit > size:
            return extend_in_chunks(self._extend_in_blocks, state, q, new, commit, cross_layer, outside, size=size)
        # The chunks of a prompt begin at these positions. Those of a later text may not, or not in every sequence.
        pos = new.pos[:, 0]
        is_block = (pos[:, 0] // size == pos.max(1) // size).all()

        def extend_block(state: LayerState, q: Array, new: KVBlock, cross_layer: Any, outside: Any) -> StepResult:
            return self._extend_once(state, q, new, commit, cross_layer, outside)

        def extend_tokens(state: LayerState, q: Array, new: KVBlock, cross_layer: Any, outside: Any) -> StepResult:
            return extend_token_by_token(self._extend_once, state, q, new, commit, cross_layer, outside)

        return jax.lax.cond(is_block, extend_block, extend_tokens, *arguments)

    @property
    def _has_sequential_writes(self) -> bool:
        return any(x.sequential_writes for x in (self.method.k, self.method.v, self.method.read))

    def _extend_once(
        self, state: LayerState, q: Array, new: KVBlock, commit: int, cross_layer: Any, outside: Partial | None
    ) -> StepResult:
        """`extend` of tokens that all components take in one call."""
        m, T, q_pos = self.method, q.shape[3], new.pos[:, 0]
        if m.decode:
            new = new.clean()
            if commit:
                state = m.decode.before_token(self.storage, state, q[:, :, :, :commit], q_pos[:, :commit])
        with jax.named_scope("append"):
            state = self._append(state, new.first(commit))
        with jax.named_scope("read"):
            others = [] if outside is None else [outside]
            if commit < T:
                others.append(attend_dense(q, new.without_first(commit), q_pos, self.spec.rule))
            # A reader that adapts to the attention weights has to know how much weight lies outside its slots.
            other_partial = functools.reduce(combine, others) if others else None
            opened = self.storage.open_values(state)
            result = m.read.read(self.storage, opened, q, q_pos, other_partial, cross_layer)
            if not isinstance(result, ReadResult) or not isinstance(result.part, Partial):
                returned = result.part if isinstance(result, ReadResult) else result
                raise KvjaxError(
                    f"{type(m.read).__name__}.read must return ReadResult(part), where part is a Partial such as "
                    f"attention.attend_scores(logits, values) makes, and returned {type(returned).__name__}"
                )
            partials = [result.part]
            if m.side_store:
                partials.append(m.side_store.read(self.storage, opened, q, q_pos))
        state = dataclasses.replace(state, reader_state=result.reader_state)
        if m.decode and commit:
            weights = result.weights if m.decode.needs_weights else None
            if weights is not None and outside is not None:
                # What the reader normalized over its slots becomes the weight in the softmax over all.
                own, rest = result.part, functools.reduce(combine, partials[1:] + others)
                share = weight_share(log_sum_exp(own.m, own.l), log_sum_exp(rest.m, rest.l))
                weights = weights * share[..., None]
            weights = None if weights is None else weights[:, :, :, 0]
            policy_state = m.decode.observe_token(self.spec, state, new.first(commit))
            state = dataclasses.replace(state, policy_state=policy_state)
            after = m.decode.after_token(self.spec, state, weights, q_pos[:, :commit])
            pos, policy_state = check_policy_result(m.decode, "after_token", after, q.shape[:2], state.pos.shape[2])
            state = dataclasses.replace(state, pos=pos, policy_state=policy_state)
        return StepResult(merge(partials + others), state, result.cross_layer)

    def _append(self, state: LayerState, new: KVBlock) -> LayerState:
        """Writes new tokens after the last slot in use, or, under a policy, each into an empty slot."""
        count = new.pos.shape[2]
        if state.n is None and count > 1:  # empty slots need not follow one another
            tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0)[:, :, :, None], new)
            return jax.lax.scan(lambda state, token: (self._append(state, token), None), state, tokens)[0]
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
        k, v = self.storage.append(state.k, state.v, new, slot)
        reader_state = self.method.read.append(state.reader_state, new, slot, self.spec)
        return dataclasses.replace(
            state, k=k, v=v, pos=memory.put(state.pos, pos, pos_slot), n=n, bias=bias, reader_state=reader_state
        )

    # The optional abilities, which act on a state as a whole. `cache.uses` says which components rule some of them out.

    def empty_bytes(self, state: LayerState, dtype: str, prompt: int | None = None) -> dict[str, int]:
        """`SizedLayer.empty_bytes`: of the slots and of the side store."""
        B, _, S = state.pos.shape
        store, slots = self.method.side_store, None if prompt is None else self._slots(prompt)
        # Counted by NumPy: a reduction by JAX would be compiled for every shape.
        if slots is not None:
            used = np.full(B, min(slots.main, S))
        elif state.n is not None:
            used = to_numpy(state.n)
        else:  # under a policy heads may have unequal numbers of tokens, and the fullest one counts
            is_token = to_numpy(state.pos) >= 0
            used = is_token.sum(2).max(1)
        empty = self._empty_slot_bytes(state, used.tolist(), dtype)
        if store is None:
            return empty
        other = store.empty_bytes(state.side_store, slots, prompt)
        return {kind: size + other[kind] for kind, size in empty.items()}

    def _empty_slot_bytes(self, state: LayerState, used: Sequence[int], dtype: str) -> dict[str, int]:
        """Bytes of the slots beyond the first `used` of each sequence; only the shapes of the state are read."""
        slots = state.pos.shape[2]
        if not slots:  # the side store has the whole prompt, and there is no headroom
            return array_bytes(())
        # Positions, biases and a policy's statistics have one entry for each slot. Codes and summaries need not be
        # proportional to the slots: groups are rounded up, and a residual window has a size of its own.
        total = bytes_beyond((state.pos, state.bias, state.policy_state), slots, used)
        every = slot_bytes(self, slots, dtype)
        for count in used:
            filled = slot_bytes(self, count, dtype, filled=True)
            total = {kind: size + every[kind] - filled[kind] for kind, size in total.items()}
        return total

    def check_use(self, use: Use) -> None:
        """See `ShareableLayer` and `ReadableLayer`."""
        use.check(self.method)

    def step_bytes(self, state: LayerState) -> StepBytes:
        """`MeteredLayer.step_bytes`: the sum of what the components say."""
        total = self.read_bytes(state)
        total += StepBytes.of_append((state.k, state.v, state.reader_state), state.pos.shape[2])
        if self.method.decode is not None:
            total += self.method.decode.read_bytes(self.storage, state)
        return total

    def max_rollback(self, state: LayerState) -> Array:
        """`RewindableLayer.max_rollback`: the tokens after the last group that a codec has quantized for good."""
        self.check_use(ROLLBACK)
        assert state.n is not None  # as without a policy
        committed = [codec.num_committed(x, state.n) for codec, x in ((self.k, state.k), (self.v, state.v))]
        return state.n - jnp.maximum(*committed)

    @packs
    def crop(self, state: LayerState, count: Array) -> LayerState:
        """`RewindableLayer.crop`."""
        assert state.n is not None
        n = state.n - count
        slot = jnp.arange(state.pos.shape[2], dtype=jnp.int32)[None, None]
        # Codecs keep the numbers of cropped tokens: an empty slot may hold anything.
        state = dataclasses.replace(state, pos=jnp.where(slot < n[:, None, None], state.pos, -1), n=n)
        return dataclasses.replace(state, reader_state=self.method.read.crop(self.storage, state))

    def decoded_block(self, state: LayerState) -> KVBlock:
        """`EditableLayer.decoded_block`."""
        return self.storage.decode(state.k, state.v, state.pos)

    @packs
    def append_block(self, state: LayerState, block: KVBlock) -> LayerState:
        """`EditableLayer.append_block`."""
        self.check_use(EDIT)
        # Sequences of unequal length end in different slots: only a write on the device drops what lies beyond.
        appended = self._append(memory.load(state), block.clean())
        return memory.map_buffers(lambda new, old: memory.to_host(new) if old.host else new, appended, state)

    def partial(self, state: LayerState, q: Array, q_pos: Array, outside: Partial | None = None) -> Partial:
        """`ShareableLayer.partial`: over all slots and the side store, without `outside`, which the reader is told."""
        state = self.storage.open_values(state)
        part = self.method.read.read(self.storage, state, q, q_pos, outside, None).part
        if self.method.side_store is None:
            return part
        return combine(part, self.method.side_store.read(self.storage, state, q, q_pos))

    def read_bytes(self, state: LayerState) -> StepBytes:
        """`ReadableLayer.read_bytes`: of slots and side store."""
        m = self.method
        total = StepBytes.of_all((state.pos, state.bias, state.n)) + m.read.read_bytes(self.storage, state)
        return total if m.side_store is None else total + m.side_store.read_bytes(self.storage, state)

    @property
    def readable_tokens(self) -> int | None:
        """`ReadableLayer.readable_tokens`: one where the tokens of a step leave or are coded one after another."""
        m = self.method
        return 1 if m.decode is not None or self._has_sequential_writes else None

    @packs
    def read_state(self, state: LayerState, q: Array, q_pos: Array, outside: Partial | None = None) -> Array:
        """`ReadableLayer.read_state`: as in `extend`, without a trace."""
        with jax.named_scope("read"):
            part = self.partial(state, q, q_pos, outside)
        return merge([part] if outside is None else [part, outside])

    def reconstruction_error(self, state: LayerState, exact: KVBlock) -> tuple[Array, Array]:
        """`InspectableLayer.reconstruction_error`: of the slots, then of the side store."""
        expected = gather_tokens(exact, state.pos)
        keys = relative_error(self.k.decode(state.k), self.storage.keys_to_store(expected))
        values = relative_error(self.v.decode(self.storage.open_values(state).v), expected.v)
        side_store = self.method.side_store
        if side_store is None:
            return keys, values
        expected = gather_tokens(exact, side_store.positions(state.side_store))
        read = side_store.visible_block(self.storage, state.side_store)
        if read is None:
            other_keys = other_values = jnp.full(expected.k.shape[:3], jnp.nan)
        else:
            other_keys, other_values = relative_error(read.k, expected.k), relative_error(read.v, expected.v)
        return jnp.concatenate([keys, other_keys], 2), jnp.concatenate([values, other_values], 2)


@hash_once
@dataclasses.dataclass(frozen=True)
class PromptSelector:
    """Selects what each head of a layer keeps of a prompt, in the numbers that it is given, and encodes nothing.

    See `TabulatedLayer`. What differs between the layers of a table is left out, so that their selectors are equal.
    """

    layer: MethodLayer

    @property
    def needs(self) -> Needs:
        """Those of the layer."""
        return self.layer.needs

    def prefill(self, block: KVBlock, observation: Observation | None, num_slots: int) -> Any:
        """Places the tokens that stay in `num_slots` slots of each head in the mean."""
        assert self.layer.selection is not None and self.layer.method.side_store is not None
        most_kept = int(self.layer.selection.select.num_kept_by_length(block.pos.shape[2]).max())
        kept = apply_selection(self.layer.selection, block, observation, most_kept)
        return self.layer.method.side_store.place(self.layer.storage, kept, num_slots)


def _without_sums(observation: Observation | None) -> Observation | None:
    """The observation without its softmax sums, which cover the whole prompt, once some of its tokens are gone."""
    return None if observation is None else observation._replace(softmax_lse=None)


@functools.lru_cache(maxsize=65_536)  # each length of a growing text is an entry for each distinct layer
def slot_bytes(layer: MethodLayer, slots: int, dtype: str, filled: bool = False) -> dict[str, int]:
    """Bytes that codecs and reader keep of one sequence, found by tracing the layer: nothing is computed.

    Args:
      layer: a bound layer.
      slots: of the sequence.
      dtype: of the model's keys and values.
      filled: whether to count only what tokens in all of these slots fill, and not all arrays.

    Returns:
      Bytes by memory kind, of one sequence and all its heads.
    """

    def store(block: KVBlock, queries: Observation) -> Any:
        # A prompt that is fed through the method is stored before any query has been observed.
        observes = layer.needs.observes and not layer.needs.prompt_chunk
        k, v, reader_state = layer.encode_slots(block, queries if observes else None)
        if filled:
            k, v = layer.k.used_part(k, slots), layer.v.used_part(v, slots)
            reader_state = layer.method.read.used_part(reader_state, slots)
        return memory.without_guards((k, v, reader_state))

    abstract: Any = jax.ShapeDtypeStruct  # typed Any, since its users say Array
    spec, num_queries = layer.spec, layer.needs.observed_queries
    K, G, H = spec.num_kv_heads, spec.num_groups, spec.head_dim
    num_queries = slots if num_queries is None else num_queries
    keys, values = (abstract((1, K, slots, width), dtype) for width in (H, spec.value_dim))
    block = KVBlock(keys, values, abstract((1, 1, slots), jnp.int32))
    observation = Observation(abstract((1, K, G, num_queries, H), dtype), abstract((1, num_queries), jnp.int32))
    # `jax.eval_shape` would not tell in which memory an array lies; the abstract values of a jaxpr do.
    return array_bytes(jax.make_jaxpr(store)(block, observation).out_avals)
