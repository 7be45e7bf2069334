"""Axis letters, and the records that most modules share.

Axis letters, in einsums, annotations and docstrings:

    B sequences      T query tokens of this call    S cache slots     L layers
    N query heads    K key/value heads              G = N // K        H head dim
    D model width    F MLP width                    V vocabulary      Q observed queries
    Hv width of a head's values, H in most models
    U units or pages of slots                       C tokens of a chunk of the prompt

Queries are `q [B K G T H]`; keys `k [B K S H]`, after RoPE; values `v [B K S Hv]`. `pos i32[B K S]` is the original
position of the token in a slot, -1 in an empty slot; its K axis is 1 where all heads hold the same tokens.

Annotations are those of jaxtyping: `Float[Array, "B K S H"]` takes any float dtype, and in `Int32[Array, "B #K S"]` the
axis K may be 1. A letter is one size within a call, which tests check in each call that they make.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import NamedTuple, TypeVar, dataclass_transform

import jax
import jax.export
import jax.numpy as jnp
from jaxtyping import Float, Float32, Int32

from kvjax.core import static_fields

Array = jax.Array

T = TypeVar("T")

_num_registered: Counter[str] = Counter()  # classes by qualified name


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def pytree(cls: type[T]) -> type[T]:
    """Makes a class a frozen dataclass and a pytree; fields with metadata `static` are structure, not leaves."""
    return exportable(jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls)))


def exportable(cls: type[T]) -> type[T]:
    """Lets `jax.export` write programs that take or return `cls`, a named tuple or a dataclass that is a pytree.

    Static fields are written as JSON (`core.static_fields`). Reading such a program needs the class to be imported.
    """
    name = f"{cls.__module__}.{cls.__qualname__}"
    _num_registered[name] += 1
    # JAX refuses a name twice, and a notebook's cell that is run again defines its class again. The old class keeps
    # the plain name, because programs that were exported before hold it.
    if _num_registered[name] > 1:
        name += f"#{_num_registered[name]}"
    if issubclass(cls, tuple):
        return jax.export.register_namedtuple_serialization(cls, serialized_name=name)
    return jax.export.register_pytree_node_serialization(
        cls, serialized_name=name, serialize_auxdata=static_fields.dumps, deserialize_auxdata=static_fields.loads
    )


def hash_once(cls: type[T]) -> type[T]:
    """Makes a frozen dataclass keep its hash: `jax.jit` hashes its static arguments at every call."""
    compute_hash = cls.__hash__

    def __hash__(self: T) -> int:  # noqa: N807 (it becomes the class's own)
        fields = vars(self)
        if "_hash" not in fields:
            fields["_hash"] = compute_hash(self)
        return fields["_hash"]

    # A pickle must not carry the hash: hashes of strings differ from process to process.
    def __getstate__(self: T) -> dict:  # noqa: N807
        return {name: value for name, value in vars(self).items() if name != "_hash"}

    cls.__hash__, cls.__getstate__ = __hash__, __getstate__
    return cls


@exportable
class Partial(NamedTuple):
    """Attention over some of the slots, not yet normalized; `attention.combine` adds those over the others."""

    # float32 whatever the model's dtype: partials over many blocks are added up, and each sum would round again.
    o: Float32[Array, "B K G T Hv"]  # sum of exp(logit - m) * value
    m: Float32[Array, "B K G T"]  # largest logit
    l: Float32[Array, "B K G T"]  # sum of exp(logit - m)


@pytree
class KVBlock:
    """The keys and values of one layer in full precision; slot i is empty iff pos[..., i] < 0."""

    k: Float[Array, "B K S H"]  # after RoPE
    v: Float[Array, "B K S Hv"]
    pos: Int32[Array, "B #K S"]
    bias: Float32[Array, "B K S"] | None = None  # added to a slot's logits: log of the number of tokens merged into it
    # What the keys and values of new tokens were projected from, for `Policy.needs_hidden`.
    hidden: Float[Array, "B 1 S D"] | None = None

    def first(self, num_slots: int) -> KVBlock:
        """Returns the first `num_slots` slots."""
        return jax.tree.map(lambda x: x[:, :, :num_slots], self)

    def without_first(self, num_slots: int) -> KVBlock:
        """Returns all but the first `num_slots` slots."""
        return jax.tree.map(lambda x: x[:, :, num_slots:], self)

    def clean(self) -> KVBlock:
        """Returns the block with zeros in empty slots."""
        # An empty slot has weight 0, and 0 times whatever padding left there may be NaN.
        is_full = (self.pos >= 0)[..., None]
        k, v = (jnp.where(is_full, x, jnp.zeros((), x.dtype)) for x in (self.k, self.v))
        return dataclasses.replace(self, k=k, v=v)


def gather_tokens(block: KVBlock, slots: Int32[Array, "B #K n"]) -> KVBlock:
    """Takes the tokens in some slots of a block.

    Args:
      block: keys and values of S slots.
      slots: one set for all heads, or one for each; below 0, the place in the result stays empty.

    Returns:
      The block of n slots; its `pos` has K = 1 where both `block.pos` and `slots` have.
    """
    take = functools.partial(jnp.take_along_axis, axis=2, mode="promise_in_bounds")
    B, K, _, _ = block.k.shape
    # The mode promises indices in bounds, since JAX's default fills with NaN and costs a comparison for each number.
    index = jnp.maximum(slots, 0)
    per_head = jnp.broadcast_to(index, (B, K, index.shape[2]))
    # `pos` keeps one head where it can: that says that all heads hold the same tokens, and masks stay a K-th in size.
    pos_heads = max(block.pos.shape[1], slots.shape[1])
    pos = take(
        jnp.broadcast_to(block.pos, (B, pos_heads, block.pos.shape[2])),
        jnp.broadcast_to(index, (B, pos_heads, index.shape[2])),
    )
    k, v = (take(x, per_head[..., None]) for x in (block.k, block.v))
    bias = None if block.bias is None else take(block.bias, per_head)
    return KVBlock(k, v, jnp.where(slots >= 0, pos, -1), bias)
