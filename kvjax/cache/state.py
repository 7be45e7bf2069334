"""The optional abilities of a layer under `kvjax.Method`, which act on its state as a whole: see `cache.protocol`.

Taking sequences out of a state, or joining them, needs no ability: every array of a state has B first, or 1 if all
sequences share it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.accounting import slot_bytes
from kvjax.cache.protocol import BatchedLayer, BoundLayer, LayerSpec, LayerState, Needs, StepResult
from kvjax.cache.readers.full import Full
from kvjax.cache.token_status import relative_error
from kvjax.core import memory
from kvjax.core.attention import combine
from kvjax.core.memory import array_bytes, bytes_beyond
from kvjax.core.types import Array, KVBlock, Partial, gather_tokens
from kvjax.errors import IncompatibleMethod

if TYPE_CHECKING:
    from kvjax.cache.bound_layer import MethodLayer
    from kvjax.cache.components import Codec
    from kvjax.cache.method import Method

CONTEXT_REMEDY = "a context is a value: keep the one of before, or fork it, instead of taking tokens back"


class StateOperations:
    """The optional abilities of `MethodLayer`; each raises IncompatibleMethod where a component rules it out."""

    # Members of `MethodLayer`.
    method: Method
    spec: LayerSpec
    needs: Needs
    k: Codec
    v: Codec
    num_kept: Callable[[int], int]
    decode_keys: Callable[[Any, Array], Array]
    keys_to_store: Callable[[KVBlock], Array]
    _append: Callable[[LayerState, KVBlock], LayerState]
    _extend_once: Callable[..., StepResult]
    _extend_in_steps: Callable[..., StepResult]

    @property
    def _layer(self) -> MethodLayer:
        return cast("MethodLayer", self)

    def empty_bytes(self, state: LayerState, dtype: str) -> dict[str, int]:
        """`SizedLayer.empty_bytes`: of the slots and of the side store."""
        # Counted by NumPy: a reduction by JAX would be compiled for every shape.
        used = (np.asarray(state.pos) >= 0).sum(2).max(1) if state.n is None else np.asarray(state.n)
        empty = self._empty_slot_bytes(state, used.tolist(), dtype)
        if self.method.side_store is None:
            return empty
        other = self.method.side_store.empty_bytes(state.side_store)
        return {kind: size + other[kind] for kind, size in empty.items()}

    def planned_empty_bytes(self, state: LayerState, prompt: int, dtype: str) -> dict[str, int]:
        """`PlannableLayer.planned_empty_bytes`: `empty_bytes` of an abstract state."""
        side_store, kept = self.method.side_store, self.num_kept(prompt)
        used = kept if side_store is None else side_store.num_main_slots(kept)
        empty = self._empty_slot_bytes(state, [min(used, state.pos.shape[2])] * state.pos.shape[0], dtype)
        if side_store is None:
            return empty
        other = side_store.planned_empty_bytes(state.side_store, kept, prompt)
        return {kind: size + other[kind] for kind, size in empty.items()}

    def _empty_slot_bytes(self, state: LayerState, used: Sequence[int], dtype: str) -> dict[str, int]:
        """Bytes of the slots beyond the first `used` of each sequence; only the shapes of the state are read."""
        slots = state.pos.shape[2]
        if not slots:  # the side store has the whole prompt, and there is no room for more tokens
            return array_bytes(())
        # Positions, biases and a policy's statistics have one entry for each slot. Codes and summaries need not be
        # proportional to the slots: groups are rounded up, and a residual window has a size of its own.
        total = bytes_beyond((state.pos, state.bias, state.policy_state), slots, used)
        every = slot_bytes(self._layer, slots, dtype)
        for count in used:
            filled = slot_bytes(self._layer, count, dtype, filled=True)
            total = {kind: size + every[kind] - filled[kind] for kind, size in total.items()}
        return total

    def max_rollback(self, state: LayerState) -> Array:
        """`RewindableLayer.max_rollback`: the tokens after the last group that a codec has quantized for good."""
        self._check_append_only("give back tokens")
        assert state.n is not None  # as without a policy
        committed = [codec.num_committed(x, state.n) for codec, x in ((self.k, state.k), (self.v, state.v))]
        return state.n - jnp.maximum(*committed)

    def crop(self, state: LayerState, count: Array) -> LayerState:
        """`RewindableLayer.crop`."""
        assert state.n is not None
        n = state.n - count
        slot = jnp.arange(state.pos.shape[2], dtype=jnp.int32)[None, None]
        # Codecs keep the numbers of cropped tokens: an empty slot may hold anything.
        state = dataclasses.replace(state, pos=jnp.where(slot < n[:, None, None], state.pos, -1), n=n)
        return dataclasses.replace(state, reader_state=self.method.read.crop(self._layer, state))

    def decoded_block(self, state: LayerState) -> KVBlock:
        """`EditableLayer.decoded_block`."""
        self._check_append_only("be edited")
        return KVBlock(self.decode_keys(state.k, state.pos), self.v.decode(state.v), state.pos)

    def append_block(self, state: LayerState, block: KVBlock) -> LayerState:
        """`EditableLayer.append_block`."""
        for name in ("k", "v", "read"):
            component = getattr(self.method, name)
            if component.sequential_writes:
                raise IncompatibleMethod(
                    f"component `{name}`, {type(component).__name__}, takes tokens one by one, as they are read, and "
                    "cannot be edited; edit the text under `full`, which any method can then be made of "
                    "(`kvjax.generation.reuse.full_kv`)"
                )
        # Sequences of unequal length end in different slots: only a write on the device drops what lies beyond.
        appended = self._append(memory.map_buffers(memory.to_device, state), block.clean())
        return memory.map_buffers(lambda new, old: memory.to_host(new) if old.host else new, appended, state)

    def partial(self, state: LayerState, q: Array, q_pos: Array) -> Partial:
        """`ShareableLayer.partial`: over all slots and the side store."""
        part = self.method.read.read(self._layer, state, q, q_pos, None, None).part
        if self.method.side_store is None:
            return part
        return combine(part, self.method.side_store.read(self._layer, state, q, q_pos))

    def extend_with_prefix(
        self, state: LayerState, q: Array, new: KVBlock, commit: int, cross_layer: Any, other_partial: Partial
    ) -> StepResult:
        """`ShareableLayer.extend_with_prefix`."""
        # `_extend_in_steps` cuts a call along its tokens, and cuts `cross_layer` with it along axis 2. So the other
        # partial travels with that value, its T moved to axis 2 and back.

        def extend_once(state: LayerState, q: Array, new: KVBlock, commit: int, both: Any):
            cross_layer, other = both
            other = Partial(*(jnp.moveaxis(x, 2, 3) for x in other))
            return self._extend_once(state, q, new, commit, cross_layer, other)

        both = cross_layer, Partial(*(jnp.moveaxis(x, 3, 2) for x in other_partial))
        return self._extend_in_steps(extend_once, state, q, new, commit, both)

    def reconstruction_error(self, state: LayerState, exact: KVBlock) -> tuple[Array, Array]:
        """`InspectableLayer.reconstruction_error`: of the slots, then of the side store."""
        expected = gather_tokens(exact, state.pos)
        keys = relative_error(self.k.decode(state.k), self.keys_to_store(expected))
        values = relative_error(self.v.decode(state.v), expected.v)
        side_store = self.method.side_store
        if side_store is None:
            return keys, values
        expected = gather_tokens(exact, side_store.positions(state.side_store))
        read = side_store.visible_block(self._layer, state.side_store)
        if read is None:
            other_keys = other_values = jnp.full(expected.k.shape[:3], jnp.nan)
        else:
            other_keys, other_values = relative_error(read.k, expected.k), relative_error(read.v, expected.v)
        return jnp.concatenate([keys, other_keys], 2), jnp.concatenate([values, other_values], 2)

    def check_shared(self) -> None:
        """`ShareableLayer.check_shared`: a prefix is read in full, and stays as it is."""
        m = self.method
        if self.needs.paired_layer:
            raise IncompatibleMethod(
                "a prefix that sequences share is read layer by layer, and component `side_store`, "
                f"{type(m.side_store).__name__}, holds what two layers share once for both; read the prefix under "
                "another method, such as 'full'"
            )
        if m.decode is not None or not isinstance(m.read, Full):
            name = "read" if m.decode is None else "decode"
            raise IncompatibleMethod(
                f"a prefix that sequences share is read in full and never changes, and component `{name}`, "
                f"{type(getattr(m, name)).__name__}, chooses anew at every step; read the prefix under another method, "
                "such as 'full', and its documents under this one"
            )

    def check_with_prefix(self) -> None:
        """`ShareableLayer.check_with_prefix`: a sequence's own tokens stand at true positions and are seen whole."""
        m = self.method
        reasons = (
            ("positions", m.positions != "true", "positions inside the cache would be those of the shared tokens too"),
            ("read", m.read.prompt_chunk > 0 and m.select is None, "the prompt's own attention would go through it"),
            ("attend", m.attend is not None, "it says what of the whole prompt its queries read"),
            ("select", self.needs.replay is not None, "the whole prompt would be read a second time"),
            ("side_store", self.needs.paired_layer != 0, "two layers would have to see each other's whole prompts"),
            (
                "layer_budgets",
                m.layer_budgets is not None,
                "layers would divide a budget that they measured on a part of the text (level=head divides none)",
            ),
        )
        for name, cannot, reason in reasons:
            if cannot:
                raise IncompatibleMethod(
                    f"component `{name}` cannot work behind a prefix that sequences share: {reason}; read the "
                    "documents whole, or under a method without it"
                )

    def _check_append_only(self, ability: str) -> None:
        m = self.method
        for name in ("decode", "select", "side_store"):
            if getattr(m, name) is not None:
                raise IncompatibleMethod(
                    f"component `{name}`, {type(getattr(m, name)).__name__}, has made its choice among the tokens, so "
                    f"that this cache cannot {ability}; {CONTEXT_REMEDY}"
                )


