"""Two layers that hold a prompt as a pair: directions of keys and values once for both, lengths for each of them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from kvjax.cache.eviction.representatives import IntOrArray, fraction_of
from kvjax.cache.protocol import LayerSpec, LayerState
from kvjax.cache.readers.base import map_query_blocks
from kvjax.cache.readers.full import Full
from kvjax.cache.side_store.mixed_precision import PrecisionTiers
from kvjax.core.attention import MASKED_LOGIT, mix, scores, visible, weights
from kvjax.core.attention_mass import Observation
from kvjax.core.top_k import mask_to_slots, top_k_mask
from kvjax.core.types import Array, KVBlock, Partial, gather_tokens, pytree
from kvjax.errors import IncompatibleMethod, KvjaxError

if TYPE_CHECKING:
    from kvjax.cache.bound_layer import MethodLayer


@pytree
class Merged:
    """The tokens that a layer of a pair holds by directions, in the order of their positions."""

    k: Any  # directions of the keys [B K S H], stored by the key codec; None in the upper layer
    v: Any  # directions of the values, stored by the value codec; None in the upper layer
    k_length: Array  # f32[B K S]
    v_length: Array  # f32[B K S]
    pos: Array  # i32[B K S], -1 empty


@dataclasses.dataclass(frozen=True)
class SharedDirections(PrecisionTiers):
    """The slot `side_store` of pairs of layers, from the layer `start * L` (rounded down) up (MiniCache, section 4).

    The lower layer of a pair holds the directions, and hands them up in each step. Those of the share of a head's
    tokens, rounded up, whose keys differ most between both layers stay in the slots of both, exactly.
    """

    t: float = 0.6
    share: float = 0.05
    start: float = 0.5
    paired_layer: int = 0

    def __post_init__(self):
        if not 0 <= self.t <= 1:
            raise KvjaxError(f"t lies between the lower layer, 0, and the upper one, 1; got {self.t}, use 0.6")
        if not 0.001 <= self.share <= 1:
            raise KvjaxError(f"share of the tokens that stay exact must lie in [0.001, 1], got {self.share}; use 0.05")
        if not 0 <= self.start <= 1:
            raise KvjaxError(f"start, a share of the layers, must lie in [0, 1], got {self.start}; use 0.5")

    def at(self, spec: LayerSpec) -> SharedDirections | None:
        """The lower or the upper layer of a pair; None below the first pair, and in a last layer without another."""
        assert spec.index is not None
        place = spec.index - fraction_of(self.start, spec.num_layers)
        lower = place % 2 == 0
        if place < 0 or (lower and spec.index + 1 == spec.num_layers):
            return None
        return dataclasses.replace(self, paired_layer=1 if lower else -1)

    def num_main_slots(self, kept: IntOrArray) -> IntOrArray:
        """Of so many tokens, an int or i32[B], those that stay exact."""
        return kept - fraction_of(1 - self.share, kept)

    def split(
        self, layer: MethodLayer, block: KVBlock, observation: Observation | None, slots: int
    ) -> tuple[KVBlock, Merged]:
        most = self._max_kept(layer, block.pos.shape[2], slots)
        assert observation is not None and observation.paired_block is not None
        mine, other = block.clean(), observation.paired_block.clean()
        length = (mine.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
        exact = top_k_mask(-signed_squared_cosine(mine.k, other.k), mine.pos >= 0, self.num_main_slots(length))
        here = mask_to_slots(exact, self.num_main_slots(most))
        there = mask_to_slots((mine.pos >= 0) & ~exact, max(self.low_tier_tokens(most), 1))
        return gather_tokens(mine, here), self._merged(layer, gather_tokens(mine, there), gather_tokens(other, there))

    def _merged(self, layer: MethodLayer, mine: KVBlock, other: KVBlock) -> Merged:
        """The store of the same tokens in this layer and in the other one."""
        lengths = split_length(mine.k)[0], split_length(mine.v)[0]
        if self.paired_layer < 0:
            return Merged(None, None, *lengths, mine.pos)
        k, v = (slerp(a, b, self.t).astype(a.dtype) for a, b in ((mine.k, other.k), (mine.v, other.v)))
        held = layer.as_held(KVBlock(k, v, mine.pos))  # lengths do not change when keys lose their rotation
        return Merged(layer.k.encode(held, mine.pos), layer.v.encode(v, mine.pos), *lengths, mine.pos)

    def open_pair(self, layer: MethodLayer, store: Merged, cross_layer: Any) -> tuple[Merged, Any]:
        if self.paired_layer < 0:
            k, v = cross_layer
            return dataclasses.replace(store, k=k, v=v), None
        k, v = layer.keys(store.k, store.pos), layer.v.decode(store.v)
        return dataclasses.replace(store, k=k, v=v), (k, v)

    def read(self, layer: MethodLayer, state: LayerState, q: Array, q_pos: Array) -> Partial:
        store: Merged = state.side_store

        def attend(q: Array, q_pos: Array) -> Partial:
            s = scores(q, store.k) * store.k_length[:, :, None, None]
            p, m, l = weights(jnp.where(visible(store.pos, q_pos, layer.spec.window), s, MASKED_LOGIT))
            return Partial(mix(p * store.v_length[:, :, None, None], store.v), m, l)

        return map_query_blocks(attend, q, q_pos, 512)

    def visible_block(self, layer: MethodLayer, store: Merged) -> None:
        """A layer alone cannot tell: the directions lie in the lower layer of a pair."""

    def check(self, layer: MethodLayer) -> None:
        """Raises IncompatibleMethod for other slots of the method that this one cannot work with."""
        super().check(layer)
        m = layer.method
        reasons = (
            (
                "select",
                m.select is not None,
                "both layers of a pair must hold the same tokens, and each chooses its own",
            ),
            (
                "read",
                not isinstance(m.read, Full),
                "it chooses among the slots, and most tokens are held as directions",
            ),
            ("k", m.k.num_queries != 0, "it goes by one layer's queries, and the directions are those of two layers"),
            ("v", m.v.num_queries != 0, "it goes by one layer's queries, and the directions are those of two layers"),
        )
        for name, cannot, reason in reasons:
            if cannot:
                raise IncompatibleMethod(
                    f"slot `side_store` shares directions slerp two layers and cannot work with slot `{name}`, "
                    f"{type(getattr(m, name)).__name__}: {reason}; leave one of them out"
                )


def split_length(x: Array) -> tuple[Array, Array]:
    """Rows [... H] as (their lengths f32[...], their directions f32[... H]); a row of zeros has no direction."""
    x = x.astype(jnp.float32)
    scale = jnp.abs(x).max(-1, keepdims=True)  # squares of small numbers would vanish
    x = x / jnp.where(scale > 0, scale, 1.0)
    length = jnp.sqrt(jnp.square(x).sum(-1, keepdims=True))
    return (scale * length)[..., 0], x / jnp.where(length > 0, length, 1.0)


def slerp(a: Array, b: Array, t: float) -> Array:
    """The direction between those of rows a, b [... H], the share t of the angle away from a: f32[... H] (SLERP).

    Where the angle is next to 0 or to a half turn no plane is given, and the rows are mixed by their shares.
    """
    a, b = split_length(a)[1], split_length(b)[1]
    cos, most = (a * b).sum(-1, keepdims=True), 1 - 1e-6
    angle = jnp.arccos(jnp.clip(cos, -most, most))
    flat = jnp.abs(cos) > most
    of_a = jnp.where(flat, 1 - t, jnp.sin((1 - t) * angle) / jnp.sin(angle))
    of_b = jnp.where(flat, t, jnp.sin(t * angle) / jnp.sin(angle))
    return split_length(of_a * a + of_b * b)[1]


def signed_squared_cosine(a: Array, b: Array) -> Array:
    """The cosine of the angle between rows a, b [... H], squared, with its sign: f32[...]; 0 for rows of zeros.

    The same bits in every program, whichever row comes first, since both layers of a pair must choose the same tokens:
    a sum of floats, or a root, may be rounded in two ways in two programs. So rows are whole numbers, whose sums are
    exact, and the cosine is known to about three digits.
    """
    a, b = (_whole(x) for x in (a, b))
    both, of_a, of_b = ((x * y).sum(-1, dtype=jnp.int32).astype(jnp.float32) for x, y in ((a, b), (a, a), (b, b)))
    return both * jnp.abs(both) / jnp.maximum(of_a * of_b, 1.0)


def _whole(x: Array) -> Array:
    """Rows [... H] in whole numbers up to 1023, so that sums of products fit for H up to 2048."""
    x = x.astype(jnp.float32)
    scale = jnp.abs(x).max(-1, keepdims=True)
    return jnp.round(x / jnp.where(scale > 0, scale, 1.0) * 1023).astype(jnp.int32)
