"""The glossary of axis letters, and the few records that cross file borders.

Axis letters (einsums, comments and docstrings use these and nothing else):

    B batch rows    T query tokens of this call    S cache slots    L layers
    N query heads   K key/value heads              G = N // K       H head dim
    D model width   F MLP width                    V vocabulary     W observation window

`q [B K G T H]`, `k, v [B K S H]` (keys after RoPE). `pos i32[B K S]` is the original position of the
token in a slot, -1 when the slot is empty; its K axis may be 1 when all heads hold the same tokens.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any, NamedTuple, TypeVar, dataclass_transform

import jax
import jax.export
import jax.numpy as jnp

Array = jax.Array

T = TypeVar("T")

_EXPORTABLE: Counter[str] = Counter()  # classes of each name


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def pytree(cls: type[T]) -> type[T]:
    """Frozen dataclass registered as a pytree; fields marked `static` are structure, not leaves."""
    return exportable(jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls)))


def exportable(cls: type[T]) -> type[T]:
    """Lets `jax.export` write programs that take or return a named tuple, or a dataclass that is a pytree.

    Whoever reads such a program imports the class first. Static fields are written as JSON (`core.static_fields`).
    """

    def dump(static: Any) -> bytes:
        from kvjax.core.static_fields import dumps  # which needs this module

        return dumps(static)

    def load(content: bytes) -> Any:
        from kvjax.core.static_fields import loads

        return loads(content)

    name = f"{cls.__module__}.{cls.__qualname__}"
    _EXPORTABLE[name] += 1
    if _EXPORTABLE[name] > 1:  # another class of this name, as where a cell of a notebook is run again
        name += f"#{_EXPORTABLE[name]}"
    if issubclass(cls, tuple):
        return jax.export.register_namedtuple_serialization(cls, serialized_name=name)
    return jax.export.register_pytree_node_serialization(
        cls, serialized_name=name, serialize_auxdata=dump, deserialize_auxdata=load
    )


def hash_once(cls: type[T]) -> type[T]:
    """Has a frozen dataclass compute its hash once: `jax.jit` hashes its static arguments at every call."""
    compute = cls.__hash__

    def __hash__(self: T) -> int:  # noqa: N807 (it becomes the class's own)
        fields = vars(self)
        if "_hash" not in fields:
            fields["_hash"] = compute(self)
        return fields["_hash"]

    def __getstate__(self: T) -> dict:  # noqa: N807
        # Hashes of strings differ from process to process.
        return {name: value for name, value in vars(self).items() if name != "_hash"}

    cls.__hash__, cls.__getstate__ = __hash__, __getstate__
    return cls


@exportable
class Partial(NamedTuple):
    """Attention over some slots, not yet normalised: numerator, running maximum, denominator."""

    o: Array  # f32[B K G T H]
    m: Array  # f32[B K G T]
    l: Array  # f32[B K G T]


@pytree
class KVBlock:
    """The keys and values of one layer in full precision; slot i is empty iff pos[..., i] < 0."""

    k: Array  # [B K S H], after RoPE
    v: Array  # [B K S H]
    pos: Array  # i32[B 1|K S]
    bias: Array | None = None  # f32[B K S], added to the slot's logits: the log of how many tokens it stands for

    def first(self, count: int) -> KVBlock:
        """The first so many slots."""
        return jax.tree.map(lambda x: x[:, :, :count], self)

    def after(self, count: int) -> KVBlock:
        """All but the first so many slots."""
        return jax.tree.map(lambda x: x[:, :, count:], self)

    def clean(self) -> KVBlock:
        """The same with zeros in empty slots, whatever they held."""
        full = (self.pos >= 0)[..., None]
        k, v = (jnp.where(full, x, jnp.zeros((), x.dtype)) for x in (self.k, self.v))
        return dataclasses.replace(self, k=k, v=v)


def gather_tokens(block: KVBlock, slots: Array) -> KVBlock:
    """Takes the tokens in some slots of a block.

    Args:
      block: keys and values [B K S H].
      slots: i32[B 1|K n], one set for all heads or one for each; below 0, the place in the result stays empty.

    Returns:
      The block of n slots; its `pos` has K = 1 where both `block.pos` and `slots` have.
    """

    def take(x: Array, index: Array) -> Array:
        return jnp.take_along_axis(x, index, 2, mode="promise_in_bounds")

    B, K, _, _ = block.k.shape
    index = jnp.maximum(slots, 0)
    per_head = jnp.broadcast_to(index, (B, K, index.shape[2]))
    pos_heads = max(block.pos.shape[1], slots.shape[1])
    pos = take(
        jnp.broadcast_to(block.pos, (B, pos_heads, block.pos.shape[2])),
        jnp.broadcast_to(index, (B, pos_heads, index.shape[2])),
    )
    k, v = (take(x, per_head[..., None]) for x in (block.k, block.v))
    bias = None if block.bias is None else take(block.bias, per_head)
    return KVBlock(k, v, jnp.where(slots >= 0, pos, -1), bias)
