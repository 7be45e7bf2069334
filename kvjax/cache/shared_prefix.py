"""A prefix that rows share, held once: attention to it and to a row's own tokens, merged (Hydragen).

Juravsky et al. 2024, arXiv 2402.05099, section 3: the queries of all rows read one copy of the prefix together, each
row's own tokens are read as ever, and both partials are merged by their log-sum-exp, which is exact. A prefix may share
a prefix itself: so levels nest.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.protocol import (
    EditableLayer,
    KVMethod,
    LayerSpec,
    Needs,
    ShareableLayer,
    SizedLayer,
    StepResult,
    Traits,
)
from kvjax.cache.readers.base import by_query_blocks
from kvjax.cache.state import as_one, as_rows, missing
from kvjax.core import memory
from kvjax.core.attention import MASKED_LOGIT, attend_dense, combine, merge
from kvjax.core.attention_mass import Observation
from kvjax.core.types import Array, KVBlock, Partial, pytree
from kvjax.errors import IncompatibleMethod, KvjaxError


@pytree
class SharedState:
    """The state of one layer: P prefixes, and what each of B rows has behind its own."""

    prefix: Any  # the prefixes' state, of P rows
    own: Any  # the rows' state, of B rows, as of texts that begin where the prefix ends
    before: Array  # i32[B], tokens of the row's prefix
    members: Array | None  # i32[P M], the rows that have each prefix, -1 unused; None: all rows have the only one


@dataclasses.dataclass(frozen=True)
class Shared:
    """Two layers as one: `prefix` holds what rows share and is never written to, `own` holds what is theirs.

    To `own` a row is a text that begins at position 0. Keys and queries are both rotated further by the length of the
    prefix, which changes no product of theirs; and what a policy weighs are a row's own tokens among themselves.
    """

    prefix: ShareableLayer
    own: ShareableLayer

    @property
    def spec(self) -> LayerSpec:
        """Of the layer of the model."""
        return self.own.spec

    @property
    def needs(self) -> Needs:
        """What the rows' own method asks of the decoder."""
        return self.own.needs

    @property
    def parts(self) -> tuple[ShareableLayer, ShareableLayer]:
        """The layers whose states come first in its own, in this order."""
        return self.prefix, self.own

    def num_slots(self, prompt_tokens: int, headroom_tokens: int) -> int:
        """Slots for a row's own tokens."""
        return self.own.num_slots(prompt_tokens, headroom_tokens)

    def prefill(self, block: KVBlock, observation: Observation | None, num_slots: int) -> Any:
        """Not of a bare prompt: raises KvjaxError, see `begin`."""
        raise KvjaxError("a shared prefix is read first: kvjax.read(model, prefix, ..).share(documents)")

    def begin(
        self,
        prefix: Any,
        before: Array,
        members: Array | None,
        q: Array,
        block: KVBlock,
        observation: Observation | None,
        slots: int,
    ) -> tuple[Array, SharedState]:
        """Prompts behind before i32[B] tokens of their prefixes -> (out, the state); their positions begin at 0."""
        q_pos = block.pos[:, 0]

        def attend(q: Array, q_pos: Array) -> Partial:
            return attend_dense(q, block, q_pos, self.spec.window)

        part = self._of_prefix(prefix, members, q, moved(q_pos, before))
        out = merge([part, by_query_blocks(attend, q, q_pos, 128)])
        return out, SharedState(prefix, self.own.prefill(block, observation, slots), before, members)

    def extend(self, state: SharedState, q: Array, new: KVBlock, commit: int, cross_layer: Any) -> StepResult:
        """`BoundLayer.extend`; fresh tokens become the rows' own."""
        return self._extended(state, q, new, commit, cross_layer)

    def extend_with_prefix(
        self, state: SharedState, q: Array, new: KVBlock, commit: int, cross_layer: Any, other_partial: Partial
    ) -> StepResult:
        """`ShareableLayer.extend_with_prefix`."""
        return self._extended(state, q, new, commit, cross_layer, other_partial)

    def _extended(
        self,
        state: SharedState,
        q: Array,
        new: KVBlock,
        commit: int,
        cross_layer: Any,
        other_partial: Partial | None = None,
    ) -> StepResult:
        with jax.named_scope("shared"):
            part = self._of_prefix(state.prefix, state.members, q, new.pos[:, 0])
        part = part if other_partial is None else combine(other_partial, part)
        new = dataclasses.replace(new, pos=moved(new.pos, -state.before))
        out, own, cross_layer = self.own.extend_with_prefix(state.own, q, new, commit, cross_layer, part)
        return StepResult(out, dataclasses.replace(state, own=own), cross_layer)

    def partial(self, state: SharedState, q: Array, q_pos: Array) -> Partial:
        """`ShareableLayer.partial`: a prefix that shares a prefix."""
        part = self._of_prefix(state.prefix, state.members, q, q_pos)
        return combine(part, self.own.partial(state.own, q, moved(q_pos, -state.before)))

    def _of_prefix(self, prefix: Any, members: Array | None, q: Array, q_pos: Array) -> Partial:
        """Queries [B K G T H] of all rows over their prefixes, each of which is read once."""
        B, _, _, T, _ = q.shape
        part = self.prefix.partial(prefix, _gathered(q, members), _positions(q_pos, members))
        return Partial(
            *(_scattered(x, members, (B, T), fill) for x, fill in zip(part, (0.0, MASKED_LOGIT, 0.0), strict=True))
        )

    def positions(self, state: SharedState) -> Array:
        """i32[B 1|K S]: those of the prefix, then the row's own."""
        mine = moved(self.own.positions(state.own), state.before)
        B = mine.shape[0]
        shared = self.prefix.positions(state.prefix)
        which = prefix_of(state.members, B)
        shared = jnp.where(which[:, None, None] >= 0, shared[which], -1)
        heads = max(shared.shape[1], mine.shape[1])
        return jnp.concatenate([jnp.broadcast_to(x, (B, heads, x.shape[2])) for x in (shared, mine)], 2)

    def empty_bytes(self, state: SharedState, dtype: str) -> dict[str, int]:
        """`SizedLayer.empty_bytes`: of the prefixes, and behind them."""
        total = {"device": 0, "pinned_host": 0}
        for layer, held in ((self.prefix, state.prefix), (self.own, state.own)):
            if isinstance(layer, SizedLayer):
                empty = layer.empty_bytes(held, dtype)
                total = {kind: size + empty[kind] for kind, size in total.items()}
        return total

    def rows(self, state: SharedState, which: Array | np.ndarray) -> SharedState:
        """Rows of their own; the prefixes stay, held once."""
        members = state.members
        if members is not None:
            prefix = prefix_of(members, len(state.before))
            members = members_of(np.asarray(prefix[which]), members.shape[0])
        before = as_rows(None, state.before, which)
        return SharedState(state.prefix, as_rows(self.own, state.own, which), before, members)

    def joined(self, states: list[SharedState]) -> SharedState:
        """Rows that share one prefix, as one batch; raises ValueError for others."""
        held = [jax.tree.leaves(state.prefix) for state in states]
        if not all(len(held[0]) == len(other) and all(map(_equal, held[0], other)) for other in held[1:]):
            raise ValueError("shared prefixes that are not the same one")
        if any(state.members is not None for state in states):
            raise ValueError("several shared prefixes")
        before = as_one(None, [state.before for state in states])
        return SharedState(states[0].prefix, as_one(self.own, [state.own for state in states]), before, None)

    def max_rollback(self, state: SharedState) -> Array:
        """i32[B]: of the rows' own tokens."""
        return self._editable.max_rollback(state.own)

    def crop(self, state: SharedState, count: Array) -> SharedState:
        """`RewindableLayer.crop`, of the rows' own tokens."""
        return dataclasses.replace(state, own=self._editable.crop(state.own, count))

    def held(self, state: SharedState) -> KVBlock:
        """`EditableLayer.held`, of the rows' own tokens."""
        return self._editable.held(state.own)

    def appended(self, state: SharedState, block: KVBlock) -> SharedState:
        """`EditableLayer.appended`."""
        return dataclasses.replace(state, own=self._editable.appended(state.own, block))

    def check_shared(self) -> None:
        """Raises IncompatibleMethod unless all its parts can be read by queries of other rows."""
        self.own.check_shared()

    def check_with_prefix(self) -> None:
        """Raises IncompatibleMethod unless the rows' own method can work behind a prefix."""
        self.own.check_with_prefix()

    @property
    def _editable(self) -> EditableLayer:
        if not isinstance(self.own, EditableLayer):
            raise missing(self.own, "give back tokens")
        return self.own


