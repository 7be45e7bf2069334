"""MiniCache: adjacent layers share the directions of a prompt's keys and values, and keep their own magnitudes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from kvjax.cache.bound_layer import MethodLayer
from kvjax.cache.eviction.representatives import IntOrArray, fraction_of
from kvjax.cache.method import Method
from kvjax.cache.protocol import LayerSpec, LayerState
from kvjax.cache.readers.full import Full
from kvjax.cache.readers.query_blocks import map_query_blocks
from kvjax.cache.side_store.mixed_precision import PrecisionTiers
from kvjax.core.attention import MASKED_LOGIT, mix, scores, visible, weights
from kvjax.core.attention_mass import Observation
from kvjax.core.top_k import mask_to_slots, top_k_mask
from kvjax.core.types import Array, KVBlock, Partial, gather_tokens, pytree
from kvjax.errors import IncompatibleMethod, KvjaxError
from kvjax.registry.registration import register_method


@pytree
class MergedTokens:
    """The prompt tokens that a layer of a pair stores as shared directions, in the order of their positions."""

    k: Any  # directions of the keys [B K S H], stored by the key codec; None in the upper layer
    v: Any  # directions of the values, stored by the value codec; None in the upper layer
    k_length: Array  # f32[B K S]
    v_length: Array  # f32[B K S]
    pos: Array  # i32[B K S], -1 empty


@dataclasses.dataclass(frozen=True)
class SharedDirections(PrecisionTiers):
    """The side store of pairs of layers, from layer `start * L` (rounded down) up (MiniCache, section 4).

    The lower layer of a pair stores the directions, and passes them to the upper layer in each step. Both layers keep
    in their slots, exactly, the tokens of each head whose keys differ most between the two. The fields are the
    arguments of `minicache`, and `paired_layer`, which `at` sets: +1 in the lower layer of a pair, -1 in the upper one.
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
            raise KvjaxError(f"start, a fraction of the layers, must lie in [0, 1], got {self.start}; use 0.5")

    def at(self, spec: LayerSpec) -> SharedDirections | None:
        """Returns the lower or the upper half of a pair; None below the first pair, and in a last layer left over."""
        assert spec.index is not None
        place = spec.index - fraction_of(self.start, spec.num_layers)
        is_lower = place % 2 == 0
        if place < 0 or (is_lower and spec.index + 1 == spec.num_layers):
            return None
        return dataclasses.replace(self, paired_layer=1 if is_lower else -1)

    def num_main_slots(self, kept: IntOrArray) -> IntOrArray:
        return kept - fraction_of(1 - self.share, kept)

    def split(
        self, layer: MethodLayer, block: KVBlock, observation: Observation | None, slots: int
    ) -> tuple[KVBlock, MergedTokens]:
        most = self._max_kept(layer, block.pos.shape[2], slots)
        assert observation is not None and observation.paired_block is not None
        own, other = block.clean(), observation.paired_block.clean()
        length = (own.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
        is_exact = top_k_mask(-signed_squared_cosine(own.k, other.k), own.pos >= 0, self.num_main_slots(length))
        exact_slots = mask_to_slots(is_exact, self.num_main_slots(most))
        merged_slots = mask_to_slots((own.pos >= 0) & ~is_exact, max(self.low_tier_tokens(most), 1))
        main = gather_tokens(own, exact_slots)
        own, other = (gather_tokens(x, merged_slots) for x in (own, other))

        lengths = split_length(own.k)[0], split_length(own.v)[0]
        if self.paired_layer < 0:  # the upper layer reads the directions of the lower one
            return main, MergedTokens(None, None, *lengths, own.pos)
        k, v = (slerp(a, b, self.t).astype(a.dtype) for a, b in ((own.k, other.k), (own.v, other.v)))
        # A codec of pre-RoPE keys gets unrotated directions; a rotation changes no length.
        stored_k = layer.keys_to_store(KVBlock(k, v, own.pos))
        return main, MergedTokens(layer.k.encode(stored_k, own.pos), layer.v.encode(v, own.pos), *lengths, own.pos)

    def open_pair(self, layer: MethodLayer, store: MergedTokens, cross_layer: Any) -> tuple[MergedTokens, Any]:
        if self.paired_layer < 0:
            k, v = cross_layer
            return dataclasses.replace(store, k=k, v=v), None
        k, v = layer.decode_keys(store.k, store.pos), layer.v.decode(store.v)
        return dataclasses.replace(store, k=k, v=v), (k, v)

    def read(self, layer: MethodLayer, state: LayerState, q: Array, q_pos: Array) -> Partial:
        store: MergedTokens = state.side_store

        def attend(q: Array, q_pos: Array) -> Partial:
            # Lengths scale logits and attention weights, so that no full-size key or value is ever restored.
            s = scores(q, store.k) * store.k_length[:, :, None, None]
            p, m, l = weights(jnp.where(visible(store.pos, q_pos, layer.spec.window), s, MASKED_LOGIT))
            return Partial(mix(p * store.v_length[:, :, None, None], store.v), m, l)

        return map_query_blocks(attend, q, q_pos, 512)

    def visible_block(self, layer: MethodLayer, store: MergedTokens) -> None:
        """A layer alone cannot tell: the directions lie in the lower layer of a pair."""

    def check(self, layer: MethodLayer) -> None:
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
        for name, is_wrong, reason in reasons:
            if is_wrong:
                raise IncompatibleMethod(
                    f"component `side_store` shares directions between two layers and cannot work with component "
                    f"`{name}`, {type(getattr(m, name)).__name__}: {reason}; leave one of them out"
                )


def split_length(x: Array) -> tuple[Array, Array]:
    """Splits vectors [... H] into their lengths f32[...] and unit directions f32[... H]; zeros have no direction."""
    x = x.astype(jnp.float32)
    scale = jnp.abs(x).max(-1, keepdims=True)  # squares of small numbers would vanish
    x = x / jnp.where(scale > 0, scale, 1.0)
    length = jnp.sqrt(jnp.square(x).sum(-1, keepdims=True))
    return (scale * length)[..., 0], x / jnp.where(length > 0, length, 1.0)


def slerp(a: Array, b: Array, t: float) -> Array:
    """Interpolates the directions of vectors a, b [... H] on the sphere, at the fraction t of the way: f32[... H].

    At an angle of almost 0 or a half turn no plane is defined, and the vectors are mixed linearly.
    """
    a, b = split_length(a)[1], split_length(b)[1]
    cos, limit = (a * b).sum(-1, keepdims=True), 1 - 1e-6
    angle = jnp.arccos(jnp.clip(cos, -limit, limit))
    is_degenerate = jnp.abs(cos) > limit
    weight_a = jnp.where(is_degenerate, 1 - t, jnp.sin((1 - t) * angle) / jnp.sin(angle))
    weight_b = jnp.where(is_degenerate, t, jnp.sin(t * angle) / jnp.sin(angle))
    return split_length(weight_a * a + weight_b * b)[1]


def signed_squared_cosine(a: Array, b: Array) -> Array:
    """Computes cos |cos| of the angle between vectors a, b [... H]: f32[...], 0 for vectors of zeros.

    The result has the same bits in every program and for both orders of the arguments, because both layers of a pair
    must choose the same tokens. Two programs may round a sum of floats, or a root, in two ways; so vectors become whole
    numbers, whose sums are exact, and the cosine is known to about three digits.
    """

    def to_integers(x: Array) -> Array:
        x = x.astype(jnp.float32)
        scale = jnp.abs(x).max(-1, keepdims=True)
        # Up to 1023, so that sums of products fit into 32 bits for H up to 2048.
        return jnp.round(x / jnp.where(scale > 0, scale, 1.0) * 1023).astype(jnp.int32)

    def dot(x: Array, y: Array) -> Array:
        return (x * y).sum(-1, dtype=jnp.int32).astype(jnp.float32)

    a, b = to_integers(a), to_integers(b)
    return dot(a, b) * jnp.abs(dot(a, b)) / jnp.maximum(dot(a, a) * dot(b, b), 1.0)


@register_method(family="fewer numbers per vector")
def minicache(t: float = 0.6, share: float = 0.05, start: float = 0.5) -> Method:
    """Stores the directions of a prompt's keys and values once for two neighboring layers, with norms for each.

    Decoded tokens stay exact. Compose it with a codec, as in 'minicache + int4', to store directions and exact tokens
    in fewer bits.

    Formula:
      x'_l = |x_l| e and x'_{l-1} = |x_{l-1}| e, e = [sin((1-t) w) u_{l-1} + sin(t w) u_l] / sin(w), u = x / |x|, w the
      angle between both u; tokens with the largest w keep x

    Differs:
      The tokens that stay exact are a fixed fraction of each head's, by the angle between keys, for keys and values
      alike; the paper counts them by a threshold between the smallest and the largest angle (gamma = 0.05, unverified),
      which gives no fixed size. Merged directions are normalized again, which matters only near a half turn. Decoded
      tokens are never merged.

    Args:
      t: interpolation weight of the shared direction, 0 for that of the lower layer and 1 for that of the upper (the
        paper: 0.6).
      share: fraction of each head's tokens, rounded up, that both layers keep exactly: those whose keys turn most
        between the layers (5 %).
      start: fraction of the layers, rounded down, below the first pair (the paper: half of them). They store
        everything, and so does a last layer without a partner.

    Reference:
      MiniCache, Liu et al. 2024, arXiv 2405.14366
    """
    return Method(side_store=SharedDirections(t, share, start))
