"""The cache types of llama.cpp: blocks of 32 channels in 4, 5 or 8 bits with scales of 16 bits, after a rotation."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from kvjax import method_api as kv

IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
"""The levels of iq4_nl, 127 of them a unit: closer around zero, where most numbers are."""

CacheType = Literal["f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]


@kv.exportable
class GgmlBlocks(NamedTuple):
    """A token vector as blocks of codes."""

    codes: kv.Array  # uint32[... words], packed along the vector; of 5-bit codes the low four bits
    fifth_bits: kv.Array | None  # uint32[... words]
    scales: kv.Array  # f16[... H/block]
    minima: kv.Array | None  # f16[... H/block], of the types _1


@dataclasses.dataclass(frozen=True)
class GgmlBlock(kv.Quantizer):
    """Quantizes blocks of channels as GGML's reference code does, with the same codes and scales.

    Codes come from the scale in float32, and numbers are restored by the scale in float16. With `pairs` the two halves
    of a vector are interleaved before they are cut into blocks.
    """

    type: Literal["q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
    block: kv.PositiveInt = 32
    pairs: bool = False

    __post_init__ = kv.check_fields

    def check(self, H: int) -> None:
        kv.bit_packing.check_divides("block", self.block, H)
        kv.bit_packing.check_fills(H, 1 if self.bits == 5 else self.bits)

    @property
    def bits(self) -> int:
        return {"q8_0": 8, "q5_1": 5, "q5_0": 5}.get(self.type, 4)

    def encode(self, x: kv.Array) -> GgmlBlocks:
        if self.pairs:
            x = _transpose(x, 2, x.shape[-1] // 2)
        blocks = kv.bit_packing.split_blocks(x, self.block)
        at_largest = jnp.abs(blocks).argmax(-1, keepdims=True)
        largest, minima = jnp.take_along_axis(blocks, at_largest, -1), None  # with its sign
        half = 2.0 ** (self.bits - 1)
        if self.type == "iq4_nl":
            codes, scales = self._encode_nonlinear(blocks, largest)
        elif self.type == "q8_0":
            scales = _divide(jnp.abs(largest), 127.0)
            scaled = blocks * _reciprocal(scales)
            codes = jnp.sign(scaled) * jnp.floor(jnp.abs(scaled) + 0.5) + half  # half away from zero; none is negative
        elif self.type.endswith("_1"):
            minima = blocks.min(-1, keepdims=True)
            scales = _divide(blocks.max(-1, keepdims=True) - minima, 2.0 * half - 1)
            codes = jnp.floor(_times(blocks - minima, _reciprocal(scales)) + 0.5)
        else:
            # The largest number takes the code 0, which has no counterpart above zero.
            scales = _divide(largest, -half)
            codes = jnp.floor(_times(blocks, _reciprocal(scales)) + (half + 0.5))
        codes = jnp.clip(codes, 0, 2**self.bits - 1).astype(jnp.uint32).reshape(x.shape)
        fifth = kv.bit_packing.pack(codes >> 4, 1, -1) if self.bits == 5 else None
        packed = kv.bit_packing.pack(codes & 15, 4, -1) if self.bits == 5 else kv.bit_packing.pack(codes, self.bits, -1)
        return GgmlBlocks(packed, fifth, _to_float16(scales), None if minima is None else _to_float16(minima))

    def decode(self, coded: GgmlBlocks) -> kv.Array:
        codes = kv.bit_packing.unpack(coded.codes, 4 if self.bits == 5 else self.bits, -1)
        if coded.fifth_bits is not None:
            codes = codes | kv.bit_packing.unpack(coded.fifth_bits, 1, -1) << 4
        if self.type == "iq4_nl":
            levels = jnp.asarray(IQ4_NL)[codes]
        else:
            zero = 2.0 ** (self.bits - 1) if coded.minima is None else 0.0
            levels = kv.bit_packing.codes_to_float(codes) - zero
        blocks = kv.bit_packing.split_blocks(levels, self.block) * coded.scales[..., None].astype(jnp.float32)
        if coded.minima is not None:
            blocks = blocks + coded.minima[..., None].astype(jnp.float32)
        x = blocks.reshape(levels.shape)
        return _transpose(x, x.shape[-1] // 2, 2) if self.pairs else x

    def _encode_nonlinear(self, blocks: kv.Array, largest: kv.Array) -> tuple[kv.Array, kv.Array]:
        """The nearest levels where the largest number is level -127, and the scale of least squares for them."""
        scaled = blocks * _reciprocal(_divide(largest, -127.0))
        middles = jnp.asarray((IQ4_NL[1:] + IQ4_NL[:-1]) / 2)
        codes = jnp.searchsorted(middles, scaled, side="right", method="compare_all")  # a tie takes the higher level
        # Weights are squares, here of numbers over the largest one: they cannot overflow, and the quotient is the same.
        levels, weights = jnp.asarray(IQ4_NL)[codes], jnp.square(blocks * _reciprocal(largest))
        products = (weights * levels * blocks).sum(-1, keepdims=True)
        squares = (weights * levels * levels).sum(-1, keepdims=True)
        return codes.astype(jnp.float32), jnp.where(squares > 0, products / jnp.where(squares > 0, squares, 1.0), 0.0)


def _transpose(x: kv.Array, rows: int, columns: int) -> kv.Array:
    """Transposes each vector x [... rows*columns] as a matrix."""
    return x.reshape(*x.shape[:-1], rows, columns).swapaxes(-1, -2).reshape(x.shape)


def _divide(x: kv.Array, number: float) -> kv.Array:
    # XLA replaces a division by a bare constant with a product by its rounded reciprocal, which changes last bits.
    return x / jnp.where(x != 0, number, 1.0)


def _reciprocal(x: kv.Array) -> kv.Array:
    return jnp.where(x == 0, 0.0, 1.0 / jnp.where(x == 0, 1.0, x))


def _times(x: kv.Array, reciprocals: kv.Array) -> kv.Array:
    # The maximum changes no value, but stops XLA from fusing product and sum into one operation that rounds only once.
    return jnp.maximum(x * reciprocals, -17.0)


def _to_float16(x: kv.Array) -> kv.Array:
    largest = float(jnp.finfo(jnp.float16).max)
    return jnp.clip(x[..., 0], -largest, largest).astype(jnp.float16)


@dataclasses.dataclass(frozen=True)
class RotatedAsInLlamaCpp(kv.PerTokenCodec):
    """Rotates blocks of 64 channels, or the largest blocks that divide the head; heads of other sizes stay as they are.

    Args:
      largest: whether blocks are the largest power of two, from 64 on, that divides the head size (llama.cpp's keys).
    """

    quantizer: GgmlBlock = GgmlBlock("q8_0")
    largest: bool = False

    def count_rotated_channels(self, H: int) -> int:
        if not self.rotate or H % 64:
            return 0
        width = H & -H if self.largest else 64
        # Interleaving moves the bits of a channel's index round by one, and Hadamard's signs are by the bits that two
        # indices share: both commute, so that the quantizer can interleave, if a whole head is rotated.
        if self.quantizer.pairs and width != H:
            raise kv.KvjaxError(
                f"pairs=true of ggml needs heads that are rotated whole, and of {H} channels {width} are rotated "
                "together; use rotate=false or pairs=false"
            )
        return width


@kv.register_method(example="ggml:block=8", family="quantization by token")
def ggml(
    k: CacheType = "q8_0", v: CacheType = "q8_0", rotate: bool = True, block: int = 32, pairs: bool = False
) -> kv.Method:
    """Stores keys and values in the cache types of llama.cpp, each token once, when it arrives.

    Attention in the prompt is exact. A number takes 8.5 bits in q8_0, 6 in q5_1, 5.5 in q5_0, 5 in q4_1, 4.5 in q4_0
    and iq4_nl, and those of the model's dtype in f16.

    Formula:
      over a block, with d stored in float16, and h = 16 for 5 bits, 8 for 4:
      q8_0: d = max |x| / 127, x' = round(x / d) d
      q5_0, q4_0: d = -m / h for the number m with the largest |m|, x' = (floor(x / d + h + 1/2) - h) d
      q5_1, q4_1: d = (max - min) / (2 h - 1), x' = floor((x - min) / d + 1/2) d + min
      iq4_nl: levels l of a table, nearest to -127 x / m, d = sum x^3 l / sum x^2 l^2, x' = l d

    Differs:
      As in llama.cpp since its change 21038, but for f16, which is the model's own dtype here. There attention in the
      prompt reads the codes too, and on CPUs queries are rounded to q8_0. Scales beyond float16 are clipped, where
      GGML's are infinite.

    Args:
      k: type of keys, llama.cpp's `-ctk`.
      v: type of values, `-ctv`.
      rotate: whether quantized vectors are multiplied by Hadamard's matrix first, where the head size is a multiple of
        64: keys in the largest blocks that are powers of two, values in blocks of 64 (off in llama.cpp with
        LLAMA_ATTN_ROT_DISABLE=1).
      block: channels that share a scale. llama.cpp's are 32, and smaller ones serve heads that 32 does not divide.
      pairs: whether the halves of a key are interleaved before it is cut into blocks. The two channels that RoPE
        rotates together are then neighbors, as in GGUF files whose architecture is `llama` (Llama, Mistral),
        `mistral3`, `granite` or `smollm3`.

    Reference:
      llama.cpp, --cache-type-k and --cache-type-v; ggml-quants.c; the rotation: pull request 21038
    """

    def codec(kind: CacheType, of_keys: bool) -> kv.Codec:
        if kind == "f16":
            return kv.Plain()
        quantizer = GgmlBlock(kind, block, pairs and of_keys)
        return RotatedAsInLlamaCpp(quantizer, "hadamard" if rotate else "", largest=of_keys)

    return kv.Method(k=codec(k, True), v=codec(v, False))