@dataclasses.dataclass(frozen=True)
class Behind:
    """The method of rows that share a prefix: `prefix`, under which this was read, and `own`, for the rows' tokens."""

    prefix: KVMethod
    own: KVMethod

    @property
    def traits(self) -> Traits:
        """What is true of both, or of either."""
        a, b = self.prefix.traits, self.own.traits
        return Traits(
            evicts=a.evicts or b.evicts,
            exact=a.exact and b.exact,
            constant=b.constant,
            host=a.host or b.host,
            after_prompt=a.after_prompt or b.after_prompt,
        )

    def bind(self, spec: LayerSpec) -> Shared:
        """Both in one layer; raises IncompatibleMethod where a prefix or what is behind it cannot be held so."""
        prefix, own = self.prefix.bind(spec), self.own.bind(spec)
        if not isinstance(prefix, ShareableLayer) or not isinstance(own, ShareableLayer):
            name = type(own if isinstance(prefix, ShareableLayer) else prefix).__name__
            raise IncompatibleMethod(f"{name} cannot be read beside other tokens; use a kvjax.Method")
        prefix.check_shared()
        own.check_with_prefix()
        return Shared(prefix, own)


def _equal(x: Array, y: Array) -> bool:
    """Whether two concrete arrays, wherever they lie, hold the same."""
    return x is y or bool(jnp.array_equal(*(jax.device_put(a, memory.DEVICE) for a in (x, y))))