def missing_ability(layer: BoundLayer, ability: str) -> IncompatibleMethod:
    """Makes the error for a layer without an optional ability."""
    return IncompatibleMethod(f"{type(layer).__name__} does not say how its cache could {ability}; {CONTEXT_REMEDY}")


def take_sequences(layer: BoundLayer | None, state: Any, which: Array | np.ndarray) -> Any:
    """Takes the sequences `which` i32[n] of a state, each as often as it is named."""
    if isinstance(layer, BatchedLayer):
        return layer.take_sequences(state, which)
    batch = _batch_size(state)

    def take(x: Array) -> Array:
        # What all sequences share, such as a calibrated basis, has one entry and stays as it is.
        return memory.apply_on_device(lambda a: a[which], x) if x.ndim and x.shape[0] == batch else x

    return jax.tree.map(take, state)


def concat_sequences(layer: BoundLayer | None, states: list[Any]) -> Any:
    """Concatenates the sequences of several states; raises ValueError where shapes differ."""
    if isinstance(layer, BatchedLayer):
        return layer.concat_sequences(states)

    if isinstance(layer, StateOperations):
        states = pad_to_largest(states)
    batches = [_batch_size(state) for state in states]

    def concat_on_device(*xs: Array) -> Array:
        if len({(x.shape[1:], x.dtype) for x in xs}) > 1:
            raise ValueError(f"arrays of {' and '.join(str(x.shape[1:]) for x in xs)} per sequence")
        # One sequence and what all sequences share look alike. So a shared array may come with an entry per sequence,
        # from a state of one sequence that was forked, and then all get one.
        return jnp.concatenate([jnp.broadcast_to(x, (n, *x.shape[1:])) for x, n in zip(xs, batches, strict=True)])

    def concat(*xs: Array) -> Array:
        is_shared = xs[0].ndim == 0 or (max(batches) > 1 and all(x.shape[0] == 1 for x in xs))
        return xs[0] if is_shared else memory.apply_on_device(concat_on_device, *xs)

    return jax.tree.map(concat, *states)


