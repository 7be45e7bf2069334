"""RotateKV: pre-RoPE keys rotated over several heads and sorted by channel, values rotated, both in two bits."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvjax import method_api as kv
from kvjax.cache.codecs.per_token import hadamard

MAX_ZERO_POINT_STEPS = 2.0**14  # steps from zero to the codes at most, so that a zero point fits into 16 bits


@kv.exportable
class ZeroPointCodes(NamedTuple):
    """Vectors as codes of equal steps; zero is a whole number of steps away."""

    codes: kv.Array  # uint32[... words]
    scale: kv.Array  # bf16[... 1], the size of a step
    zero: kv.Array  # i16[... 1], the code that stands for zero; it may lie outside of the codes


@dataclasses.dataclass(frozen=True)
class ZeroPointQuantizer(kv.Quantizer):
    """Asymmetric quantization with an integer zero point, as in RotateKV's code; 4 bytes in addition to the codes.

    With top = 2^bits - 1: scale = (clip max - clip min) / top, zero = round(-clip min / scale), code = round(x / scale)
    + zero, limited to 0..top, halves to even; x' = (code - zero) scale.

    Args:
      bits: bits of a code.
      clip: fraction of min and of max that the codes span; if all numbers have one sign, both ends move towards zero.
    """

    bits: kv.RowBits = 4
    clip: Annotated[float, kv.Within("(0, 1]")] = 1.0

    __post_init__ = kv.check_fields

    def check(self, H: int) -> None:
        kv.bit_packing.check_fills(H, self.bits)

    def encode(self, x: kv.Array) -> ZeroPointCodes:
        top = float(2**self.bits - 1)
        least, most = x.min(-1, keepdims=True) * self.clip, x.max(-1, keepdims=True) * self.clip
        # Far from zero, a narrow range gets wider steps rather than a zero point that overflows.
        magnitude = jnp.maximum(jnp.abs(least), jnp.abs(most))
        scale = jnp.maximum(kv.step_size(most - least, top, 1e-30), magnitude / MAX_ZERO_POINT_STEPS).astype(
            jnp.bfloat16
        )
        step = scale.astype(jnp.float32)  # as it is stored, so that codes and zero point belong to the rounded scale
        zero = jnp.round(-least / step)
        codes = jnp.clip(jnp.round(x / step) + zero, 0.0, top).astype(jnp.uint32)
        return ZeroPointCodes(kv.bit_packing.pack(codes, self.bits, -1), scale, zero.astype(jnp.int16))

    def decode(self, coded: ZeroPointCodes) -> kv.Array:
        codes = kv.bit_packing.codes_to_float(kv.bit_packing.unpack(coded.codes, self.bits, -1))
        return (codes - coded.zero.astype(jnp.float32)) * coded.scale.astype(jnp.float32)


@kv.pytree
class ReorderedKeys:
    """The rotated channels of all heads, as the inner codec stores them; head k has places k H to k H + H - 1."""

    inner: Any
    order: kv.Array  # i32[1|B K H], the channel at each place, counted over all heads
    dtype: str = dataclasses.field(metadata={"static": True})  # of the keys


@dataclasses.dataclass(frozen=True)
class CrossHeadRotation(kv.CodecWrapper):
    """Rotates pre-RoPE keys over groups of heads, and sorts the layer's channels, before another codec stores them.

    Su et al. 2025, arXiv 2501.16383, and its authors' code: the channels of a group of heads are multiplied by
    Sylvester's matrix of their number, over its root. Then the channels of the whole layer are sorted by their sum over
    the tokens, the least first, so that channels that share a scale are alike, and each head stores H of them. The
    order is that of a sequence's own prompt, ties as they stand; or, with `means`, that of the table's mean key. On
    several devices each stores its heads' places, and gathers those of the others where keys are read.

    Args:
      inner: the codec of the rotated and sorted channels.
      heads: adjacent heads that are rotated together; where they do not divide the layer's heads, as many as divide
        both; 0 for all heads.
      means: a table of `Bases`, for a calibrated order.
      spec: the layer, set by `at`.
    """

    heads: int = 4
    means: kv.TableFile | None = None
    spec: kv.LayerSpec | None = None

    pre_rope: ClassVar[bool] = True

    @property
    def supports_eviction(self) -> bool:
        return False  # a slot of all heads together cannot be written for one of them

    def at(self, spec: kv.LayerSpec) -> kv.Codec:
        bound = dataclasses.replace(kv.bind_fields(self, spec), spec=spec.without_index)
        size = bound._group_channels
        if size & (size - 1):
            raise kv.KvjaxError(
                f"Hadamard's matrix exists here for powers of two, and {size} channels, of "
                f"{size // spec.head_dim} heads, would be rotated together; use another number of heads"
            )
        if self.means is not None:
            bound._mean_key()  # a table that does not fit raises here, when the method is bound
        return bound

    def encode(self, x: kv.Array, pos: kv.Array) -> ReorderedKeys:
        x = jnp.where((pos >= 0)[..., None], x, jnp.zeros((), x.dtype))
        rotated = self._rotate_all_heads(x)
        sums = rotated.sum(1) if self.means is None else self._mean_key()
        order = jnp.argsort(sums, -1, stable=True).astype(jnp.int32).reshape(sums.shape[0], -1, x.shape[3])
        order = lax.dynamic_slice_in_dim(order, kv.over_heads.first_head(x.shape[1]), x.shape[1], 1)  # of this device
        places = jnp.take_along_axis(rotated[:, None], order[:, :, None], -1)
        return ReorderedKeys(self.inner.encode(places, kv.over_heads.max(pos)), order, x.dtype.name)

    def append(self, stored: ReorderedKeys, x: kv.Array, at: kv.Array) -> ReorderedKeys:
        places = jnp.take_along_axis(self._rotate_all_heads(x)[:, None], stored.order[:, :, None], -1)
        return dataclasses.replace(stored, inner=self.inner.append(stored.inner, places, at))

    def decode(self, stored: ReorderedKeys) -> kv.Array:
        return self._restore_keys(self.inner.decode(stored.inner), stored.order).astype(stored.dtype)

    def gather(self, stored: ReorderedKeys, idx: kv.Array) -> kv.Array:
        assert self.spec is not None
        B, K, n = idx.shape  # K heads of this device
        # Every key is a mix of all places, so the slots that any head asks for are fetched for all heads.
        requested = kv.over_heads.gather(idx).reshape(B, 1, -1)
        places = self.inner.gather(stored.inner, jnp.broadcast_to(requested, (B, K, requested.shape[2])))
        keys = self._restore_keys(places, stored.order).reshape(B, K, self.spec.num_kv_heads, n, self.spec.head_dim)
        own_head = (kv.over_heads.first_head(K) + jnp.arange(K, dtype=jnp.int32))[None, :, None, None, None]
        return jnp.take_along_axis(keys, own_head, 2)[:, :, 0].astype(stored.dtype)

    def read_bytes(self, stored: ReorderedKeys, tokens: int | None = None) -> kv.StepBytes:
        assert self.spec is not None
        asked = None if tokens is None else tokens * self.spec.num_kv_heads  # by all heads, for each of them
        return super().read_bytes(stored, asked)

    @property
    def _group_channels(self) -> int:
        """Channels that are rotated together."""
        assert self.spec is not None
        return math.gcd(self.heads, self.spec.num_kv_heads) * self.spec.head_dim

    def _mean_key(self) -> kv.Array:
        """Rotates the mean key of the table: f32[1 K*H]."""
        assert self.spec is not None and self.means is not None
        K, H = self.spec.num_kv_heads, self.spec.head_dim
        mean = self.means.layer_arrays(self.spec, bare_keys_mean=(K, H))["bare_keys_mean"]
        return self._rotate_groups(jnp.asarray(mean, jnp.float32).reshape(1, K * H))

    def _rotate_all_heads(self, x: kv.Array) -> kv.Array:
        """Keys x [B K T H] of this device's heads -> the rotated channels of all heads, f32[B T C]."""
        every = kv.over_heads.gather(x.astype(jnp.float32)).swapaxes(1, 2)
        return self._rotate_groups(_join_heads(every))

    def _restore_keys(self, places: kv.Array, order: kv.Array) -> kv.Array:
        """Sorts and rotates back: this device's places f32[B K T H] -> its heads' keys, f32[B K T H]."""
        num_own_heads, every = places.shape[1], kv.over_heads.gather(places).swapaxes(1, 2)
        order = kv.over_heads.gather(order)
        inverse = jnp.argsort(order.reshape(order.shape[0], -1), -1)
        flat = _join_heads(every)
        # Whole channels, and not number by number as `take_along_axis` would: one order holds for all tokens.
        inverse = jnp.broadcast_to(inverse, (flat.shape[0], flat.shape[2]))
        rotated = jax.vmap(lambda x, channel: x.at[:, channel].get(mode="promise_in_bounds"))(flat, inverse)
        keys = self._rotate_groups(rotated).reshape(every.shape)
        return lax.dynamic_slice_in_dim(keys, kv.over_heads.first_head(num_own_heads), num_own_heads, 2).swapaxes(1, 2)

    def _rotate_groups(self, x: kv.Array) -> kv.Array:
        """Rotates each group of heads of x f32[... C]; the rotation is its own inverse."""
        groups = kv.bit_packing.split_blocks(x, self._group_channels)
        matrix = jnp.asarray(hadamard(self._group_channels))
        return jnp.einsum("...h,hj->...j", groups, matrix, precision=lax.Precision.HIGHEST).reshape(x.shape)