def moved(pos: Array, by: Array) -> Array:
    """Positions i32[B ...] by[B] places further on, -1 staying what it is."""
    return jnp.where(pos >= 0, pos + by.reshape(-1, *[1] * (pos.ndim - 1)), -1)


def members_of(prefix: np.ndarray, count: int) -> Array:
    """The prefix of each row, i32[B], -1 for none -> the rows of each of `count` prefixes, i32[P M], -1 unused."""
    rows = [np.flatnonzero(prefix == p) for p in range(count)]
    table = np.full((count, max(1, *map(len, rows))), -1, np.int32)
    for p, found in enumerate(rows):
        table[p, : len(found)] = found
    return jnp.asarray(table)


def prefix_of(members: Array | None, rows: int) -> Array:
    """The inverse: the prefix of each of so many rows, i32[B], -1 for none."""
    if members is None:
        return jnp.zeros(rows, jnp.int32)
    which = jnp.broadcast_to(jnp.arange(members.shape[0], dtype=jnp.int32)[:, None], members.shape)
    return jnp.full(rows, -1, jnp.int32).at[_inside(members, rows)].set(which, mode="drop")


def _inside(members: Array, rows: int) -> Array:
    """Unused places as an index that writes drop."""
    return jnp.where(members >= 0, members, rows)


def _gathered(q: Array, members: Array | None) -> Array:
    """Queries [B K G T H] -> [P K G M*T H], those of a prefix's rows side by side."""
    q = q[None] if members is None else q[jnp.maximum(members, 0)]  # [P M K G T H]
    P, M, K, G, T, H = q.shape
    return jnp.moveaxis(q, 1, 3).reshape(P, K, G, M * T, H)


def _positions(q_pos: Array, members: Array | None) -> Array:
    """i32[B T] -> i32[P M*T], -1 in unused places."""
    if members is None:
        return q_pos.reshape(1, -1)
    return jnp.where(members[..., None] >= 0, q_pos[jnp.maximum(members, 0)], -1).reshape(members.shape[0], -1)


def _scattered(x: Array, members: Array | None, size: tuple[int, int], fill: float) -> Array:
    """[P K G M*T ..] -> [B K G T ..], `fill` in rows without a prefix."""
    rows, T = size
    P, K, G = x.shape[:3]
    x = jnp.moveaxis(x.reshape(P, K, G, -1, T, *x.shape[4:]), 3, 1)  # [P M K G T ..]
    if members is None:
        return x[0]
    return jnp.full((rows, *x.shape[2:]), fill, x.dtype).at[_inside(members, rows)].set(x, mode="drop")