def pad_to_largest(states: Sequence[Any]) -> list[Any]:
    """Gives states of one layer under a `kvjax.Method` equal shapes: empty slots, pages and chunks follow the others.

    The states are of one capacity. What a prompt leaves and the room behind it add up to different numbers of slots
    where a method evicts, and a budget of the whole model gives a layer as many as its prompt asks for.

    Raises:
      ValueError: states of different parts or with different numbers of heads.
    """
    leaves, trees = zip(*map(jax.tree.flatten, states), strict=True)
    if len(set(trees)) == 1 and len({tuple(x.shape[1:] for x in xs) for xs in leaves}) == 1:
        return list(states)
    if len({len(xs) for xs in leaves}) > 1:
        raise ValueError("some of them have parts that others lack")
    shapes = [tuple(map(max, zip(*(x.shape[2:] for x in xs), strict=True))) for xs in zip(*leaves, strict=True)]
    # Static fields, such as the slots that a codec counts, are those of the state with the most.
    tree = trees[int(np.argmax([sum(x.size // max(x.shape[0], 1) for x in xs if x.ndim) for xs in leaves]))]

    def pad(x: Array, shape: tuple[int, ...]) -> Array:
        if x.shape[2:] == shape:
            return x
        # Numbers lie in the order of their slots, chunks or pages, in a ring with as many places as there are slots
        # too, so that those behind the last one are free. An i32 is a position, a head or a slot, and -1 is none.
        more = [(0, 0), (0, 0), *((0, n - m) for n, m in zip(shape, x.shape[2:], strict=True))]
        return memory.apply_on_device(lambda a: jnp.pad(a, more, constant_values=-1 if a.dtype == jnp.int32 else 0), x)

    return [tree.unflatten(map(pad, xs, shapes)) for xs in leaves]


def _batch_size(state: Any) -> int:
    return max((x.shape[0] for x in jax.tree.leaves(state) if x.ndim), default=1)