def _join_heads(x: kv.Array) -> kv.Array:
    """Joins the channels of all heads: x [B T K H] -> [B T K*H]."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3])  # no -1: there may be no tokens


@kv.register_method(family="quantization by token", sized_by="bits")
def rotatekv(
    bits: int = 2, heads: int = 4, clip: float = 0.0, sinks: kv.NonNegativeInt = 5, table: str = ""
) -> kv.Method:
    """Quantizes each token by itself after rotations that spread large numbers over many channels.

    A group is as many channels as a head has (128 in the authors' models). On several devices a read gathers keys from
    all of them. Attention in the prompt is exact. A key or a value of head size H takes H bits / 8 + 4 bytes.

    Formula:
      K before RoPE: y = channels of 4 heads together times H / sqrt(4 d), sorted by sum over tokens, then groups of d;
      V: v H / sqrt(d); s = c (max - min) / (2^bits - 1), z = round(-c min / s), code = clip(round(x / s) + z), x' =
      (code - z) s

    Differs:
      The channels' order is by default that of each prompt, where the authors calibrate it. Their code keeps those
      tokens exact that have the 20 largest numbers of a prompt's hidden states; here the first tokens are exact. Their
      scale divides by bits^2 - 1, which is 8 instead of 7 for 3 bits.

    Args:
      bits: 2, 3 or 4 (the authors'; also 1 and 8).
      heads: neighboring key/value heads that are rotated together (the authors: 4), or their greatest common divisor
        with the layer's.
      clip: fraction of a group's smallest and largest number that codes span; 0 for the authors' defaults, 0.8 at 2
        bits and 1 at others.
      sinks: first tokens that are stored exactly (the authors' code has 5 in a comment).
      table: a file of `kvjax calibrate bases`, or "shipped", by whose mean keys channels are ordered; without one, by
        those of each prompt.

    Reference:
      RotateKV, Su et al. 2025, arXiv 2501.16383; constants of its authors' code
    """
    quantizer = ZeroPointQuantizer(bits, clip or (0.8 if bits == 2 else 1.0))
    keys = CrossHeadRotation(kv.PerTokenCodec(quantizer), heads, kv.Bases.table_file(table) if table else None)
    return kv.Method(k=kv.ExactPrefix(keys, sinks), v=kv.ExactPrefix(kv.PerTokenCodec(quantizer, "hadamard"), sinks))
