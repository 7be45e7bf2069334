"""MiniCache: adjacent layers share the directions of a prompt's keys and values, and keep their own magnitudes."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from kvjax import method_api as kv
from kvjax.cache.storage import observed_queries


@kv.pytree
class MergedTokens:
    """The prompt tokens that a layer of a pair stores as shared directions, in the order of their positions."""

    k: Any  # directions of the keys [B K S H], stored by the key codec; None in the upper layer
    v: Any  # directions of the values, stored by the value codec; None in the upper layer
    k_length: kv.Array  # f32[B K S]
    v_length: kv.Array  # f32[B K S]
    pos: kv.Array  # i32[B K S], -1 empty


@dataclasses.dataclass(frozen=True)
class SharedDirections(kv.PrecisionTiers):
    """The side store of pairs of layers, from layer `start * L` (rounded down) up (MiniCache, section 4).

    The lower layer of a pair stores the directions, and passes them to the upper layer in each step. Both layers keep
    in their slots, exactly, the tokens of each head whose keys differ most between the two. The fields are the
    arguments of `minicache`, and `paired_layer`, which `at` sets: +1 in the lower layer of a pair, -1 in the upper one.
    """

    t: kv.UnitFloat = 0.6
    share: Annotated[float, kv.Within("[0.001, 1]")] = 0.05
    start: kv.UnitFloat = 0.5
    paired_layer: int = 0

    __post_init__ = kv.check_fields

    def at(self, spec: kv.LayerSpec) -> SharedDirections | None:
        """Returns the lower or the upper half of a pair; None in a layer without a partner."""
        assert spec.index is not None
        layers, lower = spec.method_layers[kv.fraction_of(self.start, len(spec.method_layers)) :], []
        for layer in layers:
            if layer + 1 in layers and layer - 1 not in lower:
                lower.append(layer)
        if not lower and len(spec.method_layers) < spec.num_layers:
            kind, remedy = "without a sliding window", "share in windows too, as in 'minicache + in_windows'"
            if spec.recurrent_layers:
                kind, remedy = "with keys and values", "take a method that works in each layer by itself"
            raise kv.IncompatibleMethod(
                "component `side_store` shares directions between neighboring layers, and from layer "
                f"{layers[0] if layers else spec.num_layers} on this model has no two neighbors {kind}; give a lower "
                f"start, or {remedy}"
            )
        if spec.index in lower:
            return dataclasses.replace(self, paired_layer=1)
        return dataclasses.replace(self, paired_layer=-1) if spec.index - 1 in lower else None

    def slots(self, spec: kv.LayerSpec, kept: int, width: int) -> kv.Slots:
        merged = kv.fraction_of(1 - self.share, kept)
        return kv.Slots(kept, kept - merged, merged)

    def split(
        self, storage: kv.KVStorage, block: kv.KVBlock, observation: kv.Observation | None, slots: kv.Slots
    ) -> tuple[kv.KVBlock, MergedTokens]:
        assert observation is not None and observation.paired_block is not None
        own, other = block.clean(), observation.paired_block.clean()
        length = (own.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
        num_exact = length - kv.fraction_of(1 - self.share, length)
        is_exact = kv.top_k_mask(-signed_squared_cosine(own.k, other.k), own.pos >= 0, num_exact)
        exact_slots = kv.mask_to_slots(is_exact, slots.main)
        merged_slots = kv.mask_to_slots((own.pos >= 0) & ~is_exact, max(slots.side, 1))
        main = kv.gather_tokens(own, exact_slots)
        own, other = (kv.gather_tokens(x, merged_slots) for x in (own, other))

        # Values that are channels of the keys are those of the merged key, which has one length.
        k_length = split_length(own.k)[0]
        lengths = k_length, k_length if storage.shares_values else split_length(own.v)[0]
        if self.paired_layer < 0:  # the upper layer reads the directions of the lower one
            return main, MergedTokens(None, None, *lengths, own.pos)
        k, v = (slerp(a, b, self.t).astype(a.dtype) for a, b in ((own.k, other.k), (own.v, other.v)))
        # A codec of pre-RoPE keys gets unrotated directions; a rotation changes no length.
        return main, MergedTokens(*storage.encode(kv.KVBlock(k, v, own.pos)), *lengths, own.pos)

    def open_pair(self, storage: kv.KVStorage, store: MergedTokens, cross_layer: Any) -> tuple[MergedTokens, Any]:
        if self.paired_layer < 0:
            k, v = cross_layer
            return dataclasses.replace(store, k=k, v=v), None
        block = storage.decode(store.k, store.v, store.pos)
        return dataclasses.replace(store, k=block.k, v=block.v), (block.k, block.v)

    def read_bytes(self, storage: kv.KVStorage, state: kv.LayerState) -> kv.StepBytes:
        total = super().read_bytes(storage, state)
        if self.paired_layer > 0:
            return total
        # The upper layer reads what the lower one has decoded of its store, in the dtype of the keys.
        decoded = jax.eval_shape(storage.k.decode, state.k)
        widths = storage.spec.head_dim, storage.spec.value_dim
        shapes = ((*state.side_store.pos.shape, width) for width in widths)
        return total + kv.StepBytes.of_all([jax.ShapeDtypeStruct(shape, decoded.dtype) for shape in shapes])

    def read(self, storage: kv.KVStorage, state: kv.LayerState, q: kv.Array, q_pos: kv.Array) -> kv.Partial:
        store: MergedTokens = state.side_store

        def attend(q: kv.Array, q_pos: kv.Array) -> kv.Partial:
            # Lengths scale logits and attention weights, so that no full-size key or value is ever restored.
            s = kv.attention.scores(q, store.k) * store.k_length[:, :, None, None]
            p, m, l = kv.attention.weights(storage.spec.rule.logits(s, store.pos, q_pos))
            return kv.Partial(kv.attention.mix(p * store.v_length[:, :, None, None], store.v), m, l)

        return kv.map_query_blocks(attend, q, q_pos, 512)

    def visible_block(self, storage: kv.KVStorage, store: MergedTokens) -> None:
        """A layer alone cannot tell: the directions lie in the lower layer of a pair."""

    def check(self, components: kv.Components) -> None:
        super().check(components)
        m = components
        reasons = (
            (
                "select",
                m.select is not None,
                "both layers of a pair must hold the same tokens, and each chooses its own",
            ),
            (
                "read",
                not isinstance(m.read, kv.Full),
                "it chooses among the slots, and most tokens are held as directions",
            ),
            (
                "k",
                observed_queries(m.k) != 0,
                "it goes by one layer's queries, and the directions are those of two layers",
            ),
            (
                "v",
                observed_queries(m.v) != 0,
                "it goes by one layer's queries, and the directions are those of two layers",
            ),
        )
        for name, is_wrong, reason in reasons:
            if is_wrong:
                raise kv.IncompatibleMethod(
                    f"component `side_store` shares directions between two layers and cannot work with component "
                    f"`{name}`, {type(getattr(m, name)).__name__}: {reason}; leave one of them out"
                )


def split_length(x: kv.Array) -> tuple[kv.Array, kv.Array]:
    """Splits vectors [... H] into their lengths f32[...] and unit directions f32[... H]; zeros have no direction."""
    x = x.astype(jnp.float32)
    scale = jnp.abs(x).max(-1, keepdims=True)  # squares of small numbers would vanish
    x = x / jnp.where(scale > 0, scale, 1.0)
    length = jnp.sqrt(jnp.square(x).sum(-1, keepdims=True))
    return (scale * length)[..., 0], x / jnp.where(length > 0, length, 1.0)


def slerp(a: kv.Array, b: kv.Array, t: float) -> kv.Array:
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


def signed_squared_cosine(a: kv.Array, b: kv.Array) -> kv.Array:
    """Computes cos |cos| of the angle between vectors a, b [... H]: f32[...], 0 for vectors of zeros.

    The result has the same bits in every program and for both orders of the arguments, because both layers of a pair
    must choose the same tokens. Two programs may round a sum of floats, or a root, in two ways; so vectors become whole
    numbers, whose sums are exact, and the cosine is known to about three digits.
    """

    def to_integers(x: kv.Array) -> kv.Array:
        x = x.astype(jnp.float32)
        scale = jnp.abs(x).max(-1, keepdims=True)
        # Up to 1023, so that sums of products fit into 32 bits for H up to 2048.
        return jnp.round(x / jnp.where(scale > 0, scale, 1.0) * 1023).astype(jnp.int32)

    def dot(x: kv.Array, y: kv.Array) -> kv.Array:
        return (x * y).sum(-1, dtype=jnp.int32).astype(jnp.float32)

    a, b = to_integers(a), to_integers(b)
    return dot(a, b) * jnp.abs(dot(a, b)) / jnp.maximum(dot(a, a) * dot(b, b), 1.0)


@kv.register_method(family="fewer numbers per vector")
def minicache(t: float = 0.6, share: float = 0.05, start: float = 0.5) -> kv.Method:
    """Stores the directions of a prompt's keys and values once for two neighboring layers, with norms for each.

    Decoded tokens stay exact. Compose it with a codec, as in 'minicache + int4', to store directions and exact tokens
    in fewer bits.

    Formula:
      x'_l = |x_l| e and x'_{l-1} = |x_{l-1}| e, e = [sin((1-t) w) u_{l-1} + sin(t w) u_l] / sin(w), u = x / |x|, w the
      angle between both u; tokens with the largest w keep x

    Differs:
      Decoded tokens are never merged, so that an answer takes its full size in both layers, where the paper merges them
      too: 512 tokens and an answer of 512 take 90% of the exact cache's bytes, and a prompt of 1,024 80% (SmolLM2-135M,
      where the answer takes 0.245 bits per byte more than under the exact cache; 4 contexts). The tokens that stay
      exact are a fixed fraction of each head's, by the angle between keys, for keys and values alike; the paper counts
      them by a threshold between the smallest and the largest angle (gamma = 0.05, unverified), which gives no fixed
      size. Merged directions are normalized again, which matters only near a half turn. There is no public code.

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
    return kv.Method(side_store=SharedDirections(t, share, start))
