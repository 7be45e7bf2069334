"""A method bound to one layer: what its slots do with a prompt, and with each token after it."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import company
from kvjax.cache.contract import LayerSpec, LayerState, Needs
from kvjax.cache.decode.policy import first_empty
from kvjax.cache.hold.codecs import Codec
from kvjax.cache.select.shares import HeadShares
from kvjax.cache.select.units import gather
from kvjax.cache.states import StateOperations
from kvjax.cache.stepping import Extend, in_pieces, singly
from kvjax.core import memory
from kvjax.core.attention import attend_dense, combine, merge
from kvjax.core.observe import Obs
from kvjax.core.types import Array, Block, KvjaxError, Partial

if TYPE_CHECKING:
    from kvjax.cache.method import Method


_OF_PROMPTS = "select", "rescore", "represent", "merge", "shares", "attend"
"""The components of a method that nothing but a prompt meets."""


@dataclasses.dataclass(frozen=True)
class MethodLayer(StateOperations):
    """A method bound to one layer: the `Layer` of the contract, by the method's slots.

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

    # Compiled programs are found by layers, in every step: a hash that is computed anew each time walks all components.
    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is not type(self) or self._hash != other._hash:
            return False
        return (self.method, self.spec, self.budgets) == (other.method, other.spec, other.budgets)

    def __reduce__(self) -> tuple[Any, ...]:
        # Without what is cached: hashes of strings differ between processes.
        return type(self), (self.method, self.spec, self.budgets)

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.method, self.spec, self.budgets))

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
        asked = [0 if m.select is None else m.select.scorer.queries, 0 if m.decode is None else m.decode.queries]
        asked += [x.queries for x in (m.k, m.v, m.read, m.apart, m.shares) if x is not None]
        queries = None if None in asked else max(asked)
        chunk = 0 if m.select else m.read.chunk
        output = m.select is not None and (m.select.scorer.output or (m.rescore is not None and m.rescore.output))
        hidden = m.select is not None and m.select.scorer.hidden
        probe = None if m.select is None else m.select.scorer.probe
        neighbour = 0 if m.apart is None else m.apart.neighbour
        endless = m.positions == "cache" or m.read.endless
        shared = m.shares is not None
        return Needs(queries, chunk, m.read.guesses, shared, m.attend, output, hidden, probe, neighbour, endless)

    @functools.cached_property
    def after_prompt(self) -> MethodLayer:
        """The layer as decode steps need it: without the components that act on prompts alone.

        Methods that only select have one decode program in common. What is asked about a cache's content, as its bytes
        or positions, is asked of the layer itself.
        """
        if self.method.decode is not None:  # a policy may make the selection again
            return self
        method = dataclasses.replace(self.method, **dict.fromkeys(_OF_PROMPTS))
        if method.apart is not None:
            method = dataclasses.replace(method, apart=method.apart.after_prompt)
        return dataclasses.replace(self, method=method, budgets=())

    def check(self) -> None:
        """Raises IncompatibleMethod for slots that cannot work together."""
        company.check(self)

    def kept(self, prompt: int) -> int:
        """Most tokens that a prompt of this length leaves in this layer."""
        m = self.method
        kept = m.select.kept(prompt) if m.select else prompt
        return m.decode.kept(self, kept) if m.decode else kept

    def slots(self, prompt: int, room: int) -> int:
        """Slots for a prompt of so many tokens and so many more."""
        return self.holding(self.kept(prompt), room)

    def holding(self, kept: int, room: int) -> int:
        """Slots for so many prompt tokens that stay and so many more."""
        if self.method.decode:
            return self.method.decode.slots(self)
        return (self.method.apart.body(kept) if self.method.apart else kept) + room

    def positions(self, state: LayerState) -> Array:
        """i32[B 1|K S], of the tokens held."""
        if state.apart is None:
            return state.pos
        here, there = state.pos, self.method.apart.positions(state.apart)
        heads = max(here.shape[1], there.shape[1])
        return jnp.concatenate([jnp.broadcast_to(x, (x.shape[0], heads, x.shape[2])) for x in (here, there)], 2)

    def measure(self, block: Block, seen: Obs | None) -> Any:
        """See `MeasuredLayer`."""
        return self.method.shares.measure(self, block, seen)

    def shares(self, measures: Any, lengths: Array) -> Array:
        """See `MeasuredLayer`."""
        return self.method.shares.tokens(self, measures, lengths)

    def slots_for(self, tokens: np.ndarray) -> int:
        """See `MeasuredLayer`."""
        return self.method.apart.slots_for(tokens) if self.method.shares.by_head else int(tokens.max())

    def with_room_for(self, slots: int) -> MethodLayer:
        """See `MeasuredLayer`."""
        if not self.method.shares.by_head:
            return self  # the number of its slots says it
        pages = dataclasses.replace(self.method.apart, slots_per_head=slots)
        return dataclasses.replace(self, method=dataclasses.replace(self.method, apart=pages))

    def look(self, block: Block, start: Array, seen: Obs, fresh: Block, before: Array) -> Array:
        """f32[B K T]: see `ProbedLayer`."""
        return self.method.select.scorer.look(block, start, seen, fresh, before, self.spec)

    def prefill(self, block: Block, seen: Obs | None, slots: int) -> LayerState:
        """The state after a prompt: block [B K T H], rows left-aligned, seen by the queries `seen`."""
        m = self.method
        apart = marks = None
        if m.apart:
            block, apart = m.apart.split(self, block, seen, slots)
        elif m.select:
            block = self.selected(block, seen, min(slots, block.pos.shape[2]))
        if m.decode:
            if (m.apart or m.select) and seen is not None:
                seen = seen._replace(sums=None)  # those are over the whole prompt
            stay, marks = m.decode.begin(self, block, seen, slots)
            block = gather(block, stay)
        block = _grown(block, slots)
        n = None if m.decode else (block.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
        k, v, aux = self.stored(block, seen)
        return LayerState(k, v, block.pos, n, block.bias, aux, marks, apart)

    def stored(self, block: Block, seen: Obs | None) -> tuple[Any, Any, Any]:
        """What the codecs and the reader keep of the tokens in the slots: (keys, values, the reader's)."""
        k, v = self.k.begin(self.as_held(block), block.pos, seen), self.v.begin(block.v, block.pos, seen)
        return k, v, self.method.read.fit(block, seen, self.spec)

    def selected(self, block: Block, seen: Obs | None, slots: int, share: HeadShares | None = None) -> Block:
        """What the selection leaves of a prompt, in at most so many slots, representatives and merging included.

        share: of the places of all heads; a head may then have more tokens than `slots`.
        """
        m = self.method
        keep = m.select.counts(block, seen, slots)
        choice = m.select.choose(block, seen, keep, slots, self.spec, m.represent, share, m.rescore)
        kept = gather(block, choice.slots)
        return kept if m.merge is None else m.merge(block, kept, choice, self.spec)

    def as_held(self, block: Block) -> Array:
        """The keys as the codec gets them: without rotation where it asks so, or positions are those in the cache."""
        if self.method.positions == "true" and not self.k.bare:
            return block.k
        return self.spec.rope.bare(block.k, block.pos).astype(block.k.dtype)

    def keys(self, stored: Any, pos: Array) -> Array:
        """All keys of the codec [B K S H], rotated to their positions i32[B 1|K S]."""
        return self._rotated(self.k.decode(stored), pos)

    def key_rows(self, stored: Any, idx: Array, pos: Array) -> Array:
        """Of these keys, those in slots idx i32[B K n] at positions i32[B 1|K n]: [B K n H]."""
        return self._rotated(self.k.rows(stored, idx), pos)

    def _rotated(self, k: Array, pos: Array) -> Array:
        return self.spec.rope.turn(k, pos).astype(k.dtype) if self.k.bare else k

    def _takes_singly(self, count: int, commit: int) -> bool:
        """Whether a call of so many tokens, of which `commit` are kept, has to be one call for each of them."""
        m = self.method
        if count == 1:
            return False
        if m.decode is None:
            # What is not kept changes nothing that others see, so one token and any guesses make a single step.
            return commit > 1 and (m.k.stepwise or m.v.stepwise or m.read.stepwise)
        # A policy takes one token a step, beside a guess only if the reader is made for that.
        return commit > 1 or not m.read.guesses

    def extend(
        self, state: LayerState, q: Array, fresh: Block, commit: int, carry: Any = None
    ) -> tuple[Array, LayerState, Any]:
        """Attends T fresh tokens to past and fresh ones, and keeps the first `commit` of them.

        A chunk of T tokens gives what T single steps give, of a method that guesses ahead what its loop gives: a call
        does not know the guess that an earlier one would have gone on with.
        """
        if not self.needs.neighbour:
            return self._in_steps(self._at_once, state, q, fresh, commit, carry)
        # What a pair of layers shares is that of all tokens of the call, however many are taken at a time.
        store, carry = self.method.apart.opened(self, state.apart, carry)
        opened = dataclasses.replace(state, apart=store)
        out, after, _ = self._in_steps(self._at_once, opened, q, fresh, commit, None)
        return out, dataclasses.replace(after, apart=state.apart), carry

    def _in_steps(
        self, at_once: Extend, state: LayerState, q: Array, fresh: Block, commit: int, carry: Any
    ) -> tuple[Array, LayerState, Any]:
        """`at_once`, with as many tokens at a time as the slots take."""
        m, T = self.method, q.shape[3]
        if self._takes_singly(T, commit):
            if commit < T and m.decode is None:
                raise KvjaxError(
                    f"this method keeps 0, 1 or all of a chunk's tokens, got commit={commit} of {T}: it holds one "
                    "sequence per row, and no tree or beam of guesses"
                )
            return singly(at_once, state, q, fresh, commit, carry)
        if 0 < m.read.chunk < T:
            return in_pieces(at_once, state, q, fresh, commit, carry, m.read.chunk)
        return at_once(state, q, fresh, commit, carry)

    def _at_once(
        self, state: LayerState, q: Array, fresh: Block, commit: int, carry: Any, beside: Partial | None = None
    ) -> tuple[Array, LayerState, Any]:
        """`extend` of tokens that the slots take in one call."""
        m, T, q_pos = self.method, q.shape[3], fresh.pos[:, 0]
        if m.decode:
            fresh = fresh.clean()
            if commit:
                state = m.decode.before(self, state, q[:, :, :, :1], q_pos[:, :1])
        with jax.named_scope("append"):
            state = self._append(state, fresh.first(commit))
        with jax.named_scope("read"):
            others = [] if beside is None else [beside]
            if commit < T:
                others.append(attend_dense(q, fresh.after(commit), q_pos, self.spec.window))
            elsewhere = functools.reduce(combine, others) if others else None
            found = m.read.read(self, state, q, q_pos, elsewhere, carry)
            parts = [found.part]
            if m.apart:
                parts.append(m.apart.read(self, state, q, q_pos))
        state = dataclasses.replace(state, aux=found.aux)
        if m.decode and commit:
            weights = found.weights[:, :, :, 0] if m.decode.weights else None
            pos, marks = m.decode.after(self, state, weights, q_pos[:, :1])
            state = dataclasses.replace(state, pos=pos, marks=marks)
        return merge(parts + others), state, found.carry

    def _append(self, state: LayerState, fresh: Block) -> LayerState:
        """The state with fresh tokens: behind the last slot in use, or under a policy one in any empty slot."""
        count = fresh.pos.shape[2]
        pos = jnp.broadcast_to(fresh.pos, (*state.pos.shape[:2], count))
        if state.n is None:
            if not count:
                return state
            at, n = first_empty(state.pos), None
            where = jnp.where(pos[:, :, 0] >= 0, at, state.pos.shape[2])  # of padding no position is noted
        else:  # also without tokens: a codec may have something due before the next ones are read
            at = where = state.n[:, None]
            n = state.n + (fresh.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
        bias = state.bias
        if bias is not None:  # a fresh token stands for itself alone
            bias = memory.put(bias, jnp.zeros((*bias.shape[:2], count), bias.dtype), where)
        return dataclasses.replace(
            state,
            k=self.k.write(state.k, self.as_held(fresh), at),
            v=self.v.write(state.v, fresh.v, at),
            pos=memory.put(state.pos, pos, where),
            n=n,
            bias=bias,
            aux=self.method.read.write(state.aux, fresh, at, self.spec),
        )


def _grown(block: Block, slots: int) -> Block:
    """The block with empty slots behind it."""
    more = [(0, 0), (0, 0), (0, slots - block.pos.shape[2])]
    k, v = (jnp.pad(x, [*more, (0, 0)]) for x in (block.k, block.v))
    bias = None if block.bias is None else jnp.pad(block.bias, more)
    return Block(k, v, jnp.pad(block.pos, more, constant_values=-1), bias)
